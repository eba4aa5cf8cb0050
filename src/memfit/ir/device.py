"""A device that steps run on, or are predicted for."""

from __future__ import annotations

from typing import Literal

import msgspec

from memfit.ir.allocator import AllocatorSettings

Vendor = Literal["nvidia", "amd", "cpu"]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device, with the figures that predictions need. Rates are the vendor's peaks, without structured sparsity.

    Attributes:
        name: As `device=` takes it.
        kind: PyTorch's device type. ROCm builds of PyTorch call theirs "cuda" too.
        description: What it is.
        memory_bytes: What it has.
        usable_bytes: What PyTorch's allocator may take: without the driver's share and the context
            (`context_bytes`), and on the machine at hand without what others use.
        cores: Streaming multiprocessors or compute units; threads that PyTorch uses on a CPU.
        bandwidth_bytes_per_second: Of its memory, read and write together.
        cache_bytes: Its last-level cache (L2; Infinity Cache on CDNA 3).
        matrix_flops: Peak rate of matrix units, by dtype name ("tf32", "bfloat16", "float16",
            "float8", "float64"); absent where the device has no such unit.
        vector_flops: Peak rate without matrix units, by dtype name ("float32", "float16", ...).
        capability: CUDA compute capability, None for others.
        link_bytes_per_second: One direction between host and device.
        launch_seconds: The least time from one eager operator to the next.
        context_bytes: What the context and the loaded modules take outside the allocator.
        cublas_workspace_bytes: What each cuBLAS handle keeps in the allocator.
        allocator: What the caching allocator does unless told otherwise.
        sources: Where each figure comes from, by attribute name.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    vendor: Vendor
    description: str
    memory_bytes: int
    usable_bytes: int
    cores: int
    bandwidth_bytes_per_second: float = 0.0
    cache_bytes: int = 0
    matrix_flops: dict[str, float] = {}
    vector_flops: dict[str, float] = {}
    capability: tuple[int, int] | None = None
    link_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    context_bytes: int = 0
    cublas_workspace_bytes: int = 0
    allocator: AllocatorSettings = AllocatorSettings()
    sources: dict[str, str] = {}
