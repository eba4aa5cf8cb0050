"""Runs: train with a plan, compare it with the plain step, and report."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.fake import nothing_changes, real_copy
from memfit.capture.measure import measure_peak_bytes
from memfit.cost.calibrate import calibrate
from memfit.ir.modules import module_table
from memfit.ir.plan import Levers, Plan
from memfit.ir.record import Comparison, Views
from memfit.pipeline.applying import applied, check_not_applied, check_plan
from memfit.pipeline.planning import capture_levers, predict
from memfit.train.step import Step
from memfit.workload import Workload, tensors_of


def views(plan: Plan, workload: Workload, comparison: Comparison | None = None) -> Views:
    """Return what a report draws: the predicted timelines of the plain and the planned step, and the modules."""
    check_plan(plan, workload)
    plain = capture_levers(workload, Levers(microbatch_size=plan.batch_size))
    planned = capture_levers(workload, plan.levers)
    costs = calibrate([plain, planned])
    return Views(
        plain=predict(plain, costs)[1],
        planned=predict(planned, costs)[1],
        modules=module_table(plain, planned, costs, plan.levers.regions),
        comparison=comparison,
    )


def compare(
    plan: Plan,
    workload: Workload,
    *,
    steps: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Train the plain and the planned step side by side on copies, on the same batches from the same start.

    Steps are interleaved, so that a busy machine slows both alike; the first of each, which makes the
    optimizer's state, is not timed.

    Args:
        plan: The plan.
        workload: The workload it was made for; nothing of it is changed.
        steps: Steps of each (≥ 2).
        progress: Called with how many steps are done, of how many.
    """
    check_not_applied(workload)
    check_plan(plan, workload)
    batches = _first_batches(workload, steps)
    with nothing_changes(workload):
        both = [real_copy(workload), real_copy(workload)]
        with applied(Levers(microbatch_size=plan.batch_size), both[0]) as plain, applied(plan.levers, both[1]) as planned:
            losses, seconds = _interleave([plain, planned], batches, progress)
            peaks = [measure_peak_bytes(step, batches[0]) for step in (plain, planned)]
    return Comparison(
        plain_peak_bytes=peaks[0],
        planned_peak_bytes=peaks[1],
        plain_step_seconds=statistics.median(seconds[0]),
        planned_step_seconds=statistics.median(seconds[1]),
        plain_losses=losses[0],
        planned_losses=losses[1],
    )


def _first_batches(workload: Workload, count: int) -> list[Any]:
    """Return the first training batches, whole ones only; the position of the user's data is left as it was."""
    if workload.batches is None:
        return [workload.batch] * count
    state = workload.batches.state_dict() if hasattr(workload.batches, "state_dict") else None
    random_state = torch.get_rng_state()
    found: list[Any] = []
    shapes = [tuple(t.shape) for t in tensors_of(workload.batch)]
    try:
        while len(found) < count:
            before = len(found)
            for batch in workload.batches:
                if [tuple(t.shape) for t in tensors_of(batch)] == shapes:
                    found.append(batch)
                if len(found) == count:
                    break
            if len(found) == before:
                return [workload.batch] * count
    finally:
        torch.set_rng_state(random_state)
        if state is not None:
            workload.batches.load_state_dict(state)  # type: ignore[attr-defined]
    return found


def _interleave(
    steps: list[Step], batches: list[Any], progress: Callable[[int, int], None] | None
) -> tuple[list[list[float]], list[list[float]]]:
    """Run each step on each batch in turn, from the same random state; return losses and seconds by step."""
    losses: list[list[float]] = [[] for _ in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    for index, batch in enumerate(batches):
        for which, step in enumerate(steps):
            torch.manual_seed(index)
            result = step(batch)
            losses[which].append(result.loss)
            if index > 0 or len(batches) == 1:
                seconds[which].append(result.seconds)
        if progress is not None:
            progress(index + 1, len(batches))
    return losses, seconds
