"""A run's log: a line for each step in `metrics.jsonl`, its record, and TensorBoard's scalars."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from memfit import hardware, ir
from memfit.errors import OutputError, UsageError, brought_by
from memfit.foundations import __version__
from memfit.hardware import host_name
from memfit.ir import Evaluation, Event, RunRecord
from memfit.workload import Workload, fingerprint

LogFunction = Callable[[dict[str, Any]], object]
"""Takes a record of a step, an evaluation or an event, as `log=` does: a dict of its own, which it may change."""


@dataclass(frozen=True)
class StepRecord:
    """One step, as in a line of `metrics.jsonl`, where values that are not finite are null.

    Those not named here are of its `StepResult`.

    Attributes:
        step: Number of the step's update, from 1. A skipped update is tried again on the next batch, under the same
            number.
        epoch: The epoch, from 0.
        data_seconds: Time that the step waited for its batch, which `seconds` leaves out.
        samples_per_second: Samples of the global batch per second.
        peak_bytes: Measured peak allocated; None where it was not measured.
        learning_rate: Learning rate of the first parameter group in this step.
        allocation_retries: How often the GPU's allocator released its cache and retried an allocation, since the run
            began or was resumed; None on the CPU.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    data_seconds: float
    seconds: float
    samples_per_second: float
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    learning_rate: float
    skips: int = 0
    allocation_retries: int | None = None


class RunLog:
    """A writer of the log; use it as a context manager.

    Args:
        tensorboard: Folder for TensorBoard's files, or None to write none.
        step_count: Number of steps done before; TensorBoard hides earlier records of later steps.
    """

    def __init__(self, metrics: Path, tensorboard: Path | None, step_count: int) -> None:
        self._path = metrics
        self._writer = (
            None if tensorboard is None else require_tensorboard()(str(tensorboard), purge_step=step_count + 1)
        )
        with self._as_output_error():
            self._file = metrics.open("a", encoding="utf-8")

    @contextlib.contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise OutputError(f"can't write {self._path}: {e.strerror or e}") from e

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with self._as_output_error() if error is None else contextlib.suppress(OSError):
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append the line of a step, an evaluation or an event."""
        with self._as_output_error():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._writer is not None:
            scalars: dict[str, float | None] = {}
            if "evaluation" in line:
                scalars = {f"evaluation/{name}": value for name, value in line["evaluation"].items()}
            elif "event" not in line:
                others = ("step", "skipped", "peak_bytes", "predicted_peak_bytes", "allocation_retries")
                scalars = {f"train/{name}": value for name, value in line.items() if name not in others}
                for name in ("peak_bytes", "predicted_peak_bytes"):
                    gib = None if line[name] is None else line[name] / 2**30
                    scalars[f"memory/{name.removesuffix('_bytes')}(GiB)"] = gib
                scalars["memory/num_alloc_retries"] = line["allocation_retries"]
            for tag, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(tag, value, line["step"])

    def sync(self) -> None:
        """Flush the written lines to disk, so that they survive a crash of the machine."""
        with self._as_output_error():
            os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without an incomplete last one.

    Raises:
        OutputError: The file is not such a log.
    """
    if not metrics.exists():
        return []
    lines = []
    raw = metrics.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(raw):
        try:
            line = json.loads(text)
            lines.append({"step": int(line["step"]), **line})
        except (ValueError, TypeError, KeyError) as e:
            if number == len(raw) - 1 and not text.endswith(b"\n"):
                break
            raise OutputError(f"line {number + 1} of {metrics} was not written by memfit: move the file") from e
    return lines


def require_tensorboard() -> Any:
    """Return TensorBoard's writer; raise MissingExtraError unless it is installed."""
    with brought_by("tensorboard", "tensorboard logging"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


def finite(value: Any) -> Any:
    """Return a value as a line has it: null for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class History:
    """Collects the lines of a log into a record; `started` is in ISO 8601, None for now."""

    def __init__(self, workload: Workload, started: str | None = None) -> None:
        self.started = started or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.evaluations: list[Evaluation] = []
        self.events: list[Event] = []
        repeated = " (its one batch, repeated)" if workload.batches is None else ""
        self._workload = f"{workload.name}{repeated}"
        self._fingerprint = fingerprint(workload)
        self._losses: tuple[float | None, float | None] = (None, None)
        self._steps: list[tuple[int | None, float, float]] = []  # measured peaks, seconds, and those of loading before
        self._allocation_retries: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the log."""
        if "evaluation" in line:
            finite = {name: value for name, value in line["evaluation"].items() if value is not None}
            self.evaluations.append(Evaluation(line["step"], finite))
            return
        if "event" in line:
            self.events.append(Event(line["step"], line["event"]["kind"], line["event"]["text"]))
            return
        first, _ = self._losses
        self._losses = (line["loss"] if first is None else first, line["loss"])
        self._steps.append((line["peak_bytes"], line["seconds"], line["data_seconds"]))
        self._allocation_retries = line.get("allocation_retries")

    def record(
        self, status: Literal["running", "finished", "failed"], step_count: int, error: str | None = None
    ) -> RunRecord:
        """Return the record. Its seconds leave out measured steps, which are slower, unless all were measured."""
        unmeasured = [seconds for peak_bytes, seconds, _ in self._steps if peak_bytes is None]
        measured = [seconds for peak_bytes, seconds, _ in self._steps if peak_bytes is not None]
        seconds = unmeasured[1:] or measured or unmeasured
        waited_seconds = sum((waited for _, _, waited in self._steps[1:]), 0.0)
        whole_seconds = waited_seconds + sum((seconds for _, seconds, _ in self._steps[1:]), 0.0)
        program, *words = sys.argv or [""]
        is_ours = Path(program).stem == "memfit" or Path(program).parts[-2:] == ("memfit", "__main__.py")
        return RunRecord(
            workload=self._workload,
            fingerprint=self._fingerprint,
            memfit_version=__version__,
            torch_version=str(torch.__version__),
            machine=host_name(),
            started=self.started,
            status=status,
            steps=step_count,
            measured_peak_bytes=max((peak for peak, _, _ in self._steps if peak is not None), default=None),
            step_seconds=statistics.median(seconds) if seconds else None,
            first_loss=self._losses[0],
            last_loss=self._losses[1],
            data_share=waited_seconds / whole_seconds if whole_seconds else None,
            allocation_retries=self._allocation_retries,
            command=words if is_ours and words[:1] == ["train"] else [],  # empty where another program trains
            evaluations=list(self.evaluations),
            events=list(self.events),
            error=error,
        )


def resumed_history(
    workload: Workload, run: Path, metrics: Path, step_count: int, *, is_writing: bool = True
) -> History:
    """Return the history of a run up to a step, and truncate its log there where `is_writing`."""
    started = None
    with contextlib.suppress(UsageError):
        started = ir.codec.read(run, RunRecord, error=UsageError).started
    history = History(workload, started)
    lines = [line for line in read_lines(metrics) if line["step"] <= step_count]
    if is_writing:
        ir.codec.write_atomic(metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
    for line in lines:
        history.add(line)
    return history


class LoopLog:
    """Gives `log=` a record of each step, with names as in a line of `metrics.jsonl`.

    `step` is its number, from 1. `seconds` is the wall time from the first call of the model to the last update; the
    device is not waited for. `peak_bytes` is the peak allocated where the step raised the device's peak so far, and
    None elsewhere and on the CPU. `predicted_peak_bytes` is the plan's, and None before there is one.

    Args:
        log: Takes the records; what it raises is not handled. None for no records.
    """

    def __init__(self, log: LogFunction | None) -> None:
        self._log, self._count = log, 0
        self._started: float | None = None

    def begin(self, model: nn.Module) -> None:
        """Note that a step of a model begins, unless one is under way."""
        if self._log is not None and self._started is None:
            self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
            self._before = hardware.accelerators.peaks(self._device)
            self._started = self._ended = time.perf_counter()

    def update(self) -> None:
        """Note that parameters were updated, which may be the end of the step."""
        self._ended = time.perf_counter()

    def end(self, predicted_peak_bytes: int | None, step: int | None = None) -> None:
        """Give `log=` the record of the step under way, if there is one.

        Args:
            predicted_peak_bytes: What the plan predicts; None where the step ran under none.
            step: Its number; None for one more than the last.
        """
        if self._log is None or self._started is None:
            return
        seconds, self._started = self._ended - self._started, None
        self._count = self._count + 1 if step is None else step
        peaks, before = hardware.accelerators.peaks(self._device), self._before
        is_raised = peaks is not None and before is not None and peaks.allocated_bytes > before.allocated_bytes
        self._log(
            {
                "step": self._count,
                "seconds": seconds,
                "peak_bytes": peaks.allocated_bytes if peaks is not None and is_raised else None,
                "predicted_peak_bytes": predicted_peak_bytes,
            }
        )
