"""Models that come quantised: predicted as they are, or refused by name, and told what their quantiser left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError
from memfit.ir import Levers, Region
from memfit.workload import Workload
from tests.measuring import peaks

WIDTH, DEPTH, ROWS = 128, 3, 16


class Adapted(nn.Module):
    """A layer that came quantised, and an adapter beside it that trains."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base_layer(x).to(x.dtype) + self.up(self.down(x)))


def nf4(double: bool = True, on_parameter_alone: bool = False) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(WIDTH, WIDTH, compress_statistics=double, quant_type="nf4")
    if on_parameter_alone:  # the module does not know the state
        values = torch.randn(WIDTH, WIDTH)
        layer.weight = bnb.nn.Params4bit(values, requires_grad=False, compress_statistics=double, quant_type="nf4")
        layer.weight = layer.weight.to("cpu")
    return layer.requires_grad_(False).to("cpu")  # type: ignore[no-any-return]


def int8(threshold: float = 0.0) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False, threshold=threshold)
    return layer.requires_grad_(False).to("cpu")  # type: ignore[no-any-return]


def torchao(kind: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False)
    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }[kind]()
    quantization.quantize_(layer, config)
    return layer


KINDS: dict[str, Callable[[], nn.Module]] = {
    "nf4": nf4,
    "nf4, scales as they are": lambda: nf4(double=False),
    "nf4, state on the parameter alone": lambda: nf4(on_parameter_alone=True),
    "int8": int8,
    "torchao int8": lambda: torchao("int8"),
    "torchao int4": lambda: torchao("int4"),
}
CODES_BYTES = {"nf4": 0.5, "int8": 1.0, "torchao int8": 1.0, "torchao int4": 1.0}  # torchao keeps 4 bits in 8
SLOW = {"nf4, scales as they are", "torchao int4"}


def workload(make: Callable[[], nn.Module], **more: nn.Module) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted(make()) for _ in range(DEPTH)])
    for name, module in more.items():
        model.add_module(name, module)
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = torch.randn(ROWS, WIDTH)
    return Workload(model, batch, lambda m, x: m(x).square().mean(), torch.optim.AdamW(trained), name="quantised")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.ci] if k in SLOW else []) for k in KINDS])
def test_a_quantised_model_is_predicted(kind: str) -> None:
    made = workload(KINDS[kind])
    predicted_bytes, measured_bytes = peaks(made, Levers(microbatch_size=ROWS))
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)
    regions = tuple(Region((f"{index}",)) for index in range(DEPTH))
    predicted_bytes, measured_bytes = peaks(made, Levers(microbatch_size=ROWS // 2, regions=regions))
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8", pytest.param("torchao int4", marks=pytest.mark.ci)])
def test_its_weights_take_on_a_card_what_they_take_here(kind: str) -> None:
    made = workload(KINDS[kind])
    here, there = memfit.estimate(made), memfit.estimate(made, device="rtx-4090")
    assert there.by_category["parameters"] == here.by_category["parameters"]
    numbers = DEPTH * WIDTH * WIDTH
    adapters = sum(p.nbytes for p in made.model.parameters() if p.requires_grad)
    codes = here.by_category["parameters"] + here.by_category.get("buffers", 0) - adapters
    assert CODES_BYTES[kind] * numbers <= codes < (CODES_BYTES[kind] + 0.2) * numbers


def test_values_that_decide_on_a_card_are_refused_by_name() -> None:
    """With a threshold, columns of outliers are computed apart, as many as there are."""
    made = workload(lambda: int8(threshold=6.0))
    predicted_bytes, measured_bytes = peaks(made, Levers(microbatch_size=ROWS))
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)
    with pytest.raises(CaptureError, match=r"The model has quantised parameters \(3 Int8Params\).*device='cpu'"):
        memfit.estimate(made, device="rtx-4090")


def test_a_plan_of_a_quantised_model_is_what_it_says() -> None:
    made = workload(nf4)
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 1, "optimizers": ()}
    peak_bytes = memfit.estimate(made).peak_bytes
    plan = memfit.plan(made, budget=int(0.93 * peak_bytes), numerics="reduced", **options)
    assert plan.levers.frozen_weights is None  # they are in few bits
    found = memfit.verify(plan, made, steps=0)
    assert found.holds and found.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.005)


class Experts(nn.Module):
    """The weights of several layers in one tensor, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("ri,eoi->ro", x, self.up)


def test_weights_that_the_quantiser_left_are_told() -> None:
    left = r"quantised, but these of its weights are not: experts\.up\. They take 256\.0 KiB, \d+% of the parameters"
    for device in ("cpu", "rtx-4090"):
        notes = memfit.estimate(workload(nf4, experts=Experts()), device=device).notes
        assert any(re.search(left, note) for note in notes)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (nf4, {}),
        (nf4, {"trained": nn.Linear(WIDTH, WIDTH)}),
        (nf4, {"head": nn.Linear(WIDTH, WIDTH).requires_grad_(False)}),
        (lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), {"experts": Experts()}),
    ],
    ids=["all are", "trained", "a linear layer that nothing is said of", "none is"],
)
def test_others_are_not(make: Callable[[], nn.Module], more: dict[str, nn.Module]) -> None:
    assert not any("the model is quantised" in note for note in memfit.estimate(workload(make, **more)).notes)


def test_a_number_beside_a_tensor_changes_no_layout() -> None:
    """An integer division by a number, as mixtures of experts index their tokens by."""
    model = nn.Linear(8, 8)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(x[:, 0])
        return m(x)[order // 2].square().mean()

    made = Workload(model, torch.randn(16, 8), loss, torch.optim.SGD(model.parameters(), lr=0.1), name="divided")
    estimate = memfit.estimate(made)
    assert not any("ran with data" in note for note in estimate.notes)
