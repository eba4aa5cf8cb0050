"""Plans with a frontier made by hand."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memfit.ir import Candidate, Plan, Region
from memfit.levers import LeversOn, lever_uses


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
