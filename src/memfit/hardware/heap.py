"""The heap of the C library: whether it keeps the memory of freed tensors, and how much of it is in use.

PyTorch's CPU allocator calls malloc. glibc serves requests below a threshold from its heap, raises that threshold by
itself up to 32 MiB, and keeps most of the freed memory there. A container counts it as resident memory of the process.
Blocks above the threshold are returned to the system at once, and so is the free end of the heap where it is larger
than twice the threshold, which it is after most steps: mallopt(3). All that costs a page fault for each page when it is
allocated again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memfit.foundations import format_bytes

if TYPE_CHECKING:
    import torch

_is_kept = False
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST_BYTES = 2**25 - 2**18  # of a block of the heap: glibc raises its threshold to 32 MiB at most
_BESIDE_BYTES = 2**17  # for each block: its alignment, and small blocks that come to lie in between
_VOID = ctypes.c_void_p
_NEVER = -1  # no free end of the heap is large enough to be returned
_MOST_KEPT = 4.0  # ratio of the heap to tensors: chosen, well above the 2.5 that `benchmarks.resident` measured


def settle(peak_bytes: int, room_bytes: int) -> str | None:
    """Make the C library keep freed memory for the next step, or return it at once where it could outgrow the room.

    It changes the whole process, but returns no memory that the heap already has: call it where memfit owns the
    process, before any large allocation. A message for the user is returned where memory is: not where it is kept,
    where the C library is not glibc, or where the user has set options of malloc.
    """
    if keep(peak_bytes, room_bytes) or _has_room(peak_bytes, room_bytes):
        return None
    if is_set_by_user() or not return_freed_memory():
        return None
    return (
        f"The C library returns freed memory to the system at once, because the plan needs {format_bytes(peak_bytes)}"
        f" of {format_bytes(room_bytes)}. Steps take longer, 60 % in a measured one. To change it, set"
        " MALLOC_MMAP_THRESHOLD_ in the environment."
    )


def keep(peak_bytes: int, room_bytes: int) -> bool:
    """Make the C library keep freed memory for the next step, where there is ample room; tell whether it does now."""
    return _has_room(peak_bytes, room_bytes) and not is_set_by_user() and keep_freed_memory()


def _has_room(peak_bytes: int, room_bytes: int) -> bool:
    return peak_bytes * _MOST_KEPT <= room_bytes


def is_set_by_user() -> bool:
    """Tell whether the environment sets options of malloc, or replaces it."""
    names = ("LD_PRELOAD", "GLIBC_TUNABLES")
    return any(name in os.environ for name in names) or any(name.startswith("MALLOC_") for name in os.environ)


def return_freed_memory() -> bool:
    """Make the C library map each block of 1 MiB or more by itself; tell whether that succeeded."""
    return _set_options({_M_MMAP_THRESHOLD: 2**20})


def keep_freed_memory() -> bool:
    """Make the C library map no block by itself, and never return the heap's end; tell whether that succeeded."""
    global _is_kept
    _is_kept = _set_options({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER})
    return _is_kept


def is_kept() -> bool:
    """Tell whether `keep_freed_memory` was called in this process, with success."""
    return _is_kept


@contextlib.contextmanager
def touched(blocks: Sequence[int]) -> Iterator[None]:
    """Hold free memory for blocks of some bytes in the heap that was touched before, as there is amid a step.

    A call that runs alone gets memory from the heap's end, which glibc returns when the call's output is freed: each
    run then costs page faults that a step has once. Blocks above the threshold are left out, as each of them is mapped
    anew in a step too. Elsewhere than with glibc nothing happens.
    """
    nbytes = sum(block + _BESIDE_BYTES for block in blocks if block <= _MOST_BYTES)
    if not nbytes or is_kept() or is_set_by_user() or platform.libc_ver()[0] != "glibc":
        yield
        return
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, malloc.argtypes, free.restype, free.argtypes = _VOID, [ctypes.c_size_t], None, [_VOID]
    size = min(nbytes, _MOST_BYTES)
    free(malloc(size + _BESIDE_BYTES))  # the threshold is above the largest block that was freed
    parts = [malloc(size) for _ in range(-(-nbytes // size))]
    above = malloc(size)  # is not touched, and keeps the others from being the heap's end
    for part in parts:
        if part is not None:
            ctypes.memset(part, 0, size)
        free(part)
    try:
        yield
    finally:
        free(above)


class _Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`: `uordblks` are bytes in use of the heap, `hblkhd` of blocks mapped alone."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def live_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on a device, by a counter that costs little; None where nothing counts them.

    On the CPU they are all that the process has of the C library: tensors, and what else is in use. That takes a
    fraction of a millisecond, and more in a heap of many free blocks.
    """
    if device.type != "cpu":
        from memfit.hardware import accelerators

        return accelerators.allocated_bytes(device)
    count = _counter()
    if count is None:
        return None
    info = count()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def _counter() -> Callable[[], _Mallinfo] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another C library, or glibc before 2.33
        return None
    found.restype = _Mallinfo
    return found


def _set_options(values: Mapping[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in values.items())
