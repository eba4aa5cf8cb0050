"""The plain step and the planned one, trained side by side on copies: peaks, times and losses."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.measured_peak import measure_peak_bytes
from memfit.cost.pace import Pace, busy_notes
from memfit.errors import UsageError
from memfit.hardware.accelerators import synchronize
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers, Plan
from memfit.ir.run_record import Comparison
from memfit.ir.sharding import Sharding
from memfit.levers.stack import applied
from memfit.pipeline.placement import check_runs_here, place_of, rank_place, ranks_of
from memfit.ranks.processes import SingleProcess
from memfit.rng import rng_preserved
from memfit.training.step import Step
from memfit.units import format_bytes
from memfit.workload import Workload, tensors_of

_MEASUREMENTS = 3  # of which the least counts: gloo's threads may hold what was sent for a moment longer


class PlainStepTooLargeError(UsageError):
    """The plain step of several ranks is predicted not to fit, so that nothing is compared with it."""


def compare(
    plan: Plan,
    workload: Workload,
    *,
    steps: int,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Train the plain and the planned step side by side on copies, on the same batches from the same start.

    Steps are interleaved, so that a busy machine slows both alike; the first of each, which makes the
    optimizer's state, is not timed.

    A plan for several ranks is compared on as many, which all call this. The plain step is then
    DistributedDataParallel's in fp32: each rank runs its part of the batch in one pass, and recomputes nothing. Peaks
    are of the rank that holds most, times of the one that takes longest.

    Args:
        plan: The plan.
        workload: The workload it was made for; nothing of it is changed.
        steps: Steps of each (≥ 1).
        progress: Called with how many steps are done, of how many.

    Raises:
        UsageError: There are more or fewer ranks than the plan is for.
        PlainStepTooLargeError: The plain step of the ranks is predicted not to fit.
    """
    place = check_runs_here(plan, workload)
    batches = first_batches(workload, steps)
    with ranks_of(plan) as ranks, nothing_changes(workload) as around:
        progress = None if progress is None else around.outside(progress)
        if plan.levers.sharding is not None:
            _check_plain_fits(plan, ranks)
        if ranks.size > 1:
            place = rank_place(place)
        both = [real_copy(workload, place), real_copy(workload, place)]
        with applied(_plain_levers(plan), both[0]) as plain, applied(plan.levers, both[1]) as planned:
            pace = Pace() if place.type == "cpu" and ranks.size == 1 else None  # ranks wait for one another
            run = _interleave([plain, planned], batches, progress, pace)
            measure = measure_peak_bytes if ranks.size == 1 else rank_peak_bytes
            peaks = [measure(step, batches[0]) for step in (plain, planned)]
        # Of the rank that holds most, and of the one that takes longest.
        plain_bytes, planned_bytes, *medians = ranks.most([*peaks, *map(statistics.median, run.seconds)])
    return Comparison(
        plain_peak_bytes=int(plain_bytes),
        planned_peak_bytes=int(planned_bytes),
        plain_step_seconds=medians[0],
        planned_step_seconds=medians[1],
        plain_losses=run.losses[0],
        planned_losses=run.losses[1],
        notes=tuple(run.notes),
    )


def _plain_levers(plan: Plan) -> Levers:
    """Return the step that a plan is compared with: of several ranks, that of DistributedDataParallel."""
    sharding = plan.levers.sharding
    if sharding is None:
        return Levers(microbatch_size=plan.batch_size)
    size = sharding.world_size
    data_parallel = Sharding(world_size=size, mode="ddp", gradient_as_bucket_view=True)
    return Levers(microbatch_size=-(-plan.batch_size // size), sharding=data_parallel)


def _check_plain_fits(plan: Plan, ranks: SingleProcess) -> None:
    """Refuse to compare with a step that is predicted not to fit: one rank that runs out leaves the others waiting.

    Raises:
        PlainStepTooLargeError: It does not fit on the rank that has least; raised on all of them.
    """
    needed, own = plan.plain.peak_reserved_bytes or plan.plain.peak_bytes, find_device(plan.device).usable_bytes
    least = -int(ranks.most([-own])[0])
    if needed > least:
        raise PlainStepTooLargeError(
            f"the plain step needs {format_bytes(needed)} on each rank, and {plan.device} has"
            f" {format_bytes(least)}: memfit can't run it to compare the plan with it. Compare on a smaller"
            " batch or model"
        )


def rank_peak_bytes(step: Step, batch: Any) -> int:
    """Return the peak of a rank's step, after one that made the optimizer's state. All ranks call this."""
    if place_of(step.workload).type != "cpu":
        return measure_peak_bytes(step, batch)
    step(batch)  # DistributedDataParallel fills its buckets in another order from here on
    gc.collect()
    return min(measure_peak_bytes(step, batch) for _ in range(_MEASUREMENTS))


def first_batches(workload: Workload, count: int) -> list[Any]:
    """Return the first training batches, whole ones only; the position of the user's data is left as it was."""
    if workload.batches is None:
        return [workload.batch] * count
    state = workload.batches.state_dict() if hasattr(workload.batches, "state_dict") else None
    found: list[Any] = []
    shapes = [tuple(t.shape) for t in tensors_of(workload.batch)]
    try:
        with rng_preserved():
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
        if state is not None:
            workload.batches.load_state_dict(state)  # type: ignore[attr-defined]
    return found


class _Interleaved(NamedTuple):
    """The losses and the seconds of some steps, by step, and notes on the seconds."""

    losses: list[list[float]]
    seconds: list[list[float]]
    notes: list[str]


def _interleave(
    steps: list[Step], batches: list[Any], progress: Callable[[int, int], None] | None, pace: Pace | None
) -> _Interleaved:
    """Run each step on each batch in turn, from the same random state."""
    losses: list[list[float]] = [[] for _ in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    own_seconds = 0.0
    for index, batch in enumerate(batches):
        is_timed = index > 0 or len(batches) == 1
        for which, step in enumerate(steps):
            if is_timed and pace is not None:
                pace.read()
            torch.manual_seed(index)
            started, own = time.perf_counter(), time.thread_time()
            losses[which].append(step(batch).loss)
            synchronize(place_of(step.workload))  # or the next step would wait for this one's update
            if is_timed:
                seconds[which].append(time.perf_counter() - started)
                own_seconds += time.thread_time() - own
        if progress is not None:
            progress(index + 1, len(batches))
    if pace is None:
        return _Interleaved(losses, seconds, [])
    return _Interleaved(losses, seconds, busy_notes("they ran", own_seconds / sum(map(sum, seconds)), pace.slowdown))
