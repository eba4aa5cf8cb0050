"""What the allocator handed out, for allocations that are known."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from memfit.hardware import allocated, allocated_by_name
from memfit.hardware.memory import allocated_between

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_a_known_pattern_has_its_known_peak() -> None:
    with allocated() as meter:
        one = block(100)
        two = block(300)
        del one
        three = block(150)
        del two
        four = block(50)
        del three
    assert meter.peak_bytes == 450 * KIB
    assert meter.net_bytes == 50 * KIB
    del four


def test_the_peak_is_not_the_sum_and_nothing_allocated_is_nothing() -> None:
    held = block(10)
    with pytest.raises(ZeroDivisionError), allocated():
        block(1)
        raise ZeroDivisionError
    for count in (0, 5):
        with allocated() as meter:
            for _ in range(count):
                block(64)
        assert (meter.peak_bytes, meter.net_bytes) == (64 * KIB * bool(count), 0)
    del held


def test_buffers_inside_operators_count() -> None:
    x = torch.randn(64, 256).bfloat16()
    with allocated() as meter:
        out = torch.nn.functional.mse_loss(x.float(), torch.zeros(64, 256))
    assert meter.peak_bytes >= 3 * 64 * 256 * 4
    assert out.isfinite()


def test_named_blocks_are_measured_each_for_itself() -> None:
    with allocated_by_name("mine-") as meters:
        with torch.profiler.record_function("mine-a"):
            a = block(100)
            block(50)
        with torch.profiler.record_function("other"):
            b = block(1000)
        with torch.profiler.record_function("mine-b"):
            del b
            c = block(30)
    assert meters.keys() == {"mine-a", "mine-b"}
    assert (meters["mine-a"].peak_bytes, meters["mine-a"].net_bytes) == (150 * KIB, 100 * KIB)
    assert (meters["mine-b"].peak_bytes, meters["mine-b"].net_bytes) == (0, -970 * KIB)
    del a, c


@pytest.mark.parametrize("is_profiled", [False, True], ids=["unseen", "seen by an earlier profile"])
def test_a_free_of_an_earlier_tensor_counts_for_nothing(is_profiled: bool) -> None:
    with allocated() if is_profiled else contextlib.nullcontext():
        earlier = [torch.empty(1000)]
    with allocated() as meter:
        earlier.clear()
        kept = torch.empty(100)
        freed = torch.empty(50)
        del freed
    assert (meter.peak_bytes, meter.net_bytes) == (600, 400)
    del kept


def test_a_free_by_another_thread_is_seen_when_its_address_is_allocated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [(0, 100, 7), (1, 30, 8), (2, 100, 7), (3, -30, 8), (4, -100, 7), (5, -50, 9)]  # at, bytes, address
    nodes = [
        SimpleNamespace(start_time_ns=at, children=[], extra_fields=SimpleNamespace(alloc_size=nbytes, ptr=address))
        for at, nbytes, address in events
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: nodes, events=list)
    profile = SimpleNamespace(kineto_results=results)
    monkeypatch.setattr("memfit.hardware.memory._profile", lambda: contextlib.nullcontext(profile))
    with allocated() as meter:
        pass
    assert (meter.peak_bytes, meter.net_bytes) == (130, 0)


def test_peaks_between_marks_are_those_of_all_that_is_held_by_then() -> None:
    mib = 2**20

    def mark(name: str) -> None:
        with torch.profiler.record_function(name):
            pass

    with allocated_between("mark", but_in="aside") as peaks:
        kept = torch.empty(mib, dtype=torch.uint8)
        mark("mark")
        torch.empty(2 * mib, dtype=torch.uint8)
        mark("another")
        with torch.profiler.record_function("aside"):
            torch.empty(8 * mib, dtype=torch.uint8)
        mark("mark")
        del kept
        torch.empty(mib // 2, dtype=torch.uint8)
    assert peaks == [mib, 3 * mib, mib]
    with allocated_between("mark") as peaks:
        pass
    assert peaks == [0]
