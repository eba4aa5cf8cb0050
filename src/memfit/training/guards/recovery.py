"""Steps that run out of memory: undone, run again on their batch under a lower plan, and kept as memory snapshots.

Before the optimizer's update a step changes only random states, the loss scale, buffers such as BatchNorm's statistics,
and gradients, which are dropped anyway. These are saved at the beginning of every step.

Weights and optimizer state are changed by the optimizer alone, and copies of them before every update would double
their memory, or take the time of a transfer to the host. So right before the optimizer begins:

1. If its memory is certainly free, nothing is copied.
2. Otherwise weights and state are copied to the host, and the copies dropped after the update. If the host has no room
   for them, the step fails there, before anything was changed.

Ranks that share a step agree on that: where one of them may run out, all copy. They do so too before the update that
creates the optimizer's state, where the host has room for it. After such an update they vote once more, and only then
drop the copies, so that one that fails in the middle of it is undone on all.

If the optimizer fails nevertheless, the version counters of its tensors show whether it changed one of them. If so, and
nothing was copied, the training is torn, and can only be resumed from a checkpoint.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit import hardware
from memfit._torch import local_part, own_buffers, take_snapshot, version_of
from memfit.errors import MemfitError, OutOfMemoryError, OutputError
from memfit.foundations import format_bytes
from memfit.hardware import OutOfMemory, allocations_can_fail, free_bytes, out_of_memory
from memfit.ir import Plan, uses_text, write_atomic
from memfit.ranks import PeerError, UnansweredError
from memfit.training.guards.limits import CpuLimit
from memfit.training.optimizers import Optimizers, parameters_of, state_of
from memfit.training.step import Step, StepResult
from memfit.workload import rng_snapshot

RETRIES = 8
"""Most lower plans to try for one batch."""
MOST_SNAPSHOTS = 8
"""Most snapshots in a folder: a step that runs out every day would fill the disk with them."""
_BLOCK_BYTES = 2**26  # memory is requested in pieces, as an optimizer does
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own reader knows
_SNAPSHOT = re.compile(r"out-of-memory-[0-9]+(\.[0-9]+)?\.pickle")


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
        then = "no plan with a lower peak is left"
        if self.lower is not None:
            then = (
                "memfit undid the step, and ran its batch again under the plan of"
                f" {format_bytes(self.lower.predicted.peak_bytes)}: {uses_text(self.lower.uses)}"
            )
        return f"{said}{held}; {then}{f'; {self.snapshot}' if self.snapshot else ''}"


class OutOfMemoryObserver:
    """Runs steps, as `StepOptions.recovery`. When one runs out of memory, writes a snapshot, and notes it on the error.

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
                self._take_snapshot()
                snapshot = self._write_snapshot(batch)
                self.events.append(OutOfMemoryEvent(self.step.steps + 1, outcome, 0, self.plan, None, snapshot))
                if snapshot:
                    e.add_note(f"memfit: {snapshot}")
            raise

    def _take_snapshot(self) -> None:
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
        lower: Applies the plan after a given one to the step, and returns it; None where there is none.
        snapshots: Writes a snapshot each time that memory runs out; None for none.
    """

    def __init__(
        self,
        step: Step,
        plan: Plan,
        lower: Callable[[Plan], Plan | None],
        *,
        snapshots: Snapshots | None = None,
    ) -> None:
        super().__init__(step, plan, snapshots)
        self._lower = lower
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
        before_bytes = hardware.accelerators.held_bytes()
        for attempt in range(RETRIES + 1):
            outcome = self._attempt(run, batch)
            if isinstance(outcome, StepResult):
                self._rollback.settle()
                return outcome
            gc.collect()  # cycles that hold tensors of the failed step
            hardware.accelerators.release_cache()
            if self._ranks.is_updating:  # the other ranks have updated, and this one has not
                raise self._error(outcome, attempt, is_torn=True)
            self._tell(outcome)
            is_restored, plan = self._ranks.all(self._rollback.restore()), self.plan
            snapshot = "" if outcome.kind == "another rank" else self._write_snapshot(batch)
            lowered = self._lower(plan) if is_restored and attempt < RETRIES else None
            lowered = lowered if self._ranks.all(lowered is not None) else None
            held_bytes = max(0, hardware.accelerators.held_bytes() - before_bytes)
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
                if not self._ranks.is_updating:
                    try:  # the other ranks
                        self._ranks.failed(ran_out=False)
                    except UnansweredError:
                        e.add_note(
                            "memfit: the other ranks can't be informed at this point: they wait until torchrun or their"
                            " process group's timeout ends them"
                        )
                    else:
                        self._ranks.reset()
                raise
            self._take_snapshot()
            return record

    def _tell(self, outcome: OutOfMemory) -> None:
        """Tell the other ranks that this one ran out of memory, and make ready for the next attempt."""
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


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    @property
    def is_changed(self) -> bool:
        now = own_buffers(self.module).get(self.name)
        return now is not self.tensor or not torch.equal(self.tensor, self.copy)

    def marked(self) -> _Buffer | None:
        """Return this buffer with a copy of its present values; None where the module no longer has it."""
        now = own_buffers(self.module).get(self.name)
        if now is None:
            return None
        fits = now.shape == self.copy.shape and now.dtype == self.copy.dtype
        return self._replace(tensor=now, copy=self.copy.copy_(now) if fits else now.clone())


class Rollback:
    """Saves the state before a step, and restores it; its optimizer is watched until `close`.

    Buffers are copied on their device: all of them before the first step, later those that the first step changed.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._optimizer = step.workload.optimizer
        self._buffers: list[_Buffer] | None = None
        self._is_marked = self._is_settled = False
        self._set_back_rng: Callable[[], None] = rng_snapshot()
        self._forget_update()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ]

    def close(self) -> None:
        """Stop watching the optimizer."""
        for handle in self._handles:
            handle.remove()

    def mark(self) -> None:
        """Save the present state. If memory runs out here, `restore` knows that nothing has changed."""
        self._is_marked = False
        self._forget_update()
        self._set_back_rng = rng_snapshot()
        self._scaler_state = {} if self.step.scaler is None else self.step.scaler.state_dict()
        with torch.no_grad():
            if self._buffers is None:
                modules = self.step.workload.model.modules()
                places = [(m, name, b) for m in modules for name, b in own_buffers(m).items() if b is not None]
                self._buffers = [
                    _Buffer(*place, place[-1].clone()) for place in {id(p[-1]): p for p in places}.values()
                ]
            else:
                self._buffers = [now for buffer in self._buffers if (now := buffer.marked()) is not None]
        self._is_marked = True

    def settle(self) -> None:
        """Note that the step is done."""
        if not self._is_settled:
            self._buffers = [buffer for buffer in self._buffers or () if buffer.is_changed]
            self._is_settled = True
        self._forget_update()

    def restore(self) -> bool:
        """Restore the saved state; tell whether that was possible.

        If not, weights or optimizer state are partly updated.
        """
        if not self._is_marked:
            return True
        if self._has_updated:
            return False
        with torch.no_grad():
            if self._has_begun:
                is_same = self._versions and all(version_of(tensor) == version for tensor, version in self._versions)
                if not self._copies and not is_same:
                    return False
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
                self._optimizer.state.clear()
                self._optimizer.state.update(self._state)
                for group, before in self._groups:
                    group.update(before)
            for module, name, tensor, copy in self._buffers or ():
                own_buffers(module)[name] = tensor.copy_(copy)
        if self.step.scaler is not None:
            self.step.scaler.load_state_dict(self._scaler_state)
        self._set_back_rng()
        self._forget_update()
        return True

    @staticmethod
    def has_room(wanted_bytes: int, device: torch.device) -> bool:
        """Tell whether a device certainly has as many free bytes, if possible without allocating them."""
        if device.type == "cpu":
            limit = CpuLimit.active
            if limit is not None and limit.held_bytes + wanted_bytes > limit.limit_bytes:
                return False
            if not allocations_can_fail():
                return True
        elif hardware.accelerators.cached_bytes(device) > 2 * wanted_bytes:  # cached memory may be fragmented
            return True
        blocks = []
        try:
            for start in range(0, wanted_bytes, _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, wanted_bytes - start)
                blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
        except Exception as e:
            if out_of_memory(e) is None:
                raise
            return False
        return True

    # The update

    def _forget_update(self) -> None:
        self._has_begun = self._has_updated = self._is_guarded = False
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # that a step saw, and their settings
        self._state: dict[torch.Tensor, dict[str, Any]] = {}

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ranks = self.step.options.ranks
        tensors = [*parameters_of(optimizer), *state_of(optimizer)]  # all that it changes
        is_sure = self.has_room(needed_bytes(optimizer), tensors[0].device if tensors else torch.device("cpu"))
        if ranks.size > 1 and any(p.grad is not None and not optimizer.state.get(p) for p in parameters_of(optimizer)):
            # It creates state: all ranks can undo that, as far as the host's memory goes.
            is_sure = is_sure and sum(local_part(tensor).nbytes for tensor in tensors) * ranks.size >= free_bytes()
        self._is_guarded = not ranks.agree(is_sure)
        if self._is_guarded:
            self._copies = [(part, part.detach().to("cpu", copy=True)) for part in map(local_part, tensors)]
        optimizers = optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]
        # Version counters show which tensors an optimizer changed: true of PyTorch's.
        changes_in_place = all(type(o).__module__.startswith("torch.optim.") for o in optimizers)
        if changes_in_place:
            self._versions = [(tensor, version_of(tensor)) for tensor in tensors]
        if changes_in_place or self._copies:
            groups = optimizer.param_groups
            self._groups = [(group, {k: v for k, v in group.items() if k != "params"}) for group in groups]
            self._state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        if self._is_guarded and ranks.size > 1:
            ranks.agree(True)
        else:
            ranks.commit()
        self._has_begun = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ranks = self.step.options.ranks
        if self._is_guarded and ranks.size > 1:
            ranks.agree(True)
            ranks.commit()
        self._has_updated = True
        self._copies = []


def needed_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return a bound on the bytes that an optimizer's next update allocates: temporaries, and state to be created.

    For optimizers of `torch.optim` with at most two tensors of state for each parameter, as Adam. "foreach"
    implementations, the default on accelerators, make temporaries for a whole group of parameters, others for one
    parameter at a time, fused ones none.
    """
    temporaries = state = 0
    for group in optimizer.param_groups:
        updated = [p for p in group["params"] if p.grad is not None]
        sizes = [local_part(p).nbytes for p in updated]
        state += 2 * sum(local_part(p).nbytes for p in updated if not optimizer.state.get(p))
        is_foreach = group.get("foreach")
        if is_foreach is None:
            is_foreach = all(p.device.type != "cpu" for p in group["params"])
        if not group.get("fused"):
            temporaries = max(temporaries, 2 * sum(sizes) if is_foreach else 3 * max(sizes, default=0))
    return state + temporaries


class Snapshots:
    """Writes `out-of-memory-<step>.pickle` into a folder, created if missing, when a step runs out of memory.

    On a GPU it is the snapshot of PyTorch's allocator when the error is raised, with its history where
    `torch.cuda.memory._record_memory_history()` was called before. The CPU's allocator has none; there it holds the
    step's predicted allocations, by operator, module and category.
    """

    def __init__(
        self, folder: Path, device: torch.device, write_predicted: Callable[[Plan, Any, Path], object]
    ) -> None:
        self.folder, self._device, self._write_predicted = folder, device, write_predicted
        self._record: Any = None

    def take(self) -> None:
        """Take the allocator's snapshot, while the tensors of the failed step are still alive."""
        self._record = None
        if self._device.type == "cuda":
            try:
                self._record = take_snapshot(self._device)
            except Exception as e:  # must not hide the out-of-memory error
                self._record = e

    def write(self, step_number: int, plan: Plan, batch: Any) -> str:
        """Write the snapshot of a step, and return a text on it: its name, or why there is none. Raises nothing."""
        record, self._record = self._record, None
        try:
            if len(all_snapshots(self.folder)) >= MOST_SNAPSHOTS:
                raise OutputError(f"{self.folder} already has {MOST_SNAPSHOTS} snapshots")
            numbers = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
            paths = (self.folder / f"out-of-memory-{step_number}{n}.pickle" for n in numbers)
            path = next(path for path in paths if not path.exists())
            if self._device.type != "cuda":
                self._write_predicted(plan, batch, path)
                return f"predicted memory snapshot: {path.name}"
            if isinstance(record, Exception):
                raise record
            write_atomic(path, pickle.dumps(record, protocol=_PICKLE_PROTOCOL))
            return f"memory snapshot: {path.name}"
        except Exception as e:  # must not hide the out-of-memory error
            return f"no memory snapshot ({repr(e)[:200]})"


def all_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder."""
    return [path for path in folder.iterdir() if _SNAPSHOT.fullmatch(path.name)] if folder.exists() else []
