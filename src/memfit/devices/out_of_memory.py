"""Which errors mean that memory ran out: one classifier for all the forms they take.

Only some are typed. PyTorch's allocators raise `torch.OutOfMemoryError` on accelerators and a `RuntimeError` on the
CPU; CUDA itself, its libraries, oneDNN and the operating system each have a text of their own.

Not among them is `CUDNN_STATUS_NOT_SUPPORTED`, which some tools count: it says as often that a layout or a size has no
kernel, and a smaller plan would not cure that.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from memfit.devices.host import cgroup_oom_kills
from memfit.errors import MemoryLimitError

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
    """What an error says about memory that ran out; it refers to no frame and no tensor.

    Attributes:
        kind: Who refused: PyTorch's allocator, the driver, a library, the operating system, the control
            group that killed a process, `limit_bytes`, or what another rank of the training met.
        requested_bytes: What was asked for, where the error says so.
        text: The error, as "type: first line".
    """

    kind: Kind
    requested_bytes: int | None
    text: str


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return what an error says about memory that ran out, or None where it is about something else.

    An error that was raised from such a one counts as it.
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
        return "library"  # the same words stand for what oneDNN can't do: only a limit makes memory the likely cause
    return "control group" if _KILLED.search(text) and cgroup_oom_kills() else None


def _requested_bytes(error: BaseException) -> int | None:
    if isinstance(error, MemoryLimitError):
        return error.requested_bytes
    found = _REQUESTED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def allocations_can_fail() -> bool:
    """Tell whether the operating system may refuse memory: by default Linux promises it, and kills when it runs out."""
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
