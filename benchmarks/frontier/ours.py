"""memfit: a plan for each budget, applied."""

from __future__ import annotations

from typing import Any

import memfit
from benchmarks.frontier.methods import LOWEST, OURS, Method, Prepared, Task, Unsupported
from memfit import InfeasibleError, Plan
from memfit.units import format_bytes


def _settings(task: Task) -> list[float | str]:
    return [LOWEST, *task.shares]


def plan_for(task: Task, share: float | str, numerics: Any = "exact") -> Plan:
    """Return the plan for a share of the plain peak, or of the lowest peak that memfit finds.

    Raises:
        InfeasibleError: No plan fits.
    """

    def planned(budget: int) -> Plan:
        return memfit.plan(
            task.workload, budget=budget, device=task.device, numerics=numerics, precisions=("32-true",), points=1
        )

    if share != LOWEST:
        return planned(task.budget_bytes(float(share)))
    try:
        return planned(1)
    except InfeasibleError as e:
        return planned(e.lowest_peak_bytes)


def _make(task: Task, lowest: list[int], share: float | str) -> Prepared:
    """Plan for a budget; what is below the lowest peak found is not searched again."""
    if share != LOWEST and lowest and task.budget_bytes(float(share)) < lowest[0]:
        raise Unsupported(f"no plan fits: the lowest peak that memfit finds is {format_bytes(lowest[0])}")
    plan = plan_for(task, share)
    if share == LOWEST:
        lowest.append(plan.budget_bytes)
    return Prepared(lambda workload: memfit.apply(plan, workload), facts(plan))


def facts(plan: Plan) -> dict[str, Any]:
    """Return what a plan says."""
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        **({"predicted_reserved_bytes": reserved} if (reserved := plan.predicted.peak_reserved_bytes) else {}),
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_ratio": plan.predicted.step_seconds / plan.plain.step_seconds,
        "status": plan.solution.status,
        "gap": plan.solution.gap,
        "solve_seconds": plan.solution.solve_seconds,
        "microbatch_size": plan.levers.microbatch_size,
        "regions": len(plan.levers.regions),
    }


EAGER = (Method(OURS, "eager", _settings, _make, lambda task: []),)
