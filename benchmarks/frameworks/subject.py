"""What both frameworks run: models by size, their data, and what a run says about itself."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE = 0.05


@dataclass(frozen=True)
class UNetSizes:
    """Of a U-Net in two or three dimensions, whose channels double with each level."""

    inputs: int = 3
    outputs: int = 2
    base: int = 8
    levels: int = 3
    dims: int = 2

    @property
    def widths(self) -> list[int]:
        """Channels of each level, the finest first."""
        return [self.base * 2**level for level in range(self.levels + 1)]


@dataclass(frozen=True)
class TransformerSizes:
    """Of a small Transformer."""

    blocks: int = 6
    width: int = 32
    heads: int = 2


@dataclass(frozen=True)
class Subject:
    """A model and its batch.

    Attributes:
        shape: Of the input.
        share: Of the plain step's own peak, for the planned step.
    """

    name: str
    sizes: UNetSizes | TransformerSizes
    shape: tuple[int, ...]
    share: float


SUBJECTS = {
    s.name: s
    for s in (
        Subject("U-Net 2-D", UNetSizes(base=16), (8, 3, 128, 128), 0.7),
        Subject("U-Net 3-D", UNetSizes(inputs=1, dims=3), (2, 1, 48, 48, 48), 0.8),
        Subject("Transformer", TransformerSizes(width=128, heads=4), (16, 128, 128), 0.5),
        Subject("U-Net 2-D, small", UNetSizes(), (8, 3, 64, 64), 0.8),
        Subject("U-Net 3-D, small", UNetSizes(inputs=1, dims=3), (2, 1, 32, 32, 32), 0.9),
        Subject("Transformer, small", TransformerSizes(width=64), (16, 64, 64), 0.5),
    )
}


def data(subject: Subject) -> dict[str, Any]:
    """Return a batch as arrays: voxel labels for a U-Net, targets for a Transformer."""
    random = np.random.RandomState(0)
    x = random.randn(*subject.shape).astype("float32")
    spatial = (subject.shape[0], *subject.shape[2:])
    is_unet = isinstance(subject.sizes, UNetSizes)
    return {"x": x, "y": (random.rand(*spatial) > 0.5).astype("int64") if is_unet else np.tanh(x)}


def report(
    steps: int,
    run: Callable[[], float],
    own_peak_bytes: Callable[[], int],
    levers: Any,
    budget_bytes: int,
    out: Path,
    base_bytes: int,
) -> None:
    """Run steps, and write the losses, the median time, and the peaks that the framework and the system saw."""
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(run())
        seconds.append(time.perf_counter() - started)
    peak = high_water_bytes()
    found = {
        "losses": losses,
        "step_seconds": statistics.median(seconds[min(2, steps - 1) :]),
        "own_peak_bytes": own_peak_bytes(),
        "process_peak_bytes": peak,
        "added_process_bytes": peak - base_bytes,
        "budget_bytes": budget_bytes,
        "levers": levers,
    }
    out.write_text(json.dumps(found))


def high_water_bytes() -> int:
    """Return the most memory that the process had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def resident_bytes() -> int:
    """Return what the process has resident, and start its high-water mark anew from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
