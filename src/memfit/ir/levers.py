"""Levers: the settings that a plan chooses among, and their numerics classes.

Without NumPy: options of the command line are made of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from memfit.errors import PlanError
from memfit.ir import codec
from memfit.ir.codec import Shown

Precision = Literal["32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true"]
CompilerLever = Literal["none", "inductor", "inductor-channels-last"]
OptimizerLever = Literal["as-is", "fused", "adamw-8bit", "adamw-4bit", "adafactor"]
UpdateTime = Literal["after", "in-backward"]
StatePlace = Literal["on-device", "offloaded"]
UpdateSetting = Literal["as-is", "fused", "adamw-8bit", "adamw-4bit", "adafactor", "in-backward", "offloaded"]
"""A way of updating parameters that may be tried: values of `Levers.optimizer`, `.update` and `.optimizer_state`."""
Numerics = Literal["exact", "reordered", "reduced", "changed"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
"""Numerics classes, from the strictest to the freest."""
Mode = Literal["ddp", "zero1", "zero2", "zero3"]
MODES: tuple[Mode, ...] = get_args(Mode)
Reduces = Literal["each", "last"]
Quantizer = Literal["nf4", "int8"]
_MIB = 2**20
Keep = tuple[str, ...]
"""Operators whose outputs a region keeps, each as "overload#occurrence" within one call of the region."""
OTHER_DRAWS = "dropout masks of "
"""The beginning of a plan's note that its step draws other random numbers than the plain one."""


def allows(allowed: Numerics, used: Numerics) -> bool:
    """Tell whether a class that is used is no freer than the one that is allowed."""
    return NUMERICS.index(used) <= NUMERICS.index(allowed)


class Region(Shown, frozen=True, forbid_unknown_fields=True):
    """Modules whose activations are recomputed together.

    Attributes:
        modules: FQNs in the model: one, or several that are called one after the other.
        keep: Operators whose outputs are kept nevertheless, as "overload#occurrence" within one call.
        offload: Whether the tensors kept for the backward pass, arguments and outputs in `keep`, wait in host memory.
        prefetch: The FQN of a module called later by the same parent: when its backward pass starts, the tensors are
            copied back. "" to copy them back when the region is recomputed, which then waits for them.
    """

    modules: tuple[str, ...]
    keep: Keep = ()
    offload: bool = False
    prefetch: str = ""


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


class ChunkedLoss(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The loss of a few rows of logits at a time: the logits are never whole in memory.

    Attributes:
        head: FQN of the `nn.Linear` that computes the logits, or of the convolution over single positions.
        rows: Rows of logits in memory at a time (> 0): tokens, pixels or frames. A CTC loss takes whole samples, at
            least one.
        others: Whether the same is done with the heads of models that only the loss function refers to, as a frozen
            reference: each such layer with as many outputs.
    """

    head: str
    rows: int
    others: bool = False


class Tiles(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token-wise modules that are computed a few tokens at a time, in the forward and in the backward pass.

    Attributes:
        modules: FQNs of the modules, none within another.
        tokens: Tokens in a tile (> 0), counted over all samples of a microbatch.
    """

    modules: tuple[str, ...]
    tokens: int


class FrozenWeights(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bits of matrices that do not train.

    Attributes:
        quantizer: "nf4" for 4 bits a number, whose scales are quantised too, or "int8" for 8 bits, by blocks.
        kept: FQNs of `nn.Linear` that stay as they are, as the one that makes the logits.
    """

    quantizer: Quantizer
    kept: tuple[str, ...] = ()


class HostWeights(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights that don't train and wait in host memory, on the device while their module runs.

    Attributes:
        modules: FQNs of the modules, none within another, in the order in which they run.
        host_bytes: Pinned host memory that their weights take.
    """

    modules: tuple[str, ...]
    host_bytes: int


class Levers(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a plan.

    Attributes:
        precision: Precision of the forward pass and of its gradients.
        microbatch_size: Samples in one forward and backward pass; gradients are accumulated over them.
        regions: Modules to checkpoint. A region inside another is checkpointed again while the outer one is recomputed.
        chunked_loss: Chunks of the loss; None computes the loss whole.
        lean: FQNs of normalisations, activations and dropouts that recompute their outputs in the backward pass; *
            matches anything.
        optimizer: The optimizer that updates the parameters: "as-is" the user's, "fused" the user's by its fused step,
            "adamw-8bit", "adamw-4bit" or "adafactor" these, with less state.
        compiler: The compiler of the model and the loss: "none", "inductor" (`torch.compile`), or
            "inductor-channels-last", with the channels of convolutions last. The compiled code then recomputes regions;
            their names are the module calls of its graphs.
        sharding: How ranks share the step; None for one process. With ranks, `microbatch_size` is of one rank's
            samples.
        tiles: Modules that are computed a few tokens at a time; None computes all whole.
        frozen_weights: The bits of matrices that do not train; None for as many as they have.
        float8: FQNs of `nn.Linear` whose products are in float8; * matches anything.
        own_checkpointing: The model's own gradient checkpointing, of transformers: "as-is", or "off".
        allocator: The settings of the GPU's allocator: "as-is", or with "expandable-segments".
        update: When each parameter is updated: "after" the backward pass, or "in-backward" as soon as its gradient is
            computed, which is then freed.
        optimizer_state: Where the optimizer's state is between updates: "on-device", or "offloaded" to the host's
            memory.
        host_weights: Modules whose frozen weights wait in host memory; None for all weights on the device.

    Raises:
        PlanError: `optimizer` has a value that another field has now.
    """

    precision: Precision = "32-true"
    microbatch_size: int
    regions: tuple[Region, ...] = ()
    chunked_loss: ChunkedLoss | None = None
    lean: tuple[str, ...] = ()
    optimizer: OptimizerLever = "as-is"
    compiler: CompilerLever = "none"
    sharding: Sharding | None = None
    tiles: Tiles | None = None
    frozen_weights: FrozenWeights | None = None
    float8: tuple[str, ...] = ()
    own_checkpointing: Literal["as-is", "off"] = "as-is"
    allocator: Literal["as-is", "expandable-segments"] = "as-is"
    update: UpdateTime = "after"
    optimizer_state: StatePlace = "on-device"
    host_weights: HostWeights | None = None

    def __post_init__(self) -> None:
        """Refuse an earlier value, which would be left out silently."""
        if advice := _MOVED.get(self.optimizer):
            raise PlanError(f"levers.optimizer={self.optimizer!r} is a setting of its own: {advice}")


_MOVED = {
    "in-backward": "set levers.update to 'in-backward', and levers.optimizer to 'as-is'",
    "offloaded": "set levers.optimizer_state to 'offloaded', and levers.optimizer to 'as-is'",
}
"""Advice for values that `Levers.optimizer` had before its settings combined."""
for _value, _advice in _MOVED.items():
    codec.advise(f"Invalid enum value '{_value}'", _advice)


class LeverUse(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lever that a plan uses, in words: reports show it without knowing the lever.

    Attributes:
        name: Name of the lever ("microbatches").
        setting: Its setting ("4 of 16 samples, 4 microbatches").
        brief: The same, for a table of many plans ("microbatch 4").
        numerics: Its numerics class.
        recomputes: Whether it runs modules again in the backward pass.
    """

    name: str
    setting: str
    brief: str
    numerics: Numerics
    recomputes: bool = False


def uses_text(uses: Iterable[LeverUse]) -> str:
    """Return levers that are used in a few words, "plain" for none."""
    return ", ".join(use.brief for use in uses) or "plain"


def freest(uses: Iterable[LeverUse]) -> Numerics:
    """Return the freest class of the levers that are used; "exact" where there are none."""
    return max((use.numerics for use in uses), key=NUMERICS.index, default="exact")


def levers_key(levers: Levers) -> str:
    """Return a short text that other levers would hardly have."""
    return hashlib.sha256(msgspec.json.encode(levers)).hexdigest()[:16]
