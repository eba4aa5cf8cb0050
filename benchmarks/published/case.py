"""The prediction of published rows, in a process with fake CUDA tensors (`memfit.hardware.shim`)."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from typing import Any

from msgspec.structs import replace

from benchmarks.common import Case
from benchmarks.packages import torchvision_operators  # noqa: F401  before any package that imports torchvision
from benchmarks.published.building import fake
from benchmarks.published.rows import Row, every_row
from memfit import estimate
from memfit.errors import MemfitError
from memfit.hardware import find_device
from memfit.ir import Levers, Prediction
from memfit.planner import capture_plain, costs_of, predict
from memfit.workload import Workload, samples_of


def built(row: Row, options: dict[str, Any]) -> Workload:
    """Return a row's workload, of fake tensors."""
    module, _, function = row.build.partition(":")
    make = getattr(importlib.import_module(f"benchmarks.published.{module}"), function)
    return fake(lambda: make(**options))


def predicted(row: Row, options: dict[str, Any]) -> Prediction:
    """Return the prediction of a row's step."""
    return estimate(built(row, options), device=row.device, precision=row.precision)


def retries(row: Row, found: Prediction) -> int | None:
    """Return the retries of a row's step on its card, of which all kernels leave less where all are loaded."""
    if row.fits is None or not row.loads_all or found.context_bytes is None or found.context_upper_bytes is None:
        return found.retries
    kernels = found.context_upper_bytes - found.context_bytes
    device = find_device(row.device)
    device = replace(device, usable_bytes=device.usable_bytes - kernels)
    workload = built(row, row.options)
    trace = capture_plain(workload, Levers(precision=row.precision, microbatch_size=samples_of(workload)), device)
    prediction, _ = predict(trace, costs_of([trace], device), device)
    return prediction.retries


def case(row: Row) -> Case:
    """Return what is predicted for a row."""
    start = time.perf_counter()
    found = predicted(row, row.options)
    often = retries(row, found)
    timed = predicted(row, {**row.options, **row.timed}) if row.timed and row.step else found
    return {
        "id": row.id,
        "allocated_bytes": found.peak_bytes - sum(found.by_category[name] for name in row.without),
        "after_bytes": found.after_step_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "upper_bytes": found.peak_upper_bytes,
        "usable_bytes": found.device_bytes,
        "context_bytes": found.context_bytes,
        "context_upper_bytes": found.context_upper_bytes,
        "retries": often,
        "fits": often is not None,
        "step_seconds": timed.step_seconds,
        "phase_seconds": timed.phase_seconds,
        "by_category": found.by_category,
        "where": found.where,
        "notes": found.notes,
        "seconds": time.perf_counter() - start,
    }


def main(*ids: str) -> None:
    """Print a line of JSON for each row."""
    rows = every_row()
    for name in ids:
        try:
            print(json.dumps(case(rows[name])), flush=True)
        except MemfitError as e:
            traceback.print_exc()
            print(json.dumps({"id": name, "failed": f"{type(e).__name__}: {e}"}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
