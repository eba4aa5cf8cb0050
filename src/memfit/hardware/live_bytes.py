"""The bytes in use at present, by a counter that costs little: of PyTorch's allocator, or of the C library's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from memfit.hardware import accelerators


class _Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`: `uordblks` are bytes in use of the heap, `hblkhd` of blocks mapped alone."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def live_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on a device; None where nothing counts them.

    On the CPU they are all that the process has of the C library: tensors, and what else is in use. That takes a
    fraction of a millisecond, and more in a heap of many free blocks.
    """
    if device.type != "cpu":
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
