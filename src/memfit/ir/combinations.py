"""What combines with what: the one table that the docs show and that plans are held against."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from memfit.errors import PlanError
from memfit.ir.plan import Levers, Numerics

MICROBATCHES = "microbatches"
CHECKPOINTING = "checkpointing"
OFFLOAD = "activation offload"
CHUNKED_LOSS = "chunked loss"
IN_BACKWARD = "optimizer in the backward pass"
COUPLING_LOSS = "a loss that couples the samples of a batch"
OFFLOADED = "optimizer states in host memory"
ADAMW_8BIT = "AdamW with 8-bit states"
ADAFACTOR = "Adafactor"
NOT_ADAMW = "an optimizer other than AdamW, or Adam without weight decay"
NO_BITSANDBYTES = "bitsandbytes not installed"
BATCH_NORM = "BatchNorm in training mode"
CLIPPING = "Workload.max_grad_norm"
SEVERAL_OPTIMIZERS = "several optimizers"
FOREIGN_OPTIMIZER = "an optimizer that is not of torch.optim"
COMPILED = "torch.compile"
HEAD_INSIDE = "a region around the head of the logits"
NO_UPDATES = "Workload.bf16_updates=None"
NO_TF32 = "a device without TF32"
NO_LINK = "a device without a link to the host"
JITTOR = "memfit.jittor"
ADAPTING = "a plan for each batch's shapes (`memfit.adapt`)"


class Refused(NamedTuple):
    """Two things that don't go together.

    Attributes:
        one: A lever.
        other: A lever, or something about the workload, the device or the call.
        why: What would go wrong.
        instead: What to do.
        unless: The numerics class under which they are allowed all the same; None for none.
    """

    one: str
    other: str
    why: str
    instead: str
    unless: Numerics | None = None

    def row(self) -> str:
        """Return the row of the table."""
        exception = f" (allowed under `numerics='{self.unless}'`)" if self.unless else ""
        return f"| {self.one} | {self.other} | {self.why}{exception} | {self.instead} |"


TABLE: tuple[Refused, ...] = (
    Refused(
        MICROBATCHES,
        BATCH_NORM,
        "the model normalises over the batch, so that microbatches would change the training",
        "allow numerics='changed', or take memfit.freeze_batch_norm or memfit.group_norm_for_batch_norm",
        unless="changed",
    ),
    Refused(
        MICROBATCHES,
        COUPLING_LOSS,
        "the loss of the whole batch is not that of its parts put together, as in a contrastive loss, or a mean over"
        " tokens that is returned as one over samples",
        "return (sum, count) where it is a mean over tokens or voxels, plan with numerics='exact', or allow"
        " numerics='changed'",
        unless="changed",
    ),
    Refused(
        "bf16-true",
        NO_UPDATES,
        "bf16 weights lose every update below 1/256 of their value",
        "give bf16_updates='master-weights' (fp32 copies that the optimizer updates) or 'stochastic-rounding', or use"
        " 'bf16-mixed'",
    ),
    Refused("tf32", NO_TF32, "it has no units for TF32", "use '32-true'; NVIDIA's GPUs from Ampere on have TF32"),
    Refused(
        OFFLOAD,
        NO_LINK,
        "nothing is known of how fast copies to the host are, or there are none",
        "leave host_budget out, or name a GPU",
    ),
    Refused(
        CHUNKED_LOSS,
        HEAD_INSIDE,
        "the chunks' gradients are made in the forward pass, which a recomputation would do again",
        "take the region out of levers.regions, or set levers.chunked_loss to null",
    ),
    Refused(
        CHUNKED_LOSS,
        COMPILED,
        "compiled code can't hold logits that have no numbers",
        "set levers.chunked_loss to null, or don't compile the model",
    ),
    Refused(
        IN_BACKWARD,
        MICROBATCHES,
        "a gradient is used and freed before those of later microbatches are added to it",
        "set levers.microbatch_size to the whole batch, or levers.optimizer to 'as-is'",
    ),
    Refused(
        IN_BACKWARD,
        CLIPPING,
        "the norm of all gradients is known when the last of them is there, and the others are used by then",
        "set Workload.max_grad_norm=None, or levers.optimizer to 'as-is'",
    ),
    Refused(
        IN_BACKWARD,
        "16-mixed",
        "whether gradients overflowed is known when the last of them is there, and the others are used by then",
        "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    ),
    Refused(
        IN_BACKWARD,
        "bf16-true",
        "weights in bf16 are updated by a pass of their own after the backward pass",
        "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    ),
    Refused(
        IN_BACKWARD,
        SEVERAL_OPTIMIZERS,
        "what one of them skips, all of them must skip, which is known only after the backward pass",
        "use one optimizer with several groups, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        IN_BACKWARD,
        FOREIGN_OPTIMIZER,
        "it may use more than the gradient of the parameter at hand",
        "use an optimizer of torch.optim, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        OFFLOADED,
        NO_LINK,
        "nothing is known of how fast copies to the host are, or its memory is the device's",
        "name a GPU, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        OFFLOADED,
        "bf16-true",
        "weights in bf16 are updated by a pass of their own",
        "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    ),
    Refused(
        OFFLOADED,
        SEVERAL_OPTIMIZERS,
        "states are moved for one optimizer's groups",
        "use one optimizer with several groups, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        OFFLOADED,
        FOREIGN_OPTIMIZER,
        "it may use more than the state of the parameter at hand",
        "use an optimizer of torch.optim, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        ADAMW_8BIT,
        NOT_ADAMW,
        "it does AdamW's mathematics, without amsgrad and maximize, and no other's",
        "use torch.optim.AdamW, or set levers.optimizer to 'as-is'",
    ),
    Refused(ADAMW_8BIT, NO_BITSANDBYTES, "the optimizer is that package's", "pip install 'memfit[optimizers]'"),
    Refused(
        ADAMW_8BIT,
        "bf16-true",
        "weights in bf16 are updated through the user's own optimizer",
        "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    ),
    Refused(
        ADAFACTOR,
        "bf16-true",
        "weights in bf16 are updated through the user's own optimizer",
        "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    ),
    Refused(
        ADAFACTOR,
        SEVERAL_OPTIMIZERS,
        "parameters that are updated by different rules are so for a reason",
        "use one optimizer, or set levers.optimizer to 'as-is'",
    ),
    Refused(
        ADAPTING,
        "bf16-true",
        "other shapes are predicted from the model as it was made, and its weights are in bf16 by then",
        "use 'bf16-mixed', or memfit.apply, which has one plan for all shapes",
    ),
    Refused(OFFLOAD, JITTOR, "Jittor moves memory by itself", "leave out offload="),
    Refused(CHUNKED_LOSS, JITTOR, "it is made of PyTorch's functions", "set levers.chunked_loss to null"),
    *(
        Refused(optimizer, JITTOR, "it is made for PyTorch", "set levers.optimizer to 'as-is'")
        for optimizer in (IN_BACKWARD, OFFLOADED, ADAMW_8BIT, ADAFACTOR)
    ),
)
"""Everything else combines."""


def names_of(levers: Levers, batch_size: int) -> set[str]:
    """Return what the table calls the levers that are used."""
    used: set[str] = {levers.precision}
    if levers.microbatch_size < batch_size:
        used.add(MICROBATCHES)
    if levers.regions:
        used.add(CHECKPOINTING)
    if any(region.offload for region in levers.regions):
        used.add(OFFLOAD)
    if levers.chunked_loss is not None:
        used.add(CHUNKED_LOSS)
        head = f"{levers.chunked_loss.head}."
        inside = [fqn for region in levers.regions for fqn in region.modules if not fqn or head.startswith(f"{fqn}.")]
        used |= {HEAD_INSIDE} if inside else set()
    if levers.optimizer != "as-is":
        used.add(OPTIMIZERS[levers.optimizer])
    return used


OPTIMIZERS = {"in-backward": IN_BACKWARD, "offloaded": OFFLOADED, "adamw-8bit": ADAMW_8BIT, "adafactor": ADAFACTOR}
"""What the table calls the values of `Levers.optimizer`."""


def refusals(used: Collection[str], allowed: Numerics = "exact") -> list[Refused]:
    """Return the rows of the table that some levers and circumstances meet.

    Args:
        used: What the table calls them.
        allowed: The numerics class that the user allows.
    """
    return [row for row in TABLE if row.one in used and row.other in used and row.unless != allowed]


def between(one: str, other: str) -> Refused:
    """Return the row of the table for two things."""
    return next(row for row in TABLE if (row.one, row.other) == (one, other))


def check(used: Collection[str], allowed: Numerics = "exact", where: str = "") -> None:
    """Refuse what does not combine.

    Args:
        used: What the table calls the levers and the circumstances.
        allowed: The numerics class that the user allows.
        where: What the error begins with.

    Raises:
        PlanError: Two of them are in the table.
    """
    for row in refusals(used, allowed):
        raise PlanError(
            f"{where}{row.one} does not go with {row.other}: {row.why}. What to do: {row.instead}."
            f" The row in docs/reference/combinations.md: {row.row()}"
        )


def markdown() -> str:
    """Return the table."""
    heading = "| this | with that | why not | what to do |\n| --- | --- | --- | --- |"
    return "\n".join([heading, *(row.row() for row in TABLE)])
