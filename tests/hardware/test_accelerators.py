"""Statistics of hardware.accelerators, of the kinds that are not here: by stand-ins for their modules."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from memfit import hardware
from memfit.errors import UsageError

CPU = torch.device("cpu")


def module(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> torch.device:
    """Have PyTorch's module of a kind hold some functions; return its first device."""
    found = types.SimpleNamespace(**functions)
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return torch.device("xpu", 0)


def test_the_cpu_counts_nothing() -> None:
    here = hardware.accelerators
    assert here.peaks(CPU) is None and here.allocation_retries(CPU) is None
    assert here.allocated_bytes(CPU) == here.reserved_bytes(CPU) == here.cached_bytes(CPU) == 0
    here.reset_peaks(CPU)
    here.synchronize(CPU)
    with pytest.raises(UsageError, match="does not report the memory of cpu.*limit_bytes="):
        here.memory_info(CPU)


def test_a_kind_that_counts_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    place = module(
        monkeypatch,
        max_memory_allocated=lambda device: 5,
        max_memory_reserved=lambda device: 7,
        memory_allocated=lambda device: 3,
        memory_reserved=lambda device: 4,
        memory_stats=lambda device: {"num_alloc_retries": 2},
        mem_get_info=lambda device: (10, 20),
        reset_peak_memory_stats=seen.append,
        synchronize=seen.append,
        set_per_process_memory_fraction=lambda share, device: seen.append(share),
    )
    assert hardware.accelerators.peaks(place) == (5, 7)
    assert (hardware.accelerators.allocated_bytes(place), hardware.accelerators.cached_bytes(place)) == (3, 1)
    assert hardware.accelerators.allocation_retries(place) == 2 and hardware.accelerators.memory_info(place) == (10, 20)
    fraction = hardware.accelerators.MemoryFraction(place)
    assert (fraction.total_bytes, fraction.get()) == (20, 1.0)
    fraction.set(0.5)
    hardware.accelerators.reset_peaks(place)
    hardware.accelerators.synchronize(place)
    assert seen == [0.5, place, place]


def test_a_kind_that_has_less_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    place = module(monkeypatch, mem_get_info=lambda device: (1, 2))
    assert hardware.accelerators.peaks(place) is None and hardware.accelerators.allocation_retries(place) is None
    hardware.accelerators.reset_peaks(place)
    with pytest.raises(UsageError, match="can't limit the memory of xpu:0: leave out limit_bytes="):
        hardware.accelerators.MemoryFraction(place)


def test_apples_functions_have_other_names_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    module(
        monkeypatch,
        current_allocated_memory=lambda: 3,
        driver_allocated_memory=lambda: 4,
        recommended_max_memory=lambda: 100,
        synchronize=lambda: None,
        device_count=lambda: 1,
        get_rng_state=lambda: torch.zeros(2),
        set_rng_state=states.append,
    )
    place = torch.device("mps", 0)
    assert hardware.accelerators.memory_info(place) == (97, 100) and hardware.accelerators.cached_bytes(place) == 1
    assert hardware.accelerators.peaks(place) is None
    hardware.accelerators.synchronize(place)
    hardware.accelerators.set_rng_states("mps", hardware.accelerators.rng_states("mps"))
    assert len(states) == 1


def test_only_used_accelerators_are_asked_for_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would make their context."""
    initialized = [False]
    place = module(
        monkeypatch,
        is_initialized=lambda: initialized[0],
        memory_allocated=lambda device: 3,
        device_count=lambda: 2,
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: place)
    assert (hardware.accelerators.used_kind(), hardware.accelerators.held_bytes()) == (None, 0)
    initialized[0] = True
    assert (hardware.accelerators.used_kind(), hardware.accelerators.held_bytes()) == ("xpu", 6)
    hardware.accelerators.release_cache()


def test_the_hosts_clock_times_what_has_no_events() -> None:
    calls: list[int] = []
    seconds = hardware.accelerators.stopwatch(CPU)(lambda: calls.append(1), 5)
    assert len(calls) == 5 and 0 < seconds < 1
