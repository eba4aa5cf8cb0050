"""Blocks of device memory, and the sorted lists of free ones that the caching allocator keeps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment only) without memory behind it.

    Attributes:
        address: Where it starts.
        size: Its bytes; a sum over blocks in use is what PyTorch calls allocated.
        requested: What was asked for, at most `size`; 0 unless in use.
        mapped: Whether memory is behind its addresses.
        prev: The block before it in the segment.
        next: The block after it in the segment.
        freed_at: The allocator's count of lookups when it became free.
    """

    __slots__ = ("address", "allocated", "freed_at", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.requested = 0
        self.allocated = False
        self.mapped = mapped
        self.prev: Block | None = None
        self.next: Block | None = None
        self.freed_at = 0

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Keep the first bytes, and return the rest as a new block after this one."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Take over the next block's bytes."""
        rest = self.next
        assert rest is not None
        self.size += rest.size
        self.next = rest.next
        if rest.next is not None:
            rest.next.prev = self

    def through_end(self) -> Iterator[Block]:
        """Yield this block and those after it in its segment."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next


class Pool:
    """The free blocks of one stream, small or large.

    Attributes:
        small: Whether it serves requests of up to 1 MiB.
        stream: The stream its blocks belong to.
        page_bytes: What an expandable segment grows by.
        free: Free blocks with memory, by size and then by address.
        unmapped: Blocks without memory, by address.
    """

    __slots__ = ("free", "page_bytes", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, page_bytes: int) -> None:
        self.small = small
        self.stream = stream
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> Block:
        """File a free or unmapped block, joined with neighbours of its own kind, and return what it became."""
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

    def remove(self, block: Block) -> None:
        """Take a block off its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def first_of_size(self, size: int) -> int:
        """Return where in `free` the blocks of at least this size start."""
        return bisect_left(self.free, (size,))
