"""Events replayed through the allocator."""

from __future__ import annotations

import random
import time

import pytest

from memfit.allocator.caching_allocator import AllocationEvent, replay
from memfit.allocator.settings import AllocatorSettings

MIB = 2**20


def events(*rows: tuple[int, int, float]) -> list[AllocationEvent]:
    """Return events from rows of point, storage (negative where it dies) and MiB."""
    return [
        AllocationEvent(point, abs(storage), int(size * MIB), storage > 0, "activations", f"forward · net · op{point}")
        for point, storage, size in rows
    ]


STEP = events((-1, 1, 12), (0, 2, 0.5), (1, 3, 30), (1, -2, 0.5), (2, -3, 30), (2, 4, 8), (3, -4, 8))


def test_peaks_and_where_they_are() -> None:
    report = replay(STEP, AllocatorSettings(), history=True)
    assert report.peak_allocated_bytes == report.peak_requested_bytes == 42.5 * MIB
    assert (report.peak_allocated_event, report.peak_reserved_event) == (2, 2)
    assert report.peak_reserved_bytes == 44 * MIB
    assert [n / MIB for n in report.allocated_bytes] == [12, 12.5, 42.5, 42, 12, 20, 12]
    assert [n / MIB for n in report.reserved_bytes] == [12, 14, 44, 44, 44, 44, 44]
    assert (report.end_allocated_bytes, report.end_reserved_bytes) == (12 * MIB, 44 * MIB)
    assert (report.num_ooms, report.oom) == (0, None)


def test_a_replay_ends_where_more_is_reserved_than_is_of_interest() -> None:
    report = replay(STEP, AllocatorSettings(), history=True, until_reserved_bytes=14 * MIB)
    assert [n / MIB for n in report.reserved_bytes] == [12, 14, 44]
    assert report.peak_reserved_bytes > 14 * MIB and report.num_ooms == 0
    whole = replay(STEP, AllocatorSettings(), until_reserved_bytes=44 * MIB)
    assert whole == replay(STEP, AllocatorSettings())


def test_a_second_step_uses_the_names_and_the_memory_again() -> None:
    once, twice = (replay(STEP + STEP[1:] * n, AllocatorSettings(), history=True) for n in (0, 1))
    assert twice.peak_allocated_bytes == once.peak_allocated_bytes
    assert twice.peak_reserved_bytes == once.peak_reserved_bytes
    assert len(twice.reserved_bytes) == 13
    assert replay(STEP, AllocatorSettings()).reserved_bytes == []


def test_running_out_ends_the_replay_at_the_point_where_it_happens() -> None:
    report = replay(STEP, AllocatorSettings(), 40 * MIB)
    assert report.oom is not None and (report.num_ooms, report.num_alloc_retries, report.oom.point) == (1, 1, 1)
    assert report.oom == STEP[2]
    assert report.peak_reserved_bytes == 14 * MIB
    assert replay(STEP, AllocatorSettings(), 44 * MIB).num_ooms == 0


def test_empty_storages_are_passed_over() -> None:
    assert replay(events((0, 1, 0), (0, 1, 0), (1, -1, 0)), AllocatorSettings()).peak_reserved_bytes == 0
    assert replay([], AllocatorSettings()).peak_allocated_event is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 1, 1), (3, 1, 1)), "storage 1 is allocated at point 3, but is allocated already"),
        (((2, -7, 1),), "storage 7 is freed at point 2, but is not allocated"),
    ],
)
def test_lives_that_can_not_be(rows: tuple[tuple[int, int, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(events(*rows), AllocatorSettings())


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_many_events_take_little_time(conf: str) -> None:
    numbers, live, rows = random.Random(1), [], []
    for storage in range(1, 100_001):
        size = 2 ** numbers.uniform(-16, 6)
        rows.append((storage, storage, size))
        live.append((storage, size))
        if len(live) > 1000:
            dead, size = live.pop(numbers.randrange(len(live)))
            rows.append((storage, -dead, size))
    many = events(*rows)
    started = time.perf_counter()
    report = replay(many, AllocatorSettings.parse(conf))
    seconds = time.perf_counter() - started
    assert seconds < 10, f"{len(many)} events took {seconds:.1f} s"  # 0.5 s where nothing else runs
    assert report.peak_allocated_bytes <= report.peak_reserved_bytes
