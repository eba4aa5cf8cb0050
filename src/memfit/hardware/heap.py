"""The heap of the C library, which keeps memory of freed tensors.

PyTorch's CPU allocator calls malloc. glibc serves requests below a threshold from its heap, raises that threshold by
itself up to 32 MiB, and keeps most of the freed memory there. A container counts it as resident memory of the process.
Blocks above the threshold are returned to the system at once, and cost a page fault for each page when they are
allocated again: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import platform

from memfit.units import format_bytes

THRESHOLD_BYTES = 2**20
VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""The environment variable that sets the threshold before a process starts."""
_M_MMAP_THRESHOLD = -3
_MOST_KEPT = 4.0  # ratio of the heap to tensors: chosen, well above the 2.4 that `benchmarks.resident` measured


def spare(peak_bytes: int, room_bytes: int) -> str | None:
    """Make the C library return freed memory at once, where its heap could outgrow the available memory.

    It changes the whole process, but not memory that the heap already has: call it where memfit owns the process,
    before any large allocation.

    Returns:
        A message for the user; None where there is enough memory, where the C library is not glibc, or where the user
        has set its threshold.
    """
    if peak_bytes * _MOST_KEPT <= room_bytes or is_set_by_user() or not return_freed_memory():
        return None
    return (
        f"Freed memory goes back to the system at once: the plan's {format_bytes(peak_bytes)} leave too little of"
        f" {format_bytes(room_bytes)} for what the C library would keep. Steps take longer, ×1.4 in a measured one;"
        f" {VARIABLE} in the environment sets it otherwise."
    )


def is_set_by_user() -> bool:
    """Tell whether the environment sets options of malloc, or replaces it."""
    names = ("LD_PRELOAD", "GLIBC_TUNABLES")
    return any(name in os.environ for name in names) or any(name.startswith("MALLOC_") for name in os.environ)


def return_freed_memory() -> bool:
    """Make the C library map each block of 1 MiB or more by itself; tell whether that succeeded."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1
