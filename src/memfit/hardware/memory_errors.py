"""The classifier of errors which mean that memory ran out.

Only some are typed. PyTorch's allocators raise `torch.OutOfMemoryError` on accelerators and a `RuntimeError` on the
CPU; CUDA itself, its libraries, oneDNN and the operating system each have a text of their own.

`CUDNN_STATUS_NOT_SUPPORTED` does not count, in contrast to some tools: it is also raised for layouts and sizes without
a kernel, which a smaller plan would not cure.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from memfit.errors import MemoryLimitError
from memfit.hardware.host import cgroup_oom_kills

Kind = Literal["allocator", "driver", "library", "host", "control group", "limit", "another rank"]

_TEXTS: tuple[tuple[Kind, str], ...] = (
    ("allocator", r"DefaultCPUAllocator: (can't allocate|not enough) memory"),
    ("allocator", r"\b(CUDA|HIP|XPU|MTIA|NPU|MPS backend) out of memory\b"),
    ("library", r"\bCU(BLAS|DNN|SOLVER|SPARSE|FFT|RAND)\w*_ALLOC(ATION)?_FAILED\b"),
    ("library", r"\bCU(DNN|SPARSE)_STATUS_\w*(DEVICE_ALLOCATION_FAILED|INSUFFICIENT_RESOURCES)\b"),
    ("library", r"\b(HIPBLAS|ROCBLAS|MIOPEN)_?\w*(ALLOC_FAILED|memory_error|StatusAllocFailed)\b"),
    ("driver", r"\b(CUDA|HIP)( driver| runtime)? error:? *(\(?2\)?:? *)?out of memory\b"),
    ("driver", r"\b(CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b"),
    ("driver", r"\bCuda failure (2 )?'?out of memory"),
    ("driver", r"\bTriton Error \[\w+\]: out of memory\b"),
    ("host", r"\bstd::bad_alloc\b"),
    ("host", r"\bCannot allocate memory\b"),
    ("host", r"\bunable to allocate shared memory\b"),
)
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
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        kind = _kind(link)
        if kind is not None:
            line = (str(link).strip() or "no more memory").splitlines()[0]
            return OutOfMemory(kind, _requested_bytes(link), f"{type(link).__name__}: {line}")
        seen.add(id(link))
        link = link.__cause__
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
    for kind, pattern in _TEXTS:
        if re.search(pattern, text):
            return kind
    if _ONEDNN.search(text) and _is_address_space_limited():
        return "library"  # oneDNN also raises it for unsupported cases: only under a limit is memory the likely cause
    return "control group" if _KILLED.search(text) and cgroup_oom_kills() else None


def _requested_bytes(error: BaseException) -> int | None:
    if isinstance(error, MemoryLimitError):
        return error.requested_bytes
    match = _REQUESTED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


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
