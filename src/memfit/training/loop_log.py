"""Records of steps that memfit does not run itself: those of the user's own loop, or of another library's trainer."""

from __future__ import annotations

import time

import torch
from torch import nn

from memfit.hardware import accelerators
from memfit.training.runs.log import LogFunction


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
            self._before = accelerators.peaks(self._device)
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
        peaks, before = accelerators.peaks(self._device), self._before
        is_raised = peaks is not None and before is not None and peaks.allocated_bytes > before.allocated_bytes
        self._log(
            {
                "step": self._count,
                "seconds": seconds,
                "peak_bytes": peaks.allocated_bytes if peaks is not None and is_raised else None,
                "predicted_peak_bytes": predicted_peak_bytes,
            }
        )
