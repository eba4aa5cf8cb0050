"""Memory snapshots of steps that ran out of memory: files for pytorch.org/memory_viz."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfit._torch.cuda import take_snapshot
from memfit.errors import OutputError
from memfit.ir.codec import write_atomic
from memfit.ir.plan import Plan

MOST = 8
"""Most snapshots in a folder: a step that runs out every day would fill the disk with them."""
_PICKLE_PROTOCOL = 4  # the newest that the viewer's own reader knows
_NAME = re.compile(r"out-of-memory-[0-9]+(\.[0-9]+)?\.pickle")

Predicted = Callable[[Plan, Any, Path], object]
"""Writes the snapshot of a step that is predicted to run a plan on a batch."""


class Snapshots:
    """Writes `out-of-memory-<step>.pickle` into a folder when a step runs out of memory.

    On a GPU it is the snapshot of PyTorch's allocator when the error is raised, with its history where
    `torch.cuda.memory._record_memory_history()` was called before. The CPU's allocator has none; there it holds the
    step's predicted allocations, by operator, module and category.

    Args:
        folder: The folder, created if missing.
    """

    def __init__(self, folder: Path, device: torch.device, predicted: Predicted) -> None:
        self.folder = folder
        self._device, self._predicted = device, predicted
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
            path = self._new_path(step_number)
            if self._device.type != "cuda":
                self._predicted(plan, batch, path)
                return f"predicted memory snapshot: {path.name}"
            if isinstance(record, Exception):
                raise record
            write_atomic(path, pickle.dumps(record, protocol=_PICKLE_PROTOCOL))
            return f"memory snapshot: {path.name}"
        except Exception as e:  # must not hide the out-of-memory error
            return f"no memory snapshot ({repr(e)[:200]})"

    def _new_path(self, step_number: int) -> Path:
        if len(all_snapshots(self.folder)) >= MOST:
            raise OutputError(f"{self.folder} already has {MOST} snapshots")
        names = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
        paths = (self.folder / f"out-of-memory-{step_number}{n}.pickle" for n in names)
        return next(path for path in paths if not path.exists())


def all_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder."""
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.exists() else []
