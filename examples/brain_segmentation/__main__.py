"""Train a 3-D UNet on a brain in one budget: plain with a small patch, planned and structured with a large one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memfit
from benchmarks.common import Case, main
from examples.training import moments, plain_levers, plain_peak_bytes, train, used_levers
from memfit import Workload, ir, structure
from memfit.errors import brought_by
from memfit.recipes import brain_segmentation, load_slabs, segment
from memfit.training import evaluation_mode

Patch = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Size:
    """What is trained: patches in voxels from large to small, the model, the budget, steps of the large patch.

    No patch is larger than the validation slab, which would be padded otherwise.
    """

    patches: tuple[Patch, ...] = ((96, 40, 88), (80, 40, 80), (64, 40, 64), (48, 40, 48), (32, 32, 32))
    channels: tuple[int, ...] = (16, 32, 64)
    batch_size: int = 2
    resolution: int = 2
    budget: str = "132MiB"
    steps: int = 140
    evaluations: int = 4


QUICK = Size(
    patches=((32, 20, 32), (24, 16, 24), (16, 16, 16)),
    channels=(8, 16),
    resolution=4,
    budget="7.5MiB",
    steps=3,
    evaluations=1,
)


def run(quick: bool, picture: Path | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for the plain step with the large patch, which is not trained, and for each training."""
    if picture is not None:
        figure_class()  # says what is missing before anything is trained
    size = QUICK if quick else Size()
    large = unet(size, size.patches[0])
    plan = memfit.plan(large, budget=size.budget, precisions=["32-true"], points=1)
    does_not_fit = _case("plain, large patch", large, plan.plain.peak_bytes)
    does_not_fit["measured_peak_bytes"] = plain_peak_bytes(unet(size, size.patches[0]))
    proposal = structure.separable_convolutions(large, fit="weights")
    lighter = dataclasses.replace(proposal.workload, batches=unet(size, size.patches[0]).batches)  # the same ones
    lighter_plan = memfit.plan(lighter, budget=size.budget, precisions=["32-true"], points=1)
    small, small_peak_bytes = largest_that_fits(size, plan.budget_bytes)
    trainings = {
        "plain, small patch": (small, plain_levers(small), small_peak_bytes, []),
        "planned": (large, plan.levers, plan.predicted.peak_bytes, used_levers(plan)),
        "structured, planned": (
            lighter,
            lighter_plan.levers,
            lighter_plan.predicted.peak_bytes,
            ["structure: separable convolutions", *used_levers(lighter_plan)],
        ),
    }
    cases = [does_not_fit]
    segmentations = {}
    for name, (workload, levers, peak_bytes, used) in trainings.items():
        case = _case(name, workload, peak_bytes) | {"levers": used}
        cases.append(case | train(workload, levers, moments(_steps(size, workload), size.evaluations)))
        segmentations[name] = segmented(workload, size)
    summary = dataclasses.asdict(size) | {
        "budget_bytes": plan.budget_bytes,
        "voxels": size.steps * size.batch_size * math.prod(size.patches[0]),
        "multiply_adds_ratio_structured": proposal.after.multiply_adds / proposal.before.multiply_adds,
        "timing": "CPU seconds (time.process_time) of steps alone, one thread",
    }
    if picture is not None:
        draw(segmentations, size, picture)
        summary["picture_sha256"] = hashlib.sha256(picture.read_bytes()).hexdigest()
    return cases, summary


def unet(size: Size, patch: Patch) -> Workload:
    """Return the recipe's workload, without dropout in so short a run."""
    return brain_segmentation(
        patch=patch,
        batch_size=size.batch_size,
        channels=size.channels,
        dropout=0.0,
        resolution=size.resolution,
        learning_rate=3e-3,
    )


def largest_that_fits(size: Size, budget_bytes: int) -> tuple[Workload, int]:
    """Return the plain step with the largest patch that fits, and its predicted peak."""
    for patch in size.patches[1:]:
        workload = unet(size, patch)
        predicted = memfit.estimate(workload)
        if predicted.peak_upper_bytes <= budget_bytes:
            return workload, predicted.peak_bytes
    raise memfit.UsageError(f"budget={size.budget} fits the plain step with none of patches={size.patches[1:]}")


def segmented(workload: Workload, size: Size) -> Tensor:
    """Return the classes that a trained model gives the voxels of the validation slab."""
    _, validation = load_slabs(size.resolution)
    with evaluation_mode(workload.model):
        return segment(workload.model, validation.image, _patch(workload), size.batch_size)


def figure_class() -> Any:
    """Return matplotlib's figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with brought_by("examples", "examples.brain_segmentation --picture"):
        from matplotlib.figure import Figure
    return Figure


def draw(segmentations: dict[str, Tensor], size: Size, path: Path) -> None:
    """Draw slices with most tissue in the middle of the validation slab: image, truth, and what each model says."""
    _, validation = load_slabs(size.resolution)
    columns = {"T1": validation.image, "truth": validation.label, **segmentations}
    views = {"axial": 2, "coronal": 1, "sagittal": 0}
    drawing = figure_class()(figsize=(2 * len(columns), 2 * len(views)), layout="constrained")
    for row, (view, axis) in enumerate(views.items()):
        others = [a for a in range(3) if a != axis]
        tissue = (validation.label > 0).sum(others)
        edge = len(tissue) // 4  # where a model does not see what is around
        at = edge + int(tissue[edge:-edge].argmax())
        for column, (name, volume) in enumerate(columns.items()):
            axes = drawing.add_subplot(len(views), len(columns), row * len(columns) + column + 1)
            limits = {} if name == "T1" else {"vmin": 0, "vmax": 2}
            axes.imshow(
                volume.select(axis, at).T.numpy(), cmap="gray", origin="lower", interpolation="nearest", **limits
            )
            axes.set(xticks=[], yticks=[], title=name if row == 0 else "", ylabel=view if column == 0 else "")
    drawn = io.BytesIO()
    drawing.savefig(drawn, dpi=80, metadata={"Software": None})
    ir.codec.write_atomic(path, drawn.getvalue())


def _steps(size: Size, workload: Workload) -> int:
    """Return how many steps see about as many voxels as all trainings are given."""
    return round(size.steps * math.prod(size.patches[0]) / math.prod(_patch(workload)))


def _patch(workload: Workload) -> Patch:
    patch: Patch = tuple(workload.batch["image"].shape[2:])
    return patch


def _case(name: str, workload: Workload, predicted_peak_bytes: int) -> Case:
    return {
        "training": name,
        "patch": list(_patch(workload)),
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "predicted_peak_bytes": predicted_peak_bytes,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    picture = {"type": Path, "metavar": "FILE", "help": "a PNG file of slices of the held-out part"}
    main("brain_segmentation", run, __doc__, {"--picture": picture}, package="examples")
