"""The CUDA caching allocator, simulated."""

from __future__ import annotations

import msgspec


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `PYTORCH_ALLOC_CONF` sets, with PyTorch's defaults.

    Attributes:
        expandable_segments: One growing segment for each pool instead of many fixed ones.
        roundup_power2_divisions: Steps between powers of two that requests are rounded up to; 0 for none.
        max_split_bytes: Blocks of at least this size are not split; None for no such limit.
        garbage_collection_threshold: Share of the memory allowed from which unused blocks are
            released before the device is asked for more; 0 for never.
        large_segment_bytes: The segment that serves requests above 1 MiB and under 10 MiB.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: int = 0
    max_split_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = 20 * 2**20
