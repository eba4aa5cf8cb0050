"""`verify` proves what a plan says, and fails on a plan that was tampered with."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from examples import digits_resnet
from memfit.errors import PlanMismatchError
from memfit.ir import Levers, Plan, Region
from memfit.levers import LeversOn, lever_uses
from memfit.planner import probe_regions
from memfit.recipes import brain_segmentation, byte_lm
from memfit.workload import Workload
from tests.pipeline.plans import exact
from tests.workloads import lean, other

EVERY: dict[str, Callable[[], Workload]] = {
    "byte_lm": functools.partial(byte_lm, n_layer=1, d_model=64, context=64, batch_size=4, max_bytes=500_000),
    "brain_segmentation": functools.partial(brain_segmentation, patch=(32, 32, 32), batch_size=2),
    "digits_resnet": functools.partial(digits_resnet.workload, size=16),
}


RUNS = [("plain step", 3), ("planned step", 4)]


LARGE = ("brain_segmentation", "digits_resnet")
SOME = [pytest.param(name, marks=pytest.mark.ci) if name in LARGE else name for name in EVERY]


@pytest.mark.parametrize("name", SOME)
def test_the_workloads_have_dropout(name: str) -> None:
    model = EVERY[name]().model
    names = {type(m).__name__ for m in model.modules()}
    assert any("Dropout" in name for name in names) or hasattr(model, "dropout")


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_exact_plans_are_bitwise_equal_within_budget_and_predicted(name: str) -> None:
    workload = EVERY[name]()
    plain = memfit.estimate(workload).peak_bytes
    plan = exact(workload, int(0.88 * plain), precisions=None)
    assert plan.levers.regions or plan.levers.lean  # convolutions hold more or less by the processor
    found = memfit.verify(plan, workload, steps=0)
    assert found.failures == []
    assert found.bitwise
    assert found.loss_difference == found.gradient_difference == 0.0
    assert found.plain_measured_peak_bytes == pytest.approx(plain, rel=0.05)
    assert found.measured_peak_bytes <= plan.budget_bytes < found.plain_measured_peak_bytes
    assert found.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte_lm", "brain_segmentation"])  # products and attention; convolutions and norms
def test_reduced_plans_hold_in_bf16(name: str) -> None:
    workload = EVERY[name]()
    plain = memfit.estimate(workload, precision="bf16-mixed").peak_bytes
    plan = memfit.plan(
        workload, budget=int(0.9 * plain), numerics="reduced", precisions=["bf16-mixed"], optimizers=["as-is"], points=1
    )
    found = memfit.verify(plan, workload, steps=0)
    assert found.failures == []
    assert 0.0 < found.gradient_difference < 0.25
    assert found.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)


class TestTampering:
    @pytest.fixture(scope="class")
    @classmethod
    def plan(cls) -> Plan:
        return exact(lean(), int(0.75 * memfit.estimate(lean()).peak_bytes))

    def test_untouched_plan_holds_and_each_run_is_told(self, plan: Plan) -> None:
        assert plan.levers.regions
        told: list[tuple[str, int, int]] = []
        found = memfit.verify(plan, lean(), progress=lambda *stage: told.append(stage), steps=2)
        assert found.holds and found.comparison is not None
        assert found.comparison.plain_losses == found.comparison.planned_losses
        assert "Plain and planned step" in str(found)
        plain, planned = ([(step, done, total) for done in range(total + 1)] for step, total in RUNS)
        turns = [("plain and planned", done, 2) for done in (1, 2)]
        assert told == [*plain, *planned, ("prediction", 0, 1), ("prediction", 1, 1), *turns]

    @pytest.mark.parametrize(
        ("edit", "word"),
        [
            (lambda p: {"predicted": replace(p.predicted, peak_bytes=p.predicted.peak_bytes // 2)}, "predicted"),
            (lambda p: {"levers": replace(p.levers, regions=())}, "predicted"),
            (lambda p: {"budget_bytes": p.predicted.peak_bytes // 2}, "budget_bytes"),
            (lambda p: {"levers": replace(p.levers, precision="bf16-mixed")}, "uses"),
            (lambda p: {"levers": replace(p.levers, microbatch_size=1)}, "exact"),
            (lambda p: {"numerics": "reduced"}, "numerics"),
            (lambda p: {"levers": replace(p.levers, regions=(Region(("blocks.0",), ("aten.mm#7",)),))}, "predicted"),
        ],
    )
    def test_edits_are_found(self, plan: Plan, edit: Callable[[Plan], dict[str, Any]], word: str) -> None:
        found = memfit.verify(replace(plan, **edit(plan)), lean(), steps=0)
        assert not found.holds
        assert any(word in failure for failure in found.failures)

    def test_unknown_module_and_other_workload_are_refused(self, plan: Plan) -> None:
        with pytest.raises(PlanMismatchError, match="nowhere"):
            memfit.verify(replace(plan, levers=Levers(microbatch_size=4, regions=(Region(("nowhere",)),))), lean())
        with pytest.raises(PlanMismatchError, match="fingerprint"):
            memfit.verify(plan, other(), steps=0)


class Unscaled(nn.Linear):
    """A layer without its bias where autocast is on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if torch.is_autocast_enabled("cpu") else self.bias
        return nn.functional.linear(x, self.weight, bias)


def test_a_gradient_that_goes_missing_is_found() -> None:
    made = squared(nn.Sequential(nn.Linear(32, 32), Unscaled(32, 32)), torch.randn(16, 32))
    plan = exact(made)
    in_bf16 = replace(plan, levers=replace(plan.levers, precision="bf16-mixed"), numerics="reduced")
    assert "no gradient for 1.bias" in memfit.verify(in_bf16, made, steps=0).failures


def test_microbatches_are_equal_to_rounding() -> None:
    levers = Levers(microbatch_size=1)
    cut = replace(exact(lean()), levers=levers, numerics="reordered", uses=lever_uses(LeversOn(levers, 4)))
    found = memfit.verify(cut, lean(), steps=0)
    assert found.loss_difference < 1e-5
    assert 0.0 < found.gradient_difference < 1e-4
    assert not found.bitwise


class Counting(nn.Module):
    """Scales by how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x * (1 + self.calls / 8)).sin()


def squared(model: nn.Module, batch: torch.Tensor, lr: float = 0.1) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Workload(model, batch, lambda model, batch: model(batch).square().mean(), optimizer)


def counting() -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    blocks[2].insert(1, Counting())
    return squared(nn.Sequential(*blocks), torch.randn(256, 32))


NUMBERS = np.random.default_rng(0)


class Drawing(torch.nn.Module):
    """Scales by what generators outside of PyTorch draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() + float(np.random.randn()) + float(NUMBERS.random())) + x.sin()


@pytest.mark.ci
def test_a_step_that_draws_from_other_generators_is_compared_with_the_same_draws() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Drawing(), nn.Linear(32, 32), Drawing())
    made = squared(model, torch.randn(256, 32))
    plan = exact(made)
    for regions in ((), (Region(("0", "1")), Region(("3",)))):
        assert memfit.verify(replace(plan, levers=replace(plan.levers, regions=regions)), made, steps=0).bitwise


def test_a_region_that_is_recomputed_to_other_values_is_named() -> None:
    workload = counting()
    regions = (Region(("0", "1")), Region(("2", "3")))
    found = probe_regions(workload, Levers(microbatch_size=256, regions=regions))
    assert list(found) == [regions[1]]
    assert found[regions[1]].startswith("the second run of 2 differs from the first (")
    assert not probe_regions(workload, Levers(microbatch_size=256, regions=regions[:1]))
    plan = exact(workload)
    verification = memfit.verify(replace(plan, levers=replace(plan.levers, regions=regions)), workload, steps=0)
    assert "a region of the plan can't be recomputed: the second run of 2" in "".join(verification.failures)


def test_a_training_that_diverges_in_the_steps_in_turn_is_noted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1, bias=False)
    diverging = squared(model, torch.randn(64, 16), lr=5e5)  # the loss grows by 1e12 a step
    found = memfit.verify(exact(diverging), diverging)
    assert found.comparison is None and any("steps in turn diverged" in note for note in found.notes)
