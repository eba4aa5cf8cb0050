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
from memfit.ir import AllocationEvent, AllocatorSettings, CachingAllocator, MemoryBlock, replay

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


class Played:
    """An allocator after a script: "a:14" asks for MiB, "a:14@1" on another stream, "-a" frees, "empty" gives back."""

    def __init__(self, conf: str, script: str, capacity: int | None = None) -> None:
        self.allocator = allocator(conf, None if capacity is None else capacity * MIB)
        self.blocks: dict[str, MemoryBlock] = {}
        for word in script.split():
            name, _, asked = word.partition(":")
            size, _, stream = asked.partition("@")
            if word == "empty":
                self.allocator.empty_cache()
            elif word.startswith("-"):
                self.allocator.free(self.blocks[word[1:]])
            else:
                self.blocks[name] = self.allocator.malloc(int(float(size) * MIB), int(stream or 0))

    def offset(self, name: str, other: str = "a") -> float:
        return (self.blocks[name].address - self.blocks[other].address) / MIB


TINY = 512 / MIB


@pytest.mark.parametrize(
    ("conf", "script", "allocated", "reserved", "offsets"),
    [
        # a remainder of up to a mebibyte is charged to a large block; small requests use no large remainder
        ("", "a:11", 12, 12, {}),
        ("", f"a:{11 - TINY} b:{1 - TINY}", 12 - 2 * TINY, 14, {}),
        # small requests share a segment down to 512 bytes
        ("", f"a:{1 - TINY} b:1 c:{TINY}", 2, 2, {"b": 1 - TINY, "c": 2 - TINY}),
        ("", f"a:{1 - TINY} b:1 c:{TINY} d:{1 / MIB}", 2 + TINY, 4, {}),
        # requests below 10 MiB share a segment of 20; 1 MiB is left: not above 1 MiB, so the third block has it
        ("", "a:8 b:8 c:3", 20, 20, {"b": 8, "c": 16}),
        # the smallest block that fits is taken, and the lowest of equals
        ("", "a:30 b:14 c:22 d:14 e:18 -a -b -c -d -e f:13", 14, 98, {"f": 30}),
        ("", "a:30 b:14 c:22 d:14 e:18 -a -b -c -d -e f:13 g:14 h:14 i:24", 66, 98, {"g": 66, "h": 80, "i": 0}),
        # freed neighbours become one block
        ("", "a:4 b:5 c:6 d:5 -a -c e:6", 16, 20, {"e": 9}),
        ("", "a:4 b:5 c:6 d:5 -a -c e:6 -b f:9", 20, 20, {"f": 0}),
        # streams have blocks of their own
        ("", "a:3@0 -a b:3@1", 3, 40, {}),
        ("", "a:3@0 -a b:3@1 c:3@0", 6, 40, {"c": 0}),
        # below the limit a request must not take a large block; at the limit it would waste 20 MiB, which is too much
        ("max_split_size_mb:40", "a:60 -a b:30", 30, 90, {}),
        ("max_split_size_mb:40", "a:60 -a b:30 c:40", 70, 130, {}),
        ("max_split_size_mb:40", f"a:60 -a b:30 c:40 d:{40 + 1 / MIB}", 130, 130, {"d": 0}),
        # expandable segments grow by pages, and split to 512 bytes
        ("expandable_segments:True", "a:11 b:11", 22, 40, {"b": 11}),
        ("expandable_segments:True", "a:11 b:11 c:18 d:1", 41, 42, {}),
        # they give back whole pages, here bytes 20 to 40 of 15 to 45, and fill the holes at the lowest room
        ("expandable_segments:True", "a:15 b:30 c:15 -b empty", 30, 40, {}),
        ("expandable_segments:True", "a:15 b:30 c:15 -b empty d:25", 55, 60, {"d": 15}),
    ],
)  # fmt: skip
def test_blocks_are_taken_by_the_rules(
    conf: str, script: str, allocated: float, reserved: float, offsets: dict[str, float]
) -> None:
    played = Played(conf, script)
    assert counts(played.allocator) == (allocated, reserved)
    assert {name: played.offset(name) for name in offsets} == offsets


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


def test_retrying_releases_one_block_above_max_split_first() -> None:
    a = Played("max_split_size_mb:40", "a:12 b:50 c:100 -a -b -c d:70", 200).allocator
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
