"""Plans that tests ask for: exact ones, and those with a frontier made by hand; and what trainings end with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from msgspec.structs import replace

import memfit
from memfit.ir import Candidate, Plan, Region
from memfit.levers import LeversOn, lever_uses
from memfit.workload import Workload


def with_frontier(plan: Plan, choices: Iterable[tuple[Region, ...]]) -> Plan:
    """Return a plan of the first regions, whose frontier has all: each a byte lower and a second slower than before."""
    each = [replace(plan.levers, regions=regions) for regions in choices]
    points = [
        Candidate(
            levers=levers,
            uses=lever_uses(LeversOn(levers, plan.batch_size)),
            numerics="exact",
            budget_bytes=plan.budget_bytes,
            peak_bytes=plan.plain.peak_bytes - n,
            step_seconds=1.0 + n,
            status="feasible",
            bound_seconds=1.0,
        )
        for n, levers in enumerate(each)
    ]
    return replace(plan, levers=points[0].levers, uses=points[0].uses, frontier=points)


def exact(workload: Workload, budget: int | float | str = "1GiB", **options: Any) -> Plan:
    """Return a plan that changes no number, in the precision of the model; its frontier has one point."""
    given: dict[str, Any] = {"numerics": "exact", "precisions": ["32-true"], "points": 1, **options}
    return memfit.plan(workload, budget=budget, **given)


def have_same_weights(one: Workload, other: Workload) -> bool:
    """Tell whether two workloads' models have bitwise the same parameters."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
