"""Workloads, loaded by name for a command, with a stage of its progress."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from memfit.cli import streams
from memfit.cli.output import stages
from memfit.fake_gpu import shim

if TYPE_CHECKING:
    from memfit.workload import Workload


def load_for(workload: str, device: str | None) -> Workload:
    """Return a workload to predict for a device; for a GPU, restart in a process with fake CUDA tensors.

    There the workload is built under fake tensors, so that a model of any size takes no memory.
    """
    from memfit import pipeline

    if device is None:
        return load(workload)
    target = pipeline.find_device(device)
    if pipeline.is_elsewhere(target):
        line = shim.command("memfit", *sys.argv[1:])
        streams.give_back(is_end=False)
        sys.stdout.flush()
        os.execve(line[0], line, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return load(workload, is_fake=target.kind == "cuda")


def _told(line: str) -> None:
    print(f"memfit: {line}", file=sys.stderr, flush=True)


def load(workload: str, *, is_fake: bool = False) -> Workload:
    """Load a workload by name, which runs the user's code, and show that as a stage."""
    from memfit import pipeline

    with stages() as progress:
        progress("load", 0, 1)
        loaded = pipeline.load_fake_workload(workload, _told) if is_fake else pipeline.load_workload(workload)
        progress("load", 1, 1)
    return loaded
