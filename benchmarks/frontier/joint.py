"""At a fixed global batch and a budget: the microbatch finders of others, against memfit's microbatches and regions.

What others call out of memory is here a measured peak above the budget. All of them keep the global batch by
accumulating gradients; Lightning's finder by itself trains with another batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import find_executable_batch_size
from torch import nn

import memfit
from benchmarks.frontier.checkpointing import checkpointing, whole
from benchmarks.frontier.measuring import peak_of
from benchmarks.frontier.methods import OURS, Method, Prepared, Task, Unsupported, accumulating, stepping
from benchmarks.frontier.ours import facts, plan_for
from memfit.capture import nothing_changes
from memfit.ir import Levers
from memfit.workload import batch_size_of

SHARES = (0.6, 0.45, 0.3)
Fits = Callable[[int], bool]
"""Whether the step runs at a microbatch size."""


def largest_of_accelerate(fits: Fits, batch_size: int) -> int | None:
    """Return what accelerate's `find_executable_batch_size` ends with: it shrinks the size by a tenth each time."""

    def train(size: int) -> int:
        if not fits(size):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return size

    try:
        return int(find_executable_batch_size(train, starting_batch_size=batch_size)())
    except RuntimeError as e:
        if "No executable batch size found" not in str(e):
            raise
        return None


def largest_of_lightning(fits: Fits, batch_size: int) -> int | None:
    """Return what Lightning's `BatchSizeFinder(mode="binsearch")` ends with: doubling from 2, then halving the gap.

    After lightning 2.6, `pytorch/tuner/batch_size_scaling.py`, `_run_binary_scaling`; ours starts at 1 where 2 fails.
    """
    low, high, size = 0, None, 2
    while high is None or high - low > 1:
        if fits(min(size, batch_size)):
            low = min(size, batch_size)
            if low == batch_size:
                break
            size = (low + high) // 2 if high is not None else size * 2
        else:
            high = size
            size = (low + high) // 2
        if size < 1:
            break
    return low or None


FINDERS: dict[str, Callable[[Fits, int], int | None]] = {
    "accelerate find_executable_batch_size": largest_of_accelerate,
    "Lightning BatchSizeFinder": largest_of_lightning,
}


def refuse_unless_splittable(task: Task) -> None:
    """Refuse a step whose batch can't be cut without changing the training.

    Raises:
        Unsupported: It normalises over the batch, or has one sample.
    """
    if batch_size_of(task.workload.batch) == 1:
        raise Unsupported("the global batch is one sample, which no microbatch divides")
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.workload.model.modules()):
        raise Unsupported("the model has BatchNorm: microbatches would change the training")


def _microbatched(task: Task, find: Callable[[Fits, int], int | None], share: float, *blocks: str) -> Prepared:
    """Return the step with the microbatches that a finder ends with, and some blocks checkpointed."""
    refuse_unless_splittable(task)
    regions = whole(blocks)
    apply = stepping(lambda workload: checkpointing(workload.model, regions))

    @functools.cache
    def fits(size: int) -> bool:
        copied = task.copied()
        with nothing_changes(task.workload):
            return peak_of(accumulating(apply, size), copied).held_bytes <= task.budget_bytes(share)

    found = find(fits, batch_size_of(task.workload.batch))
    if found is None:
        raise Unsupported(f"no microbatch fits within {share:.0%} of the plain peak")
    facts = {"microbatch_size": found, "budget_bytes": task.budget_bytes(share)}
    return Prepared(accumulating(apply, found), facts, program=_program(found, blocks))


def _program(microbatch_size: int, blocks: Sequence[str] = ()) -> str:
    """Return what tells a step of microbatches, with some blocks checkpointed, from others."""
    return f"microbatches of {microbatch_size}, checkpointed: {', '.join(blocks)}"


def _found(find: Callable[[Fits, int], int | None], task: Task, studied: None, share: float) -> Prepared:
    return _microbatched(task, find, share)


def _fully_checkpointed(task: Task, studied: None, share: float) -> Prepared:
    return _microbatched(task, largest_of_lightning, share, *task.subject.blocks)


def _ours(task: Task, studied: None, share: float) -> Prepared:
    refuse_unless_splittable(task)
    plan = plan_for(task, share, numerics="reordered", measure=True)  # the finders run steps too
    size = plan.levers.microbatch_size
    program = _program(size) if plan.levers == Levers(microbatch_size=size) else None
    return Prepared(lambda workload: memfit.apply(plan, workload), facts(plan), program=program)


def _shares(task: Task) -> list[Any]:
    return [share for share in task.shares if share in SHARES]


JOINT = (
    *(Method(name, "joint", _shares, functools.partial(_found, find)) for name, find in FINDERS.items()),
    Method("checkpoint every block, largest microbatch", "joint", _shares, _fully_checkpointed),
    Method(OURS, "joint", _shares, _ours),
)
