"""A step run with data, to write down what its code reads: in bounds of time and memory."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.composites import composed_as_without_a_mode
from memfit.capture.courses import Readings
from memfit.capture.draws import GeneratorStates
from memfit.capture.fake import nothing_changes
from memfit.capture.parts import real_part
from memfit.capture.reads import Log, Writing
from memfit.capture.step import BuildStep, capture_real
from memfit.errors import CaptureError, MemfitError
from memfit.frames import users_place
from memfit.ir.trace import Trace
from memfit.workload import StepProgram, Workload, has_data

MOST_SECONDS = 60.0
"""Of a step with data, after which it is left."""
_LEAST_FREE = 0.1  # of the machine's memory, which a step with data leaves to others
_COPIES = 4  # of the parameters: the user's, the copy's, its gradients, and as much of optimizer states
_LOOKS = 64  # operators from one look at the memory to the next


class TooMuchError(MemfitError):
    """A step with data takes more time or memory than it may."""


class Bounded(TorchDispatchMode):
    """Ends code that takes too long, or too much of the machine's memory.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self.until, self.operators = seconds, time.monotonic() + seconds, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if time.monotonic() > self.until:
            raise TooMuchError(f"the step takes more than {self.seconds:g} s with data")
        if self.operators % _LOOKS == 0 and not _has_memory(0):
            raise TooMuchError("the step takes more memory with data than the machine has left")
        return func(*args, **(kwargs or {}))


def _has_memory(nbytes: int) -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available - nbytes > _LEAST_FREE * memory.total)


def why_not_here(workload: Workload) -> str | None:
    """Return why a workload can't run with data in this process; None where it can."""
    if not has_data(workload):
        return "there is no data"
    held = sum(t.numel() * t.itemsize for t in workload.model.parameters())
    return None if _has_memory(_COPIES * held) else "the machine has too little memory left"


def capture_with_data(
    workload: Workload, build: BuildStep, precision: str, microbatch_size: int, *, instead_of: CaptureError
) -> Trace:
    """Return the trace of a step that runs with data, where fake tensors can't stand in.

    Args:
        workload: With data; nothing of it is changed.
        build: Makes the step from a copy of it.
        precision: Goes into the trace.
        microbatch_size: Samples in a microbatch.
        instead_of: What fake tensors failed with; raised where the step takes too much.

    Raises:
        CaptureError: The step can't be captured with data either.
    """
    try:
        with Bounded():
            trace = capture_real(workload, build, precision, microbatch_size)
    except TooMuchError as e:
        raise instead_of from e
    except MemfitError:
        raise
    except Exception as e:
        cause = instead_of.__cause__
        raise (instead_of if (type(cause), str(cause)) == (type(e), str(e)) else _not_running(e)) from e
    why = str(instead_of.__cause__ or instead_of).splitlines()[0]
    return replace(trace, notes=[*trace.notes, f"the step was captured while it ran with data, not without ({why})"])


def read_with_data(workload: Workload, build: BuildStep, microbatch_size: int | None = None) -> Readings | None:
    """Return what two steps in a row read that run with data on a copy; None where they take too much.

    Args:
        workload: The user's workload; nothing of it is changed.
        build: Makes the step from a copy of it.
        microbatch_size: Samples in a microbatch, of which as many run as a capture may; None for the whole batch.

    Raises:
        CaptureError: The user's code raises.
    """
    if why_not_here(workload) is not None:
        return None
    with nothing_changes(workload):
        copied = real_part(workload, microbatch_size)
        logs, starts = [], []
        try:
            with Bounded(), composed_as_without_a_mode(), build(copied) as step:
                for _ in range(2):
                    starts.append(GeneratorStates.now())
                    logs.append(_written(step, copied.batch))
        except TooMuchError:
            return None
        except MemfitError:
            raise
        except Exception as e:
            line = users_place(e)
            raise CaptureError(
                f"the step does not run with data{line} ({type(e).__name__}: {e}): mend that first"
            ) from e
    return Readings((logs[0], logs[1]), (starts[0], starts[1]))


def _not_running(error: Exception) -> CaptureError:
    said = f"{users_place(error)} ({type(error).__name__}: {error})"
    return CaptureError(f"the step does not run with data{said}: mend that first")


def _written(step: StepProgram, batch: Any) -> Log:
    writing = Writing()
    step.on_phase = writing.enter_phase
    with torch.autograd.set_multithreading_enabled(False), writing, writing.arrays():
        step(batch)
    return writing.log
