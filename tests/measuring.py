"""Peaks of a step with levers, run on a copy of its workload on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memfit.capture.fake import real_copy
from memfit.capture.measure import measure_peak_bytes
from memfit.devices.allocation import allocated
from memfit.devices.host import find_device
from memfit.ir.plan import Levers
from memfit.pipeline.applying import applied
from memfit.pipeline.predicting import capture_levers, costs_of, predict
from memfit.workload import Workload

T = TypeVar("T")


def step_peak_bytes(workload: Workload, levers: Levers) -> int:
    """Return the measured peak of the second step, when the optimizer has its state."""
    copied = real_copy(workload)
    with applied(levers, copied) as step:
        step(copied.batch)
        return measure_peak_bytes(step, copied.batch)


def peaks(workload: Workload, levers: Levers) -> tuple[int, int]:
    """Return the peak of a step, predicted and measured."""
    device = find_device("cpu")
    trace = capture_levers(workload, levers, device)
    prediction, _ = predict(trace, costs_of([trace], device), device)
    return prediction.peak_bytes, step_peak_bytes(workload, levers)


def peak_bytes_of(run: Callable[[], T]) -> tuple[T, int]:
    """Return what a call returns, and the peak of what the allocator gave to it, beyond what was held before."""
    with allocated() as meter:
        found = run()
    return found, meter.peak_bytes
