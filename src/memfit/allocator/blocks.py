"""Blocks of device memory, and the pools of free blocks of the caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """A part of a segment: in use, free, or (in an expandable segment only) unmapped.

    Attributes:
        size: Its bytes; PyTorch's allocated bytes are the sum over blocks in use.
        requested: Requested bytes, at most `size`; 0 unless in use.
        mapped: Whether its addresses are mapped to memory.
        freed_at: The allocator's count of lookups when it was freed.
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
        """Whether its segment has other blocks."""
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Shrink to the first `size` bytes, and return the remainder as a new block after this one."""
        remainder = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
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

    def through_end(self) -> Iterator[Block]:
        """Yield this block and the later ones of its segment."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next


class Pool:
    """The free blocks of one stream, small or large.

    Attributes:
        small: Whether it serves requests of up to 1 MiB.
        stream: The stream of its blocks.
        page_bytes: Page size by which an expandable segment grows.
        free: Free mapped blocks, sorted by size and address.
        unmapped: Unmapped blocks, sorted by address.
    """

    __slots__ = ("free", "page_bytes", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, page_bytes: int) -> None:
        self.small = small
        self.stream = stream
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> Block:
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

    def remove(self, block: Block) -> None:
        """Remove a block from its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def first_of_size(self, size: int) -> int:
        """Return the index in `free` of the first block of at least this size."""
        return bisect_left(self.free, (size,))
