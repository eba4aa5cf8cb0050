"""What a run takes of the host, its memory and its disk: counted before it begins, and watched between its steps.

A full disk at the end costs all of a run's work.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from memfit.errors import BudgetError, MemoryLimitError, OutputError
from memfit.foundations import format_bytes
from memfit.hardware import free_bytes, own_bytes
from memfit.ir import Plan
from memfit.training.optimizers import state_of
from memfit.training.runs import checkpoint
from memfit.training.runs.run_options import RunOptions
from memfit.training.step import Step
from memfit.workload import Workload, tensors_of

_LEAST_ROOM_BYTES = 2**24
_REST_BYTES = 2**24  # upper bound seen for the record, the views, the report and the small files of checkpoints
_LINE_BYTES = 600  # upper bound for a step's line in the log


def host_needs(
    plan: Plan, workload: Workload, levers_bytes: Mapping[str, int], options: RunOptions | None = None
) -> dict[str, int]:
    """Return the additional bytes of host memory that a run needs, by the argument that is responsible.

    Args:
        levers_bytes: What the plan's levers put there, by their names.
        options: Those of the run; None for steps alone.
    """
    options = options or RunOptions(out=Path())
    parameters = list(workload.model.parameters())
    is_on_host = all(p.device.type == "cpu" for p in parameters)
    batch_bytes = bytes_of(tensors_of(workload.batch))
    there = bytes_of([*parameters, *workload.model.buffers(), *state_of(workload.optimizer)]) + batch_bytes
    sharding = plan.levers.sharding  # a rank copies its shards for a checkpoint; or all, where the first writes all
    copies = sharding.shards if sharding is not None and sharding.is_fully_sharded else 1
    copied_bytes = -(-sum(stored_bytes(plan, workload)) // copies)
    ahead = options.prefetch_batches
    made = (ahead + 1) * batch_bytes if ahead else 0
    needs = {
        "steps of the plan": max(0, plan.predicted.peak_upper_bytes - there) if is_on_host else 0,
        **levers_bytes,
        f"prefetch_batches={ahead}": made if is_on_host else 2 * made,  # for a GPU, in pinned memory too
        "writing checkpoints": checkpoint_bytes(workload),
        "async_checkpoints=True": copied_bytes if options.async_checkpoints else 0,
        "recover=True": bytes_of(workload.model.buffers()) if options.recover and is_on_host else 0,
    }
    return {name: count for name, count in needs.items() if count}


def checkpoint_bytes(workload: Workload) -> int:
    """Return the bytes that writing a checkpoint copies in host memory: tensors elsewhere, or not contiguous."""
    files = [*workload.model.parameters(), *workload.model.buffers()], state_of(workload.optimizer)
    return max(bytes_of(t for t in file if t.device.type != "cpu" or not t.is_contiguous()) for file in files)


def stored_bytes(plan: Plan, workload: Workload) -> tuple[int, int]:
    """Return the bytes of a checkpoint's model and of its optimizer state, as predicted where it does not exist yet."""
    model_bytes = bytes_of([*workload.model.parameters(), *workload.model.buffers()])
    predicted = plan.plain.by_category.get("optimizer state", 0)
    return model_bytes, max(predicted, bytes_of(state_of(workload.optimizer)))


def check_host(needs: dict[str, int], budget_bytes: int | None) -> None:
    """Refuse a run whose `host_needs` exceed the budget, or what the host has left, by a BudgetError."""
    total, left = sum(needs.values()), free_bytes()
    allowed = left if budget_bytes is None else min(left, budget_bytes)
    if total <= allowed:
        return
    items = ", ".join(f"{name}: {format_bytes(count)}" for name, count in needs.items())
    there = f"host_budget={budget_bytes} allows"
    if allowed == left:
        there = f"the host has {format_bytes(left)} free, within the limits of control groups"
    less = "Leave out async_checkpoints=, lower" if "async_checkpoints=True" in needs else "Lower"
    raise BudgetError(
        f"the run needs {format_bytes(total)} more of the host's memory than this process uses now ({items}), and"
        f" {there}. {less} prefetch_batches=, make a plan with a lower budget= (or host_budget=, if activations are"
        " offloaded), or give the run more memory"
    )


class HostWatch:
    """Ends a run, between two steps and with a checkpoint, before the host's memory is used up.

    What a process takes too much of is otherwise noticed by Linux alone, which kills it.

    Args:
        budget_bytes: What the process may take beyond what it holds now; None for what the host has.

    Attributes:
        check_seconds: Time between two looks.
    """

    check_seconds = 0.5

    def __init__(self, step: Step, budget_bytes: int | None) -> None:
        self._step, self._budget_bytes = step, budget_bytes
        self._before_bytes, self._last = own_bytes(), 0.0

    def check(self) -> None:
        """Look at the host's memory, once in a while.

        Raises:
            MemoryLimitError: The process has taken more than its budget, or the host has less left than writing a
                checkpoint may take.
        """
        now = time.monotonic()
        if now - self._last < self.check_seconds:
            return
        self._last = now
        taken_bytes, left_bytes = own_bytes() - self._before_bytes, free_bytes()
        if self._budget_bytes is not None and taken_bytes > self._budget_bytes:
            text = f"the run uses {format_bytes(taken_bytes)} of the host's memory, more than host_budget="
            raise self._error(f"{text}{self._budget_bytes} allows", self._budget_bytes, taken_bytes, 0)
        reserve = max(_LEAST_ROOM_BYTES, checkpoint_bytes(self._step.workload))
        if left_bytes < reserve:
            text = f"the host has {format_bytes(left_bytes)} free for this process, within the limits of control groups"
            raise self._error(text, taken_bytes + left_bytes, taken_bytes, reserve)

    def _error(self, what: str, limit_bytes: int, taken_bytes: int, requested_bytes: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"{what}: the run stops after step {self._step.steps}, and can be resumed. Look for growing lists of"
            " tensors or caches of workers, lower prefetch_batches= or num_workers, or give the run more memory",
            limit_bytes=limit_bytes,
            held_bytes=taken_bytes,
            requested_bytes=requested_bytes,
            by_category={"taken since the run began": taken_bytes},
            where="between two steps",
        )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(t): t.nbytes for t in tensors}.values())


def check_disk(plan: Plan, workload: Workload, options: RunOptions) -> None:
    """Refuse a run that needs more disk space than is free, or larger files than the limit, by an OutputError."""
    out, steps, keep_checkpoints = options.out, options.steps, options.keep_checkpoints
    model_bytes, state_bytes = stored_bytes(plan, workload)
    each = model_bytes + state_bytes
    every = options.checkpoint_every
    written = 1 if every is None else 2 + (keep_checkpoints if steps is None else steps // every)
    at_once = min(written, keep_checkpoints + 1)  # the oldest is removed after the newest is written
    there = [path for path in out.iterdir() if checkpoint.is_ours(path)] if out.is_dir() else []
    replaced_bytes = sum(os.stat(file).st_size for path in there for file in path.iterdir())
    needed = at_once * each + _REST_BYTES + _LINE_BYTES * (steps or 0)
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    total, _, free = shutil.disk_usage(place)
    checkpoints = f"{at_once} checkpoint{'s' if at_once > 1 else ''} of {format_bytes(each)} at a time"
    if total and needed - replaced_bytes > free:  # some network file systems report a size of 0
        replaced = (
            f" ({format_bytes(replaced_bytes)} of it in use by the present run already)" if replaced_bytes else ""
        )
        raise OutputError(
            f"out={str(out)!r} has {format_bytes(free)} free, and the run needs {format_bytes(needed)}{replaced}:"
            f" {checkpoints}, the log and the report. Free space there, lower keep_checkpoints= ({keep_checkpoints}),"
            " or give another out="
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(model_bytes, state_bytes)
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise OutputError(
            f"this process may write files of at most {format_bytes(limit)} (ulimit -f), and the run's largest file"
            f" needs {format_bytes(largest)}: raise the limit with ulimit -f"
        )
