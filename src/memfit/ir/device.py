"""A device that steps run on, or are predicted for, and the settings of its allocator (`PYTORCH_ALLOC_CONF`).

The rules of the settings are those of `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` of torch
2.13. The parser is stricter where PyTorch accepts meaningless values ("128abc", "-1", unknown keys).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from memfit.errors import AllocatorSettingsError
from memfit.foundations import format_bytes
from memfit.ir.codec import Shown, ShownList

MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
DEFAULT_LARGE_SEGMENT_BYTES = 20 * MIB
INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB, each with its own divisions; the last also serves larger requests."""

_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^:,\[\]]+)(?:,|$)")
_BYTES = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
}
_SHARES = {
    "garbage_collection_threshold": "garbage_collection_threshold",
    "per_process_memory_fraction": "memory_fraction",
}
_WITHOUT_EFFECT = {
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
}
"""Keys of 2.13 that change pinned host memory, locks or CUDA graphs, and no byte on the device."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of `PYTORCH_ALLOC_CONF`, with PyTorch's defaults.

    Attributes:
        expandable_segments: Whether each pool has one growing segment instead of many fixed ones.
        roundup_power2_divisions: Steps between powers of two that requests are rounded up to; 0 for none.
            16 numbers set it for requests from 1, 2, 4 ... 32768 MiB on; the first also serves smaller ones.
        max_split_bytes: Blocks of at least this size are not split; None for no such limit.
        max_non_split_rounding_bytes: A block that must not be split serves only requests with a remainder below this;
            None for `large_segment_bytes`.
        garbage_collection_threshold: Share of the allowed memory from which unused blocks are released before the
            device is asked for more; 0 for never. PyTorch uses it only where `memory_fraction` is below 1.
        large_segment_bytes: Size of the segments for requests above 1 MiB and under 10 MiB.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: int | tuple[int, ...] = 0
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES

    def __post_init__(self) -> None:
        large = self.large_segment_bytes
        sizes = {
            "large_segment_bytes": (large, MIN_LARGE_BYTES + MIB),
            "max_split_bytes": (self.max_split_bytes, large),
            "max_non_split_rounding_bytes": (self.max_non_split_rounding_bytes, large),
        }
        for name, (size, least) in sizes.items():
            if size is not None and (size % MIB or size < least):
                raise AllocatorSettingsError(
                    f"{name}={size} must be a whole number of MiB, and at least {format_bytes(least)}"
                )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise AllocatorSettingsError(
                f"garbage_collection_threshold={self.garbage_collection_threshold} must be at least 0 and below 1"
            )
        if not 0 < self.memory_fraction <= 1:
            raise AllocatorSettingsError(f"memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        divisions = self.divisions()
        if len(divisions) != INTERVALS or any(n and not _is_power_of_two(n) for n in divisions):
            raise AllocatorSettingsError(
                f"roundup_power2_divisions={self.roundup_power2_divisions} must be one number or {INTERVALS}, "
                "each a power of two, or 0 for none"
            )

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse a value of `PYTORCH_ALLOC_CONF`.

        Keys that change no byte on the device (pinned memory, locks, CUDA graphs) are ignored.

        Raises:
            AllocatorSettingsError: PyTorch would refuse or ignore a setting, or it is not simulated.
        """
        fields: dict[str, Any] = {}
        text, position = re.sub(r"\s", "", text), 0
        while position < len(text):
            match = _PAIR.match(text, position)
            if match is None:
                raise AllocatorSettingsError(
                    f"{text[position:]!r} in the allocator settings {text!r} is not key:value; "
                    "write them as 'expandable_segments:True,max_split_size_mb:128'"
                )
            fields |= _field(match[1], match[2])
            position = match.end()
        return cls(**fields)

    def conf(self) -> str:
        """Return the value of `PYTORCH_ALLOC_CONF` for these settings."""
        default = AllocatorSettings()
        sizes = {key: (getattr(self, name), getattr(default, name)) for key, name in _BYTES.items()}
        parts = [f"{key}:{size // MIB}" for key, (size, usual) in sizes.items() if size and size != usual]
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if any(self.divisions()):
            steps = self.roundup_power2_divisions
            each = "" if isinstance(steps, int) else ",".join(f"{2**i}:{n}" for i, n in enumerate(steps))
            parts.append(f"roundup_power2_divisions:{steps if isinstance(steps, int) else f'[{each}]'}")
        shares = {key: (getattr(self, name), getattr(default, name)) for key, name in _SHARES.items()}
        return ",".join([*parts, *(f"{key}:{share}" for key, (share, usual) in shares.items() if share != usual)])

    def divisions(self) -> tuple[int, ...]:
        """Return `roundup_power2_divisions` for each interval of sizes."""
        divisions = self.roundup_power2_divisions
        return (divisions,) * INTERVALS if isinstance(divisions, int) else divisions

    def rounded_bytes(self, nbytes: int) -> int:
        """Return the size that a request is rounded up to."""
        divisions = self.roundup_power2_divisions
        if divisions and nbytes >= MIN_BLOCK_BYTES:
            if not isinstance(divisions, int):
                divisions = divisions[min(max(nbytes.bit_length() - 1 - 20, 0), INTERVALS - 1)]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                step = (1 << nbytes.bit_length() - 1) // divisions
                return -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, size: int) -> int:
        """Return the size of a new segment for a rounded request."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _field(key: str, value: str) -> dict[str, Any]:
    """Return the field of `AllocatorSettings` for a setting, if any; refuse settings that are not simulated."""
    if key in _BYTES:
        return {_BYTES[key]: _number(key, value) * MIB}
    if key in _SHARES:
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", value):
            raise AllocatorSettingsError(f"{key}:{value} is not a number")
        if float(value) == 0:
            raise AllocatorSettingsError(f"{key}:{value} is not above 0; leave the key out instead")
        return {_SHARES[key]: float(value)}
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise AllocatorSettingsError(f"{key}:{value} is neither True nor False")
        return {key: value == "True"}
    if key == "roundup_power2_divisions":
        return {key: _divisions(key, value)}
    simulated = {"backend": "native", "throw_on_cudamalloc_oom": "False"}
    if key in simulated and value != simulated[key]:
        raise AllocatorSettingsError(f"{key}:{value} is not simulated: only {key}:{simulated[key]} is")
    if key not in simulated and key not in _WITHOUT_EFFECT:
        known = sorted({*_BYTES, *_SHARES, *simulated, "expandable_segments", "roundup_power2_divisions"})
        raise AllocatorSettingsError(f"{key!r} is not an allocator setting: use one of {', '.join(known)}")
    return {}


def _number(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise AllocatorSettingsError(f"{key}:{value} is not a whole number")
    return int(value)


def _divisions(key: str, value: str) -> int | tuple[int, ...]:
    """Parse divisions: one number for all sizes, or one for each interval as in "[256:1,512:2,>:4]".

    The first size also sets every interval below it, and ">" sets those above the last size, or above the first
    interval without any size.
    """
    if not value.startswith("["):
        divisions = _number(key, value)
        if divisions == 0:
            raise AllocatorSettingsError(f"PyTorch refuses {key}:0; leave the key out instead")
        return divisions
    result, last, first = [0] * INTERVALS, 0, True
    for pair in filter(None, value[1:-1].split(",")):
        size, _, number = pair.partition(":")
        divisions = _number(key, number)
        if divisions and not _is_power_of_two(divisions):  # even where a later pair sets the same interval
            raise AllocatorSettingsError(f"{key}:{value} has {divisions} steps, which is no power of two, nor 0")
        if size == ">":
            result[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        mebibytes = _number(key, size)
        if not _is_power_of_two(mebibytes):
            raise AllocatorSettingsError(f"{key}:{value} names {size} MiB, which is not a power of two")
        last = min(mebibytes.bit_length() - 1, INTERVALS - 1)
        if first:
            result[:last] = [divisions] * last
        result[last], first = divisions, False
    return tuple(result)


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


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
