"""The accelerator of this machine, of whatever kind: PyTorch's own statistics, limits and random generators for it.

`torch.accelerator` and the module of each kind (`torch.cuda`, `torch.xpu`, `torch.mps`, or one of another package) have
the same functions by the same names, as far as they have them. What a kind lacks is None here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memfit._torch import is_initialized
from memfit.errors import UsageError


class Peaks(NamedTuple):
    """The most bytes that tensors took, and that the allocator reserved, since the peaks were last reset."""

    allocated_bytes: int
    reserved_bytes: int


def current_kind() -> str | None:
    """Return the kind of accelerator that PyTorch has here, such as "cuda"; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def used_kind() -> str | None:
    """Return the kind of accelerator that this process has used; None where it has used none.

    Asking an accelerator that was not used would take hundreds of MiB for its context.
    """
    kind = current_kind()
    return kind if kind is not None and is_initialized(kind) else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work; the CPU always has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(*_index(device))


def peaks(device: torch.device) -> Peaks | None:
    """Return the peaks of a device's allocator; None for the CPU, whose allocator counts nothing."""
    module = _module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    return Peaks(int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device)))


def reset_peaks(device: torch.device) -> None:
    """Have a device's allocator count its peaks from now on."""
    if hasattr(_module(device), "reset_peak_memory_stats"):
        _module(device).reset_peak_memory_stats(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that tensors hold on a device; 0 where its allocator does not count."""
    return _counted(device, "current_allocated_memory" if device.type == "mps" else "memory_allocated")


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that a device's allocator has reserved; 0 where it does not count."""
    return _counted(device, "driver_allocated_memory" if device.type == "mps" else "memory_reserved")


def _counted(device: torch.device, name: str) -> int:
    count = getattr(_module(device), name, None)
    return 0 if count is None else int(count(*_index(device)))


def held_bytes() -> int:
    """Return the bytes that tensors hold on all accelerators that this process has used."""
    return sum(allocated_bytes(device) for device in _devices(used_kind()))


def cached_bytes(device: torch.device) -> int:
    """Return the bytes that a device's allocator has reserved, and no tensor holds."""
    return max(0, reserved_bytes(device) - allocated_bytes(device))


def release_cache() -> None:
    """Empty the caches of used accelerators' allocators."""
    kind = used_kind()
    if kind is not None and hasattr(torch.get_device_module(kind), "empty_cache"):
        torch.get_device_module(kind).empty_cache()


def allocation_retries(device: torch.device) -> int | None:
    """Return how often a device's allocator gave back its cache and tried again; None where it does not count."""
    module = _module(device)
    return int(module.memory_stats(device).get("num_alloc_retries", 0)) if hasattr(module, "memory_stats") else None


@functools.cache
def pins_memory(kind: str) -> bool:
    """Tell whether host memory can be pinned for copies to a kind of accelerator of its own memory.

    CUDA always can, and is not asked: that would take memory for its context.
    """
    if kind in ("cpu", "mps"):  # whose memory is the host's
        return False
    if kind == "cuda":
        return True
    try:
        torch.empty(1).pin_memory()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return a device's free and total bytes; raise UsageError where PyTorch can't tell."""
    module = _module(device)
    if device.type == "mps":  # memory is the host's: what Metal recommends to take of it
        total = int(module.recommended_max_memory())
        return total - allocated_bytes(device), total
    if not hasattr(module, "mem_get_info"):
        raise UsageError(
            f"PyTorch does not report the memory of {device}: give the budget in bytes, and no limit_bytes="
        )
    free, total = module.mem_get_info(device)
    return int(free), int(total)


class MemoryFraction:
    """The share of a device's memory that PyTorch's allocator may take; UsageError where it can't be limited."""

    def __init__(self, device: torch.device) -> None:
        self._module, self.device = _module(device), device
        self.total_bytes = memory_info(device)[1]
        if not hasattr(self._module, "set_per_process_memory_fraction"):
            raise UsageError(f"PyTorch can't limit the memory of {device}: leave out limit_bytes=")

    def get(self) -> float:
        """Return the share; 1 where PyTorch does not tell."""
        known = getattr(self._module, "get_per_process_memory_fraction", None)
        return 1.0 if known is None else float(known(self.device))

    def set(self, share: float) -> None:
        """Allow a share (> 0, ≤ 1)."""
        self._module.set_per_process_memory_fraction(share, self.device)


def rng_states(kind: str) -> list[torch.Tensor]:
    """Return the states of the global random generators of each device of a kind."""
    module = torch.get_device_module(kind)
    return [module.get_rng_state(*_index(device)) for device in _devices(kind)]


def set_rng_states(kind: str, states: Sequence[torch.Tensor]) -> None:
    """Set the global random generators of a kind's devices; states of devices that are not here are left out."""
    module = torch.get_device_module(kind)
    for device, state in zip(_devices(kind), states, strict=False):
        module.set_rng_state(state, *_index(device))


def seed(kind: str, value: int) -> None:
    """Seed the global random generators of each device of a kind."""
    torch.get_device_module(kind).manual_seed_all(value)


def stopwatch(device: torch.device) -> Callable[[Callable[[], Any], int], float]:
    """Return a function that returns the seconds of one of several calls in a row, by the device's own clock.

    Kinds without timed events are timed by the host, from one wait for the device to the next.
    """

    def timed(call: Callable[[], Any], count: int) -> float:
        if device.type == "cuda":  # other kinds' events were not tried
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                call()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3 / count
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        return (time.perf_counter() - started) / count

    return timed


def _module(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def _devices(kind: str | None) -> list[torch.device]:
    count: int = 0 if kind is None else torch.get_device_module(kind).device_count()
    return [torch.device(str(kind), index) for index in range(count)]


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return a device as an argument; Apple's functions take none, for there is one."""
    return () if device.type == "mps" else (device,)
