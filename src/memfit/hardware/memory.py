"""Memory as PyTorch tells of it: allocations on the CPU, and errors which mean that it ran out.

Allocations are the events that PyTorch's allocator reports to the profiler. Of errors only some are typed. PyTorch's
allocators raise `torch.OutOfMemoryError` on accelerators and a `RuntimeError` on the CPU; CUDA itself, its libraries,
oneDNN and the operating system each have a text of their own. `CUDNN_STATUS_NOT_SUPPORTED` does not count, in contrast
to some tools: it is also raised for layouts and sizes without a kernel, which a smaller plan would not cure.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import gc
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from memfit.errors import MemoryLimitError
from memfit.foundations import chain
from memfit.hardware.host import cgroup_oom_kills

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


Kind = Literal["allocator", "driver", "library", "host", "control group", "limit", "another rank"]

_TEXTS: dict[Kind, str] = {
    "allocator": r"""DefaultCPUAllocator:\ (can't\ allocate|not\ enough)\ memory
        | \b(CUDA|HIP|XPU|MTIA|NPU|MPS\ backend)\ out\ of\ memory\b""",
    "library": r"""\bCU(BLAS|DNN|SOLVER|SPARSE|FFT|RAND)\w*_ALLOC(ATION)?_FAILED\b
        | \bCU(DNN|SPARSE)_STATUS_\w*(DEVICE_ALLOCATION_FAILED|INSUFFICIENT_RESOURCES)\b
        | \b(HIPBLAS|ROCBLAS|MIOPEN)_?\w*(ALLOC_FAILED|memory_error|StatusAllocFailed)\b""",
    "driver": r"""\b(CUDA|HIP)(\ driver|\ runtime)?\ error:?\ *(\(?2\)?:?\ *)?out\ of\ memory\b
        | \b(CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b
        | \bCuda\ failure\ (2\ )?'?out\ of\ memory
        | \bTriton\ Error\ \[\w+\]:\ out\ of\ memory\b""",
    "host": r"\bstd::bad_alloc\b | \bCannot\ allocate\ memory\b | \bunable\ to\ allocate\ shared\ memory\b",
}
_ONEDNN = re.compile(r"\bcould not (create|execute) a (primitive|memory)")
_KILLED = re.compile(r"is killed by signal: Killed|exited? (unexpectedly )?with (exit ?code|status) -?(9|137)\b")
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class OutOfMemory:
    """A record of an out-of-memory error, without references to frames or tensors.

    Attributes:
        kind: The origin: PyTorch's allocator, the driver, a library, the operating system, the control group that
            killed a process, `limit_bytes`, or another rank of the training.
        requested_bytes: The requested bytes, where the error states them.
        text: The error, as "type: first line".
    """

    kind: Kind
    requested_bytes: int | None
    text: str


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return the record of an out-of-memory error; None for other errors.

    An error raised from such an error counts too.
    """
    for link in chain(error):
        kind = _kind(link)
        if kind is not None:
            line = (str(link).strip() or "no more memory").splitlines()[0]
            match = _REQUESTED.search(str(link))
            requested = int(float(match[1]) * _UNITS[match[2]]) if match else None
            requested = link.requested_bytes if isinstance(link, MemoryLimitError) else requested
            return OutOfMemory(kind, requested, f"{type(link).__name__}: {line}")
    return None


def _kind(error: BaseException) -> Kind | None:
    if isinstance(error, MemoryLimitError):
        return "limit"
    if isinstance(error, torch.OutOfMemoryError):
        return "allocator"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    for kind, pattern in _TEXTS.items():
        if re.search(pattern, text, re.VERBOSE):
            return kind
    if _ONEDNN.search(text) and _is_address_space_limited():
        return "library"  # oneDNN also raises it for unsupported cases: only under a limit is memory the likely cause
    return "control group" if _KILLED.search(text) and cgroup_oom_kills() else None


def allocations_can_fail() -> bool:
    """Tell whether the operating system can refuse memory: by default Linux overcommits, and kills processes later."""
    if _is_address_space_limited():
        return True
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return True


def _is_address_space_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)
