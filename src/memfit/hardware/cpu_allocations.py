"""Measured allocations on the CPU: the events that PyTorch's allocator reports to the profiler."""

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
    """The allocations of an interval: the most bytes at a time beyond those at its start, and the bytes not freed."""

    peak_bytes: int = 0
    net_bytes: int = 0


@contextlib.contextmanager
def allocated(but_in: str = "") -> Iterator[PeakMeter]:
    """Measure the peak of PyTorch's CPU allocations, buffers inside operators included.

    Not counted are frees of earlier allocations, and peaks in `torch.profiler.record_function` blocks named `but_in`.
    """
    meter = PeakMeter()
    gc.collect()
    with _profile() as profile:
        yield meter
    totals = list(_totals(profile, but_in))
    meter.peak_bytes = max([0, *(total for _, total, is_counted in totals if is_counted)])
    meter.net_bytes = totals[-1][1] if totals else 0


@contextlib.contextmanager
def allocated_between(mark: str, but_in: str = "") -> Iterator[list[int]]:
    """Measure the peaks before, between and after `torch.profiler.record_function` blocks named `mark`.

    Each is that of all that is allocated by then, as of `allocated`; the list is filled on leaving.
    """
    peaks: list[int] = []
    gc.collect()
    with _profile() as profile:
        yield peaks
    marks = [start for name, start, _ in _blocks(profile, mark) if name == mark]
    peaks += [0] * (len(marks) + 1)
    before = 0
    for at, total, is_counted in _totals(profile, but_in):
        if is_counted:
            place = bisect.bisect_right(marks, at)
            # What is held since before an interval is held in it.
            peaks[place] = max(peaks[place], before, total)
        before = total


@contextlib.contextmanager
def allocated_by_name(prefix: str) -> Iterator[dict[str, PeakMeter]]:
    """Measure each `torch.profiler.record_function` block whose name has a prefix; the result is filled on leaving."""
    meters: dict[str, PeakMeter] = {}
    with _profile() as profile:
        yield meters
    changes = _changes(profile)
    moments = [at for at, _ in changes]
    for name, start, end in _blocks(profile, prefix):
        within = changes[bisect.bisect_left(moments, start) : bisect.bisect_right(moments, end)]
        running = list(itertools.accumulate(nbytes for _, nbytes in within))
        meters[name] = PeakMeter(max([0, *running]), running[-1] if running else 0)


def _profile() -> Any:
    """Return PyTorch's profiler; only its raw events are read, since its summary took most of the time."""
    return torch.autograd.profiler.profile(profile_memory=True)


def _blocks(profile: Any, prefix: str) -> list[tuple[str, int, int]]:
    """Return the names, starts and ends, in nanoseconds, of the blocks whose name has a prefix, in order of time."""
    events = profile.kineto_results.events()
    found = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith(prefix)]
    return sorted(found, key=lambda block: block[1:])


def _totals(profile: Any, but_in: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (nanoseconds, bytes allocated by then, whether outside of the blocks of a name) for each change."""
    blocks = [(first, last) for name, first, last in _blocks(profile, but_in) if name == but_in] if but_in else []
    total = 0
    for at, nbytes in _changes(profile):
        total += nbytes
        yield at, total, not any(first <= at <= last for first, last in blocks)


def _changes(profile: Any) -> list[tuple[int, int]]:
    """Return (nanoseconds, bytes allocated or freed) in order of time.

    Left out are frees of what was allocated before: PyTorch reports those of what an earlier profile saw. Frees by
    other threads are not reported: they are noticed when their addresses are allocated again.
    """
    nodes, allocations = list(profile.kineto_results.experimental_event_tree()), []
    for node in nodes:  # which grows meanwhile
        nodes += node.children
        if hasattr(node.extra_fields, "alloc_size"):
            allocations.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    live: dict[int, int] = {}
    changes = []
    for at, nbytes, pointer in sorted(allocations, key=lambda allocation: allocation[0]):
        freed = live.pop(pointer, 0)
        if freed:
            changes.append((at, -freed))
        if nbytes > 0:
            live[pointer] = nbytes
            changes.append((at, nbytes))
    return changes
