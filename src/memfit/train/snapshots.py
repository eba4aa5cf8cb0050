"""Memory snapshots of steps that ran out of memory: files for pytorch.org/memory_viz."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfit.errors import OutputError
from memfit.ir.codec import write_atomic
from memfit.ir.plan import Plan

MOST = 8
"""Snapshots that a folder is given: a step that runs out every day would fill the disk with them."""
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own reader knows
_NAME = re.compile(r"out-of-memory-[0-9]+(\.[0-9]+)?\.pickle")

Predicted = Callable[[Plan, Any, Path], object]
"""Writes the snapshot of a step that is predicted to run a plan on a batch."""


class Snapshots:
    """Writes `out-of-memory-<step>.pickle` into a folder when a step ran out of memory.

    On a GPU it is what PyTorch's allocator holds when the error is raised, with its history where
    `torch.cuda.memory._record_memory_history()` was called before. The CPU's allocator has none; there it is what the
    step was predicted to allocate and free, by operator, module and category.

    Args:
        folder: Made if it is not there.
        device: That the step runs on.
        predicted: Writes the snapshot of a predicted step.
    """

    def __init__(self, folder: Path, device: torch.device, predicted: Predicted) -> None:
        self.folder = folder
        self._device, self._predicted = device, predicted
        self._record: Any = None

    def take(self) -> None:
        """Take the allocator's snapshot, while the tensors of the step that failed are still there."""
        self._record = None
        if self._device.type == "cuda":
            try:
                self._record = torch.cuda.memory._snapshot(self._device)
            except Exception as e:  # what counts is the error at hand
                self._record = e

    def write(self, step_number: int, plan: Plan, batch: Any) -> str:
        """Write the snapshot, and return what is to be said of it: its name, or why there is none. Raises nothing.

        Args:
            step_number: The update that the step was for.
            plan: The plan that ran out.
            batch: Its batch.
        """
        record, self._record = self._record, None
        try:
            path = self._new_path(step_number)
            if self._device.type != "cuda":
                self._predicted(plan, batch, path)
                return f"memory snapshot, as predicted: {path.name}"
            if isinstance(record, Exception):
                raise record
            write_atomic(path, pickle.dumps(record, protocol=_PICKLE_PROTOCOL))
            return f"memory snapshot: {path.name}"
        except Exception as e:  # a snapshot that can't be had must not hide what it is of
            return f"no memory snapshot ({repr(e)[:200]})"

    def _new_path(self, step_number: int) -> Path:
        if len(all_snapshots(self.folder)) >= MOST:
            raise OutputError(f"{self.folder} holds {MOST} already")
        names = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
        paths = (self.folder / f"out-of-memory-{step_number}{n}.pickle" for n in names)
        return next(path for path in paths if not path.exists())


def all_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots that a folder holds."""
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.exists() else []
