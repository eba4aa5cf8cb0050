"""Microbatches: the batch cut into parts, whose gradients are added up."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.ir import Levers, Numerics
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting
from memfit.workload import Workload, samples_of

MICROBATCHES = "microbatches"
OF_BATCH_NORM = Conflict(
    MICROBATCHES,
    Circumstance.BATCH_NORM,
    "the model normalises over the batch: microbatches would change the training",
    "allow numerics='changed', or use memfit.tools.freeze_batch_norm or memfit.tools.group_norm_for_batch_norm",
    unless="changed",
)
OF_COUPLING_LOSS = Conflict(
    MICROBATCHES,
    Circumstance.COUPLING_LOSS,
    "the whole batch's loss differs from the mean over its parts, as with a contrastive loss, or with a mean over"
    " tokens that is returned as a mean over samples",
    "return (sum, count) for a mean over tokens or voxels, plan with numerics='exact', or allow numerics='changed'",
    unless="changed",
)
OF_GRADIENT_HOOKS = Conflict(
    MICROBATCHES,
    Circumstance.GRADIENT_HOOKS,
    "each hook would run once per microbatch, on a part of the gradient",
    "set levers.microbatch_size to the whole batch, move the hooks to the optimizer's step, or allow"
    " numerics='changed'",
    unless="changed",
)


class Microbatches(Lever):
    """Gradient accumulation over parts of a batch."""

    name = MICROBATCHES
    field = "microbatch_size"
    switchable = True
    waits = True
    rungs = (MICROBATCHES,)
    conflicts = (OF_BATCH_NORM, OF_COUPLING_LOSS, OF_GRADIENT_HOOKS)

    def is_used(self, on: LeversOn) -> bool:
        return on.levers.microbatch_size < samples_of_rank(on)

    def words(self, on: LeversOn) -> tuple[str, str]:
        size, batch_size = on.levers.microbatch_size, samples_of_rank(on)
        count = -(-batch_size // size)
        last = batch_size - size * (count - 1)
        uneven = f", the last of {last:,}" if last != size else ""
        return f"{size:,} of {batch_size:,} samples, {count:,} microbatches{uneven}", f"microbatch {size:,}"

    def numerics(self, on: LeversOn) -> Numerics:
        return "changed" if on.couples_batch else "reordered"

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        if step.coupling is not None and step.numerics != "changed":
            raise NotOffered(step.coupling, is_noted=True)
        if step.numerics == "exact":
            raise NotOffered("its class is reordered: allow it with numerics='reordered'")
        sizes = microbatch_sizes(step.batch_size)
        return [
            replace(levers, microbatch_size=size)
            for levers in wanted
            for size in (sizes if step.allows(levers) else sizes[:1])  # what is not allowed is there for comparison
        ]

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        """Cut the batch as peak times time is predicted to be least."""
        if step.batch_size == 1:
            raise NotOffered("the batch is one sample")

        def product(cut: Levers) -> float:
            predicted = step.predicted(cut)
            return predicted.peak_bytes * predicted.step_seconds

        best = min(self.propose(step, [levers])[1:], key=product)
        return best, f"{-(-step.batch_size // best.microbatch_size)} of {best.microbatch_size} samples"


def samples_of_rank(on: LeversOn) -> int:
    """Return the samples of a global batch that a rank runs at most."""
    return on.batch_size if on.levers.sharding is None else -(-on.batch_size // on.levers.sharding.world_size)


def microbatch_size_of(levers: Levers, workload: Workload) -> int | None:
    """Return `StepOptions.microbatch_size` for a workload: None where its batch is not cut, so that no other one is."""
    is_whole = levers.sharding is None and levers.microbatch_size >= samples_of(workload)
    return None if is_whole else levers.microbatch_size


def microbatch_sizes(batch_size: int, most: int = 5) -> list[int]:
    """Return microbatch sizes, the whole batch first, about halving down to one sample.

    They divide the batch evenly where some divisor is no less than a third of the size before, as 3 of 9 samples;
    elsewhere the size before is halved, as for 7 samples, and the last microbatch has fewer samples.
    """
    sizes = [batch_size]
    while sizes[-1] > 1:
        half = -(-sizes[-1] // 2)
        divisor = next(d for d in range(sizes[-1] // 2, 0, -1) if batch_size % d == 0)
        sizes.append(divisor if 3 * divisor >= sizes[-1] else half)
    return sizes if len(sizes) <= most else [*sizes[: most - 1], 1]
