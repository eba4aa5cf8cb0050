"""The log of a run: a line for each step in `metrics.jsonl`, and TensorBoard scalars on request."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.errors import OutputError, brought_by
from memfit.ir import codec

LogFunction = Callable[[dict[str, Any]], object]
"""Takes a record of a step, an evaluation or an event, as `log=` does: a dict of its own, which it may change."""


@dataclass(frozen=True)
class StepRecord:
    """One step, as in a line of `metrics.jsonl`, where values that are not finite are null.

    Attributes:
        step: Number of the step's update, from 1. A skipped update is tried again on the next batch, under the same
            number.
        epoch: The epoch, from 0.
        loss: Mean loss over the global batch.
        grad_norm: Global norm of the gradients before clipping; NaN when the update was skipped, or where gradients are
            sparse and nothing clips.
        skipped: Whether the update was skipped since gradients overflowed (fp16 only).
        loss_scale: The loss scale of the step; 1.0 without scaling.
        data_seconds: Time that the step waited for its batch.
        seconds: Wall time of the step, without that.
        samples_per_second: Samples of the global batch per second.
        peak_bytes: Measured peak allocated; None where it was not measured.
        predicted_peak_bytes: The plan's predicted peak.
        learning_rate: Learning rate of the first parameter group in this step.
        skips: Number of updates skipped so far.
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


class Log:
    """A writer of the log; use it as a context manager.

    Args:
        tensorboard: Folder for TensorBoard's files, or None to write none.
        step_count: Number of steps done before; TensorBoard hides earlier records of later steps.

    Raises:
        OutputError: The file can't be written.
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, metrics: Path, tensorboard: Path | None, step_count: int) -> None:
        self._path = metrics
        self._writer = None if tensorboard is None else _summary_writer()(str(tensorboard), purge_step=step_count + 1)
        try:
            self._file = metrics.open("a", encoding="utf-8")
        except OSError as e:
            raise OutputError(f"can't write {metrics}: {e.strerror or e}") from e

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._file.close()
        except OSError as e:
            if error is None:
                raise OutputError(f"can't write {self._path}: {e.strerror or e}") from e
        if self._writer is not None:
            self._writer.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append the line of a step, an evaluation or an event."""
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as e:
            raise OutputError(f"can't write {self._path}: {e.strerror or e}") from e
        if self._writer is not None:
            for tag, value in _scalars(line).items():
                self._writer.add_scalar(tag, value, line["step"])

    def sync(self) -> None:
        """Flush the written lines to disk, so that they survive a crash of the machine.

        Raises:
            OutputError: The file could not be written.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            raise OutputError(f"can't write {self._path}: {e.strerror or e}") from e
        if self._writer is not None:
            self._writer.flush()


class NoLog(Log):
    """The log of a rank that writes none: the first one's is that of the run."""

    def __init__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        pass

    def write(self, line: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass


def step_line(progress: StepRecord) -> dict[str, Any]:
    """Return the line of a step."""
    return {key: _finite(value) for key, value in asdict(progress).items()}


def evaluation_line(step: int, epoch: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of an evaluation."""
    return {"step": step, "epoch": epoch, "evaluation": {name: _finite(value) for name, value in values.items()}}


def event_line(step: int, epoch: int, kind: str, text: str) -> dict[str, Any]:
    """Return the line of an unusual event after a step."""
    return {"step": step, "epoch": epoch, "event": {"kind": kind, "text": text}}


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


def lines_until(metrics: Path, step_count: int) -> list[dict[str, Any]]:
    """Return the lines of a log up to a step.

    Raises:
        OutputError: The file is not such a log.
    """
    return [line for line in read_lines(metrics) if line["step"] <= step_count]


def cut_lines(metrics: Path, step_count: int) -> list[dict[str, Any]]:
    """Remove the lines after a step, atomically, and return the remaining ones.

    Raises:
        OutputError: The file is not such a log, or can't be written.
    """
    lines = lines_until(metrics, step_count)
    codec.write_atomic(metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines


def require_tensorboard() -> None:
    """Raise MissingExtraError unless TensorBoard is installed."""
    _summary_writer()


def _summary_writer() -> Any:
    with brought_by("tensorboard", "tensorboard logging"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the TensorBoard scalars of a line."""
    if "evaluation" in line:
        return {f"evaluation/{name}": value for name, value in line["evaluation"].items() if value is not None}
    if "event" in line:
        return {}
    names = (
        "loss",
        "grad_norm",
        "learning_rate",
        "loss_scale",
        "skips",
        "samples_per_second",
        "seconds",
        "data_seconds",
        "epoch",
    )
    scalars = {f"train/{name}": line[name] for name in names}
    for name in ("peak_bytes", "predicted_peak_bytes"):
        gib = None if line[name] is None else line[name] / 2**30
        scalars[f"memory/{name.removesuffix('_bytes')}(GiB)"] = gib
    scalars["memory/num_alloc_retries"] = line["allocation_retries"]
    return {tag: value for tag, value in scalars.items() if value is not None}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
