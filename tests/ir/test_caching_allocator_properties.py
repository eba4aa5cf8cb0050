"""The allocator agrees with a naive one on random requests, and keeps its invariants; both checks can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import SimulatedOutOfMemoryError
from memfit.ir import AllocatorSettings, CachingAllocator, MemoryBlock
from tests.ir.naive_allocator import MIB, NaiveAllocator, check

EDGES = [1, 512, 513, 4096, MIB // 2, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7, 9 * MIB, 10 * MIB - 512]
EDGES += [10 * MIB, 10 * MIB + 1, 11 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 24 * MIB, 39 * MIB, 40 * MIB, 61 * MIB]
SIZES = st.one_of(st.sampled_from(EDGES), st.integers(1, 2 * MIB), st.integers(1, 64 * MIB))
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 0, 7])),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
        st.tuples(st.sampled_from(["free", "free", "empty"]), st.integers(0, 10**6), st.just(0)),
    ),
    max_size=60,
)
CAPACITIES = st.one_of(st.none(), st.integers(20 * MIB, 300 * MIB))
SETTINGS = st.one_of(
    st.just(AllocatorSettings()),
    st.just(AllocatorSettings(expandable_segments=True)),
    st.builds(
        AllocatorSettings,
        expandable_segments=st.booleans(),
        roundup_power2_divisions=st.one_of(
            st.sampled_from([0, 1, 2, 8, 32]), st.tuples(*[st.sampled_from([0, 1, 2, 4])] * 16)
        ),
        max_split_bytes=st.sampled_from([None, 24 * MIB, 40 * MIB]),
        garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
        memory_fraction=st.sampled_from([1.0, 0.9, 0.5]),
        large_segment_bytes=st.sampled_from([20 * MIB, 11 * MIB, 24 * MIB]),
    ),
)
Requests = list[tuple[str, int, int]]
Steps = tuple[AllocatorSettings, int | None, Requests]
STEPS = st.tuples(SETTINGS, CAPACITIES, REQUESTS)


def run(
    steps: Steps,
    after: Callable[[CachingAllocator, list[MemoryBlock]], None],
    kind_of: type[CachingAllocator] = CachingAllocator,
) -> list[tuple[object, ...]]:
    """Carry out requests, and return what came of each."""
    options, capacity, requests = steps
    allocator = kind_of(options, capacity)
    live: list[MemoryBlock] = []
    results: list[tuple[object, ...]] = []
    for kind, number, stream in requests:
        if kind == "empty":
            allocator.empty_cache()
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
                results.append((live[-1].address, live[-1].size))
            except SimulatedOutOfMemoryError:
                results.append((None,))
        counters = (allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_reserved_bytes)
        results.append((*counters, allocator.num_alloc_retries, allocator.num_ooms))
        after(allocator, live)
    for block in live:
        allocator.free(block)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 0)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    return results


def run_naively(steps: Steps) -> list[tuple[object, ...]]:
    options, capacity, requests = steps
    allocator = NaiveAllocator(options, capacity)
    live: list[int] = []
    results: list[tuple[object, ...]] = []
    for kind, number, stream in requests:
        if kind == "empty":
            allocator.release_all()
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "malloc":
            found = allocator.malloc(number, stream)
            results.append(found or (None,))
            if found:
                live.append(found[0])
        counters = (allocator.allocated, allocator.reserved, allocator.peak_reserved)
        results.append((*counters, allocator.retries, allocator.ooms))
    return results


@given(STEPS)
@settings(max_examples=400, deadline=None)
def test_the_allocator_agrees_with_the_naive_one(steps: Steps) -> None:
    assert run(steps, lambda *_: None) == run_naively(steps)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_invariants_hold_after_every_call(steps: Steps) -> None:
    assert run(steps, check) == run(steps, lambda *_: None)


BUSY: Requests = [
    *[("malloc", size, 0) for size in (3 * MIB, 4 * MIB, 5 * MIB, 700, 1300, 30 * MIB, 12 * MIB)],
    *[("free", 1, 0)] * 5,
    *[("malloc", size, 0) for size in (2 * MIB, 600, 11 * MIB)],
]


class Unmerged(CachingAllocator):
    """Leaves what is freed beside its free neighbours."""

    def free(self, block: MemoryBlock) -> None:
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.allocated, block.requested = False, 0
        block.pool.free.append((block.size, block.address, block))
        block.pool.free.sort(key=lambda entry: entry[:2])


class TooSmall(CachingAllocator):
    """Hands out blocks that lack their last bytes."""

    def malloc(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        block = super().malloc(nbytes, stream)
        if block.size > 512:
            block.pool.add(block.split(block.size - 512))
            self.allocated_bytes -= 512
        return block


class Uncounted(CachingAllocator):
    """Still counts what it gave back to the device."""

    def empty_cache(self) -> None:
        reserved_bytes = self.reserved_bytes
        super().empty_cache()
        self.reserved_bytes = reserved_bytes


@pytest.mark.parametrize("broken", [Unmerged, TooSmall, Uncounted])
def test_the_invariants_fail_on_a_broken_allocator(broken: type[CachingAllocator]) -> None:
    steps: Steps = (AllocatorSettings(), None, [*BUSY, ("empty", 0, 0)])
    run(steps, check)
    with pytest.raises(AssertionError):
        run(steps, check, broken)


def test_the_comparison_fails_on_another_fit() -> None:
    class Worst(CachingAllocator):
        """Takes the largest free block that fits."""

        def malloc(self, nbytes: int, stream: int = 0) -> MemoryBlock:
            fits = [block.size for pool in self.pools.values() for _, _, block in pool.free if block.size >= nbytes]
            return super().malloc(max([nbytes, *fits]), stream)

    steps: Steps = (AllocatorSettings(), None, BUSY)
    assert run(steps, lambda *_: None) == run_naively(steps) != run(steps, lambda *_: None, Worst)
