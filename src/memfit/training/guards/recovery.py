"""Reruns steps that ran out of memory under a lower plan, on the same batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.errors import MemfitError, OutOfMemoryError
from memfit.hardware import accelerators
from memfit.hardware.out_of_memory import OutOfMemory, out_of_memory
from memfit.ir.plan import Plan, uses_text
from memfit.ranks.aborted import PeerError, UnansweredError
from memfit.training.guards.rollback import Rollback
from memfit.training.guards.snapshots import Snapshots
from memfit.training.step import Step, StepResult
from memfit.units import format_bytes

RETRIES = 8
"""Most lower plans to try for one batch."""


@dataclass(frozen=True)
class OutOfMemoryEvent:
    """A step that ran out of memory and was undone.

    Attributes:
        held_bytes: Bytes that tensors on accelerators still held afterwards, beyond those before the step.
        lower: The plan under which the batch was run next; None where there was none.
        snapshot: Text on the memory snapshot; "" where none was requested.
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
            return f"{said}{held}; no plan with a lower peak is left{snapshot}"
        return (
            f"{said}{held}; memfit undid the step, and ran its batch again under the plan of"
            f" {format_bytes(self.lower.predicted.peak_bytes)}: {uses_text(self.lower.uses)}{snapshot}"
        )


class OutOfMemoryObserver:
    """Runs steps. When one runs out of memory, writes a snapshot, and notes it on the error.

    Args:
        step: The step to run; use as `step.change(recovery=OutOfMemoryObserver(step, plan, snapshots))`.

    Attributes:
        events: The events so far.
    """

    def __init__(self, step: Step, plan: Plan, snapshots: Snapshots | None) -> None:
        self.step, self.plan = step, plan
        self.events: list[OutOfMemoryEvent] = []
        self._snapshots = snapshots

    def __call__(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult:
        """Run a step on a batch."""
        try:
            return run(batch)
        except Exception as e:
            outcome = out_of_memory(e)
            if outcome is not None:
                self._keep_snapshot()
                snapshot = self._write_snapshot(batch)
                self.events.append(OutOfMemoryEvent(self.step.steps + 1, outcome, 0, self.plan, None, snapshot))
                if snapshot:
                    e.add_note(f"memfit: {snapshot}")
            raise

    def _keep_snapshot(self) -> None:
        if self._snapshots is not None:
            self._snapshots.take()

    def _write_snapshot(self, batch: Any) -> str:
        return "" if self._snapshots is None else self._snapshots.write(self.step.steps + 1, self.plan, batch)


class Recovery(OutOfMemoryObserver):
    """Runs steps. One that runs out of memory is undone, and run again on its batch under the next lower plan.

    Weights, optimizer state, buffers, random states and the loss scaler are then those before the step
    (`Rollback`), so that no update is lost and none is done twice. The lower plan stays for the steps after it.
    Ranks that share the step do all this together, whichever of them runs out (`memfit.ranks.agreement`).

    Args:
        step: The step to run; use as `step.change(recovery=Recovery(step, plan, lower))`.
        lower: Applies the plan after a given one to the step, and returns it; None where there is none.
        retries: Most lower plans to try for one batch (≥ 0).
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
        self._ranks = step.options.ranks
        try:
            self._ranks.watch()
        except Exception:
            self._rollback.close()
            raise

    def close(self) -> None:
        """Stop watching the step."""
        self._rollback.close()
        self._ranks.close()

    def __call__(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult:
        """Run a step on a batch, under lower plans where memory runs out.

        Raises:
            OutOfMemoryError: No lower plan is left, or the optimizer had begun to change the weights, or the other
                ranks can't be told.
            MemfitError: Another rank failed otherwise. Nothing was updated.
        """
        before_bytes = accelerators.held_bytes()
        for attempt in range(self._retries + 1):
            outcome = self._attempt(run, batch)
            if isinstance(outcome, StepResult):
                self._rollback.settle()
                return outcome
            _release()
            if self._ranks.is_updating:  # the other ranks have updated, and this one has not
                raise self._error(outcome, attempt, is_torn=True)
            self._tell(outcome)
            is_restored, plan = self._ranks.all(self._rollback.restore()), self.plan
            snapshot = "" if outcome.kind == "another rank" else self._write_snapshot(batch)
            lowered = self._lower(plan) if is_restored and attempt < self._retries else None
            lowered = lowered if self._ranks.all(lowered is not None) else None
            held_bytes = max(0, accelerators.held_bytes() - before_bytes)
            self.events.append(OutOfMemoryEvent(self.step.steps + 1, outcome, held_bytes, plan, lowered, snapshot))
            if lowered is None:
                raise self._error(outcome, attempt, is_torn=not is_restored)
            self.plan = lowered
        raise AssertionError("unreachable")

    def _attempt(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult | OutOfMemory:
        """Run a step, and return its result, or a record of the failed allocation.

        The exception is freed on return, and so are its frames and their tensors.
        """
        try:
            self._ranks.begin(batch)
            self._rollback.mark()
            result = run(batch)
            self._ranks.finish()
            return result
        except PeerError as e:
            if e.ran_out:
                return OutOfMemory("another rank", None, str(e))
            self._ranks.reset()
            raise self._failed_otherwise() from None
        except Exception as e:
            record = out_of_memory(e)
            if record is None:
                self._tell_otherwise(e)
                raise
            self._keep_snapshot()
            return record

    def _tell(self, outcome: OutOfMemory) -> None:
        """Tell the other ranks that this one ran out of memory, and make ready for the next attempt.

        Raises:
            OutOfMemoryError: They can't be told.
            MemfitError: Another rank failed otherwise.
        """
        number = self.step.steps + 1
        try:
            have_all_run_out = self._ranks.failed(ran_out=True)
        except UnansweredError:
            raise OutOfMemoryError(
                f"step {number} ran out of memory ({outcome.text}) while DistributedDataParallel made new buckets. The"
                " other ranks can't be informed at that point: they wait until torchrun or their process group's"
                " timeout ends them. Resume from a checkpoint under a plan with a lower budget=",
                step=number,
                is_torn=True,
            ) from None
        self._ranks.reset()
        if not have_all_run_out:
            raise self._failed_otherwise()

    def _tell_otherwise(self, error: Exception) -> None:
        """Tell the other ranks that this one failed with an error of its own."""
        if self._ranks.is_updating:
            return
        try:
            self._ranks.failed(ran_out=False)
        except UnansweredError:
            error.add_note(
                "memfit: the other ranks can't be informed at this point: they wait until torchrun or their process"
                " group's timeout ends them"
            )
        else:
            self._ranks.reset()

    def _failed_otherwise(self) -> MemfitError:
        return MemfitError(
            f"step {self.step.steps + 1}: {PeerError(ran_out=False)}. Nothing was updated; read that rank's error"
        )

    def _error(self, record: OutOfMemory, retries: int, *, is_torn: bool) -> OutOfMemoryError:
        number = self.step.steps + 1
        if is_torn:
            text = (
                f"step {number} ran out of memory while the optimizer changed the weights ({record.text}), and there"
                " was no memory for a copy of the weights: resume from a checkpoint (resume=True)"
            )
        else:
            tried = f" and under {retries} with a lower peak" if retries else ""
            text = (
                f"step {number} ran out of memory under its plan{tried}; the last plan's predicted peak is"
                f" {format_bytes(self.plan.predicted.peak_bytes)} ({record.text}). Nothing was updated. Make a plan"
                " with a lower budget=, allow more by numerics=, or give the step more memory"
            )
        return OutOfMemoryError(text, step=number, is_torn=is_torn)


def _release() -> None:
    """Free reference cycles, and release the allocator's cache to the device."""
    gc.collect()
    accelerators.release_cache()
