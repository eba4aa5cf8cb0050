"""Plans fit, and are the fastest that fit; budgets that nothing fits say what would."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.errors import BudgetError, InfeasibleError, PlanError, PlanMismatchError, UsageError, WorkloadError
from memfit.ir import NUMERICS, Candidate, CostTable, Levers, Plan, Prediction, Region, Trace
from memfit.levers import LeversOn, lever_uses
from memfit.planner import assembly, captured_steps
from memfit.planner.captured_steps import CapturedSteps
from memfit.planner.confirmation import Confirmation
from memfit.recipes import byte_lm
from memfit.solver import SIMPLER_WITHIN
from memfit.workload import Workload, rng_state
from tests.measuring import step_peak_bytes
from tests.pipeline.plans import exact
from tests.workloads import lean, other


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    return memfit.estimate(lean()).peak_bytes


def small() -> Workload:
    """Of one layer: for what has no need of more, and captures many steps."""
    return byte_lm(n_layer=1, d_model=64, n_head=4, context=64, batch_size=2, dropout=0.0, max_bytes=200_000)


def squared(model: nn.Module, batch: torch.Tensor) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, batch, lambda model, batch: model(batch).square().mean(), optimizer)


@pytest.fixture(scope="module")
def lowest() -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(small(), budget="64KiB", precisions=["32-true"], points=1)
    return caught.value


@pytest.mark.parametrize(
    ("numerics", "share"),
    [
        ("exact", 0.75),
        ("reordered", 0.55),
        *(pytest.param("reordered" if share < 0.9 else "exact", share, marks=pytest.mark.ci) for share in (0.9, 0.7)),
        pytest.param("reordered", 0.9, marks=pytest.mark.ci),
    ],
)
def test_planned_step_stays_within_its_budget(plain_bytes: int, share: float, numerics: Any) -> None:
    budget = int(share * plain_bytes)
    plan = memfit.plan(lean(), budget=budget, numerics=numerics, precisions=["32-true"], points=1)
    peak = step_peak_bytes(lean(), plan.levers)
    assert peak <= budget
    assert plan.predicted.peak_bytes == pytest.approx(peak, rel=0.02)
    assert plan.predicted.peak_upper_bytes <= budget
    assert NUMERICS.index(plan.numerics) <= NUMERICS.index(plan.allowed)
    assert plan.solution.bound_seconds <= plan.predicted.step_seconds


def test_lowest_budget_fits_and_the_one_below_does_not(lowest: InfeasibleError) -> None:
    plan = memfit.plan(small(), budget=lowest.lowest_peak_bytes, precisions=["32-true"], points=1)
    assert step_peak_bytes(small(), plan.levers) <= lowest.lowest_peak_bytes
    with pytest.raises(InfeasibleError):
        memfit.plan(small(), budget=int(lowest.lowest_peak_bytes * 0.97), precisions=["32-true"], points=1)


@pytest.mark.parametrize("slack", [0.01, 0.2])
def test_lowest_budget_fits_where_other_plans_of_that_peak_are_less_sure(slack: float) -> None:
    captured: list[Levers] = []
    capture = Confirmation.confirmed

    def less_sure_of_others(self: Confirmation, levers: Levers, *, is_long: bool = False) -> Trace:
        captured.append(levers)
        return replace(capture(self, levers, is_long=is_long), slack=0.0 if levers == captured[0] else slack)

    with mock.patch.object(Confirmation, "confirmed", less_sure_of_others):
        with pytest.raises(InfeasibleError) as caught:
            exact(lean(), "1MiB")
        plan = exact(lean(), caught.value.lowest_peak_bytes)
    assert plan.levers == captured[0]


def test_infeasible_says_what_where_and_what_to_do(lowest: InfeasibleError) -> None:
    assert lowest.proven == ("Smallest budget that works" in str(lowest))
    assert lowest.budget_bytes == 2**16
    assert lowest.where in str(lowest)
    assert f"{lowest.lowest_peak_bytes} bytes" in str(lowest) and "raise budget=" in str(lowest)


def test_plain_step_is_left_alone_where_it_fits(plain_bytes: int) -> None:
    plan = memfit.plan(lean(), budget=2 * plain_bytes, numerics="exact", points=1)
    assert plan.levers == Levers(microbatch_size=4)
    assert plan.classes == {}


def test_frontier_is_undominated_and_holds_the_plan(plain_bytes: int, captures: list[Levers]) -> None:
    plan = memfit.plan(lean(), budget=int(0.55 * plain_bytes), points=4)
    assert plan.levers in [c.levers for c in plan.frontier]
    seconds = [c.step_seconds for c in plan.frontier]
    assert seconds == sorted(seconds)
    assert {levers.precision for levers in captures} == {"32-true", "bf16-mixed"}
    for a, b in itertools.permutations([c for c in plan.frontier if c.levers != plan.levers], 2):
        as_strict = NUMERICS.index(a.numerics) <= NUMERICS.index(b.numerics)
        assert not (as_strict and a.step_seconds <= b.step_seconds and a.peak_bytes <= b.peak_bytes)


def test_no_row_of_the_frontier_contradicts_the_plan(plain_bytes: int) -> None:
    plan = memfit.plan(lean(), budget="0.6x", points=6)
    (own,) = [c for c in plan.frontier if c.levers == plan.levers]
    assert own.is_captured
    assert (own.peak_bytes, own.held_bytes) == (plan.predicted.peak_bytes, plan.predicted.peak_upper_bytes)
    assert own.step_seconds == plan.predicted.step_seconds
    for point in plan.frontier:
        assert point.held_bytes >= point.peak_bytes
        is_allowed = NUMERICS.index(point.numerics) <= NUMERICS.index(plan.allowed)
        if is_allowed and point.held_bytes <= plan.budget_bytes:
            assert point.step_seconds * (1 + SIMPLER_WITHIN) >= plan.predicted.step_seconds
    assert plan.solution.status == "feasible" or plan.solution.gap <= SIMPLER_WITHIN
    assert plan.budget_bytes == int(0.6 * plain_bytes)
    assert plan.budget_share.startswith("0.6x of the plain step's peak")


@pytest.mark.parametrize(("slower", "is_taken"), [(100.0, True), (1.0, False)])
def test_a_row_that_is_faster_than_the_captured_plan_is_captured_and_taken(slower: float, is_taken: bool) -> None:
    """Applied, a plan may be slower than the solver knew, as of one kind of region here."""
    confirm = assembly._Assembly._confirm
    confirmed: list[Levers] = []

    def slower_with_microbatches(self: assembly._Assembly, candidate: Candidate) -> Prediction:
        confirmed.append(candidate.levers)
        found = confirm(self, candidate)
        is_cut = candidate.levers.microbatch_size < 4
        return replace(found, step_seconds=found.step_seconds * (slower if is_cut else 1.0))

    with mock.patch.object(assembly._Assembly, "_confirm", slower_with_microbatches):
        plan = memfit.plan(lean(), budget="0.75x", precisions=["32-true"], points=6)
    cut = [levers for levers in confirmed if levers.microbatch_size < 4]
    if is_taken:
        assert plan.levers.microbatch_size == 4 and plan.levers in confirmed
        assert plan.predicted.peak_upper_bytes <= plan.budget_bytes
        for left in cut:
            (row,) = [c for c in plan.frontier if c.levers == left]
            assert row.is_captured and row.step_seconds > plan.predicted.step_seconds
    assert len(set(map(str, confirmed))) == len(confirmed)


@pytest.mark.parametrize(
    ("budget", "of"), [("50%", "50% of the"), ("0.9x", "0.9x of the plain step's peak of"), ("1GiB", "")]
)
def test_a_plan_says_what_a_share_was_of(budget: str, of: str) -> None:
    plan = memfit.plan(lean(), budget=budget, points=1, numerics="exact")
    assert plan.budget_share.startswith(of) and bool(plan.budget_share) == bool(of)
    assert any("'0.5x'" in note for note in plan.notes) == (budget == "50%")


@pytest.mark.parametrize(
    ("slow_seconds", "budget", "is_needed"),
    [
        pytest.param(1e9, "1GiB", False, marks=pytest.mark.ci),  # slower than whatever is planned
        pytest.param(1e-6, "1GiB", True, marks=pytest.mark.ci),  # faster than what is planned
        (1e9, "1MiB", True),  # nothing else fits, nor does this
    ],
)
@pytest.mark.ci
def test_slow_precisions_are_microbatched_where_nothing_else_is_as_fast(
    slow_seconds: float, budget: str, is_needed: bool, captures: list[Levers], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"32-true": 1e-9, "bf16-mixed": slow_seconds}
    predicted = CapturedSteps.predicted

    def as_given(self: CapturedSteps, levers: Levers) -> Prediction:
        return replace(predicted(self, levers), step_seconds=seconds[levers.precision])

    monkeypatch.setattr(CapturedSteps, "predicted", as_given)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    workload = squared(model, torch.randn(64, 256))
    with contextlib.suppress(InfeasibleError) if budget == "1MiB" else contextlib.nullcontext():
        memfit.plan(workload, budget=budget, numerics="reduced", precisions=["32-true", "bf16-mixed"], points=1)
    sizes = {precision: {c.microbatch_size for c in captures if c.precision == precision} for precision in seconds}
    assert len(sizes["32-true"]) > 1
    assert sizes["bf16-mixed"] == (sizes["32-true"] if is_needed else {64})


@pytest.mark.ci
@pytest.mark.parametrize(("slower", "searches"), [(3.0, 2), (1.01, 1)])
def test_operators_that_are_measured_anew_count_for_all_plans(
    slower: float, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the machine has got slower since the first steps were captured, unless it is hardly slower."""
    options: dict[str, Any] = {"budget": "0.9x", "precisions": ["32-true"], "points": 4}
    expected = memfit.plan(lean(), **options)
    known, choose, factors = captured_steps.costs_of, assembly._Assembly._choose, [1.0]

    def costs_of(*arguments: Any) -> CostTable:
        costs = known(*arguments)
        ops = {text: replace(cost, seconds=factors[-1] * cost.seconds) for text, cost in costs.ops.items()}
        return replace(costs, ops=ops)

    def chosen_later(self: assembly._Assembly) -> Any:
        factors.append(slower)
        return choose(self)

    monkeypatch.setattr(captured_steps, "costs_of", costs_of)
    monkeypatch.setattr(assembly._Assembly, "_choose", chosen_later)
    plan = memfit.plan(lean(), **options)
    assert len(factors) == 1 + searches
    least = 1.5 if searches == 2 else 0.99
    assert plan.plain.step_seconds > least * expected.plain.step_seconds
    rows = {row.levers: row.step_seconds for row in plan.frontier}
    assert rows[Levers(microbatch_size=plan.batch_size)] == pytest.approx(plan.plain.step_seconds, rel=0.02)
    before = {row.levers: row.step_seconds for row in expected.frontier}
    shared = rows.keys() & before.keys()
    assert len(shared) > 1 and all(rows[levers] > least * before[levers] for levers in shared)


def test_random_numbers_of_the_users_own_code_are_drawn_anew() -> None:
    workload = small()
    loss_fn = workload.loss_fn

    def drawing(model: torch.nn.Module, batch: object) -> object:
        random.random()
        np.random.rand()
        torch.rand(1)
        return loss_fn(model, batch)

    before = rng_state()
    memfit.estimate(dataclasses.replace(workload, loss_fn=drawing))  # type: ignore[arg-type]
    assert rng_state() == before
    random.random()
    assert rng_state() != before


def test_batch_norm_is_not_microbatched_unless_allowed() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    workload = squared(nn.Sequential(*blocks), torch.randn(512, 64))
    plan = memfit.plan(workload, budget="0.8x", precisions=["32-true"], points=1)
    assert plan.levers != Levers(microbatch_size=512)
    assert {c.levers.microbatch_size for c in plan.frontier} == {512}
    assert any("BatchNorm" in note for note in plan.notes)
    assert [u.numerics for u in lever_uses(LeversOn(Levers(microbatch_size=1), 2, couples_batch=True))] == ["changed"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"budget": "lots"}, BudgetError),
        ({"budget": -5}, BudgetError),
        ({"budget": "1GiB", "numerics": "loose"}, UsageError),
        ({"budget": "1GiB", "device": "tpu"}, UsageError),
        ({"budget": "1GiB", "points": 0}, UsageError),
        ({"budget": "1GiB", "precisions": ["fp8"]}, UsageError),
        ({"budget": "1GiB", "measure": "often"}, UsageError),
        ({"budget": "1GiB", "optimizers": ["lion"]}, UsageError),
        ({"budget": "1GiB", "precisions": ["bf16-mixed"]}, UsageError),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=str(list(arguments)[-1])):
        memfit.plan(lean(), **arguments)  # type: ignore[arg-type]


def test_a_model_without_data_is_estimated_alike_and_not_run() -> None:
    with torch.device("meta"):
        empty = lean()
    assert memfit.estimate(empty).peak_bytes == memfit.estimate(lean()).peak_bytes
    plan = memfit.plan(lean(), budget="1GiB")
    with pytest.raises(WorkloadError, match="has no data"):
        memfit.verify(plan, empty, steps=0)


def test_ranks_and_snapshots_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="world_size=0"):
        memfit.estimate(lean(), world_size=0)
    with pytest.raises(UsageError, match="mode='zero4'"):
        memfit.estimate(lean(), world_size=2, sharding="zero4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="snapshot="):
        memfit.estimate(lean(), snapshot="never-written.pickle")


def test_model_elsewhere_is_refused() -> None:
    class Elsewhere(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([types.SimpleNamespace(device=torch.device("xpu", 0), requires_grad=False)])

    with pytest.raises(WorkloadError, match="is on xpu, not on device='cpu'"):
        memfit.estimate(dataclasses.replace(lean(), model=Elsewhere()), device="cpu")


class TestApply:
    @pytest.fixture(scope="class")
    @classmethod
    def plan(cls) -> Plan:
        return exact(lean(), "20MiB")

    def test_step_trains_and_close_restores(self, plan: Plan) -> None:
        workload = lean()
        step = memfit.apply(plan, workload)
        losses = [step(workload.batch).loss for _ in range(3)]
        assert losses[-1] < losses[0]
        assert any("forward" in m.__dict__ for m in workload.model.modules()) == bool(plan.levers.regions)
        step.close()
        step.close()
        assert not any("forward" in m.__dict__ for m in workload.model.modules())

    def test_another_model_is_refused(self, plan: Plan) -> None:
        with pytest.raises(PlanMismatchError, match="fingerprint"):
            memfit.apply(plan, other())

    def test_applying_twice_is_refused(self, plan: Plan) -> None:
        workload = lean()
        edited = replace(plan, levers=replace(plan.levers, regions=(Region(("blocks.0",)),)))
        with memfit.apply(edited, workload):
            with pytest.raises(PlanError, match=r"close\(\)"):
                memfit.apply(edited, workload)
            with pytest.raises(PlanError, match=r"close\(\)"):
                memfit.plan(workload, budget="20MiB")
        with memfit.apply(edited, workload):
            pass

    @pytest.mark.parametrize("size", [0, 5, -1])
    def test_illegal_microbatch_size_is_refused(self, plan: Plan, size: int) -> None:
        with pytest.raises(PlanError, match="microbatch_size"):
            memfit.apply(replace(plan, levers=replace(plan.levers, microbatch_size=size)), lean())


class Caching(nn.Module):
    """Cheap to run again, and adds what it saw before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        self.seen.append(y.detach().mean().view(1))
        return (y.unsqueeze(-1) * torch.cat(self.seen)).sum(-1).sin().cos().tanh()


def test_modules_that_do_something_else_when_they_run_again_are_left_out() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(blocks[0], Caching(), blocks[1], Caching(), blocks[2])
    workload = squared(model, torch.randn(1024, 64))
    budget = int(0.8 * memfit.estimate(workload).peak_bytes)
    plan = memfit.plan(workload, budget=budget, numerics="exact", points=1)
    assert {note[:20] for note in plan.notes} & {"1 is not recomputed:", "3 is not recomputed:"}
    assert plan.levers.regions and not {f for r in plan.levers.regions for f in r.modules} & {"1", "3"}
    assert memfit.verify(plan, workload, steps=0).failures == []
    assert step_peak_bytes(workload, plan.levers) <= plan.budget_bytes


def test_progress_ends_where_it_said_that_it_would() -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        told.setdefault(stage, []).append((done, total))

    memfit.plan(lean(), budget="20MiB", points=2, progress=progress)
    assert {"capture", "solve", "frontier"} <= told.keys()
    for stage, steps in told.items():
        assert steps[-1][0] == steps[-1][1], stage
        assert all(0 <= done <= total for done, total in steps)


# Other budgets, looked up on the frontier of a plan


@pytest.fixture(scope="module")
def whole() -> Plan:
    return memfit.plan(lean(), budget="1GiB", precisions=["32-true"], points=4)


def test_any_budget_is_the_fastest_point_that_fits_and_is_kept(whole: Plan) -> None:
    workload = lean()
    lowest = min(c.held_bytes for c in whole.frontier)
    seconds = []
    for share in (1, 1.3, 1.8):
        found = whole.at(int(share * lowest))
        point = next(c for c in whole.frontier if c.levers == found.levers)
        faster = [c for c in whole.frontier if c.step_seconds < point.step_seconds]
        assert all(c.held_bytes > found.budget_bytes for c in faster)
        assert found.budget_bytes == int(share * lowest)
        peak = step_peak_bytes(workload, found.levers)
        assert found.predicted.peak_bytes == pytest.approx(peak, rel=0.02)
        assert peak <= found.predicted.peak_upper_bytes <= found.budget_bytes
        assert found.solution.bound_seconds <= found.predicted.step_seconds
        seconds.append(point.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_only_what_the_numerics_allow_is_taken(whole: Plan) -> None:
    strict = replace(whole, allowed="exact")
    budget = min(c.held_bytes for c in whole.frontier if c.numerics == "exact")
    found = strict.at(budget)
    assert found.numerics == "exact" and found.levers.microbatch_size == found.batch_size


def test_shares_are_of_what_the_plan_was_made_for(whole: Plan) -> None:
    assert whole.plain.device_bytes is not None
    assert whole.at("50%").budget_bytes == whole.plain.device_bytes // 2
    found = whole.at("1.2x")
    assert found.budget_bytes == int(1.2 * whole.plain.peak_upper_bytes) and "plain step" in found.budget_share
    # Its own point keeps what was captured of it.
    assert whole.at(whole.budget_bytes).predicted == whole.predicted


def test_what_no_point_fits_is_said(whole: Plan) -> None:
    with pytest.raises(InfeasibleError, match="memfit.plan") as caught:
        whole.at("1MiB")
    assert not caught.value.proven and caught.value.lowest_peak_bytes > caught.value.budget_bytes
    assert caught.value.lowest_peak_bytes == min(c.held_bytes for c in whole.frontier)
    with pytest.raises(BudgetError):
        whole.at("much")
