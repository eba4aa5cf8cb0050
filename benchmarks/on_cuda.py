"""The truth about a step on the GPU that is here: what PyTorch's allocator counted, and how long it took."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from benchmarks.common import Measured
from memfit.capture.fake_workload import real_copy
from memfit.ir.plan import Levers
from memfit.levers.stack import applied
from memfit.workload import Workload

_WARM_UP, _TIMED = 3, 7


def measure(workload: Workload, levers: Levers) -> Measured:
    """Run a copy of a workload on the GPU with levers applied, from an empty cache."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    copied = real_copy(workload, device)
    with applied(levers, copied) as step:
        for _ in range(_WARM_UP):
            step(copied.batch)
        seconds = []
        for _ in range(_TIMED):
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            step(copied.batch)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Measured(*peaks, statistics.median(seconds))
