"""`torch.acc`: what `torch.cuda` is to CUDA, for the device "acc"."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.accelerator_device.device import NAME, loaded

Where = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """What there is to know about the device."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


_initialized = True  # `torch.utils.checkpoint` keeps the random state of no other device


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is left to do."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(where: Where) -> None:
    _check(where)


@contextlib.contextmanager
def device(where: Where) -> Iterator[None]:
    _check(where)
    yield


def synchronize(where: Where = None) -> None:
    _check(where)


def get_device_properties(where: Where = None) -> DeviceProperties:
    return DeviceProperties("Python accelerator", mem_get_info(where)[1])


def get_device_name(where: Where = None) -> str:
    return get_device_properties(where).name


def get_device_capability(where: Where = None) -> tuple[int, int]:
    _check(where)
    return 0, 0


def memory_stats(where: Where = None) -> OrderedDict[str, Any]:
    return torch.accelerator.memory_stats(_check(where))


def memory_allocated(where: Where = None) -> int:
    return torch.accelerator.memory_allocated(_check(where))


def max_memory_allocated(where: Where = None) -> int:
    return torch.accelerator.max_memory_allocated(_check(where))


def memory_reserved(where: Where = None) -> int:
    return torch.accelerator.memory_reserved(_check(where))


def max_memory_reserved(where: Where = None) -> int:
    return torch.accelerator.max_memory_reserved(_check(where))


def reset_peak_memory_stats(where: Where = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_check(where))


def reset_accumulated_memory_stats(where: Where = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_check(where))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(where: Where = None) -> tuple[int, int]:
    """Return the free and the total bytes."""
    return torch.accelerator.get_memory_info(_check(where))


def set_per_process_memory_fraction(fraction: float, where: Where = None) -> None:
    _check(where)
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    loaded().acc_set_fraction(fraction)


def get_per_process_memory_fraction(where: Where = None) -> float:
    _check(where)
    return float(loaded().acc_get_fraction())


def get_rng_state(where: Where = None) -> torch.Tensor:
    return default_generators[_check(where)].get_state()


def set_rng_state(state: torch.Tensor, where: Where = None) -> None:
    default_generators[_check(where)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    default_generators[0].seed()


seed_all = seed


def initial_seed() -> int:
    return default_generators[0].initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


class Stream(torch.Stream):
    """A stream, on which all work is done at once."""

    def __new__(cls, device: Where = None, priority: int = 0) -> Stream:
        return super().__new__(cls, torch.device(NAME, _check(device)), priority=priority)


class Event(torch.Event):
    """A point in time."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made = super().__new__(cls, NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        return made


def current_stream(where: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_check(where))


def default_stream(where: Where = None) -> torch.Stream:
    kind: Any = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_check(where), device_type=int(kind))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    before = current_stream()
    if chosen is not None:
        set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)


def _check(where: Where) -> int:
    """Return the index of the only device."""
    if where is None:
        return 0
    chosen = torch.device(NAME, where) if isinstance(where, int) else torch.device(where)
    if chosen.type != NAME or chosen.index not in (None, 0):
        raise ValueError(f"there is no device {chosen}, only {NAME}:0")
    return 0


def _default_generators() -> tuple[torch.Generator]:
    """Return the device's own generator: the library gives it to the next one who asks for a new one."""
    loaded().acc_give_default_generator()
    return (torch.Generator(NAME),)


default_generators = _default_generators()
