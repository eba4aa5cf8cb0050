"""What a step has resident on a CPU beside what its tensors take, by what the C library does with freed memory.

Each run is a process of its own, under a plan for half of the plain step's peak. Runs of the ways take turns; figures
are medians. Resident is the process's high-water mark over its steps, less what it held before them without tensors.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import memfit
from benchmarks.common import Case, main
from benchmarks.processes import output_of
from benchmarks.resident.steps import WAYS, WORKLOADS

BUDGET = "0.5x"
TIMEOUT_SECONDS = 600


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each workload and way, and the largest and smallest ratios."""
    torch.set_num_threads(1)  # as in the processes
    cases = [case for name in WORKLOADS for case in compared(name, runs=1 if quick else 5)]
    summary: dict[str, Any] = {}
    for way in WAYS:
        found = [case["resident_bytes"] / case["peak_bytes"] for case in cases if case["way"] == way]
        summary[f"largest_resident_to_peak_{way}"] = max(found)
    seconds = {way: [c["step_seconds"] for c in cases if c["way"] == way] for way in WAYS}
    for way in ("kept", "returned"):
        pairs = zip(seconds[way], seconds["default"], strict=True)
        summary[f"largest_time_ratio_{way}"] = max(one / other for one, other in pairs)
    return cases, summary


def compared(name: str, runs: int) -> list[Case]:
    """Return a case for each way that a workload's planned step is run."""
    workload = WORKLOADS[name]()
    plan = memfit.plan(workload, budget=BUDGET, numerics="exact", precisions=["32-true"], points=1)
    with tempfile.TemporaryDirectory() as folder:
        path = plan.save(Path(folder) / "plan.json")
        command = [sys.executable, "-m", "benchmarks.resident.steps", name, str(path)]
        rows = [
            row | {"way": way}
            for _ in range(runs)
            for way in WAYS
            for row in output_of([*command, way], TIMEOUT_SECONDS).rows
        ]
    cases = []
    for way in WAYS:
        found = [row for row in rows if row["way"] == way]
        medians = {key: statistics.median(row[key] for row in found) for key in ("resident_bytes", "step_seconds")}
        cases.append({"case": name, "way": way, "runs": len(found), "peak_bytes": plan.predicted.peak_bytes, **medians})
    return cases


if __name__ == "__main__":
    main("resident", run, __doc__)
