"""The cases of one workload of the zoo: `python -m benchmarks.cases NAME`, one JSON row for each line printed.

It runs by itself, so that one workload's failure or crash leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import on_accelerator
from benchmarks.common import Case, Measured, whole_run_peak_bytes
from memfit import InfeasibleError, Plan, Workload, estimate, plan
from memfit.hardware import find_device
from memfit.ir import Levers, Numerics, Precision, Prediction
from memfit.workload import batch_size_of

NUMERICS: dict[Precision, Numerics] = {"32-true": "reordered", "bf16-mixed": "reduced"}
"""For each precision, how far its plan may go."""
SHARE = 0.6
"""Of the plain peak: the budget of the planned step, or else the lowest that fits."""


def measured(workload: Workload, levers: Levers, device: str) -> Measured:
    """Return the truth about a step on a device."""
    if device == "cpu":
        return Measured(whole_run_peak_bytes(workload, levers))
    return on_accelerator.measure(workload, levers, torch.device(find_device(device).name))


def cases(make: Callable[[], Workload], device: str = "cpu") -> Iterator[Case]:
    """Yield a workload's plain and planned step in each precision; a case that fails has an "error_message"."""
    for precision, numerics in NUMERICS.items():
        plain = _attempt(lambda p=precision: plain_case(make(), device, p))  # type: ignore[misc]
        yield {"precision": precision, "kind": "plain", "device": device, **plain}
        if "predicted_peak_bytes" in plain:
            budget = int(SHARE * plain["predicted_peak_bytes"])
            planned = _attempt(lambda p=precision, n=numerics, b=budget: planned_case(make(), device, p, n, b))  # type: ignore[misc]
        else:
            planned = {"error_message": "the plain step failed"}
        yield {"precision": precision, "kind": "planned", "device": device, **planned}


def plain_case(workload: Workload, device: str, precision: Precision) -> Case:
    """Return the plain step, predicted and measured, and what others say of it."""
    predicted = estimate(workload, device=device, precision=precision)
    levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch))
    from benchmarks.rivals import RIVALS  # what only benchmarks need is imported where they run

    return {
        **_compared(predicted, measured(workload, levers, device)),
        "rivals": {name: _or_none(rival, workload, precision) for name, rival in RIVALS.items()},
    }


def planned_case(workload: Workload, device: str, precision: Precision, numerics: Numerics, budget_bytes: int) -> Case:
    """Return the plan for a budget, or for the lowest that fits, predicted and measured."""

    def planned(budget: int) -> Plan:
        return plan(workload, budget=budget, device=device, numerics=numerics, precisions=[precision], points=1)

    try:
        made = planned(budget_bytes)
    except InfeasibleError as e:
        made = planned(e.lowest_peak_bytes)
    return {
        **_compared(made.predicted, measured(workload, made.levers, device)),
        "budget_bytes": made.budget_bytes,
        "microbatches": -(-made.batch_size // made.levers.microbatch_size),
        "regions": len(made.levers.regions),
    }


def _compared(predicted: Prediction, measured: Measured) -> Case:
    """Return what was predicted beside what was measured."""
    case = {
        "predicted_peak_bytes": predicted.peak_bytes,
        "peak_upper_bytes": predicted.peak_upper_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "error": predicted.peak_bytes / measured.peak_bytes - 1,
        "workspace_bytes": predicted.by_category.get("workspaces", 0),
        "where": predicted.where,
    }
    if measured.peak_reserved_bytes is not None and predicted.peak_reserved_bytes is not None:
        case["measured_reserved_bytes"] = measured.peak_reserved_bytes
        case["reserved_error"] = predicted.peak_reserved_bytes / measured.peak_reserved_bytes - 1
    if measured.step_seconds is not None:
        case["measured_step_seconds"] = measured.step_seconds
        case["step_error"] = predicted.step_seconds / measured.step_seconds - 1
    return case


def _attempt(make: Callable[[], Case]) -> Case:
    try:
        return make()
    except Exception as e:  # a failure is a row of the table
        traceback.print_exc()
        return {"error_message": f"{type(e).__name__}: {e}"}


def _or_none(rival: Callable[[Workload, Precision], int], workload: Workload, precision: Precision) -> int | None:
    try:
        return rival(workload, precision)
    except Exception:  # that it fails is part of the comparison
        traceback.print_exc()
        return None


def main() -> None:
    """Print the cases of a workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__)
    parser.add_argument("name", help="of the zoo")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    from benchmarks.zoo import ZOO

    rows = sys.stdout
    sys.stdout = sys.stderr  # libraries print notices
    for case in cases(ZOO[arguments.name], arguments.device):
        row: dict[str, Any] = {"workload": arguments.name, **case}
        print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
