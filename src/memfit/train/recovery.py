"""Steps that run out of memory go on under a lower plan, on the same batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed import ProcessGroup

from memfit.devices.out_of_memory import OutOfMemory, out_of_memory
from memfit.errors import MemfitError, OutOfMemoryError
from memfit.ir.plan import Plan
from memfit.train.ranks import PeerError, Ranks
from memfit.train.rollback import Rollback
from memfit.train.snapshots import Snapshots
from memfit.train.step import Step, StepResult
from memfit.units import format_bytes

RETRIES = 8
"""Lower plans that are tried for one batch."""


@dataclass(frozen=True)
class OutOfMemoryEvent:
    """A step that ran out of memory and was undone.

    Attributes:
        step: The update that it was for.
        error: What ran out.
        held_bytes: What tensors on GPUs still held afterwards, beyond what they held before the step.
        plan: The plan that ran out.
        lower: The plan that the batch was run under next; None where there was no other.
        snapshot: What is to be said of the memory snapshot; "" where none was wanted.
    """

    step: int
    error: OutOfMemory
    held_bytes: int
    plan: Plan
    lower: Plan | None
    snapshot: str = ""

    def __str__(self) -> str:
        said = f"step {self.step} under the plan of {format_bytes(self.plan.predicted.peak_bytes)}: {self.error.text}"
        held = f"; {format_bytes(self.held_bytes)} stayed allocated" if self.held_bytes else ""
        snapshot = f"; {self.snapshot}" if self.snapshot else ""
        if self.lower is None:
            return f"{said}{held}; no lower plan was left{snapshot}"
        levers = self.lower.levers
        return (
            f"{said}{held}; the step was undone, and its batch run under the plan of"
            f" {format_bytes(self.lower.predicted.peak_bytes)}: microbatches of {levers.microbatch_size},"
            f" {len(levers.regions)} regions recomputed{snapshot}"
        )


class Witness:
    """Runs steps. Out of memory, a snapshot is written, and the error goes on with a note of it.

    Args:
        step: The step to run; use as `step.recovery = Witness(step, plan, snapshots)`.
        plan: The plan that it runs.
        snapshots: Writes snapshots.

    Attributes:
        plan: The plan in force.
        events: What happened so far.
    """

    def __init__(self, step: Step, plan: Plan, snapshots: Snapshots | None) -> None:
        self.step, self.plan = step, plan
        self.events: list[OutOfMemoryEvent] = []
        self._snapshots = snapshots

    def __call__(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult:
        """Run a step on a batch.

        Args:
            run: Runs it once.
            batch: The batch.
        """
        try:
            return run(batch)
        except Exception as e:
            found = out_of_memory(e)
            if found is not None:
                self._keep_snapshot()
                snapshot = self._write_snapshot(batch)
                self.events.append(OutOfMemoryEvent(self.step.steps + 1, found, 0, self.plan, None, snapshot))
                if snapshot:
                    e.add_note(f"memfit: {snapshot}")
            raise

    def _keep_snapshot(self) -> None:
        if self._snapshots is not None:
            self._snapshots.take()

    def _write_snapshot(self, batch: Any) -> str:
        return "" if self._snapshots is None else self._snapshots.write(self.step.steps + 1, self.plan, batch)


class Recovery(Witness):
    """Runs steps. Out of memory, one is undone, and run again on the same batch under the next lower plan.

    Weights, optimizer state, buffers, random states and the loss scaler are then those before the step
    (`Rollback`), so that no update is lost and none is done twice. The lower plan stays for the steps after it.

    Args:
        step: The step to run; use as `step.recovery = Recovery(step, plan, lower)`.
        plan: The plan that it runs.
        lower: Puts the step under the plan after the one given, and returns it; None where there is none.
        retries: Lower plans to try for one batch (≥ 0).
        snapshots: Writes a snapshot each time that memory runs out; None for none.
    """

    def __init__(
        self,
        step: Step,
        plan: Plan,
        lower: Callable[[Plan], Plan | None],
        *,
        retries: int = RETRIES,
        snapshots: Snapshots | None = None,
    ) -> None:
        super().__init__(step, plan, snapshots)
        self._lower, self._retries = lower, retries
        self._rollback = Rollback(step)
        self._ranks = step.ranks

    def join(self, group: ProcessGroup) -> None:
        """Have all ranks of a process group decide together; call it on each of them.

        Raises:
            UsageError: They have different plans.
        """
        workload = self.step.workload
        ranks = Ranks(group, workload.model, workload.optimizer, self.step.parameters)
        self._ranks = self.step.ranks = ranks  # its hook comes after the rollback's, which takes what memory it needs
        levers = [self.plan.levers, *(point.levers for point in self.plan.frontier)]
        ranks.check_same("plans", msgspec.json.encode(levers))

    def close(self) -> None:
        """Watch the step no more."""
        self._rollback.close()
        self._ranks.close()

    def __call__(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult:
        """Run a step on a batch, under lower plans where memory runs out.

        Args:
            run: Runs it once.
            batch: The batch.

        Raises:
            OutOfMemoryError: No lower plan is left, or the optimizer had begun to change the weights.
            MemfitError: Another rank failed otherwise. Nothing was updated.
        """
        before_bytes = _held_bytes()
        for attempt in range(self._retries + 1):
            found = self._attempt(run, batch)
            if isinstance(found, StepResult):
                self._rollback.settle()
                self._ranks.settle()
                return found
            _release()
            if self._ranks.is_updating:  # the others have updated, and this rank has not
                raise self._error(found, attempt, is_torn=True)
            is_restored, plan = self._ranks.all(self._rollback.restore()), self.plan
            snapshot = "" if found.kind == "another rank" else self._write_snapshot(batch)
            lowered = self._lower(plan) if is_restored and attempt < self._retries else None
            lowered = lowered if self._ranks.all(lowered is not None) else None
            held_bytes = max(0, _held_bytes() - before_bytes)
            self.events.append(OutOfMemoryEvent(self.step.steps + 1, found, held_bytes, plan, lowered, snapshot))
            if lowered is None:
                raise self._error(found, attempt, is_torn=not is_restored)
            self.plan = lowered
        raise AssertionError("unreachable")

    def _attempt(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult | OutOfMemory:
        """Run a step, and return what ran out of memory as a record of it.

        The exception, and with it every frame and the tensors that they hold, is gone when this returns.
        """
        try:
            self._ranks.begin()
            self._rollback.mark()
            result = run(batch)
            self._ranks.finish()
            return result
        except PeerError as e:
            if e.ran_out:
                return OutOfMemory("another rank", None, str(e))
            raise MemfitError(
                f"step {self.step.steps + 1}: {e}. Nothing was updated; see what that rank says"
            ) from None
        except Exception as e:
            found = out_of_memory(e)
            if found is not None:
                self._keep_snapshot()
            if not self._ranks.failed(found is not None) or found is None:
                raise
            return found

    def _error(self, found: OutOfMemory, retries: int, *, is_torn: bool) -> OutOfMemoryError:
        number = self.step.steps + 1
        if is_torn:
            text = (
                f"step {number} ran out of memory while the optimizer changed the weights ({found.text}), and there"
                " was no room for a copy of them: go on from a checkpoint (resume=True)"
            )
        else:
            tried = f" and {retries} below it" if retries else ""
            text = (
                f"step {number} ran out of memory under its plan{tried}, the last predicted to take"
                f" {format_bytes(self.plan.predicted.peak_bytes)} ({found.text}). Nothing was updated. Make a plan with"
                " a lower budget=, allow a freer numerics=, or give the step more memory"
            )
        return OutOfMemoryError(text, step=number, is_torn=is_torn)


def _release() -> None:
    """Let go of what only cycles hold, and give the device what the allocator keeps of it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _held_bytes() -> int:
    """Return what tensors hold of the GPUs now."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
