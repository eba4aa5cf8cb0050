"""Allocation events of a step, and their replay in the simulated caching allocator."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from memfit.allocator.caching_allocator import Block, CachingAllocator
from memfit.allocator.settings import AllocatorSettings
from memfit.errors import SimulatedOutOfMemoryError


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


class AllocatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of the caching allocator over a sequence of events.

    Attributes:
        peak_allocated_bytes: Equivalent of `torch.cuda.max_memory_allocated`.
        peak_reserved_bytes: Equivalent of `torch.cuda.max_memory_reserved`.
        peak_requested_bytes: Equivalent of "requested_bytes.all.peak" of `torch.cuda.memory_stats`.
        peak_allocated_event: Index of the first event at the peak of allocated bytes; None without events.
        peak_reserved_event: Index of the first event at the peak of reserved bytes; None without events.
        end_allocated_bytes: Allocated bytes after the last event.
        end_reserved_bytes: Reserved bytes after the last event.
        num_alloc_retries: Number of times that the cache was released and the allocation retried.
        num_ooms: 1 if a request failed, which ends the replay; else 0.
        oom: The event that failed.
        allocated_bytes: Allocated bytes after each event, with `history`.
        reserved_bytes: Reserved bytes after each event, with `history`.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_event: int | None
    peak_reserved_event: int | None
    end_allocated_bytes: int
    end_reserved_bytes: int
    num_alloc_retries: int
    num_ooms: int
    oom: AllocationEvent | None = None
    allocated_bytes: list[int] = []
    reserved_bytes: list[int] = []

    @property
    def oom_point(self) -> int | None:
        """The point of the event that failed."""
        return None if self.oom is None else self.oom.point


class LiveStorages:
    """The storages alive in a simulated allocator."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}

    def apply(self, event: AllocationEvent) -> None:
        """Apply an event: allocate or free its storage.

        Raises:
            SimulatedOutOfMemoryError: The device is full.
            ValueError: A storage is allocated twice, or freed while not allocated.
        """
        if event.nbytes == 0:
            return
        if not event.alloc:
            block = self.blocks.pop(event.storage, None)
            if block is None:
                raise ValueError(f"storage {event.storage} is freed at point {event.point}, but is not allocated")
            self.allocator.free(block)
        elif event.storage in self.blocks:
            raise ValueError(f"storage {event.storage} is allocated at point {event.point}, but is allocated already")
        else:
            self.blocks[event.storage] = self.allocator.malloc(event.nbytes, event.stream)


def replay(
    events: Iterable[AllocationEvent],
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    total_bytes: int | None = None,
    history: bool = False,
    until_reserved_bytes: float = math.inf,
) -> AllocatorReport:
    """Return the caching allocator's statistics over events. Running out of memory is reported, not raised.

    Args:
        capacity_bytes: Most bytes that the device gives; None for no limit.
        total_bytes: The device's memory, of which `settings.memory_fraction` is a share;
            `capacity_bytes` by default.
        history: Whether to report allocated and reserved bytes after each event.
        until_reserved_bytes: The replay ends where more are reserved, and the report is of what came before.

    Raises:
        ValueError: A storage is allocated twice, or freed while not allocated.
    """
    allocator = CachingAllocator(settings, capacity_bytes, total_bytes=total_bytes)
    live = LiveStorages(allocator)
    allocated: list[int] = []
    reserved: list[int] = []
    oom = None
    for event in events:
        try:
            live.apply(event)
        except SimulatedOutOfMemoryError:
            oom = event
            break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
        if allocator.reserved_bytes > until_reserved_bytes:
            break
    return AllocatorReport(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_event=allocated.index(max(allocated)) if allocated else None,
        peak_reserved_event=reserved.index(max(reserved)) if reserved else None,
        end_allocated_bytes=allocator.allocated_bytes,
        end_reserved_bytes=allocator.reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
        num_ooms=allocator.num_ooms,
        oom=oom,
        allocated_bytes=allocated if history else [],
        reserved_bytes=reserved if history else [],
    )
