"""Peaks of a step with levers, run on a copy of its workload on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from memfit.capture import measure_peak_bytes, real_copy
from memfit.hardware import allocated, find_device
from memfit.ir import Levers
from memfit.levers import applied
from memfit.pipeline import Fitted, loop_plans
from memfit.planner import capture_levers, costs_of, predict
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
    """Return what a call returns, and the peak of what the allocator gave to it, beyond what was held before.

    What `memfit.fit` runs to time operators, while it plans, is not counted: no step is under way then.
    """
    with _planning_marked(), allocated(but_in=_PLANNING) as meter:
        found = run()
    assert meter.peak_bytes > 0, "another profiler ended the one that measures"
    return found, meter.peak_bytes


_PLANNING = "tests: planning"


@contextlib.contextmanager
def _planning_marked() -> Iterator[None]:
    """Mark the plans that `memfit.fit` makes, for the profiler."""

    def marked(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(_PLANNING):
                return own(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_plans, "make_plan", marked(loop_plans.make_plan))
        patch.setattr(loop_plans, "estimate", marked(loop_plans.estimate))
        patch.setattr(Fitted, "_held", marked(Fitted._held))
        yield
