"""The faults, and how each gets into a training."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.faults.processes import finish, mount_small_disk, wait
from benchmarks.faults.subjects import Subject, Windows
from memfit.training import METRICS
from memfit.training.runs import checkpoint
from memfit.workload import Workload

TOO_MUCH_BYTES = 1 << 60
DISK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far an undisturbed run goes.

    Attributes:
        steps: Optimizer updates.
        operators: Operators that it runs.
        seconds: What it takes, from the start of its process.
        training_seconds: What it takes from its first step on.
        folder_bytes: What its folder holds in the end.
    """

    steps: int
    operators: int
    seconds: float
    training_seconds: float
    folder_bytes: int


class Fault:
    """Disturbs a run once, at a random place.

    Args:
        draw: What draws the place.
        reach: How far the undisturbed run goes.
        out: The run's folder.

    Attributes:
        statuses: Exit statuses that the disturbed run may end with.
        event: What the run must have in its record, if anything.
    """

    statuses: ClassVar[tuple[int, ...]]
    event: ClassVar[str | None] = None

    def __init__(self, draw: random.Random, reach: Reach, out: Path) -> None:
        self.draw, self.reach, self.out = draw, reach, out

    @staticmethod
    def concerns(subject: Subject) -> bool:
        """Tell whether a training must end as if this had not happened."""
        return True

    def before(self) -> None:
        """Prepare the place of the run, in the process that watches over it."""

    def changed(self, workload: Workload) -> Workload:
        """Return the workload that is run."""
        return workload

    def around(self) -> AbstractContextManager[object]:
        """Return the context that it is run in."""
        return contextlib.nullcontext()

    def at_step(self, step: int) -> None:
        """Called in the run after each update."""

    def ended(self, pid: int) -> int:
        """Wait for the run's end, and return its exit status."""
        return finish(pid)

    def after(self) -> None:
        """Change what the run left, in the process that watches over it."""


class Killed(Fault):
    """SIGKILL: at any moment from the start of the process on in one of four, from the first step on in the others."""

    statuses = (-signal.SIGKILL,)

    def ended(self, pid: int) -> int:
        """Kill the run."""
        if self.draw.random() < 0.25:
            return _signalled(pid, signal.SIGKILL, self.draw.uniform(0, self.reach.seconds))
        return self._in_training(pid, signal.SIGKILL)

    def _in_training(self, pid: int, number: signal.Signals) -> int:
        metrics = self.out / METRICS
        while not (metrics.exists() and metrics.stat().st_size):
            status = wait(pid, 0.002)
            if status is not None:
                return status
        return _signalled(pid, number, self.draw.uniform(0, 0.9 * self.reach.training_seconds))


class Preempted(Killed):
    """SIGTERM at any moment from the first step on: a checkpoint is written after the step, and the status is 75."""

    statuses = (75,)

    def ended(self, pid: int) -> int:
        """Ask the run to end."""
        return self._in_training(pid, signal.SIGTERM)


def _signalled(pid: int, number: signal.Signals, after_seconds: float) -> int:
    """Send a signal some time later, and return the exit status."""
    status = wait(pid, after_seconds)
    if status is not None:
        return status
    os.kill(pid, number)
    return finish(pid)


class TornCheckpoint(Fault):
    """SIGKILL after a step; then the newest checkpoint is cut short, edited, zeroed at its end, or lacks a file."""

    statuses = (-signal.SIGKILL,)
    event = "damaged checkpoint"

    def __init__(self, draw: random.Random, reach: Reach, out: Path) -> None:
        super().__init__(draw, reach, out)
        self._step = draw.randint(3, reach.steps)

    def at_step(self, step: int) -> None:
        """End the process as a power failure would."""
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self) -> None:
        """Damage the newest checkpoint."""
        newest = checkpoint.latest(self.out)
        assert newest is not None  # the first is written before the first step
        file = newest / self.draw.choice([checkpoint.MANIFEST, *checkpoint.FILES])
        data = file.read_bytes()
        place = self.draw.randrange(len(data))
        flipped = bytes([data[place] ^ self.draw.randint(1, 255)])
        kind = self.draw.choice(["cut", "edited", "zeroed", "removed"])
        if kind == "removed":
            file.unlink()
        elif kind == "cut":
            file.write_bytes(data[:place])
        elif kind == "edited":
            file.write_bytes(data[:place] + flipped + data[place + 1 :])
        else:
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + bytes(len(data) - place - 1))


class FullDisk(Fault):
    """A disk on which there is room for a part of what the run writes; room is made before it is resumed."""

    statuses = (2,)

    def before(self) -> None:
        """Mount a small disk; where nothing can be mounted, writing fails instead."""
        self._room_bytes = int(self.draw.uniform(0.02, 1.4) * self.reach.folder_bytes)
        self._is_real = mount_small_disk(self.out.parent, DISK_BYTES)

    def at_step(self, step: int) -> None:
        """Let others fill the disk after the first step: before it, a run without room is refused."""
        if self._is_real and not self._filler.exists():
            free_bytes = shutil.disk_usage(self.out.parent).free
            self._filler.write_bytes(bytes(max(0, free_bytes - self._room_bytes)))

    def around(self) -> AbstractContextManager[object]:
        """Fail to write from some call on, where the disk is not really full."""
        return contextlib.nullcontext() if self._is_real else _no_space_from(self.draw.randint(1, 8 * self.reach.steps))

    def after(self) -> None:
        """Make room."""
        if self._is_real:
            self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.out.parent / "filler"


@contextlib.contextmanager
def _no_space_from(call: int) -> Iterator[None]:
    """Let the system have no room for what is written, from some call of `fsync` on."""
    real, calls = os.fsync, itertools.count(1)

    def full(descriptor: int) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    os.fsync = full  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real


class FailingData(Fault):
    """A batch that can't be made: a worker that is killed, or an error of the file system."""

    statuses = (1,)

    def __init__(self, draw: random.Random, reach: Reach, out: Path) -> None:
        super().__init__(draw, reach, out)
        self._at, self._is_killed = draw.randint(1, reach.steps), draw.random() < 0.5
        self._is_armed, self._sample = False, draw.randint(1, 8)

    def changed(self, workload: Workload) -> Workload:
        """Let a sample fail in a worker, where there are workers; otherwise a batch."""
        if isinstance(getattr(workload.batches, "dataset", None), Windows):
            Windows.at_sample = self._fail_in_worker
            return workload
        return dataclasses.replace(workload, batches=_FailingBatches(workload.batches, self._at))

    def at_step(self, step: int) -> None:
        """Workers that start from here on fail; those of the first epoch may too."""
        self._is_armed = step + 4 >= self._at

    def _fail_in_worker(self, index: int) -> None:
        self._sample -= self._is_armed or self._at <= 4
        if self._sample == 0:
            if self._is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class _FailingBatches:
    """Batches with a position, of which one can't be made."""

    def __init__(self, batches: Any, fails_at: int) -> None:
        self._batches, self._countdown = batches, fails_at
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._batches)
        while True:
            self._countdown -= 1
            if self._countdown == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            try:
                batch = next(iterator)
            except StopIteration:
                self._countdown += 1
                return
            yield batch


class NotFinite(Fault):
    """NaN in an element of the gradient of a parameter: the step raises before anything is updated.

    Under loss scaling the update would be skipped and the batch dropped, as for an overflow: a run that ends
    otherwise by design, which therefore is not disturbed.
    """

    statuses = (5,)

    @staticmethod
    def concerns(subject: Subject) -> bool:
        """Tell whether the step has no loss scaling."""
        return subject.precision != "16-mixed"

    def changed(self, workload: Workload) -> Workload:
        """Watch a parameter's gradients, and spoil one."""
        sizes = [p.numel() for p in workload.model.parameters() if p.requires_grad]
        chosen = self.draw.randrange(len(sizes))
        at, place = self.draw.randint(1, self.reach.steps), self.draw.randrange(sizes[chosen])
        calls = itertools.count(1)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if next(calls) != at:
                return gradient
            spoiled = gradient.clone(memory_format=torch.contiguous_format)
            spoiled.view(-1)[place] = torch.nan
            return spoiled

        def watch(model: torch.nn.Module, args: Any) -> None:
            handle.remove()
            [p for p in model.parameters() if p.requires_grad][chosen].register_hook(spoil)

        # Before the first forward pass, since a plan may change what the parameters are.
        handle = workload.model.register_forward_pre_hook(watch)
        return workload


class OutOfMemory(Fault):
    """An operator asks the allocator for 2**60 bytes: the error is the allocator's own.

    In a step it is undone, and its batch run again under a lower plan. Within the optimizer's update, which may then be
    half done, and outside of steps (a batch, a checkpoint, an evaluation) the run ends, and is resumed.
    """

    statuses = (0, 1, 6)

    def around(self) -> AbstractContextManager[object]:
        """Count operators up to one."""
        return CountingOperators(self.draw.randint(1, self.reach.operators))


class CountingOperators(TorchDispatchMode):
    """Counts operators; one of them asks for too much memory first.

    Args:
        fails_at: Which, from 1 on; none by default.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._fails_at = 0, fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self._fails_at:
            torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)
        return func(*args, **(kwargs or {}))


FAULTS: dict[str, type[Fault]] = {
    "out of memory": OutOfMemory,
    "NaN in a gradient": NotFinite,
    "full disk": FullDisk,
    "SIGKILL": Killed,
    "torn checkpoint": TornCheckpoint,
    "failing data worker": FailingData,
    "SIGTERM": Preempted,
}
