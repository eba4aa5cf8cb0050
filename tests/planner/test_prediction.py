"""Many captures of one workload, against each by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memfit.cost import kernels_bytes, roofline
from memfit.hardware import find_device
from memfit.ir import Levers, Precision, Region, Trace
from memfit.planner import Captures, StepVariant, capture_levers, captured_through, predict
from memfit.workload import Workload, batch_size_of
from tests.gpus import AMPERE
from tests.models import BUILDERS, COSTS, plain_trace, squared_error, transformer
from tests.pipeline.test_plan import Caching
from tests.update_settings import update_settings

DEVICE = find_device("cpu")
CHOICES: tuple[tuple[Precision, int, tuple[str, ...]], ...] = (
    ("32-true", 2, ()),
    ("bf16-mixed", 1, ()),
    ("32-true", 1, ("*",)),
    ("bf16-mixed", 2, ("*",)),
    ("32-true", 2, ()),
)
"""Precision, microbatches, lean modules; the last is the first again, after the others."""


MORE = ("tied", "unet", "twice", "recurrent")
"""Those that CI takes: they hold nothing that the others don't."""

SMALLER: dict[str, dict[str, int]] = {
    "transformer": {"layers": 1},
    "tied": {"layers": 1},
    "convnet": {"blocks": 1},
    "unet": {"levels": 2},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci) if n in MORE else n for n in BUILDERS])
def test_captures_are_those_of_each_by_itself(name: str) -> None:
    workload = BUILDERS[name](**SMALLER.get(name, {}))
    captures, size = Captures(workload, DEVICE), batch_size_of(workload.batch)
    for precision, parts, lean in CHOICES:
        levers = Levers(precision=precision, microbatch_size=size // parts, lean=lean)
        assert captures(levers) == capture_levers(workload, levers, DEVICE)


def test_a_plan_on_a_copy_that_has_made_a_step_is_the_plan_from_its_first_step_on() -> None:
    workload = transformer(layers=2)
    captures = Captures(workload, DEVICE)
    plain = Levers(microbatch_size=batch_size_of(workload.batch))
    (keep, *_) = [op.name for op in captures(plain).ops if op.name.startswith("aten.addmm")]
    for regions in ((Region(("blocks.0",)),), (Region(("blocks.0",)), Region(("blocks.1",), (f"{keep}#0",)))):
        levers = replace(plain, regions=regions)
        trace = captures(levers)
        assert any(op.phase == "recompute" for op in trace.ops)
        assert trace == capture_levers(workload, levers, DEVICE)


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("in-backward", "32-true"), ("as-is", "bf16-true"), ("as-is", "16-mixed")]
)
def test_what_changes_the_optimizers_state_starts_without(optimizer: str, precision: Precision) -> None:
    workload = dataclasses.replace(transformer(layers=1), bf16_updates="master-weights", max_grad_norm=None)
    captures = Captures(workload, DEVICE)
    plain = Levers(microbatch_size=batch_size_of(workload.batch))
    captures(plain)
    levers = Levers(precision=precision, microbatch_size=plain.microbatch_size, **update_settings(optimizer))
    assert captures(levers) == capture_levers(workload, levers, DEVICE)
    assert captures(plain) == capture_levers(workload, plain, DEVICE)


def noted(variants: list[StepVariant]) -> AbstractContextManager[None]:
    """Add what is captured to a list."""

    def store(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        variants.append(variant)
        return capture(variant)

    return captured_through(store)


def test_all_are_of_one_copy_that_has_made_a_step() -> None:
    workload, variants = transformer(layers=1), list[StepVariant]()
    captures = Captures(workload, DEVICE)
    with noted(variants):
        for size in (4, 2, 1):
            captures(Levers(microbatch_size=size))
    copies = [variant.copied() for variant in variants if variant.copied is not None]
    assert len(copies) == 3 and all(copied is copies[0] for copied in copies) and all(v.warm for v in variants)
    assert copies[0].optimizer.state and not workload.optimizer.state


def test_a_model_that_holds_something_of_the_step_before_is_captured_by_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Caching(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, (torch.randn(8, 16), torch.randn(8, 16)), squared_error, optimizer)
    captures, variants = Captures(workload, DEVICE), list[StepVariant]()
    levers = Levers(precision="bf16-mixed", microbatch_size=8)
    with noted(variants):
        assert captures(levers) == capture_levers(workload, levers, DEVICE)
    assert [variant.warm for variant in variants[-2:]] == [False, False]  # whether or not it was tried with that one


def test_a_full_card_is_retried_before_it_is_said_to_be_too_small() -> None:
    trace = plain_trace("transformer")
    roomy = replace(AMPERE, usable_bytes=AMPERE.memory_bytes)
    costs = roofline([trace], roomy)
    found, _ = predict(trace, costs, roomy)
    assert found.retries == 0 and found.context_bytes == roomy.context_bytes
    assert found.context_upper_bytes == roomy.context_bytes + kernels_bytes(trace)
    assert found.peak_reserved_bytes is not None
    tight, _ = predict(trace, costs, replace(roomy, usable_bytes=found.peak_reserved_bytes - 1))
    small, _ = predict(trace, costs, replace(roomy, usable_bytes=found.peak_bytes // 2))
    assert tight.peak_reserved_bytes == small.peak_reserved_bytes == found.peak_reserved_bytes
    assert tight.retries is None or tight.retries > 0
    assert small.retries is None


@pytest.mark.parametrize(
    ("calls", "again"),
    [
        (2, {"regions": (Region(("blocks.0",)), Region(("blocks.1",)))}),
        (1, {"regions": (Region(("blocks.1",), keep=("aten.addmm.default#0",)),)}),
        (4, {"lean": ("*.norm1", "*.norm2")}),
    ],
    ids=["regions", "regions that keep", "lean"],
)
def test_what_a_plan_recomputes_takes_its_overhead_in_time_too(calls: int, again: dict[str, Any]) -> None:
    levers = Levers(microbatch_size=8, **again)
    trace = capture_levers(transformer(batch=8), levers, DEVICE)
    costs = replace(COSTS, checkpoint_seconds=0.0, selective_op_seconds=0.0)
    without = predict(trace, costs, DEVICE)[0]
    found = predict(trace, replace(costs, checkpoint_seconds=1.0, selective_op_seconds=100.0), DEVICE)[0]
    kept = any(region.keep for region in levers.regions)
    assert (found.step_seconds - without.step_seconds) % 100 == pytest.approx(calls)
    assert (found.step_seconds - without.step_seconds > 100) == kept
    assert found.step_seconds == pytest.approx(sum(found.phase_seconds.values()))
