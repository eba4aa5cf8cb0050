"""Segmentation of the brain into grey and white matter by a 3-D UNet.

The data is the ICBM152 template (T1-weighted, 1 mm; Fonov et al., Unbiased nonlinear average
age-appropriate brain templates from birth to adulthood, NeuroImage 2009), which nilearn carries
inside its package: nothing is downloaded.

**The split.** The template is exactly symmetric, left to right: one hemisphere is the mirror image
of the other, so a split by hemisphere would validate on the training data. The split is therefore
from back to front: training patches come from behind y = 12 mm (MNI coordinates), validation is
what lies before y = 20 mm, about the front half of the frontal lobes. The gap keeps the
interpolation of one part out of the other. It is one template, so the figures tell whether training
works, not how well the network would do on another person's brain.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memfit.errors import WorkloadError, brought_by
from memfit.recipes.language import SeededBatches, check_positive, check_probability, seeded, step_on
from memfit.workload import Workload

CLASSES = ("background", "grey", "white")

TRAINING_END_MM = 12.0
VALIDATION_START_MM = 20.0

# Of the largest intensity. At 1 mm the background is zero, but resampling leaves traces around the brain.
_BACKGROUND_BELOW = 0.05

Norm = Literal["instance", "batch", "group"]

# One group: the last level of the UNet normalises as many channels as there are classes, and only
# one group divides those and every choice of `channels`.
_NORM: dict[str, Any] = {
    "instance": ("instance", {"affine": True}),
    "batch": "batch",
    "group": ("group", {"num_groups": 1}),
}


def brain_segmentation(
    *,
    patch: tuple[int, int, int] = (64, 64, 64),
    batch_size: int = 2,
    channels: Sequence[int] = (16, 32, 64, 128),
    n_residual_units: int = 2,
    norm: Norm = "instance",
    dropout: float = 0.1,
    resolution: int = 2,
    augment: bool = True,
    learning_rate: float = 1e-3,
    batches_per_epoch: int = 100,
    seed: int = 0,
) -> Workload:
    """Return the training step of MONAI's 3-D UNet on the ICBM152 template.

    Args:
        patch: Size of a training patch in voxels; each a multiple of 2 ** (len(channels) - 1).
        batch_size: Patches in a batch (> 0).
        channels: Channels of each level of the UNet, two levels or more; each level halves the size.
        n_residual_units: Convolutions in each residual unit (> 0).
        norm: "instance" and "group" (one group) keep the samples of a batch independent, "batch" does not:
            with it, microbatches change the result.
        dropout: Probability of dropping an element, in [0, 1).
        resolution: Edge of a voxel in mm, 1 to 4.
        augment: Whether patches are flipped left to right and shifted in intensity, at random.
        learning_rate: Learning rate of AdamW (> 0).
        batches_per_epoch: Batches of random patches in an epoch (> 0).
        seed: Seed of the initial weights and of the patches (>= 0). The global random state is left alone.

    Raises:
        WorkloadError: An argument is out of its range, or the patch does not fit in the training slab.
        MissingExtraError: MONAI, nilearn or nibabel is not installed.
    """
    check_positive(batch_size=batch_size, learning_rate=learning_rate, batches_per_epoch=batches_per_epoch)
    with seeded(seed):
        model = unet(channels, n_residual_units=n_residual_units, norm=norm, dropout=dropout)
    if len(patch) != 3:
        raise WorkloadError(f"patch={patch} has {len(patch)} sizes: give 3")
    factor = 2 ** (len(channels) - 1)
    if any(size <= 0 or size % factor for size in patch):
        raise WorkloadError(f"patch={patch}: with {len(channels)} channels, each must be a multiple of {factor}")
    if all(size == factor for size in patch):
        raise WorkloadError(
            f"patch={patch} leaves one voxel for the last of {len(channels)} channels: give a larger patch"
        )
    training, validation = load_slabs(resolution)
    shape = tuple(training.image.shape)
    if any(part > whole for part, whole in zip(patch, shape, strict=True)):
        raise WorkloadError(
            f"patch={patch} does not fit in the training slab of {shape} voxels at resolution={resolution} mm: "
            "lower patch or resolution"
        )
    batches = SeededBatches(partial(random_patches, training, batch_size, patch, augment), batches_per_epoch, seed)
    criterion = _import("monai.losses").DiceCELoss(softmax=True, to_onehot_y=True, batch=False)
    evaluate = partial(evaluate_dice, slab=validation, patch=patch, batch_size=batch_size)
    return step_on(batches, model, partial(loss, criterion=criterion), learning_rate, "brain_segmentation", evaluate)


# The model


def unet(channels: Sequence[int], *, n_residual_units: int, norm: Norm, dropout: float) -> nn.Module:
    """Return MONAI's UNet with 1 channel in and 3 classes out; see `brain_segmentation`."""
    check_positive(n_residual_units=n_residual_units, **{f"channels[{i}]": n for i, n in enumerate(channels)})
    check_probability(dropout=dropout)
    if len(channels) < 2:
        raise WorkloadError(f"channels={tuple(channels)} has {len(channels)} levels: give 2 or more")
    if norm not in _NORM:
        raise WorkloadError(f"norm={norm!r} is not one of {', '.join(map(repr, _NORM))}")
    network: nn.Module = _import("monai.networks.nets").UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=len(CLASSES),
        channels=tuple(channels),
        strides=(2,) * (len(channels) - 1),
        num_res_units=n_residual_units,
        norm=_NORM[norm],
        dropout=dropout,
    )
    return network


def loss(model: nn.Module, batch: Mapping[str, Tensor], *, criterion: nn.Module) -> Tensor:
    """Return the mean over the samples of Dice loss plus cross entropy."""
    value: Tensor = criterion(model(batch["image"]), batch["label"])
    return value


def evaluate_dice(model: nn.Module, *, slab: Slab, patch: tuple[int, int, int], batch_size: int) -> dict[str, float]:
    """Return the Dice coefficient of the validation slab, for each tissue and their mean."""
    return dice_coefficients(segment(model, slab.image, patch, batch_size), slab.label)


def segment(model: nn.Module, image: Tensor, patch: tuple[int, int, int], batch_size: int) -> Tensor:
    """Return the index in `CLASSES` that a model gives each voxel of an image [x, y, z].

    The image is covered by overlapping windows of the size of a patch (MONAI's sliding-window
    inference). Where it is smaller than a patch, it is padded with background.
    """
    logits = _import("monai.inferers").sliding_window_inference(
        image[None, None].to(next(model.parameters()).device),
        roi_size=patch,
        sw_batch_size=batch_size,
        predictor=model,
        cval=float(image.min()),
    )
    classes: Tensor = logits[0].argmax(0).cpu()
    return classes


def dice_coefficients(predicted: Tensor, label: Tensor) -> dict[str, float]:
    """Return 2 |A and B| / (|A| + |B|) for each tissue (NaN where neither has a voxel of it) and their mean.

    Args:
        predicted: Index in `CLASSES` for each voxel, any shape.
        label: Index in `CLASSES` of the ground truth, same shape.
    """
    figures = {}
    for index, name in enumerate(CLASSES[1:], start=1):
        a, b = predicted == index, label == index
        figures[f"dice/{name}"] = float(2 * (a & b).sum() / (a.sum() + b.sum()))
    figures["dice/mean"] = sum(figures.values()) / len(figures)
    return figures


# The data


@dataclass(frozen=True)
class Slab:
    """A part of the template.

    Args:
        image: float32 [x, y, z], zero mean and unit variance over the brain of the training slab.
        label: uint8 [x, y, z], the index in `CLASSES`.
    """

    image: Tensor
    label: Tensor


@lru_cache(maxsize=2)
def load_slabs(resolution: int = 2) -> tuple[Slab, Slab]:
    """Return the training and the validation slab, read from nilearn's package; see **The split**.

    Args:
        resolution: Edge of a voxel in mm, 1 to 4.

    Raises:
        WorkloadError: `resolution` is out of its range.
        MissingExtraError: nilearn or nibabel is not installed.
    """
    if resolution not in (1, 2, 3, 4):
        raise WorkloadError(f"resolution={resolution} mm is not one of 1, 2, 3, 4")
    image, y_origin_mm = _template("load_mni152_template", resolution)
    grey, _ = _template("load_mni152_gm_template", resolution)
    white, _ = _template("load_mni152_wm_template", resolution)
    # The remaining probability is the background's, which includes cerebrospinal fluid.
    label = torch.stack([1 - grey - white, grey, white]).argmax(0).to(torch.uint8)
    training_end = math.floor((TRAINING_END_MM - y_origin_mm) / resolution)
    validation_start = math.ceil((VALIDATION_START_MM - y_origin_mm) / resolution)
    training_image = image[:, :training_end]
    brain = training_image[training_image > _BACKGROUND_BELOW]
    image = (image - brain.mean()) / brain.std()
    return (
        Slab(image[:, :training_end].clone(), label[:, :training_end].clone()),
        Slab(image[:, validation_start:].clone(), label[:, validation_start:].clone()),
    )


def _template(loader: str, resolution: int) -> tuple[Tensor, float]:
    """Return a volume as float32 [x, y, z] and the y coordinate of its first voxel, in mm."""
    _import("nibabel")
    volume = getattr(_import("nilearn.datasets"), loader)(resolution=resolution)
    return torch.from_numpy(volume.get_fdata(dtype="float32").copy()), float(volume.affine[1, 3])


def random_patches(
    slab: Slab, batch_size: int, patch: tuple[int, int, int], augment: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return patches at uniformly random places.

    Args:
        augment: Whether to flip (half of them, left to right) and to shift the intensity (by 0.1 on average).

    Returns:
        "image", float32 [batch, 1, x, y, z], and "label", uint8 of the same shape.
    """
    pairs = []
    for _ in range(batch_size):
        starts = [
            int(torch.randint(whole - part + 1, (), generator=generator))
            for whole, part in zip(slab.image.shape, patch, strict=True)
        ]
        place = tuple(slice(start, start + part) for start, part in zip(starts, patch, strict=True))
        image, label = slab.image[place], slab.label[place]
        if augment:
            image = image + 0.125 * torch.randn((), generator=generator)
            if torch.rand((), generator=generator) < 0.5:
                image, label = image.flip(0), label.flip(0)
        pairs.append((image, label))
    images, labels = (torch.stack(parts)[:, None] for parts in zip(*pairs, strict=True))
    return {"image": images, "label": labels}


def _import(name: str) -> Any:
    """Import a module of the extra, or raise MissingExtraError."""
    with brought_by("brain", "recipes.brain_segmentation"):
        return importlib.import_module(name)
