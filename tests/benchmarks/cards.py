"""Results of a card, made up."""

from __future__ import annotations

from typing import Any

from benchmarks.prediction import summarised

MIB = 2**20
_SOURCE: dict[str, Any] = {
    "command": "python -m benchmarks.gpu",
    "machine": {"description": "a machine", "threads": 2, "accelerator": "A card"},
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-01",
}


def case(index: int, kind: str = "plain") -> dict[str, Any]:
    """Return a step whose reserved bytes are off by one or two percent, and its time by a tenth."""
    reserved = 200 + 2 * (1 + index % 2)
    return {
        "workload": f"w{index}",
        "precision": "32-true",
        "kind": kind,
        "predicted_peak_bytes": 100 * MIB,
        "peak_upper_bytes": 210 * MIB,
        "measured_peak_bytes": 100 * MIB,
        "error": 0.0,
        "measured_reserved_bytes": reserved * MIB,
        "reserved_error": 200 / reserved - 1,
        "measured_step_seconds": 0.01,
        "step_error": -0.1,
        "rivals": {},
        "budget_bytes": 210 * MIB,
    }


CASES = [case(index, kind) for index in range(60) for kind in ("plain", "planned")]
PREDICTIONS = {**_SOURCE, "cases": CASES, "summary": summarised(CASES), "failed_commands": {}}
CORRECTIONS = {
    **_SOURCE,
    "cases": [
        {"workload": "a", "precision": "32-true", "measured_seconds": 0.01, "predicted_seconds": 0.011, "error": 0.1}
    ],
    "summary": {
        "key": "nvidia-9.0",
        "median_abs_error": 0.1,
        "median_abs_estimated_error": 0.3,
        "factors": [{"class": "matrix products", "dtype": "bfloat16", "factor": 1.5, "calls": 9, "median_factor": 1.1}],
    },
    "failed_commands": {"corrections": "exit status 3"},
}
