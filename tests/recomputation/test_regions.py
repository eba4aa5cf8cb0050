"""Checkpointed modules: the same numbers, less memory, and nothing left behind."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import PlanError, PlanMismatchError
from memfit.ir import Keep, Precision, Region, Regions
from memfit.recomputation import checkpointed, is_checkpointed
from memfit.solver import options
from memfit.workload import Workload
from tests.models import BUILDERS, COSTS, convnet, plain_trace, regions_of, step_of, transformer, twice
from tests.recomputation.steps import Chain, Executed, blocks, differing

ALL_REGIONS: dict[str, dict[str, Keep]] = {
    "transformer": {"blocks.0": (), "blocks.1.mlp": (), "drop": ()},
    "tied": {"embed": (), "blocks.0": (), "head": ()},
    "convnet": {"stem": (), "stages": (), "pool": ()},
    "unet": {"unet.inner": (), "unet.up": ()},
    "recurrent": {"lstm": (), "attention": (), "norm": ()},
    "twice": {"shared": (), "between.1": ()},
}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def trained(
    workload: Workload, regions: dict[str, Keep], *, precision: Precision = "32-true", steps: int = 3
) -> dict[str, torch.Tensor]:
    """Return losses, gradients, and every parameter and buffer after some steps."""
    found: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    with step_of(workload, precision=precision, regions=regions) as step:
        loss, gradients = step.gradients(workload.batch)
        found |= {f"gradient of {name}": g for name, g in gradients.items()} | {"loss": torch.tensor(loss)}
        for index in range(steps):
            found[f"loss {index}"] = torch.tensor(step(workload.batch).loss)
    found |= {name: value.clone() for name, value in workload.model.state_dict().items()}
    return found | {"random state": torch.get_rng_state()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", BUILDERS)
def test_training_is_bitwise_the_same(name: str, precision: Precision) -> None:
    plain = trained(BUILDERS[name](), {}, precision=precision)
    assert not differing(trained(BUILDERS[name](), ALL_REGIONS[name], precision=precision), plain)


def test_the_comparison_notices_another_seed_or_one_bit() -> None:
    plain = trained(twice(), {}, steps=1)
    workload = twice()
    with torch.no_grad():
        workload.model.head.bias[0] = torch.nextafter(workload.model.head.bias[0], torch.tensor(9.0))
    assert "head.bias" in differing(trained(workload, {}, steps=1), plain)
    shared = trained(twice(), {"shared": ()}, steps=1)
    assert not differing(shared, plain)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", BUILDERS)
def test_keeping_operators_changes_no_bit(name: str, precision: Precision) -> None:
    every = [region for o in options(Regions(plain_trace(name, precision)), COSTS) for region in o.regions]
    found = {region.modules[0]: region.keep for region in every if region.keep}
    found = {f: k for f, k in found.items() if not any(f.startswith(f"{other}.") for other in found)}
    plain = trained(BUILDERS[name](), {}, precision=precision, steps=1)
    assert not differing(trained(BUILDERS[name](), found, precision=precision, steps=1), plain)


def executed(workload: Workload, regions: dict[str, Keep]) -> Counter[str]:
    with step_of(workload, regions=regions) as step, Executed() as mode:
        step.gradients(workload.batch)
    return mode.counts


def test_each_call_of_a_module_is_recomputed_by_itself() -> None:
    plain, both = executed(twice(), {}), executed(twice(), {"shared": ("aten.tanh.default#0",)})
    assert both["aten.addmm.default"] - plain["aten.addmm.default"] == 4
    assert both["aten.tanh.default"] == plain["aten.tanh.default"] == 2


def forwards(model: nn.Module) -> dict[str, Any]:
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_undoes_it(fails: bool) -> None:
    workload = transformer()
    before, keys = forwards(workload.model), list(workload.model.state_dict())
    try:
        with checkpointed(workload.model, regions_of({"blocks.0": (), "head": ()})):
            assert is_checkpointed(workload.model)
            assert list(workload.model.state_dict()) == keys
            assert [n for n, _ in workload.model.named_modules()] == list(before)
            if fails:
                raise RuntimeError("the user's")
    except RuntimeError as e:
        assert fails and str(e) == "the user's"
    assert forwards(workload.model) == before
    assert not is_checkpointed(workload.model)


def test_a_forward_of_the_users_own_is_used_and_restored() -> None:
    calls: list[str] = []

    def doubled() -> Workload:
        workload = twice()
        original = workload.model.head.forward

        def mine(x: torch.Tensor) -> torch.Tensor:
            calls.append("mine")
            return original(x) * 2

        workload.model.head.forward = mine
        return workload

    plain = trained(doubled(), {}, steps=0)
    workload = doubled()
    before = workload.model.head.__dict__["forward"]
    calls.clear()
    planned = trained(workload, {"head": ()}, steps=0)
    assert calls == ["mine", "mine"] and workload.model.head.__dict__["forward"] is before
    assert not differing(planned, plain)


@pytest.mark.parametrize(
    ("regions", "error", "text"),
    [
        ([blocks(7)], PlanMismatchError, r"'blocks\.7'"),
        ([blocks(0, 1), blocks(1, 2)], PlanError, r"'blocks\.1' twice"),
        ([blocks(0, 0)], PlanError, r"'blocks\.0' twice"),
        ([Region(("blocks.0", "blocks.0.f"))], PlanError, "of one run"),
        (
            [Region(("blocks.0.f",)), blocks(0, keep=("aten.addmm.default#0",))],
            PlanError,
            r"'blocks\.0\.f' within 'blocks\.0', and the outer region keeps",
        ),
        (
            [blocks(0, 1, keep=("aten.addmm.default#0",)), Region(("blocks.1.f",))],
            PlanError,
            r"'blocks\.1\.f' within 'blocks\.1'",
        ),
        ([Region(("blocks.1",), (), True, "nowhere")], PlanMismatchError, "prefetch"),
        ([Region(("blocks.1",), (), False, "blocks.2")], PlanError, "offload=False"),
        ([Region(("blocks.1",)), Region(("blocks.1.f",), offload=True)], PlanError, "nothing in host memory"),
        ([blocks(1, 2), Region(("blocks.1",), offload=True)], PlanError, "nothing in host memory"),
    ],
)
def test_regions_that_cannot_be_are_refused(regions: list[Region], error: type[Exception], text: str) -> None:
    model = Chain()
    with pytest.raises(error, match=text), checkpointed(model, regions):
        pass
    assert not is_checkpointed(model) and not any("forward" in m.__dict__ for m in model.modules())


def test_regions_are_put_on_once() -> None:
    model = Chain()
    with checkpointed(model, [blocks(0)]):
        for modules in (("blocks.0",), ("blocks.0.f",), ("",)):
            with pytest.raises(PlanError, match="already"), checkpointed(model, [Region(modules)]):
                pass
        assert is_checkpointed(model)
    assert not is_checkpointed(model)


def test_names_that_only_begin_alike_are_not_nested() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "layer1": nn.Linear(2, 2)})
    with checkpointed(model, regions_of({"layer": (), "layer1": ()})):
        assert is_checkpointed(model)


def test_passes_without_gradients_are_unaffected() -> None:
    workload = convnet()
    x = workload.batch["x"]
    workload.model.eval()
    before = copy.deepcopy(workload.model.state_dict())
    with torch.no_grad():
        plain = workload.model(x)
        with (
            checkpointed(workload.model, regions_of({"stages": (), "stem": ("aten.convolution.default#0",)})),
            Executed() as mode,
        ):
            assert torch.equal(workload.model(x), plain)
        assert mode.counts["aten.convolution.default"] == 5
        assert torch.equal(workload.model(x), plain)
    assert not differing(dict(workload.model.state_dict()), dict(before))
