"""What each lever buys, one on top of the other: `memfit tools ladder` on the recipes' byte-level GPT and 3-D U-Net."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.common import Case, main
from memfit import tools
from memfit.recipes import brain_segmentation, byte_lm
from memfit.workload import Workload


def workloads(quick: bool) -> list[Workload]:
    """Return what is climbed with."""
    if quick:
        return [
            byte_lm(n_layer=3, d_model=128, context=128, max_bytes=1_000_000),
            brain_segmentation(patch=(32, 32, 32), channels=(8, 16, 32)),
        ]
    return [byte_lm(), brain_segmentation()]


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Climb, and return a row for each rung."""
    cases: list[Case] = []
    summary: dict[str, Any] = {}
    for workload in workloads(quick):
        ladder = tools.ladder(workload, numerics="changed", min_run_seconds=1.0 if quick else 10.0)
        print(ladder)
        for rung in ladder.rungs:
            row = msgspec.to_builtins(rung)
            row["levers"] = None if rung.levers is None else _short(rung.levers)
            cases.append({"workload": workload.name, "batch_size": ladder.batch_size, **row})
        summary[workload.name] = _summary(ladder)
    return cases, summary


def _short(levers: Any) -> dict[str, Any]:
    """Return levers as a row shows them: how many regions, not which."""
    return {**msgspec.to_builtins(levers), "regions": len(levers.regions)}


def _summary(ladder: Any) -> dict[str, Any]:
    measured = [rung for rung in ladder.rungs if rung.is_measured]
    plain, top = ladder.rungs[0], ladder.top
    off = [abs(rung.predicted_peak_bytes / rung.peak_bytes - 1) for rung in measured]
    lean = next(rung for rung in ladder.rungs if rung.name.startswith("lean"))
    return {
        "kept": [rung.name for rung in ladder.rungs if rung.outcome == "kept"],
        "top_peak_ratio": top.peak_bytes / plain.peak_bytes,
        "top_step_ratio": top.step_seconds / plain.step_seconds,
        "lean_peak_ratio": lean.peak_ratio,
        "lean_step_ratio": lean.step_ratio,
        "largest_prediction_error": max(off),
    }


if __name__ == "__main__":
    main("ladder", run, __doc__)
