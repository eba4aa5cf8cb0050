"""No lever that is set by hand on the plan of the lowest peak lowers it, and "the lowest there is" is said of no less.

The plan is that of the budget which the error names. Each lever of the registry is set on it in each way that the
numerics class and the conflicts allow, with the plan's regions and without, and the step is captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import InfeasibleError, MemfitError
from memfit.hardware import find_device
from memfit.ir import (
    ChunkedLoss,
    Levers,
    Numerics,
    OptimizerLever,
    Plan,
    Precision,
    Region,
    Trace,
    allows,
    freest,
)
from memfit.levers import CONFLICTS, LeversOn, circumstances, lever_names, lever_uses, met
from memfit.planner import StepVariant, capture_levers, captured_through, costs_of, predict
from memfit.workload import Workload
from tests.models import Transformer

CPU = find_device("cpu")
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")


def classes_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())
    return found


def workload(model: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: Any = torch.optim.AdamW) -> Workload:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Workload(model, {"x": x, "y": y}, classes_loss, optimizer(trained, lr=1e-3))


def mlp(optimizer: Any = torch.optim.AdamW) -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return workload(nn.Sequential(*blocks), torch.randn(16, 16), torch.randint(16, (16,)), optimizer)


def convolutions() -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(a, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for a in (3, 16, 16)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return workload(model, torch.randn(8, 3, 16, 16), torch.randint(10, (8,)), torch.optim.SGD)


def language_model(layers: int, tokens: int, vocabulary: int, optimizer: Any, **options: Any) -> Workload:
    torch.manual_seed(0)
    model = Transformer(vocabulary, 32, layers, **{"dropout": 0.0, "tied": True, **options})
    ids = torch.randint(vocabulary, (2, tokens))
    return workload(model, ids, ids, optimizer)


class Adapted(nn.Module):
    """A frozen layer with low-rank factors that are trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.b(self.a(x))
        return found


def adapters() -> Workload:
    made = language_model(3, 64, 1000, torch.optim.AdamW, tied=False)
    made.model.requires_grad_(False)
    for block in made.model.blocks:  # type: ignore[union-attr]
        block.qkv, block.mlp[0], block.mlp[2] = Adapted(block.qkv), Adapted(block.mlp[0]), Adapted(block.mlp[2])
    trained = [p for p in made.model.parameters() if p.requires_grad]
    return dataclasses.replace(made, optimizer=torch.optim.AdamW(trained))


CASES: dict[str, tuple[Callable[[], Workload], Numerics]] = {
    "mlp, exact": (mlp, "exact"),
    "mlp with SGD, reduced": (lambda: mlp(torch.optim.SGD), "reduced"),
    "mlp with Adafactor": (lambda: mlp(torch.optim.Adafactor), "reordered"),
    "mlp, changed": (mlp, "changed"),
    "convolutions, exact": (convolutions, "exact"),
    "convolutions, changed": (convolutions, "changed"),
    "tied, large states": (lambda: language_model(1, 64, 2000, torch.optim.AdamW), "reduced"),
    "tied, many tokens": (lambda: language_model(2, 256, 500, torch.optim.SGD), "reordered"),
    "adapters": (adapters, "reordered"),
    "deep": (lambda: language_model(6, 64, 300, torch.optim.SGD, tied=False), "reordered"),
}
QUICK = ("mlp, exact",)


def lowest_of(made: Workload, numerics: Numerics) -> tuple[InfeasibleError, Plan]:
    options: dict[str, Any] = {"numerics": numerics, "precisions": PRECISIONS, "points": 1, "measure": False}
    options["time_limit_seconds"] = 4  # each combination that is left may take a share of it twice
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(made, budget="4KiB", **options)
    return caught.value, memfit.plan(made, budget=caught.value.lowest_peak_bytes, **options)


def peak_of(made: Workload, levers: Levers) -> int | None:
    """Return the predicted peak of a step with levers; None where they can't be applied to it."""
    try:
        trace = capture_levers(made, levers, CPU)
    except MemfitError:
        return None
    return predict(trace, costs_of([trace], CPU), CPU)[0].peak_bytes


def by_hand(made: Workload, plan: Plan) -> Iterator[Levers]:
    """Yield the plan's levers with one lever set otherwise, as far as class and conflicts allow."""
    own, size = plan.levers, plan.batch_size
    linear = [fqn for fqn, each in made.model.named_modules() if type(each) is nn.Linear]
    blocks = [fqn for fqn, _ in made.model.named_modules() if fqn and fqn.rpartition(".")[2].isdigit()]
    near = [replace(own, precision=precision) for precision in PRECISIONS]
    near += [replace(own, optimizer=optimizer) for optimizer in get_args(OptimizerLever)]
    near += [replace(own, update="in-backward"), replace(own, update="after")]
    near += [replace(own, microbatch_size=each) for each in sorted({1, 2, size // 2 or 1, size})]
    near += [replace(own, lean=lean) for lean in ((), ("*",))]
    chunked = [ChunkedLoss(head=head, rows=16) for head in linear[-1:]]
    near += [replace(own, chunked_loss=chunks) for chunks in (None, *chunked)]
    near += [replace(own, regions=regions) for regions in ((), tuple(Region((fqn,)) for fqn in blocks))]
    near += [replace(levers, regions=()) for levers in near]
    around = circumstances(made, CPU)
    is_coupled = any(isinstance(module, nn.BatchNorm2d) for module in made.model.modules())
    for levers in dict.fromkeys(near):
        uses = lever_uses(LeversOn(levers, size, is_coupled))
        names = lever_names(LeversOn(levers, size)) | around
        if allows(plan.allowed, freest(uses)) and not met(CONFLICTS, names, plan.allowed):
            yield levers


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.ci) for name in CASES]
)
def test_nothing_set_by_hand_is_lower(name: str) -> None:
    make, numerics = CASES[name]
    made = make()
    error, plan = lowest_of(made, numerics)
    assert plan.predicted.peak_upper_bytes <= error.lowest_peak_bytes
    tried = {levers: peak for levers in by_hand(made, plan) if (peak := peak_of(made, levers)) is not None}
    assert len(tried) > 3
    assert tried[plan.levers] == plan.predicted.peak_bytes
    lower = {str(levers): peak for levers, peak in tried.items() if peak < 0.999 * plan.predicted.peak_bytes}
    assert not lower


@pytest.mark.ci
@pytest.mark.slow
def test_adapters_of_a_deep_model_fit_with_checkpoints_and_a_chunked_loss() -> None:
    """In 2 layers of an 8 B Llama, on 8,192 tokens: logits alone take 2 GiB whole, and each layer is cheap to keep."""
    from examples.llama_lora import llama

    with torch.device("meta"):
        made = llama("llama", layers=2)
    plan = memfit.plan(made, device="rtx-4090", budget="8GiB", points=1)
    assert plan.levers.chunked_loss is not None and plan.predicted.peak_upper_bytes <= 8 * 2**30


@pytest.mark.ci
def test_a_step_of_many_operators_adds_levers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    make, numerics = CASES["adapters"]
    captures: list[Levers] = []

    def counted(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        captures.append(replace(variant.levers, regions=()))
        return capture(variant)

    with captured_through(counted):
        whole, _ = lowest_of(make(), numerics)
        of_all, captures = set(captures), []
        monkeypatch.setattr("memfit.planner.captured_steps._MANY_OPERATORS", 1)
        found, plan = lowest_of(make(), numerics)
    assert len(set(captures)) < len(of_all)
    assert found.lowest_peak_bytes <= 1.02 * whole.lowest_peak_bytes
    assert not found.proven and plan.predicted.peak_upper_bytes <= found.lowest_peak_bytes
