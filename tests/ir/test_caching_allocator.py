"""Each rule of the allocator on an example worked by hand, and settings as PyTorch itself reads them."""

from __future__ import annotations

import ctypes
import random
import time
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfit.errors import AllocatorSettingsError, SimulatedOutOfMemoryError
from memfit.ir import AllocationEvent, AllocatorSettings, CachingAllocator, replay

KIB, MIB = 2**10, 2**20


def allocator(conf: str = "", capacity: int | None = None, total: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(conf), capacity, total_bytes=total)


def counts(a: CachingAllocator) -> tuple[float, float]:
    """Return allocated and reserved in MiB."""
    return a.allocated_bytes / MIB, a.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # the smallest large one
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (24 * MIB, 24 * MIB, 24 * MIB),
    ],
)
def test_a_fresh_request(request_bytes: int, block: int, segment: int) -> None:
    a = allocator()
    assert a.malloc(request_bytes).size == block
    assert (a.requested_bytes, a.allocated_bytes, a.reserved_bytes) == (request_bytes, block, segment)


def test_a_remainder_of_up_to_a_mebibyte_is_charged_to_a_large_block() -> None:
    a = allocator()
    assert a.malloc(11 * MIB).size == 12 * MIB  # the rest, 1 MiB, is not above 1 MiB
    assert a.malloc(11 * MIB - 512).size == 11 * MIB - 512  # the rest is
    b = a.malloc(MIB - 512)
    assert (b.size, a.reserved_bytes) == (MIB - 512, 26 * MIB)  # small requests do not use large remainders


def test_small_requests_share_a_segment_down_to_512_bytes() -> None:
    a = allocator()
    blocks = [a.malloc(MIB - 512), a.malloc(MIB), a.malloc(512)]
    assert [b.address - blocks[0].address for b in blocks] == [0, MIB - 512, 2 * MIB - 512]
    assert counts(a) == (2.0, 2.0)
    a.malloc(1)
    assert a.reserved_bytes == 4 * MIB


def test_requests_below_10_mib_share_a_segment_of_20() -> None:
    a = allocator()
    first, second, third = a.malloc(8 * MIB), a.malloc(8 * MIB), a.malloc(3 * MIB)
    assert counts(a) == (20.0, 20.0)  # 1 MiB is left: not above 1 MiB, so the third block has it
    assert third.size == 4 * MIB
    assert (second.address - first.address, third.address - second.address) == (8 * MIB, 8 * MIB)


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    a = allocator()
    blocks = [a.malloc(n * MIB) for n in (30, 14, 22, 14, 18)]
    for block in blocks:
        a.free(block)
    assert a.malloc(13 * MIB).address == blocks[1].address
    assert a.malloc(14 * MIB).address == blocks[3].address
    assert a.malloc(14 * MIB).address == blocks[4].address
    assert a.malloc(24 * MIB).address == blocks[0].address
    assert a.reserved_bytes == 98 * MIB


def test_freed_neighbours_become_one_block() -> None:
    a = allocator()
    one, two, three, _ = (a.malloc(n * MIB) for n in (4, 5, 6, 5))
    start = one.address
    a.free(one)
    a.free(three)
    assert a.malloc(6 * MIB).address == start + 9 * MIB
    a.free(two)  # joins the free 4 MiB before it
    assert a.malloc(9 * MIB).address == start
    assert counts(a) == (20.0, 20.0)


def test_streams_have_blocks_of_their_own() -> None:
    a = allocator()
    a.free(a.malloc(3 * MIB, stream=0))
    a.malloc(3 * MIB, stream=1)
    assert a.reserved_bytes == 40 * MIB
    a.malloc(3 * MIB, stream=0)
    assert a.reserved_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("conf", "request_bytes", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # 512 · 4 is not exceeded: up to 512 only
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 84 * MIB, 96 * MIB),  # steps of 16 MiB from 64
        ("roundup_power2_divisions:8", 84 * MIB, 88 * MIB),
        ("roundup_power2_divisions:4", 64 * MIB, 64 * MIB),
        ("roundup_power2_divisions:1", 84 * MIB - 100, 84 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,>:1]", 84 * MIB, 88 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,>:1]", 130 * MIB, 192 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,>:1]", 600 * MIB + 5, 600 * MIB + 512),
        ("roundup_power2_divisions:[64:8,128:2,256:4,>:1]", 3 * MIB - 5, 3 * MIB),
    ],
)
def test_requests_are_rounded_up_to_divisions_of_powers_of_two(conf: str, request_bytes: int, rounded: int) -> None:
    assert AllocatorSettings.parse(conf).rounded_bytes(request_bytes) == rounded


def test_blocks_above_max_split_are_kept_whole() -> None:
    a = allocator("max_split_size_mb:40")
    large = a.malloc(60 * MIB)
    a.free(large)
    a.malloc(30 * MIB)  # below the limit: must not take the large one
    assert a.reserved_bytes == 90 * MIB
    a.malloc(40 * MIB)  # at the limit: would waste 20 MiB, which is too much
    assert a.reserved_bytes == 130 * MIB
    assert a.malloc(40 * MIB + 1).address == large.address  # wastes less, and is charged for all of it
    assert counts(a) == (130.0, 130.0)


def test_retrying_releases_one_block_above_max_split_first() -> None:
    a = allocator("max_split_size_mb:40", 200 * MIB)
    small, big, bigger = a.malloc(12 * MIB), a.malloc(50 * MIB), a.malloc(100 * MIB)
    for block in (small, big, bigger):
        a.free(block)
    a.malloc(70 * MIB)
    assert (a.reserved_bytes, a.num_alloc_retries) == (132 * MIB, 0)  # without the 100, with the 12 and the 50


def test_retrying_releases_all_that_is_unused_and_then_gives_up() -> None:
    a = allocator("", 100 * MIB)
    kept, gone = a.malloc(4 * MIB), a.malloc(60 * MIB)
    a.free(gone)
    a.malloc(70 * MIB)
    assert (counts(a), a.num_alloc_retries, a.num_ooms) == ((74.0, 90.0), 1, 0)
    with pytest.raises(SimulatedOutOfMemoryError, match="30.0 MiB requested, 74.0 MiB allocated and 90.0 MiB") as e:
        a.malloc(30 * MIB)
    assert (a.num_alloc_retries, a.num_ooms) == (2, 1)
    assert (e.value.requested_bytes, e.value.reserved_bytes, e.value.capacity_bytes) == (30 * MIB, 90 * MIB, 100 * MIB)
    a.malloc(10 * MIB)  # still served
    a.free(kept)
    assert a.reserved_bytes == 90 * MIB


@pytest.mark.parametrize(("fraction", "reserved"), [("", 120), (",per_process_memory_fraction:0.5", 100)])
def test_garbage_is_collected_only_under_a_memory_fraction(fraction: str, reserved: int) -> None:
    a = allocator(f"garbage_collection_threshold:0.5{fraction}", 200 * MIB)
    for size in (20, 30):
        a.free(a.malloc(size * MIB))
    a.malloc(30 * MIB)
    a.malloc(40 * MIB)
    assert a.reserved_bytes == 90 * MIB  # half of the fraction, 50 MiB, was not exceeded yet
    a.malloc(30 * MIB)
    assert a.reserved_bytes == reserved * MIB  # now it is, and the unused 20 MiB are released


def test_garbage_is_what_lay_unused_for_at_least_the_mean() -> None:
    a = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5", 400 * MIB)
    older, newer, busy = (a.malloc(n * MIB) for n in (20, 22, 30))
    a.free(older)
    a.free(busy)
    a.malloc(30 * MIB)  # one lookup later,
    a.free(newer)
    a.malloc(48 * MIB)
    assert a.reserved_bytes == 120 * MIB
    a.malloc(50 * MIB)  # 20 over half of the 200 allowed: the older one is enough
    assert sorted(block.size // MIB for _, block in a.segments.items()) == [22, 30, 48, 50]


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    a = allocator("per_process_memory_fraction:0.5", 180 * MIB, total=200 * MIB)
    a.malloc(100 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError, match=f"capacity_bytes={100 * MIB}"):
        a.malloc(1)


def test_expandable_segments_grow_by_pages_and_split_to_512_bytes() -> None:
    a = allocator("expandable_segments:True")
    first, second = a.malloc(11 * MIB), a.malloc(11 * MIB)
    assert (second.address - first.address, a.reserved_bytes) == (11 * MIB, 40 * MIB)
    a.malloc(18 * MIB)
    assert counts(a) == (40.0, 40.0)
    a.malloc(MIB)
    assert counts(a) == (41.0, 42.0)
    assert len(a.segments) == 2


def test_expandable_segments_give_back_whole_pages_and_fill_the_holes() -> None:
    a = allocator("expandable_segments:True")
    blocks = [a.malloc(n * MIB) for n in (15, 30, 15)]
    a.free(blocks[1])  # bytes 15 to 45 of the segment; only 20 to 40 are a whole page
    a.empty_cache()
    assert counts(a) == (30.0, 40.0)
    again = a.malloc(25 * MIB)  # the lowest room: 5 free bytes, the hole, 5 free bytes
    assert (again.address - blocks[0].address, a.reserved_bytes) == (15 * MIB, 60 * MIB)


def test_nothing_is_freed_twice_and_nothing_asked_for_is_no_request() -> None:
    a = allocator()
    block = a.malloc(5)
    a.free(block)
    with pytest.raises(ValueError, match="not in use"):
        a.free(block)
    with pytest.raises(ValueError, match="nbytes=0"):
        a.malloc(0)


def test_settings_are_read_as_a_record() -> None:
    options = AllocatorSettings.parse(
        " expandable_segments : True, max_split_size_mb:128 ,pinned_use_background_threads:True,"
    )
    assert options == AllocatorSettings(expandable_segments=True, max_split_bytes=128 * MIB)
    assert options.conf() == "max_split_size_mb:128,expandable_segments:True"
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert msgspec.json.decode(msgspec.json.encode(options), type=AllocatorSettings) == options
    with pytest.raises(msgspec.ValidationError, match="max_split_bytes=1 must be"):
        msgspec.json.decode(b'{"max_split_bytes": 1}', type=AllocatorSettings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segment:True", "'expandable_segment' is not an allocator setting: use one of backend, expand"),
        ("expandable_segments:1", "expandable_segments:1 is neither True nor False"),
        ("expandable_segments", "'expandable_segments' in .* is not key:value"),
        ("max_split_size_mb:128abc", "max_split_size_mb:128abc is not a whole number"),
        ("max_split_size_mb:19", "max_split_bytes=19922944 must be a whole number of MiB, and at least 20.0 MiB"),
        ("large_segment_size_mb:10", "large_segment_bytes=10485760 .* at least 11.0 MiB"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold=1.0 must be"),
        ("garbage_collection_threshold:0", "not above 0"),
        ("per_process_memory_fraction:1.5", "memory_fraction=1.5 must be"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions=3 must be"),
        ("roundup_power2_divisions:0", "leave the key out"),
        ("roundup_power2_divisions:[3:1]", "names 3 MiB, which is not a power of two"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not simulated"),
        ("throw_on_cudamalloc_oom:True", "not simulated"),
    ],
)
def test_settings_that_pytorch_or_memfit_refuse(text: str, message: str) -> None:
    with pytest.raises(AllocatorSettingsError, match=message):
        AllocatorSettings.parse(text)


DIVISIONS = st.sampled_from([0, 1, 2, 4, 64])
RECORDS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    roundup_power2_divisions=st.one_of(DIVISIONS, st.tuples(*[DIVISIONS] * 16).filter(any)),
    max_split_bytes=st.one_of(st.none(), st.integers(32, 999).map(lambda n: n * MIB)),
    max_non_split_rounding_bytes=st.one_of(st.none(), st.integers(32, 99).map(lambda n: n * MIB)),
    garbage_collection_threshold=st.sampled_from([0.0, 0.25, 0.8, 0.99]),
    memory_fraction=st.sampled_from([1.0, 0.9, 0.125]),
    large_segment_bytes=st.integers(11, 32).map(lambda n: n * MIB),
)


@given(RECORDS)
def test_settings_written_are_read_back(options: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(options.conf()) == options


INTERVALS = st.tuples(
    st.sampled_from(["1", "2", "64", "256", "1024", "32768", "65536", ">", "3", "0", ""]), st.integers(0, 9)
)
CONFS = st.lists(
    st.one_of(
        st.tuples(st.just("max_split_size_mb"), st.integers(0, 99).map(str)),
        st.tuples(st.just("max_non_split_rounding_mb"), st.integers(15, 99).map(str)),
        st.tuples(st.just("garbage_collection_threshold"), st.sampled_from(["0", "0.5", ".5", "1", "1.5", "x"])),
        st.tuples(st.just("expandable_segments"), st.sampled_from(["True", "False", "true", "1", "[True]"])),
        st.tuples(st.just("roundup_power2_divisions"), st.integers(0, 9).map(str)),
        st.tuples(
            st.just("roundup_power2_divisions"),
            st.lists(INTERVALS, max_size=5).map(lambda pairs: "[" + ",".join(f"{k}:{n}" for k, n in pairs) + "]"),
        ),
    ),
    max_size=3,
    unique_by=lambda pair: pair[0],
)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier versions do not read large_segment_size_mb")
@example(20, [("roundup_power2_divisions", "[>:1]")], [512, 2**21, 2**40])
@example(20, [("roundup_power2_divisions", "[4:4,>:2,64:8]")], [2**n for n in range(20, 38)])
@example(20, [("roundup_power2_divisions", "[32768:4,>:2]")], [2**n for n in range(20, 38)])
@example(11, [("roundup_power2_divisions", "[1:3,1:0]")], [])
@example(11, [("roundup_power2_divisions", "[>:3,>:0]")], [])
@given(st.integers(9, 40), CONFS, st.lists(st.integers(512, 2**37), max_size=20))
@settings(deadline=None)
def test_settings_are_read_as_pytorch_reads_them(large: int, pairs: list[tuple[str, str]], sizes: list[int]) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    divisions = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    divisions.argtypes, divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
    cleared = "large_segment_size_mb:20,roundup_power2_divisions:[1:0,>:0]"  # what is left out keeps its last value
    torch._C._accelerator_setAllocatorSettings(cleared)
    text = ",".join(f"{key}:{value}" for key, value in [("large_segment_size_mb", str(large)), *pairs])
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        refused = False
    except (RuntimeError, ValueError):
        refused = True
    read: AllocatorSettings | None = None
    try:
        read = AllocatorSettings.parse(text)
    except AllocatorSettingsError:
        assert refused, text
    if read is not None:
        assert not refused, text
        for size in sizes:
            assert read.divisions()[min(max(size.bit_length() - 21, 0), 15)] == divisions(size), text
    torch._C._accelerator_setAllocatorSettings(cleared)


def test_the_same_requests_give_the_same_addresses() -> None:
    def run() -> list[int]:
        numbers, a, live = random.Random(5), allocator("", 600 * MIB), []
        for _ in range(300):
            live.append(a.malloc(numbers.randrange(1, 9 * MIB)))
            if len(live) > 40:
                a.free(live.pop(numbers.randrange(len(live))))
        return [b.address for b in live]

    assert run() == run()


def events(*rows: tuple[int, int, float]) -> list[AllocationEvent]:
    """Return events from rows of point, storage (negative where it dies) and MiB."""
    return [
        AllocationEvent(point, abs(storage), int(size * MIB), storage > 0, "activations", f"forward · net · op{point}")
        for point, storage, size in rows
    ]


STEP = events((-1, 1, 12), (0, 2, 0.5), (1, 3, 30), (1, -2, 0.5), (2, -3, 30), (2, 4, 8), (3, -4, 8))


def test_events_are_applied_one_by_one() -> None:
    after = [replay(STEP[: n + 1], AllocatorSettings()) for n in range(len(STEP))]
    assert [a.allocated_bytes / MIB for a in after] == [12, 12.5, 42.5, 42, 12, 20, 12]
    assert [a.reserved_bytes / MIB for a in after] == [12, 14, 44, 44, 44, 44, 44]
    assert after[-1].peak_allocated_bytes == after[-1].peak_requested_bytes == 42.5 * MIB
    assert after[-1].peak_reserved_bytes == 44 * MIB
    assert (after[-1].num_ooms, after[-1].oom) == (0, None)


def test_a_replay_ends_where_more_is_reserved_than_is_of_interest() -> None:
    part = replay(STEP, AllocatorSettings(), until_reserved_bytes=14 * MIB)
    assert (sorted(part.blocks), part.num_ooms) == ([1, 2, 3], 0) and part.peak_reserved_bytes > 14 * MIB
    assert sorted(replay(STEP, AllocatorSettings(), until_reserved_bytes=44 * MIB).blocks) == [1]


def test_a_second_step_uses_the_names_and_the_memory_again() -> None:
    once, twice = (replay(STEP + STEP[1:] * n, AllocatorSettings()) for n in (0, 1))
    assert twice.peak_allocated_bytes == once.peak_allocated_bytes
    assert twice.peak_reserved_bytes == once.peak_reserved_bytes


def test_running_out_ends_the_replay_at_the_point_where_it_happens() -> None:
    report = replay(STEP, AllocatorSettings(), 40 * MIB)
    assert report.oom is not None and (report.num_ooms, report.num_alloc_retries, report.oom.point) == (1, 1, 1)
    assert report.oom == STEP[2]
    assert report.peak_reserved_bytes == 14 * MIB
    assert replay(STEP, AllocatorSettings(), 44 * MIB).num_ooms == 0


def test_empty_storages_are_passed_over() -> None:
    assert replay(events((0, 1, 0), (0, 1, 0), (1, -1, 0)), AllocatorSettings()).peak_reserved_bytes == 0
    assert replay([], AllocatorSettings()).peak_allocated_bytes == 0


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
