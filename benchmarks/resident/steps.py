"""Steps of one process: `python -m benchmarks.resident.steps WORKLOAD PLAN WAY` prints what they took, as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import memfit
from benchmarks.frameworks.subject import high_water_bytes, resident_bytes
from memfit import hardware
from memfit.recipes import brain_segmentation, byte_lm
from memfit.workload import Workload, tensors_of

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "byte_lm": lambda: byte_lm(n_layer=6, d_model=256, n_head=4, context=256, batch_size=8, max_bytes=400_000),
    "brain_segmentation": brain_segmentation,
}
WAYS = {"default": lambda: True, "kept": hardware.heap.keep_freed_memory, "returned": hardware.heap.return_freed_memory}
"""What becomes of freed memory: as the C library does by itself, all stays there, or all goes back at once."""
STEPS = 6


def main() -> None:
    """Run some steps, and print what they had resident and how much of a processor's time each took."""
    name, path, way = sys.argv[1:]
    if not WAYS[way]():
        raise SystemExit("the C library is not glibc")
    torch.set_num_threads(1)
    workload, plan = WORKLOADS[name](), memfit.Plan.load(path)
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    base_bytes = resident_bytes() - sum(tensor.nbytes for tensor in tensors)
    seconds = []
    with memfit.apply(plan, workload) as step:
        for _ in range(STEPS):
            started = time.thread_time()  # of a machine that others use too
            step(workload.batch)
            seconds.append(time.thread_time() - started)
    print(
        json.dumps({"resident_bytes": high_water_bytes() - base_bytes, "step_seconds": statistics.median(seconds[1:])})
    )


if __name__ == "__main__":
    main()
