"""What is trained while faults are injected: the recipes, made small, and their plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit.ir import Plan, Precision
from memfit.recipes import brain_segmentation, byte_lm, even_windows, python_source
from memfit.workload import Workload

CONTEXT, SAMPLES, BATCH = 32, 22, 6
MAX_BYTES = 100_000


@dataclass(frozen=True)
class Subject:
    """A training.

    Attributes:
        make: Makes its workload, the same in each process.
        precision: Of its plan.
        microbatch_size: Of its plan.
        prefetch_batches: Batches made ahead in a thread.
        n_steps: Optimizer updates.
        checkpoint_every: Updates between checkpoints.
    """

    name: str
    make: Callable[[], Workload]
    precision: Precision = "32-true"
    microbatch_size: int = BATCH
    prefetch_batches: int = 0
    n_steps: int = 10
    checkpoint_every: int = 2

    def plan(self) -> Plan:
        """Return a plan in the middle of a frontier whose plans all compute the same, bit for bit.

        They are exact ones: they differ in what they recompute. Each gets this subject's precision and microbatches,
        so that the peaks on the frontier say only which is lower.
        """
        found = memfit.plan(
            self.make(), budget="1GiB", numerics="exact", precisions=["32-true"], points=3, time_limit_seconds=1.0
        )
        by_regions = {c.levers.regions: c for c in found.frontier}
        ours = {"precision": self.precision, "microbatch_size": self.microbatch_size}
        lowest_last = sorted(by_regions.values(), key=lambda c: -c.peak_bytes)
        alike = [replace(c, levers=replace(c.levers, **ours)) for c in lowest_last]
        recomputing = [c for c in alike if c.levers.regions]
        chosen = recomputing[(len(recomputing) - 1) // 2]
        predicted = replace(found.predicted, peak_bytes=chosen.peak_bytes, step_seconds=chosen.step_seconds)
        return replace(found, levers=chosen.levers, numerics=chosen.numerics, predicted=predicted, frontier=alike)


def tiny_byte_lm() -> Workload:
    """Return a byte-level GPT with dropout, on batches that have a position of their own."""
    return byte_lm(
        n_layer=2,
        d_model=32,
        n_head=2,
        context=CONTEXT,
        batch_size=BATCH,
        batches_per_epoch=4,
        n_validation_windows=4,
        max_bytes=MAX_BYTES,
    )


def bf16_byte_lm() -> Workload:
    """Return the same with weights in bf16, which the optimizer updates in fp32."""
    return dataclasses.replace(tiny_byte_lm(), bf16_updates="master-weights")


def shuffled_byte_lm() -> Workload:
    """Return the same on a loader that shuffles by the global generator, with workers, whose last batch is smaller."""
    loader = DataLoader(Windows(), BATCH, shuffle=True, num_workers=2)
    return dataclasses.replace(tiny_byte_lm(), batches=loader)


def tiny_brain_segmentation() -> Workload:
    """Return a small 3-D U-Net with dropout, on augmented patches, without its evaluation, which would take longest."""
    workload = brain_segmentation(
        patch=(8, 8, 8), channels=(4, 8), n_residual_units=1, resolution=4, batches_per_epoch=4
    )
    return dataclasses.replace(workload, evaluate=None)


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the standard library's source. `at_sample` is called in a worker before it makes a sample."""

    at_sample: Callable[[int], None] | None = None

    def __init__(self) -> None:
        self.windows = even_windows(python_source("training", MAX_BYTES), SAMPLES, CONTEXT)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.at_sample is not None:
            self.at_sample(index)
        return {name: tensor[index] for name, tensor in self.windows.items()}


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("byte_lm", tiny_byte_lm, microbatch_size=3),
        Subject("byte_lm, 16-mixed", tiny_byte_lm, precision="16-mixed", microbatch_size=2),
        Subject("byte_lm, bf16-true", bf16_byte_lm, precision="bf16-true", microbatch_size=3),
        Subject("byte_lm, shuffled by workers", shuffled_byte_lm, microbatch_size=3),
        Subject("brain_segmentation", tiny_brain_segmentation, microbatch_size=1, prefetch_batches=2),
    )
}
