"""Plans with a frontier made by hand."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memfit.ir.plan import Candidate, Plan
from memfit.ir.remat import Region


def with_frontier(plan: Plan, choices: Iterable[tuple[Region, ...]]) -> Plan:
    """Return a plan of the first regions, whose frontier has all: each a byte lower and a second slower than before."""
    points = [
        Candidate(
            levers=replace(plan.levers, regions=regions),
            numerics="exact",
            budget_bytes=plan.budget_bytes,
            peak_bytes=plan.plain.peak_bytes - n,
            step_seconds=1.0 + n,
            status="feasible",
            bound_seconds=1.0,
        )
        for n, regions in enumerate(choices)
    ]
    return replace(plan, levers=points[0].levers, frontier=points)
