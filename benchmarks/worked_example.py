"""The example that the docs carry through: the workload of `examples/mine.py`, plain and planned.

`python -m benchmarks.worked_example --json FILE`; `python -m benchmarks.worked_example_page` draws it for the docs.
"""

from __future__ import annotations

from typing import Any

import torch

import memfit
from benchmarks.common import Case, main
from examples.mine import workload
from memfit.hardware import find_device
from memfit.ir import Levers, Timeline, simulate
from memfit.planner import capture_levers, costs_of

BUDGET = "100MiB"


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return the plain and the planned step, each with its bytes over time, and the frontier."""
    torch.set_num_threads(1)
    plan = memfit.plan(workload(), budget=BUDGET, numerics="exact", precisions=["32-true"], points=2 if quick else 8)
    verified = memfit.verify(plan, workload(), steps=0)
    measured = {"plain": verified.plain_measured_peak_bytes, "planned": verified.measured_peak_bytes}
    levers = {"plain": Levers(microbatch_size=plan.batch_size), "planned": plan.levers}
    predictions = {"plain": plan.plain, "planned": plan.predicted}
    cases = [
        {
            "step": name,
            "peak_bytes": predictions[name].peak_bytes,
            "peak_upper_bytes": predictions[name].peak_upper_bytes,
            "measured_peak_bytes": measured[name],
            "step_seconds": predictions[name].step_seconds,
            "after_step_bytes": predictions[name].after_step_bytes,
            "by_category": predictions[name].by_category,
            "where": predictions[name].where,
            **_over_time(_timeline(levers[name])),
        }
        for name in levers
    ]
    summary = {
        "budget_bytes": plan.budget_bytes,
        "regions": [list(region.modules) for region in plan.levers.regions],
        "status": plan.solution.status,
        "bitwise": verified.bitwise,
        "holds": verified.holds,
        "frontier": [
            {"peak_bytes": point.peak_bytes, "step_seconds": point.step_seconds, "regions": len(point.levers.regions)}
            for point in plan.frontier
        ],
    }
    return cases, summary


def _timeline(levers: Levers) -> Timeline:
    cpu = find_device("cpu")
    trace = capture_levers(workload(), levers, cpu)
    return simulate(trace, costs_of([trace], cpu))


def _over_time(timeline: Timeline) -> dict[str, Any]:
    """Return the bytes alive at each operator, by category, its seconds, and where each phase begins."""
    starts: list[list[Any]] = []
    for index, phase in enumerate(timeline.phases):
        if not starts or starts[-1][1] != phase:
            starts.append([index, phase])
    live = {name: values for name, values in timeline.live_bytes.items() if any(values)}
    seconds = [round(value, 9) for value in timeline.seconds]
    return {"live_bytes": live, "seconds": seconds, "phases": starts, "peak_index": timeline.peak_index}


if __name__ == "__main__":
    main("worked_example", run, __doc__)
