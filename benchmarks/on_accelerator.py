"""The truth about a step on an accelerator that is here: what PyTorch's allocator counted, and how long it took."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time

import torch

from benchmarks.common import Measured
from memfit import hardware
from memfit.capture import real_copy
from memfit.hardware import peaks, reset_peaks, synchronize
from memfit.ir import Levers
from memfit.levers import applied
from memfit.workload import Workload

_WARM_UP, _TIMED = 3, 7
_IN_PYTHON = "acc"  # tests/accelerator_device, which each process must load


def bring(kind: str) -> None:
    """Give this process the accelerator in Python, where that is the kind."""
    if kind.startswith(_IN_PYTHON):
        from tests.accelerator_device import load

        load()


def environment(kind: str) -> dict[str, str]:
    """Return the environment of commands for a kind of accelerator, which says where tests want the one in Python."""
    given = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    return given | ({"MEMFIT_TEST_ACCELERATOR": "1"} if kind.startswith(_IN_PYTHON) else {})


def python(kind: str | None = None) -> list[str]:
    """Return the command that runs a module in a process that has this one's accelerator, or another kind's."""
    found = kind or hardware.accelerators.current_kind() or ""
    return [sys.executable, "-m", *(["tests.accelerator_device"] if found.startswith(_IN_PYTHON) else [])]


def measure(workload: Workload, levers: Levers, device: torch.device) -> Measured:
    """Run a copy of a workload there with levers applied, from an empty cache."""
    gc.collect()
    hardware.accelerators.release_cache()
    reset_peaks(device)
    copied = real_copy(workload, device)
    with applied(levers, copied) as step:
        for _ in range(_WARM_UP):
            step(copied.batch)
        seconds = []
        for _ in range(_TIMED):
            synchronize(device)
            started = time.perf_counter()
            step(copied.batch)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
    found = peaks(device)
    assert found is not None, "this kind of device counts no peaks"
    return Measured(found.allocated_bytes, found.reserved_bytes, statistics.median(seconds))
