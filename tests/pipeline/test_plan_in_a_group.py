"""Plans that ranks make together, in a process group that they have joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import memfit
from memfit import ir
from memfit.errors import BudgetError, InfeasibleError, MemfitError, PlanMismatchError, UsageError
from tests.models import transformer
from tests.processes import on_ranks
from tests.ranks.trainings import workload

QUICK: Any = {"precisions": ["32-true"], "points": 1, "sharding": "ddp"}


def planning(rank: int) -> Iterator[Any]:
    plan = memfit.plan(workload(), budget="100MiB" if rank else "90MiB", measure=True, **QUICK)
    yield ir.codec.encode(plan), plan.budget_bytes, plan.levers.sharding
    options: Any = {"precisions": ["32-true"], "points": 1, "measure": True}
    alone = memfit.plan(workload(), budget="100MiB", world_size=1, **options)
    yield alone.levers.sharding, alone.budget_bytes
    yield [[note for note in each.notes if "shared by 2 ranks" in note] for each in (plan, alone)]
    with pytest.raises(InfeasibleError) as e:
        memfit.plan(workload(), budget=1000, **QUICK)
    yield str(e.value)
    with pytest.raises(PlanMismatchError) as other:
        memfit.plan(transformer() if rank else workload(), budget="90MiB", **QUICK)
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

    yield said(BudgetError, workload(), "much" if rank else "90MiB")
    yield said(UsageError, workload(), "0.9x" if rank else "90MiB").split("some ranks")[1]
    yield said(UsageError, workload(), "90MiB", world_size=3)


def test_what_fails_fails_on_all_ranks() -> None:
    first, second = on_ranks(2, failing)
    assert first == second
    texts = ["budget='much' can't be read", " give a share", "world_size=3, and this process"]
    assert all(part in text for part, text in zip(texts, first, strict=True)), first
