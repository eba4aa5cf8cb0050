"""What a step allocates and frees, in order, and what the caching allocator makes of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memfit.errors import SimulatedOutOfMemoryError
from memfit.ir.allocator import AllocatorSettings, CachingAllocator
from memfit.ir.blocks import Block


class AllocationEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The birth or death of a storage on the device. A sequence of them is in execution order.

    Attributes:
        point: The operator it belongs to, counted from 0 in each step; -1 for what is there before.
        storage: Names the storage. A name may be used again after its death, as by the next step.
        nbytes: What was asked for; events of 0 bytes are passed over.
        alloc: Born, not dead.
        category: What it holds: one of `ir.timeline.TIMELINE_CATEGORIES`.
        label: What runs: "phase · module FQN · operator", as in `ir.timeline.Timeline.labels`.
        stream: The CUDA stream it is allocated on.
    """

    point: int
    storage: int
    nbytes: int
    alloc: bool
    category: str
    label: str
    stream: int = 0


class AllocatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the caching allocator would count over a sequence of events.

    Attributes:
        peak_allocated_bytes: As `torch.cuda.max_memory_allocated`.
        peak_reserved_bytes: As `torch.cuda.max_memory_reserved`.
        peak_requested_bytes: As "requested_bytes.all.peak" of `torch.cuda.memory_stats`.
        peak_allocated_event: The first event after which the most is allocated, by index; None without events.
        peak_reserved_event: Likewise for reserved.
        end_allocated_bytes: Allocated after the last event.
        end_reserved_bytes: Reserved after the last event.
        num_alloc_retries: Times that the cache was released to ask the device again.
        num_ooms: 1 where a request found no room, at which the replay ends; else 0.
        oom: The event that found no room.
        allocated_bytes: Allocated after each event, where asked for.
        reserved_bytes: Reserved after each event, where asked for.
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
        """The point of the event that found no room."""
        return None if self.oom is None else self.oom.point


class LiveStorages:
    """The storages alive in a simulated allocator."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}

    def apply(self, event: AllocationEvent) -> None:
        """Allocate or free.

        Raises:
            SimulatedOutOfMemoryError: The device has no room.
            ValueError: A storage is born alive or dies dead.
        """
        if event.nbytes == 0:
            return
        if not event.alloc:
            block = self.blocks.pop(event.storage, None)
            if block is None:
                raise ValueError(f"storage {event.storage} is freed at point {event.point}, and is not alive")
            self.allocator.free(block)
        elif event.storage in self.blocks:
            raise ValueError(f"storage {event.storage} is allocated at point {event.point}, and is alive already")
        else:
            self.blocks[event.storage] = self.allocator.malloc(event.nbytes, event.stream)


def replay(
    events: Iterable[AllocationEvent],
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    total_bytes: int | None = None,
    history: bool = False,
) -> AllocatorReport:
    """Return what the caching allocator would count. Running out of memory is reported, not raised.

    Args:
        events: In execution order.
        settings: As `PYTORCH_ALLOC_CONF` would set them.
        capacity_bytes: What the device gives at most; None for as much as is asked for.
        total_bytes: The device's memory, which `settings.memory_fraction` is a share of;
            `capacity_bytes` unless given.
        history: Also report allocated and reserved after each event.

    Raises:
        ValueError: A storage is born alive or dies dead.
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
