"""A device that steps run on, or are predicted for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memfit.ir.allocator import AllocatorSettings
from memfit.ir.display import Shown, ShownList

Vendor = Literal["nvidia", "amd", "cpu"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Figure = Annotated[float, msgspec.Meta(ge=0)]


class Device(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device, with the figures that predictions need. Rates are the vendor's peaks, without structured sparsity.

    Of a machine that was probed they are what PyTorch reached there.

    Attributes:
        name: As `device=` takes it.
        kind: PyTorch's device type. ROCm builds of PyTorch call theirs "cuda" too.
        description: What it is.
        memory_bytes: What it has.
        usable_bytes: What PyTorch's allocator may take: without the driver's share and the context
            (`context_bytes`), and on the machine at hand without what others use.
        cores: Streaming multiprocessors or compute units; threads that PyTorch uses on a CPU.
        products: The names that PyTorch, or /proc/cpuinfo, has for it.
        bandwidth_bytes_per_second: Of its memory, read and write together.
        cache_bytes: Its last-level cache (L2; Infinity Cache on CDNA 3).
        matrix_flops: Peak rate of matrix units that accumulate in float32, by dtype name ("tf32", "bfloat16",
            "float16", "float8", "float64", and "float32" where they multiply it as it is, as on CDNA);
            absent where the device has no such unit. Of a probed machine, what `torch.mm` reached.
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
    memory_bytes: Count
    usable_bytes: Bytes
    cores: Count
    products: tuple[str, ...] = ()
    bandwidth_bytes_per_second: Figure = 0.0
    cache_bytes: Bytes = 0
    matrix_flops: dict[str, Figure] = {}
    vector_flops: dict[str, Figure] = {}
    capability: tuple[int, int] | None = None
    link_bytes_per_second: Figure = 0.0
    launch_seconds: Figure = 0.0
    context_bytes: Bytes = 0
    cublas_workspace_bytes: Bytes = 0
    allocator: AllocatorSettings = AllocatorSettings()
    sources: dict[str, str] = {}


class Devices(ShownList[Device]):
    """Devices: a list, shown as a table."""
