"""The machine at hand."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

import psutil
import torch

from memfit.errors import UsageError
from memfit.ir.device import Device


def devices() -> list[Device]:
    """Return the devices of this machine: the CPU, and the GPUs that PyTorch sees."""
    return [_cpu(), *(_gpu(i) for i in range(torch.cuda.device_count()))]


def find_device(name: str) -> Device:
    """Return a device by name.

    Raises:
        UsageError: This machine has no such device, or memfit can't plan for it yet.
    """
    known = {d.name: d for d in devices()}
    if name == "cpu":
        return known[name]
    if name in known:
        raise UsageError(f"device={name!r} is here, but this version plans for the CPU only: use device='cpu'")
    raise UsageError(f"device={name!r} is not on this machine, which has {', '.join(known)}: use device='cpu'")


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    limit = cgroup_limit_bytes()
    usable = min(memory.available, limit) if limit is not None else memory.available
    return Device(
        name="cpu",
        kind="cpu",
        vendor="cpu",
        description=_cpu_model(),
        memory_bytes=memory.total,
        usable_bytes=usable,
        cores=torch.get_num_threads(),
    )


def _gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Device(
        name=f"cuda:{index}",
        kind="cuda",
        vendor="amd" if torch.version.hip else "nvidia",
        description=properties.name,
        memory_bytes=total,
        usable_bytes=free,
        cores=properties.multi_processor_count,
    )


def cgroup_limit_bytes() -> int | None:
    """Return what the control group still allows this process, or None where nothing limits it.

    Cached files that can be dropped count as free.
    """
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            free = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, free + _statistic(Path(folder, "memory.stat"), cached))
    return None


def _statistic(path: Path, name: str) -> int:
    """Return a line of a control group's statistics, 0 where there is none."""
    try:
        match = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


@functools.cache
def _cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def host_name() -> str:
    """Return a short name for machines of this kind, fit for a file name."""
    slug = re.sub(r"[^a-z0-9]+", "-", _cpu_model().lower()).strip("-")
    return f"{slug}-{os.cpu_count()}cores"
