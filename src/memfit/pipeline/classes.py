"""What each lever does to the numbers."""

from __future__ import annotations

from memfit.ir import combinations
from memfit.ir.plan import NUMERICS, Levers, Numerics, OptimizerLever

OPTIMIZER_CLASSES: dict[OptimizerLever, Numerics] = {
    "in-backward": "exact",
    "offloaded": "exact",
    "adamw-8bit": "reduced",
    "adafactor": "changed",
}
"""The numerics class of each value of `Levers.optimizer` but "as-is", those of the lowest price first."""


def allows(allowed: Numerics, used: Numerics) -> bool:
    """Tell whether a class that is used is no freer than the one that is allowed."""
    return NUMERICS.index(used) <= NUMERICS.index(allowed)


def freest(classes: dict[str, Numerics]) -> Numerics:
    """Return the freest class of some levers; "exact" where there are none."""
    return max(classes.values(), key=NUMERICS.index, default="exact")


def lever_classes(levers: Levers, batch_size: int, couples_batch: bool) -> dict[str, Numerics]:
    """Return the numerics class of each lever that is used."""
    classes: dict[str, Numerics] = {}
    if levers.regions:
        classes["activation checkpointing"] = "exact"
    if any(region.offload for region in levers.regions):
        classes["activation offload"] = "exact"
    if levers.lean:
        classes["lean norms and activations"] = "exact"
    if levers.microbatch_size < batch_size:
        classes["microbatches"] = "changed" if couples_batch else "reordered"
    if levers.chunked_loss is not None:
        classes["chunked loss"] = "reordered"
    if levers.optimizer != "as-is":
        classes[combinations.OPTIMIZERS[levers.optimizer]] = OPTIMIZER_CLASSES[levers.optimizer]
    if levers.precision != "32-true":
        classes[levers.precision] = "reduced"
    return classes
