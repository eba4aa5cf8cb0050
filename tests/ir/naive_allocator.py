"""The caching allocator again, written from its rules without regard to speed, and checks on the fast one.

Here a segment knows only which bytes are in use and which of its pages have memory. Everything else (free blocks, their
neighbours, which of them could grow) is found again at each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.ir import AllocatorSettings, CachingAllocator, MemoryBlock

MIB = 2**20
FIRST_ADDRESS = 0x7000_0000_0000


@dataclass
class Segment:
    address: int
    size: int
    small: bool
    stream: int
    page: int
    pages: set[int]
    used: dict[int, int] = field(default_factory=dict)

    def runs(self) -> list[tuple[str, int, int]]:
        """Return what fills the segment, in order: ("used", "free" or "hole", address, size)."""
        edges = [self.address, self.address + self.size]
        for start, size in self.used.items():
            edges += [start, start + size]
        for page in self.pages:
            edges += [self.address + page * self.page, self.address + (page + 1) * self.page]
        edges = sorted(set(edges))
        result: list[tuple[str, int, int]] = []
        for start, end in zip(edges, edges[1:], strict=False):
            inside = any(a <= start < a + n for a, n in self.used.items())
            has_memory = (start - self.address) // self.page in self.pages
            kind = "used" if inside else "free" if has_memory else "hole"
            last = result[-1] if result else None
            if last and last[0] == kind and (kind != "used" or start not in self.used):
                result[-1] = (kind, last[1], last[2] + end - start)
            else:
                result.append((kind, start, end - start))
        return result


class NaiveAllocator:
    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings, self.capacity = settings, capacity
        self.segments: list[Segment] = []
        self.requests: dict[int, int] = {}
        self.next_address = FIRST_ADDRESS
        self.peak_reserved = self.retries = self.ooms = self.lookups = 0
        self.free_since: dict[tuple[int, int], int] = {}

    @property
    def reserved(self) -> int:
        return sum(len(s.pages) * s.page for s in self.segments)

    @property
    def allocated(self) -> int:
        return sum(sum(s.used.values()) for s in self.segments)

    def rounded(self, n: int) -> int:
        divisions = self.settings.roundup_power2_divisions
        if not isinstance(divisions, int):
            interval = 0
            while interval < 15 and n >= 2 ** (interval + 1) * MIB:
                interval += 1
            divisions = divisions[interval]
        if divisions > 1 and n > 512 * divisions:
            power = 512
            while power * 2 <= n:
                power *= 2
            total = power
            while total < n:
                total += power // divisions
            return total
        return (n + 511) // 512 * 512

    def malloc(self, n: int, stream: int) -> tuple[int, int] | None:
        """Return address and size, or None when there is no room."""
        size = self.rounded(n)
        small = size <= MIB
        self.lookups += not small
        found = self.best_fit(size, small, stream)
        if found is None:
            found = self.from_device(size, small, stream)
        if found is None:
            self.ooms += 1
            return None
        segment, address, available = found
        rest = available - size
        limit = self.settings.max_split_bytes
        if small or self.settings.expandable_segments:
            taken = size if rest >= 512 else available
        else:
            taken = size if rest > MIB and (limit is None or size < limit) else available
        segment.used[address] = taken
        self.requests[address] = n
        self.note_free()
        return address, taken

    def free(self, address: int) -> None:
        for segment in self.segments:
            segment.used.pop(address, None)
        del self.requests[address]
        self.note_free()

    def free_blocks(self, small: bool, stream: int | None) -> list[tuple[int, int, Segment, int]]:
        """Return (size, address, segment, hole behind it), by size and then by address."""
        result = []
        for segment in self.segments:
            if segment.small != small or stream not in (None, segment.stream):
                continue
            runs = [*segment.runs(), ("end", 0, 0)]
            for (kind, address, size), after in zip(runs, runs[1:], strict=False):
                if kind == "free":
                    result.append((size, address, segment, after[2] if after[0] == "hole" else 0))
        return sorted(result, key=lambda r: (r[2].stream, r[0], r[1]))

    def note_free(self) -> None:
        now = {(a, n) for small in (True, False) for n, a, _, _ in self.free_blocks(small, None)}
        self.free_since = {key: self.free_since.get(key, self.lookups) for key in now}

    def best_fit(self, size: int, small: bool, stream: int) -> tuple[Segment, int, int] | None:
        fitting = [block for block in self.free_blocks(small, stream) if block[0] >= size]
        if not fitting:
            return None
        best = fitting[0]
        if self.settings.expandable_segments:
            for other in fitting[1:]:
                if other[0] + other[3] >= best[0] + best[3]:
                    break
                best = other
        limit = self.settings.max_split_bytes
        if limit is not None:
            if size < limit and best[0] >= limit:
                return None
            slack = self.settings.max_non_split_rounding_bytes or self.settings.large_segment_bytes
            if size >= limit and best[0] >= size + slack:
                return None
        return best[2], best[1], best[0]

    def from_device(self, size: int, small: bool, stream: int) -> tuple[Segment, int, int] | None:
        self.collect_garbage()
        found = self.grow(size, small, stream)
        if found is None and self.release_oversize(size, small, stream):
            found = self.grow(size, small, stream)
        if found is None:
            self.release_all()
            self.retries += 1
            found = self.grow(size, small, stream)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return found

    def fits(self, n: int) -> bool:
        return self.capacity is None or self.reserved + n <= self.capacity

    def allowed(self) -> int | None:
        if self.settings.memory_fraction == 1 or self.capacity is None:
            return None
        return int(self.settings.memory_fraction * self.capacity)

    def grow(self, size: int, small: bool, stream: int) -> tuple[Segment, int, int] | None:
        page = 2 * MIB if small else self.settings.large_segment_bytes
        segment_size = page if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        allowed = self.allowed()
        if allowed is not None and self.reserved + segment_size > allowed:
            return None
        if self.settings.expandable_segments:
            return self.expand(size, small, stream, page)
        if not self.fits(segment_size):
            return None
        segment = self.new_segment(segment_size, small, stream, segment_size, {0}, 2 * MIB)
        return segment, segment.address, segment_size

    def new_segment(self, size: int, small: bool, stream: int, page: int, pages: set[int], align: int) -> Segment:
        address = (self.next_address + align - 1) // align * align
        self.next_address = address + size
        self.segments.append(Segment(address, size, small, stream, page, pages))
        return self.segments[-1]

    def expand(self, size: int, small: bool, stream: int, page: int) -> tuple[Segment, int, int] | None:
        place = self.room(size, small, stream)
        if place is None:
            total = self.capacity or 2**40
            pages = -(-(total + total // 8) // page)
            segment = self.new_segment(pages * page, small, stream, page, set(), page)
            place = segment, segment.address
        segment, start = place
        while True:
            at = [i for i, (kind, a, n) in enumerate(segment.runs()) if kind == "free" and a <= start < a + n]
            runs = segment.runs()
            have = runs[at[0]][2] if at else 0
            if have >= size:
                _, address, have = runs[at[0]]
                return segment, address, have
            hole = runs[at[0] + 1] if at else next(r for r in runs if r[1] == start)
            assert hole[0] == "hole"
            count = -(-min(size - have, hole[2]) // page)
            if not self.fits(count * page):
                return None
            first = (hole[1] - segment.address) // page
            segment.pages |= set(range(first, first + count))
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            self.note_free()

    def room(self, size: int, small: bool, stream: int) -> tuple[Segment, int] | None:
        """Return the lowest place that is a hole, or free with a hole behind it, with room for the request."""
        for segment in sorted(self.segments, key=lambda s: s.address):
            if (segment.small, segment.stream) != (small, stream):
                continue
            runs = segment.runs()
            for i, (kind, _, _) in enumerate(runs):
                if kind != "hole":
                    continue
                first = i - 1 if i and runs[i - 1][0] == "free" else i
                total = 0
                for kind, _, n in runs[first:]:
                    if kind == "used":
                        break
                    total += n
                if total >= size:
                    return segment, runs[first][1]
        return None

    def whole(self) -> list[Segment]:
        """Return the segments of which nothing is in use, where segments are fixed."""
        return [s for s in self.segments if not s.used and not self.settings.expandable_segments]

    def collect_garbage(self) -> None:
        allowed = self.allowed()
        if allowed is None or not self.settings.garbage_collection_threshold:
            return
        goal = int(self.settings.garbage_collection_threshold * allowed)
        while self.reserved > goal:
            ages = {s.address: self.lookups - self.free_since[s.address, s.size] for s in self.whole() if not s.small}
            if not ages:
                return
            mean = sum(ages.values()) / len(ages)
            self.segments = [s for s in self.segments if ages.get(s.address, -1) < mean]
        self.note_free()

    def release_oversize(self, size: int, small: bool, stream: int) -> bool:
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        goal = max(size, limit)
        unused = sorted(
            (s for s in self.whole() if (s.small, s.stream) == (small, stream) and s.size >= limit),
            key=lambda s: (s.size, s.address),
        )
        enough = [s for s in unused if s.size >= goal]
        if enough:
            self.segments.remove(enough[0])
            return True
        released = 0
        for segment in reversed(unused):
            if released >= goal:
                break
            released += segment.size
            self.segments.remove(segment)
        self.note_free()
        return released >= goal

    def release_all(self) -> None:
        gone = {s.address for s in self.whole()}
        self.segments = [s for s in self.segments if s.address not in gone]
        if self.settings.expandable_segments:
            for segment in self.segments:
                had = bool(segment.pages)
                busy = {
                    page
                    for a, n in segment.used.items()
                    for page in range(
                        (a - segment.address) // segment.page, (a + n - 1 - segment.address) // segment.page + 1
                    )
                }
                segment.pages &= busy
                if had and not segment.pages:
                    gone.add(segment.address)
            self.segments = [s for s in self.segments if s.address not in gone]
        self.note_free()


def check(allocator: CachingAllocator, live: list[MemoryBlock]) -> None:
    """Hold an allocator to what is true of it after every call."""
    settings = allocator.settings
    pools = list(allocator.pools.values())
    listed = {id(pool): [b for _, _, b in pool.free] + [b for _, b in pool.unmapped] for pool in pools}
    seen: list[MemoryBlock] = []
    end = 0
    for address, head in sorted(allocator.segments.items()):
        assert head.prev is None and head.address == address >= end, "segments overlap"
        before = None
        end = address
        for block in head.through_end():
            assert block.prev is before and block.address == end and block.size > 0, "blocks do not tile the segment"
            same = before is not None and not before.allocated and not block.allocated
            assert not (same and before.mapped == block.mapped), "two free neighbours were not merged"
            assert block.allocated or block in listed[id(block.pool)], "a free block is on no list"
            assert block.mapped or not block.allocated, "a block in use has no memory"
            seen.append(block)
            before, end = block, block.address + block.size
    free = [block for block in seen if not block.allocated]
    assert sum(len(blocks) for blocks in listed.values()) == len(free), "a list holds what is not free"
    for pool in pools:
        assert [(n, a) for n, a, _ in pool.free] == sorted((b.size, b.address) for _, _, b in pool.free), "free list"
        assert [a for a, _ in pool.unmapped] == sorted(b.address for _, b in pool.unmapped), "unmapped list"
    assert {id(b) for b in seen if b.allocated} == {id(b) for b in live}, "blocks in use are not those handed out"
    spans = sorted((b.address, b.address + b.size) for b in live)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "blocks in use overlap"
    assert all(b.size >= settings.rounded_bytes(b.requested) >= b.requested > 0 for b in live), "a block is too small"
    assert allocator.reserved_bytes == sum(b.size for b in seen if b.mapped), "reserved bytes"
    assert allocator.allocated_bytes == sum(b.size for b in live), "allocated bytes"
    assert allocator.requested_bytes == sum(b.requested for b in live), "requested bytes"
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes >= 0
    assert allocator.peak_reserved_bytes >= max(allocator.reserved_bytes, allocator.peak_allocated_bytes)
    assert allocator.capacity_bytes is None or allocator.peak_reserved_bytes <= allocator.capacity_bytes, "capacity"
