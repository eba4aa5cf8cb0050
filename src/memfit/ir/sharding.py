"""The record of how ranks share a step."""

from __future__ import annotations

from typing import Literal, get_args

from memfit.ir.display import Shown

Mode = Literal["ddp", "zero1", "zero2", "zero3"]
MODES: tuple[Mode, ...] = get_args(Mode)
Reduces = Literal["each", "last"]
_MIB = 2**20


class Sharding(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ranks share a step, on PyTorch's own engines.

    Attributes:
        world_size: Number of ranks (> 0).
        mode: What is sharded among them: "ddp" nothing (`DistributedDataParallel`), "zero1" the optimizer's state
            (`ZeroRedundancyOptimizer`, on paper only), "zero2" everything, with parameters that stay gathered from the
            forward to the backward pass (`fully_shard(reshard_after_forward=False)`), "zero3" everything
            (`fully_shard`).
        units: For zero2 and zero3, FQNs of the modules that `fully_shard` is called on, besides the whole step. None:
            the repeated blocks (`sharding.groups.repeated_blocks`).
        kept: For zero3, the units that stay gathered all the same.
        replicas: Copies of what is sharded (> 0, divides `world_size`): hybrid sharding where above 1.
        reduces: Which microbatches' gradients are sent: "each", or only the "last", with all of them held until then.
        param_dtype: For zero2 and zero3, the dtype that parameters are gathered and computed with ("bfloat16",
            "float16"); None for their own.
        reduce_dtype: The dtype that gradients are sent in; None for `param_dtype`.
        offload: Whether shards, their gradients and their updates are in the host's memory.
        gradient_as_bucket_view: For ddp and zero1, the argument of DistributedDataParallel.
        bucket_cap_bytes: For ddp and zero1, the size from which a bucket is full.
        first_bucket_bytes: The same for the first bucket.
        shard_itemsize: On paper, bytes per element of the sharded parameters, where their dtype differs from the
            trace's: 4 for `param_dtype="bfloat16"`, with a trace of the model in bf16. None: as in the trace.
        reduce_itemsize: On paper, bytes per element of the gradients during reduction. None: as in the trace.
    """

    world_size: int
    mode: Mode
    units: tuple[str, ...] | None = None
    kept: tuple[str, ...] = ()
    replicas: int = 1
    reduces: Reduces = "each"
    param_dtype: Literal["bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    offload: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_bytes: int = 25 * _MIB
    first_bucket_bytes: int = _MIB
    shard_itemsize: int | None = None
    reduce_itemsize: int | None = None

    @property
    def shards(self) -> int:
        """Ranks among which one copy of the state is cut."""
        return self.world_size // self.replicas

    @property
    def is_fully_sharded(self) -> bool:
        """Whether `fully_shard` runs it."""
        return self.mode in ("zero2", "zero3")
