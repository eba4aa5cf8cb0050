"""This machine: its CPU, GPUs, memory and control groups."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs
import psutil
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.hardware.catalogue import ELSEWHERE, cublas_workspace_bytes, known_devices, look_up, match
from memfit.ir import Device, Devices, Vendor

_ACCELERATOR = re.compile(r"([a-z]+)(?::(\d+))?")
KINDS = ("cuda", "xpu", "mps")
"""Kinds of accelerator that PyTorch itself knows."""
_HERE = "this machine, as PyTorch shows it"
_BUSY_PERCENT, _BUSY_SECONDS = 50.0, 0.3


def is_busy() -> bool:
    """Tell whether other programs use more than half of the processors, at present."""
    return bool(psutil.cpu_percent(interval=_BUSY_SECONDS) > _BUSY_PERCENT)


def devices() -> Devices:
    """Return the devices of this machine: the CPU, and the accelerators that PyTorch sees.

    Their figures are those of the catalogue, which includes the last probe's. Predictions for an accelerator that is
    here need none of them: its operators are measured.
    """
    import torch

    from memfit.hardware import accelerators

    known = list(known_devices().values())
    now = {"name": "cpu", "memory_bytes": psutil.virtual_memory().total, "usable_bytes": free_bytes()}
    threads = torch.get_num_threads()
    found = [Device(kind="cpu", vendor="cpu", description=cpu_model(), cores=threads, **now)]
    for device in known:
        if device.kind == "cpu" and device.cores == threads and cpu_model() in device.products:
            found = [replace(device, **now)]  # of a probe with as many threads
            break
    kind = accelerators.current_kind()  # PyTorch has one at a time
    module: Any = None if kind is None else torch.get_device_module(kind)
    for index in range(0 if module is None else module.device_count()):
        place = torch.device(str(kind), index)
        free, total = accelerators.memory_info(place)
        free += accelerators.reserved_bytes(place)  # held by this process's allocator
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        vendors: dict[str | None, Vendor] = {"xpu": "intel", "mps": "apple"}
        vendors["cuda"] = "amd" if torch.version.hip else "nvidia"
        vendor = vendors.get(kind, "other")
        found.append(present_accelerator(f"{kind}:{index}", properties, vendor, free, total, known))
    return Devices(found)


def check_device(name: str) -> None:
    """Refuse the name of a device that does not exist, as far as that is known without importing PyTorch."""
    if not _ACCELERATOR.fullmatch(name.strip().lower()):
        find_device(name)


def find_device(name: str) -> Device:
    """Return a device by name: "cpu", "cuda" or "cuda:0" of this machine, or a name of the catalogue.

    "xpu", "mps" and other accelerators that this machine has go by PyTorch's name for their kind.

    Raises:
        UsageError: No such device is on this machine or in the catalogue.
    """
    wanted = name.strip().lower()
    accelerator = _ACCELERATOR.fullmatch(wanted)
    kind = accelerator[1] if accelerator else ""
    if wanted != "cpu" and kind not in KINDS:
        try:
            device = look_up(name)
            if device.kind in ELSEWHERE:
                return device
            raise UsageError(
                f"device={device.name!r} is of kind {device.kind!r}: predict steps on a machine that has it, with"
                f" device={device.kind!r}"
            )
        except UsageError:
            if not kind:
                raise
            from memfit.hardware import accelerators

            if kind != accelerators.current_kind():  # of another package, which PyTorch must be imported to know
                raise
    here = {d.name: d for d in devices()}
    present = here.get("cpu" if wanted == "cpu" else f"{kind}:{(accelerator and accelerator[2]) or 0}")
    if present is None:
        raise UsageError(
            f"device={name!r} is not on this machine, which has {', '.join(here)}:"
            " name one of these, or a device of the catalogue (`memfit devices`)"
        )
    return present


def present_accelerator(
    name: str, properties: Any, vendor: Vendor, free_bytes: int, total_bytes: int, known: Iterable[Device]
) -> Device:
    """Return an accelerator of this machine, with the rates of the catalogue or of a probe for its product."""
    kind = name.partition(":")[0]
    product = getattr(properties, "name", kind)
    seen: dict[str, Any] = {
        "name": name,
        "description": product,
        "memory_bytes": total_bytes,
        "usable_bytes": free_bytes,
        "cores": max(1, getattr(properties, "multi_processor_count", 1)),
    }
    if kind == "cuda":
        seen["capability"] = (properties.major, properties.minor) if vendor == "nvidia" else None
    sources = dict.fromkeys(seen.keys() - {"name"}, _HERE)
    entry = match(product, total_bytes, known, kind)
    if entry is not None:
        return replace(entry, **seen, sources={**entry.sources, **sources})
    if kind == "cuda":
        seen["cache_bytes"], sources["cache_bytes"] = getattr(properties, "L2_cache_size", 0), _HERE
        seen["cublas_workspace_bytes"] = cublas_workspace_bytes(vendor, seen["capability"])
    return Device(kind=kind, vendor=vendor, products=(product,), sources=sources, **seen)


def free_bytes() -> int:
    """Return the host memory left for this process: available memory, within the limits of its control groups."""
    available, limit = int(psutil.virtual_memory().available), cgroup_limit_bytes()
    return available if limit is None else min(available, limit)


def own_bytes() -> int:
    """Return this process's resident memory without mapped files, which the system can drop."""
    held = psutil.Process().memory_info()
    return int(held.rss - getattr(held, "shared", 0))


def cgroup_limit_bytes() -> int | None:
    """Return the bytes left below the limits of the process's control groups; None without a limit.

    Its own group and all groups around it count. Cached files that the system can drop count as free.
    """
    root, left = "/sys/fs/cgroup", []
    files = ("memory.max", "memory.current", "inactive_file")
    old_files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    for folder, pattern, (limit, used, cached) in (
        (root, r"^0::/(.*)$", files),
        (f"{root}/memory", r"^\d+:[^:]*\bmemory\b[^:]*:/(.*)$", old_files),
    ):
        own = re.search(pattern, groups, re.MULTILINE)  # its path below the mount, of version 2 and of version 1
        path = [part for part in own[1].split("/") if part] if own else []
        for around in (Path(folder, *path[:count]) for count in range(len(path) + 1)):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                free = int((around / limit).read_text()) - int((around / used).read_text())
                left.append(max(0, free + _statistic(around / "memory.stat", cached)))
    return min(left, default=None)


def cgroup_oom_kills() -> int:
    """Return the number of processes of the control group killed for memory so far; 0 if unknown."""
    root = Path("/sys/fs/cgroup")
    return _statistic(root / "memory.events", "oom_kill") or _statistic(root / "memory/memory.oom_control", "oom_kill")


def _statistic(path: Path, name: str) -> int:
    """Return a value of a control group's statistics; 0 if missing."""
    try:
        match = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


@functools.cache
def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def host_name() -> str:
    """Return a short name for machines of this kind, fit for a file name."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower()).strip("-")
    return f"{slug}-{os.cpu_count()}cores"


def cache_folder() -> Path:
    """Return the folder of what is measured or built on this machine: MEMFIT_CACHE_DIR, or one of the user's cache."""
    return Path(os.environ.get("MEMFIT_CACHE_DIR") or platformdirs.user_cache_dir("memfit"))
