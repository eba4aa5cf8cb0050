"""The truth on the CPU: what PyTorch's allocator reported to the profiler."""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notices, on standard error


@dataclass
class PeakMeter:
    """What an interval allocated.

    Attributes:
        peak_bytes: The most bytes allocated at a time beyond those at the start.
        net_bytes: Bytes allocated and not freed.
    """

    peak_bytes: int = 0
    net_bytes: int = 0


@contextlib.contextmanager
def allocated() -> Iterator[PeakMeter]:
    """Measure the peak of the bytes that PyTorch's CPU allocator hands out, buffers inside operators included.

    Frees of memory that was allocated before are not seen.
    """
    meter = PeakMeter()
    gc.collect()
    with _profile() as profile:
        yield meter
    total = 0
    for _, nbytes in _changes(profile):
        total += nbytes
        meter.peak_bytes = max(meter.peak_bytes, total)
    meter.net_bytes = total


@contextlib.contextmanager
def allocated_by_name(prefix: str) -> Iterator[dict[str, PeakMeter]]:
    """Measure each `torch.profiler.record_function` block whose name starts with a prefix; filled on leaving."""
    meters: dict[str, PeakMeter] = {}
    with _profile() as profile:
        yield meters
    changes = _changes(profile)
    moments = [at for at, _ in changes]
    for event in profile.kineto_results.events():
        if not event.name().startswith(prefix):
            continue
        first = bisect.bisect_left(moments, event.start_ns())
        last = bisect.bisect_right(moments, event.start_ns() + event.duration_ns())
        running = list(itertools.accumulate(nbytes for _, nbytes in changes[first:last]))
        meters[event.name()] = PeakMeter(max([0, *running]), running[-1] if running else 0)


def _profile() -> Any:
    """Return PyTorch's profiler, of which only the raw events are read: summing them up took most of the time."""
    return torch.autograd.profiler.profile(profile_memory=True)


def _changes(profile: Any) -> list[tuple[int, int]]:
    """Return (nanoseconds, bytes allocated or freed) in the order they happened."""
    events = profile.kineto_results.events()
    found = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return sorted(found, key=lambda change: change[0])
