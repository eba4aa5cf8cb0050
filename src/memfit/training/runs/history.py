"""The history of a run, from the lines of its log."""

from __future__ import annotations

import contextlib
import datetime
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from memfit.errors import UsageError
from memfit.hardware.host import host_name
from memfit.ir import codec
from memfit.ir.run_record import Evaluation, Event, RunRecord
from memfit.training.runs.log import cut_lines, lines_until
from memfit.version import __version__
from memfit.workload import Workload, fingerprint


class History:
    """Collects the lines of a log into a record.

    Args:
        started: Start of the run, in ISO 8601; None for now.
    """

    def __init__(self, workload: Workload, started: str | None = None) -> None:
        self.started = started or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.evaluations: list[Evaluation] = []
        self.events: list[Event] = []
        repeated = " (its one batch, repeated)" if workload.batches is None else ""
        self._workload = f"{workload.name}{repeated}"
        self._fingerprint = fingerprint(workload)
        self._losses: tuple[float | None, float | None] = (None, None)
        self._peak_bytes: int | None = None
        self._seconds: list[float] = []
        self._measured_seconds: list[float] = []
        self._waited: list[tuple[float, float]] = []
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
        peak_bytes = line["peak_bytes"]
        if peak_bytes is not None:
            self._peak_bytes = max(peak_bytes, self._peak_bytes or 0)
        (self._seconds if peak_bytes is None else self._measured_seconds).append(line["seconds"])
        self._waited.append((line["data_seconds"], line["seconds"]))
        self._allocation_retries = line.get("allocation_retries")

    def record(
        self, status: Literal["running", "finished", "failed"], step_count: int, error: str | None = None
    ) -> RunRecord:
        """Return the record. Its seconds leave out measured steps, which are slower, unless all were measured."""
        seconds = self._seconds[1:] or self._measured_seconds or self._seconds
        return RunRecord(
            workload=self._workload,
            fingerprint=self._fingerprint,
            memfit_version=__version__,
            torch_version=str(torch.__version__),
            machine=host_name(),
            started=self.started,
            status=status,
            steps=step_count,
            measured_peak_bytes=self._peak_bytes,
            step_seconds=statistics.median(seconds) if seconds else None,
            first_loss=self._losses[0],
            last_loss=self._losses[1],
            data_share=_share(self._waited[1:]),
            allocation_retries=self._allocation_retries,
            command=_command(),
            evaluations=list(self.evaluations),
            events=list(self.events),
            error=error,
        )


def _command() -> list[str]:
    """Return the arguments of the running `memfit train`; empty where another program trains."""
    program, *words = sys.argv or [""]
    is_ours = Path(program).stem == "memfit" or Path(program).parts[-2:] == ("memfit", "__main__.py")
    return words if is_ours and words[:1] == ["train"] else []


def _share(waited: list[tuple[float, float]]) -> float | None:
    """Return the share of the time that steps waited for their batches."""
    data_seconds, step_seconds = (sum(column) for column in zip(*waited, strict=True)) if waited else (0.0, 0.0)
    whole = data_seconds + step_seconds
    return data_seconds / whole if whole else None


def resumed_history(
    workload: Workload, run: Path, metrics: Path, step_count: int, *, is_writing: bool = True
) -> History:
    """Return the history of a run up to a step, and truncate its log there where `is_writing`.

    Raises:
        OutputError: The log can't be read or written.
    """
    started = None
    with contextlib.suppress(UsageError):
        started = codec.read(run, RunRecord, error=UsageError).started
    history = History(workload, started)
    for line in cut_lines(metrics, step_count) if is_writing else lines_until(metrics, step_count):
        history.add(line)
    return history
