"""The CUDA caching allocator, simulated: its allocated and reserved bytes for a sequence of requests.

The rules are those of `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp` and of
`c10/core/AllocatorConfig.h`, torch 2.13. docs/internals/allocator.md lists them, and the omissions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from memfit.errors import SimulatedOutOfMemoryError
from memfit.foundations import format_bytes
from memfit.ir.device import (
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)

_FIRST_ADDRESS = 0x7000_0000_0000
_UNKNOWN_TOTAL_BYTES = 2**40
"""Memory assumed for an unknown device: more than any has."""

Tracer = Callable[[str, int, int, int], None]
"""Called with an action of PyTorch's memory history, an address, a size, and a stream."""


@dataclass(slots=True, eq=False, repr=False)
class MemoryBlock:
    """A part of a segment: in use, free, or (in an expandable segment only) unmapped.

    Attributes:
        size: Its bytes; PyTorch's allocated bytes are the sum over blocks in use.
        requested: Requested bytes, at most `size`; 0 unless in use.
        mapped: Whether its addresses are mapped to memory.
        freed_at: The allocator's count of lookups when it was freed.
    """

    pool: Pool
    address: int
    size: int
    mapped: bool = True
    requested: int = 0
    allocated: bool = False
    prev: MemoryBlock | None = None
    next: MemoryBlock | None = None
    freed_at: int = 0

    @property
    def is_split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def room_bytes(self) -> int:
        """The size that it could grow to within its expandable segment, where it is free."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)

    def split(self, size: int) -> MemoryBlock:
        """Shrink to the first `size` bytes, and return the remainder as a new block after this one."""
        remainder = MemoryBlock(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        remainder.prev, remainder.next = self, self.next
        if self.next is not None:
            self.next.prev = remainder
        self.next, self.size = remainder, size
        return remainder

    def absorb_next(self) -> None:
        """Merge the next block into this one."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        self.next = absorbed.next
        if absorbed.next is not None:
            absorbed.next.prev = self

    def through_end(self) -> Iterator[MemoryBlock]:
        """Yield this block and the later ones of its segment."""
        block: MemoryBlock | None = self
        while block is not None:
            yield block
            block = block.next


@dataclass(slots=True, eq=False, repr=False)
class Pool:
    """The free blocks of one stream, small or large.

    Attributes:
        small: Whether it serves requests of up to 1 MiB.
        stream: The stream of its blocks.
        page_bytes: Page size by which an expandable segment grows.
        free: Free mapped blocks, sorted by size and address.
        unmapped: Unmapped blocks, sorted by address.
    """

    small: bool
    stream: int
    page_bytes: int
    free: list[tuple[int, int, MemoryBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, MemoryBlock]] = field(default_factory=list)

    def add(self, block: MemoryBlock) -> MemoryBlock:
        """Merge a free or unmapped block with neighbours of its kind, add it to its list, and return it."""
        before, after = block.prev, block.next
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self.remove(after)
            block.absorb_next()
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self.remove(before)
            before.absorb_next()
            block = before
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))
        return block

    def remove(self, block: MemoryBlock) -> None:
        """Remove a block from its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class AllocationEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The allocation or free of a storage on the device. Sequences are in execution order.

    Attributes:
        point: Index of its operator in the step; -1 before the first step.
        storage: Number of the storage. A number may be reused after its free, as by the next step.
        nbytes: Requested bytes; events of 0 bytes are ignored.
        alloc: Whether it is allocated; else it is freed.
        category: Its category, one of `ir.timeline.TIMELINE_CATEGORIES`.
        label: The operator: "phase · module FQN · operator", as in `ir.timeline.Timeline.labels`.
        stream: The CUDA stream of the allocation.
    """

    point: int
    storage: int
    nbytes: int
    alloc: bool
    category: str
    label: str
    stream: int = 0


class CachingAllocator:
    """PyTorch's caching allocator of one CUDA device, without the device.

    Segments get increasing addresses, and none is reused.

    Args:
        settings: The settings of `PYTORCH_ALLOC_CONF`.
        capacity_bytes: Most bytes that the device gives; None for no limit.
        total_bytes: The device's memory, of which `memory_fraction` is a share; `capacity_bytes` by default.
        trace: Called at each action, in order.

    Attributes:
        allocated_bytes: Bytes of the blocks in use, rounding and unsplit remainders included.
        requested_bytes: Requested bytes of the blocks in use.
        reserved_bytes: Bytes of the segments taken from the device.
        num_alloc_retries: Number of times that the cache was released and the allocation retried.
        num_ooms: Number of requests that failed.
        segments: The first block of each segment, by address. An expandable segment includes unmapped blocks.
        blocks: The blocks of the storages alive, by their numbers, of events that were applied.
        pools: The free blocks, by whether they are small and by stream.
        oom: The event that failed, which ends a `replay`.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        *,
        total_bytes: int | None = None,
        trace: Tracer | None = None,
    ) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.segments: dict[int, MemoryBlock] = {}
        self.blocks: dict[int, MemoryBlock] = {}
        self.pools: dict[tuple[bool, int], Pool] = {}
        self.oom: AllocationEvent | None = None
        total = capacity_bytes if total_bytes is None else total_bytes
        limited = settings.memory_fraction < 1 and total is not None
        self._allowed_bytes = int(settings.memory_fraction * total) if limited and total is not None else None
        self._total_bytes = _UNKNOWN_TOTAL_BYTES if total is None else total
        self._trace: Tracer = trace or (lambda *_: None)
        self._next_address = _FIRST_ADDRESS
        self._lookups = 0

    def apply(self, event: AllocationEvent) -> None:
        """Allocate or free the storage of an event.

        Raises:
            SimulatedOutOfMemoryError: The device is full.
            ValueError: A storage is allocated twice, or freed while not allocated.
        """
        if event.nbytes == 0:
            return
        if event.alloc == (event.storage in self.blocks):
            verb, state = ("allocated", "is allocated already") if event.alloc else ("freed", "is not allocated")
            raise ValueError(f"storage {event.storage} is {verb} at point {event.point}, but {state}")
        if event.alloc:
            self.blocks[event.storage] = self.malloc(event.nbytes, event.stream)
        else:
            self.free(self.blocks.pop(event.storage))

    def malloc(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """Return a block for a request of at least one byte. (PyTorch does not call its allocator for zero bytes.)

        Raises:
            SimulatedOutOfMemoryError: Neither the cache nor the device has enough memory.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes} must be at least 1")
        size = self.settings.rounded_bytes(nbytes)
        key = size <= SMALL_BYTES, stream
        if key not in self.pools:
            self.pools[key] = Pool(*key, SMALL_SEGMENT_BYTES if key[0] else self.settings.large_segment_bytes)
        pool = self.pools[key]
        block = self._take_free(pool, size) or self._take_new(pool, size)
        if block is None:
            self.num_ooms += 1
            capacity = min(n for n in (self.capacity_bytes, self._allowed_bytes) if n is not None)
            self._trace("oom", capacity - self.reserved_bytes, size, stream)
            raise SimulatedOutOfMemoryError(
                f"the simulated device is full: {format_bytes(size)} requested, {format_bytes(self.allocated_bytes)} "
                f"allocated and {format_bytes(self.reserved_bytes)} reserved of capacity_bytes={capacity} "
                f"({format_bytes(capacity)}); lower the step's peak, or raise capacity_bytes=",
                requested_bytes=size,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                capacity_bytes=capacity,
            )
        block.allocated = True
        rest, most = block.size - size, self.settings.max_split_bytes
        if pool.small or self.settings.expandable_segments:
            is_split = rest >= MIN_BLOCK_BYTES
        else:
            is_split = rest > SMALL_BYTES and (most is None or size < most)
        if is_split:
            pool.add(block.split(size))
        block.requested = nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self._trace("alloc", block.address, nbytes, stream)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to the cache."""
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is not in use")
        self._trace("free_requested", block.address, block.requested, block.pool.stream)
        self._trace("free_completed", block.address, block.requested, block.pool.stream)
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.allocated = False
        block.requested = 0
        block.pool.add(block).freed_at = self._lookups

    def empty_cache(self) -> None:
        """Return free memory to the device: whole segments, or whole pages of expandable ones."""
        for key in sorted(self.pools):
            for _, _, block in list(self.pools[key].free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def _take_free(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Take the best fit: the smallest free block that is large enough, at the lowest address."""
        self._lookups += not pool.small
        free = pool.free
        i = bisect_left(pool.free, (size,))
        if i == len(free):
            return None
        if self.settings.expandable_segments:
            while i + 1 < len(free) and free[i + 1][2].room_bytes < free[i][2].room_bytes:
                i += 1
        block = free[i][2]
        most = self.settings.max_split_bytes
        if most is not None:
            if size < most <= block.size:
                return None
            slack = self.settings.max_non_split_rounding_bytes or self.settings.large_segment_bytes
            if size >= most and block.size >= size + slack:
                return None
        del free[i]
        return block

    def _take_new(self, pool: Pool, size: int) -> MemoryBlock | None:
        if self._allowed_bytes is not None and self.settings.garbage_collection_threshold:
            self._collect_garbage(self._allowed_bytes)
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: Pool, size: int) -> MemoryBlock | None:
        nbytes = self.settings.segment_bytes(size)
        if self._allowed_bytes is not None and self.reserved_bytes + nbytes > self._allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        if not self._reserve(nbytes):
            return None
        block = self._new_segment(pool, nbytes, ROUND_LARGE_BYTES)
        self._trace("segment_alloc", block.address, nbytes, pool.stream)
        return block

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: Pool, nbytes: int, alignment: int, *, mapped: bool = True) -> MemoryBlock:
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + nbytes
        block = self.segments[address] = MemoryBlock(pool, address, nbytes, mapped=mapped)
        return block

    def _release(self, block: MemoryBlock) -> None:
        block.pool.remove(block)
        del self.segments[block.address]
        self.reserved_bytes -= block.size
        self._trace("segment_free", block.address, block.size, block.pool.stream)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release one unused unsplittable block that is large enough, or else several, largest first."""
        most = self.settings.max_split_bytes
        if most is None or self.settings.expandable_segments:
            return False
        wanted = max(size, most)
        i = bisect_left(pool.free, (wanted,))
        if i < len(pool.free):
            self._release(pool.free[i][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= most:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self, allowed_bytes: int) -> None:
        """Release large segments that were unused for longer than the mean, until the threshold is met."""
        threshold = int(self.settings.garbage_collection_threshold * allowed_bytes)
        excess = self.reserved_bytes - threshold
        large = [self.pools[key] for key in sorted(self.pools) if not key[0]]
        unused = [block for pool in large for _, _, block in pool.free if not block.is_split]
        while excess > 0 and unused:
            mean = sum(self._lookups - block.freed_at for block in unused) / len(unused)
            old = [block for block in unused if self._lookups - block.freed_at >= mean]
            unused = [block for block in unused if self._lookups - block.freed_at < mean]
            for block in old:
                excess -= block.size
                self._release(block)

    def _expand(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Take a block at the lowest address of an expandable segment with room for it, mapping missing pages."""
        block = self._lowest_room(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None  # `_lowest_room` found enough consecutive free and unmapped blocks
            mapped = self._map(block.next, min(block.next.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _lowest_room(self, pool: Pool, size: int) -> MemoryBlock:
        for _, block in pool.unmapped:
            first = block.prev if block.prev is not None and not block.prev.allocated else block
            room = 0
            for each in first.through_end():
                if each.allocated or room >= size:
                    break
                room += each.size
            if room >= size:
                return first
        space = -(-(self._total_bytes + self._total_bytes // 8) // pool.page_bytes) * pool.page_bytes
        return pool.add(self._new_segment(pool, space, pool.page_bytes, mapped=False))

    def _map(self, block: MemoryBlock, nbytes: int) -> MemoryBlock | None:
        """Map the first pages of an unmapped block, and return the free block that contains them."""
        pool = block.pool
        nbytes = -(-nbytes // pool.page_bytes) * pool.page_bytes
        if not self._reserve(nbytes):
            return None
        self._trace("segment_map", block.address, nbytes, pool.stream)
        pool.remove(block)
        remainder = block.split(nbytes) if nbytes < block.size else None
        block.mapped = True
        if remainder is not None:
            pool.add(remainder)
        return pool.add(block)

    def _unmap(self, block: MemoryBlock) -> None:
        """Return the whole pages of a free block to the device."""
        pool, page = block.pool, block.pool.page_bytes
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        middle, first = block, None
        if start > block.address:
            first, middle = block, block.split(start - block.address)
        last = middle.split(end - start) if end - start < middle.size else None
        middle.mapped = False
        for part in (first, last):
            if part is not None:
                pool.add(part)
        middle = pool.add(middle)
        self.reserved_bytes -= end - start
        self._trace("segment_unmap", start, end - start, pool.stream)
        if not middle.is_split:
            pool.remove(middle)
            del self.segments[middle.address]


def replay(
    events: Iterable[AllocationEvent],
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    total_bytes: int | None = None,
    until_reserved_bytes: float = math.inf,
    trace: Tracer | None = None,
) -> CachingAllocator:
    """Return the caching allocator after events. Running out of memory ends them, and is not raised.

    Args:
        until_reserved_bytes: The replay ends where more are reserved, too.

    Raises:
        ValueError: A storage is allocated twice, or freed while not allocated.
    """
    allocator = CachingAllocator(settings, capacity_bytes, total_bytes=total_bytes, trace=trace)
    for event in events:
        try:
            allocator.apply(event)
        except SimulatedOutOfMemoryError:
            allocator.oom = event
            break
        if allocator.reserved_bytes > until_reserved_bytes:
            break
    return allocator
