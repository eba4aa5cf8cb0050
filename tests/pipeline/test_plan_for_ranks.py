"""Plans for several ranks: what is chosen, what a rank is predicted to hold, and what two ranks then hold."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import memfit
from memfit import ir
from memfit.capture import measure_peak_bytes
from memfit.errors import BudgetError, InfeasibleError, MemfitError, PlanMismatchError, UsageError
from memfit.hardware import find_device
from memfit.ir import Levers, Plan, Sharding
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.models import transformer
from tests.processes import on_ranks
from tests.ranks.trainings import workload as trained


def workload(layers: int = 2) -> Workload:
    return dataclasses.replace(transformer(batch=8, tokens=16, dim=64, layers=layers), max_grad_norm=1.0)


@pytest.fixture(scope="module", params=[0.9, 0.65])
def plan(request: pytest.FixtureRequest) -> Plan:
    return memfit.plan(workload(), budget=f"{request.param}x", world_size=2, precisions=["32-true"], points=1)


@pytest.mark.ci
def test_a_plan_shares_the_global_batch(plan: Plan) -> None:
    assert plan.levers.sharding is not None and plan.levers.sharding.world_size == 2
    assert plan.batch_size == 8 and plan.levers.microbatch_size <= 4
    assert plan.classes["sharding"] == "reordered"
    assert plan.predicted.peak_upper_bytes <= plan.budget_bytes
    assert ("microbatches" in plan.classes) == (plan.levers.microbatch_size < 4)


@pytest.mark.ci
def test_what_is_predicted_is_the_applied_step(plan: Plan) -> None:
    cpu = find_device("cpu")
    trace = capture_levers(workload(), plan.levers, cpu)
    found, _ = predict(trace, costs_of([trace], cpu), cpu)
    assert found.peak_bytes == plan.predicted.peak_bytes
    assert found.step_seconds == pytest.approx(plan.predicted.step_seconds)


def held(rank: int, plan: Plan) -> Iterator[int]:
    given = workload()
    with memfit.apply(plan, given) as step:
        for _ in range(2):
            step(given.batch)
        gc.collect()
        yield min(measure_peak_bytes(step, given.batch) for _ in range(3))


@pytest.mark.ci
@pytest.mark.slow
def test_no_rank_holds_more_than_the_budget(plan: Plan) -> None:
    for (peak,) in on_ranks(2, held, plan):
        assert peak <= plan.predicted.peak_upper_bytes <= plan.budget_bytes
        assert peak == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


@pytest.mark.ci
def test_what_is_infeasible_names_a_budget_that_is_not() -> None:
    given: Any = {"world_size": 4, "precisions": ["32-true"], "points": 1}
    with pytest.raises(InfeasibleError, match="zero3 of 4") as e:
        memfit.plan(workload(), budget=1000, **given)
    lowest = memfit.plan(workload(), budget=e.value.lowest_peak_bytes, **given)
    assert lowest.predicted.peak_upper_bytes <= e.value.lowest_peak_bytes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 0}, "world_size=0 is not a whole number above 0"),
        ({"world_size": 2.0}, "world_size=2.0 is not a whole number above 0"),
        ({"world_size": 2, "sharding": "zero1"}, "sharding='zero1' is unknown: use one of auto, ddp, zero2, zero3"),
        ({"world_size": 2, "numerics": "exact"}, "numerics='exact' does not allow world_size=2"),
    ],
)
@pytest.mark.ci
def test_what_can_not_be_is_refused_by_its_argument(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as e:
        memfit.plan(workload(), budget="0.5x", **options)
    assert text in str(e.value)


@pytest.mark.ci
def test_buckets_count_where_a_rank_is_measured() -> None:
    """What DistributedDataParallel holds between steps belongs to the step."""
    plan = memfit.plan(workload(), budget="2x", numerics="exact", precisions=["32-true"], points=1)
    sharding = Sharding(world_size=2, mode="ddp", gradient_as_bucket_view=True)
    shared = replace(plan, levers=Levers(microbatch_size=4, sharding=sharding))
    trace = capture_levers(workload(), shared.levers, find_device("cpu"))
    cpu = find_device("cpu")
    predicted, _ = predict(trace, costs_of([replace(trace, sharding=None)], cpu), cpu)
    for (peak,) in on_ranks(2, held, shared):
        assert peak == pytest.approx(predicted.peak_bytes, rel=0.01)


# Plans that ranks make together, in a process group that they have joined

QUICK: Any = {"precisions": ["32-true"], "points": 1, "sharding": "ddp"}


def planning(rank: int) -> Iterator[Any]:
    plan = memfit.plan(trained(), budget="100MiB" if rank else "90MiB", measure=True, **QUICK)
    yield ir.codec.encode(plan), plan.budget_bytes, plan.levers.sharding
    options: Any = {"precisions": ["32-true"], "points": 1, "measure": True}
    alone = memfit.plan(trained(), budget="100MiB", world_size=1, **options)
    yield alone.levers.sharding, alone.budget_bytes
    yield [[note for note in each.notes if "shared by 2 ranks" in note] for each in (plan, alone)]
    with pytest.raises(InfeasibleError) as e:
        memfit.plan(trained(), budget=1000, **QUICK)
    yield str(e.value)
    with pytest.raises(PlanMismatchError) as other:
        memfit.plan(transformer() if rank else trained(), budget="90MiB", **QUICK)
    yield "the plan is for the workload" in str(other.value)


@pytest.mark.ci
@pytest.mark.slow
def test_the_first_rank_plans_for_all_and_the_least_budget() -> None:
    first, second = on_ranks(2, planning)
    assert first == second
    (_, budget_bytes, sharding), alone, notes, infeasible, is_other = first
    assert all(notes)  # nothing was run to choose: each rank would find other times
    assert budget_bytes == 90 * 2**20
    assert sharding.world_size == 2 and sharding.mode == "ddp"
    assert alone == (None, 100 * 2**20) and is_other and "1000" in infeasible


def failing(rank: int) -> Iterator[Any]:
    def said(kind: type[MemfitError], given: memfit.Workload, budget: Any, **options: Any) -> str:
        with pytest.raises(kind) as e:
            memfit.plan(given, budget=budget, **{**QUICK, **options})
        return str(e.value)

    yield said(BudgetError, trained(), "much" if rank else "90MiB")
    yield said(UsageError, trained(), "0.9x" if rank else "90MiB").split("some ranks")[1]
    yield said(UsageError, trained(), "90MiB", world_size=3)


def test_what_fails_fails_on_all_ranks() -> None:
    first, second = on_ranks(2, failing)
    assert first == second
    texts = ["budget='much' can't be read", " give a share", "world_size=3, and this process"]
    assert all(part in text for part, text in zip(texts, first, strict=True)), first
