"""A device that steps run on, or are predicted for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memfit.ir.display import Shown, ShownList
from memfit.ir.settings import AllocatorSettings

Vendor = Literal["nvidia", "amd", "intel", "apple", "other", "cpu"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Figure = Annotated[float, msgspec.Meta(ge=0)]

_CARDS_PER_NODE = 8


class Device(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device, with the figures that predictions need. Rates are the vendor's peaks, without structured sparsity.

    For a probed machine they are the rates that PyTorch reached there.

    Attributes:
        name: Name for `device=`.
        kind: PyTorch's device type; "cuda" also for ROCm builds of PyTorch. The catalogue has "cpu" and "cuda"; an
            accelerator that is here may be of any kind.
        description: Description for people.
        memory_bytes: Total memory.
        usable_bytes: Memory that PyTorch's allocator can take: without the driver's share and the context
            (`context_bytes`), and on this machine without other programs' memory.
        cores: Streaming multiprocessors or compute units; threads that PyTorch uses on a CPU.
        products: Its names in PyTorch, or in /proc/cpuinfo.
        bandwidth_bytes_per_second: Bandwidth of its memory, read and write together.
        cache_bytes: Its last-level cache (L2; Infinity Cache on CDNA 3).
        matrix_flops: Peak rate of matrix units that accumulate in float32, by dtype name ("tf32", "bfloat16",
            "float16", "float8", "float64", and "float32" where they multiply it as it is, as on CDNA);
            absent where the device has no such unit. For a probed machine, the rate of `torch.mm`.
        float32_accumulation_share: What accumulation in float32 leaves of the matrix units' full rate: half on GeForce
            cards, which `matrix_flops` has already lost; None where it is the full rate.
        vector_flops: Peak rate without matrix units, by dtype name ("float32", "float16", ...).
        capability: CUDA compute capability, None for others.
        link_bytes_per_second: Bandwidth between host and device, in one direction.
        peer_bytes_per_second: Bandwidth from one such card to the others of its node, in one direction; 0 where they
            have nothing faster than `link_bytes_per_second`.
        node_bytes_per_second: Bandwidth from one such card to other nodes, in one direction, in its vendor's own
            servers; 0 where there are none.
        launch_seconds: Shortest time from one eager operator to the next.
        context_bytes: Memory of the context and the loaded modules, outside the allocator.
        cublas_workspace_bytes: Workspace of each cuBLAS handle, inside the allocator.
        allocator: Default settings of the caching allocator.
        sources: The source of each figure, by attribute name.
    """

    name: str
    kind: str
    vendor: Vendor
    description: str
    memory_bytes: Count
    usable_bytes: Bytes
    cores: Count
    products: tuple[str, ...] = ()
    bandwidth_bytes_per_second: Figure = 0.0
    cache_bytes: Bytes = 0
    matrix_flops: dict[str, Figure] = {}
    float32_accumulation_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    vector_flops: dict[str, Figure] = {}
    capability: tuple[int, int] | None = None
    link_bytes_per_second: Figure = 0.0
    peer_bytes_per_second: Figure = 0.0
    node_bytes_per_second: Figure = 0.0
    launch_seconds: Figure = 0.0
    context_bytes: Bytes = 0
    cublas_workspace_bytes: Bytes = 0
    allocator: AllocatorSettings = AllocatorSettings()
    sources: dict[str, str] = {}

    @property
    def cards_per_node(self) -> int:
        """Cards of one node, in servers as most are sold."""
        return _CARDS_PER_NODE

    @property
    def is_here(self) -> bool:
        """Whether it is the CPU or an accelerator of this machine ("cuda:0"), and not one of the catalogue."""
        return self.name == "cpu" or ":" in self.name


class Devices(ShownList[Device]):
    """Devices: a list, shown as a table."""
