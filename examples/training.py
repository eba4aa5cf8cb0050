"""What the case studies share: one loop for any levers, timed by the CPU seconds of its steps alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from memfit import Workload
from memfit.capture import measure_peak_bytes
from memfit.ir import Levers, Plan
from memfit.levers import applied
from memfit.report.summary import lever_rows
from memfit.structure.proposal import evaluated
from memfit.workload import batch_size_of


def train(
    workload: Workload, levers: Levers, evaluate_after: Sequence[int], *, at_least_seconds: float = 0.0
) -> dict[str, Any]:
    """Train a workload in place.

    Args:
        workload: What is trained; batches come from `Workload.batches`, over and over.
        levers: What the step runs with.
        evaluate_after: Steps, ascending, after which `Workload.evaluate` is called; the last ends the training.
        at_least_seconds: CPU seconds of steps below which training goes on, and is evaluated once more.

    Returns:
        "steps", "cpu_seconds" of them, "measured_peak_bytes" of one step, and "curve", a row of figures for each
        evaluation.
    """
    curve: list[dict[str, float]] = []
    steps, seconds = 0, 0.0
    batches = _endless(workload)
    with applied(levers, workload) as step:
        for stop in (*evaluate_after, None):
            while seconds < at_least_seconds if stop is None else steps < stop:
                batch = next(batches)
                started = time.process_time()
                step(batch)
                seconds += time.process_time() - started
                steps += 1
            if stop is not None or steps > evaluate_after[-1]:
                curve.append({"steps": steps, "cpu_seconds": seconds, **evaluated(workload)})
                print(workload.name, curve[-1], file=sys.stderr, flush=True)
        peak_bytes = measure_peak_bytes(step, workload.batch)  # which is one step more, after all is evaluated
    return {"steps": steps, "cpu_seconds": seconds, "measured_peak_bytes": peak_bytes, "curve": curve}


def moments(steps: int, evaluations: int) -> list[int]:
    """Return when to evaluate: that often, spread evenly over the steps, the last at their end."""
    return [steps * (index + 1) // evaluations for index in range(evaluations)]


def plain_peak_bytes(workload: Workload) -> int:
    """Return the measured peak of the second plain step; it changes the workload's weights."""
    with applied(plain_levers(workload), workload) as step:
        step(workload.batch)
        return measure_peak_bytes(step, workload.batch)


def plain_levers(workload: Workload) -> Levers:
    """Return the levers of the step as it is."""
    return Levers(microbatch_size=batch_size_of(workload.batch))


def used_levers(plan: Plan) -> list[str]:
    """Return what a plan does, in words."""
    return [f"{row.name}: {row.setting}" for row in lever_rows(plan) if row.numerics]


def _endless(workload: Workload) -> Iterator[Any]:
    while True:
        yield from workload.batches or [workload.batch]
