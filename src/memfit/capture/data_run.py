"""Steps run with data within limits of time and memory, to record the values that their code reads."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from msgspec.structs import replace

from memfit._torch.dispatch import EagerMode
from memfit.capture.composites import composites_without_mode
from memfit.capture.control_flow import Readings
from memfit.capture.draws import GeneratorStates
from memfit.capture.fake_workload import nothing_changes
from memfit.capture.hints import own_fault
from memfit.capture.partial_steps import real_part
from memfit.capture.step_capture import BuildStep, capture_real
from memfit.capture.value_reads import Log, ReadRecorder
from memfit.errors import CaptureError, MemfitError
from memfit.frames import users_place
from memfit.interrupts import safe_point
from memfit.ir.trace import Trace
from memfit.workload import StepProgram, Workload, has_data

MOST_SECONDS = 60.0
"""Time limit of a step with data."""
_LEAST_FREE = 0.1  # share of the machine's memory that a step with data leaves free
_COPIES = 4  # sizes of the parameters: the user's, the copy's, its gradients, and as much of optimizer states
_CHECK_EVERY = 64  # operators from one check of free memory to the next


class DataRunLimitError(MemfitError):
    """A step with data exceeds its limit of time or memory."""


class DataRunLimits(EagerMode):
    """A dispatch mode that ends code which takes too long from now on, or too much of the machine's memory."""

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self.until, self.operators = seconds, time.monotonic() + seconds, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        safe_point()
        self.operators += 1
        if time.monotonic() > self.until:
            raise DataRunLimitError(f"the step takes more than {self.seconds:g} s with data")
        if self.operators % _CHECK_EVERY == 0 and not _has_memory(0):
            raise DataRunLimitError("with data the step needs more memory than the machine has free")
        return func(*args, **(kwargs or {}))


def _has_memory(nbytes: int) -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available - nbytes > _LEAST_FREE * memory.total)


def why_no_data_run(workload: Workload) -> str | None:
    """Return the reason why a workload can't run with data in this process; None where it can."""
    if not has_data(workload):
        return "there is no data"
    nbytes = sum(t.numel() * t.itemsize for t in workload.model.parameters())
    return None if _has_memory(_COPIES * nbytes) else "the machine has too little memory left"


def capture_with_data(
    workload: Workload, build: BuildStep, precision: str, microbatch_size: int, *, instead_of: CaptureError
) -> Trace:
    """Return the trace of a step that runs with data on a copy, where it can't run under fake tensors.

    Args:
        instead_of: The error of the capture under fake tensors; raised where the step exceeds its limits.

    Raises:
        CaptureError: The step can't be captured with data either.
    """
    try:
        with DataRunLimits():
            trace = capture_real(workload, build, precision, microbatch_size)
    except DataRunLimitError as e:
        raise instead_of from e
    except MemfitError:
        raise
    except Exception as e:
        cause = instead_of.__cause__
        raise (instead_of if (type(cause), str(cause)) == (type(e), str(e)) else _not_running(e)) from e
    why = str(instead_of.__cause__ or instead_of).splitlines()[0]
    note = f"the step was captured while it ran with data, not under fake tensors ({why})"
    return replace(trace, notes=[*trace.notes, note])


def read_with_data(workload: Workload, build: BuildStep, microbatch_size: int | None = None) -> Readings | None:
    """Return the values that two steps in a row read with data on a copy; None where they exceed the limits.

    Args:
        microbatch_size: Samples in a microbatch, of which as many run as a capture may; None for the whole batch.

    Raises:
        CaptureError: The user's code raises.
    """
    if why_no_data_run(workload) is not None:
        return None
    with nothing_changes(workload):
        copied = real_part(workload, microbatch_size)
        logs, starts = [], []
        try:
            with DataRunLimits(), composites_without_mode(), build(copied) as step:
                for _ in range(2):
                    starts.append(GeneratorStates.now())
                    logs.append(_log_of(step, copied.batch))
        except DataRunLimitError:
            return None
        except MemfitError:
            raise
        except Exception as e:
            raise _not_running(e) from e
    return Readings((logs[0], logs[1]), (starts[0], starts[1]))


def _not_running(error: Exception) -> CaptureError:
    place = f"{users_place(error)} ({type(error).__name__}: {error})"
    if fault := own_fault(error):
        return CaptureError(f"memfit can't record the step while it runs with data{place}: {fault}")
    return CaptureError(f"the step fails with real data too{place}: fix Workload.model, .loss_fn or .batch first")


def _log_of(step: StepProgram, batch: Any) -> Log:
    recorder = ReadRecorder()
    step.on_phase = recorder.enter_phase
    with torch.autograd.set_multithreading_enabled(False), recorder, recorder.arrays():
        step(batch)
    return recorder.log
