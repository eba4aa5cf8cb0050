"""A classifier of video clips: which way does the camera move through a brain?

The clips are made from the ICBM152 template of `brain_segmentation`, with its split from back to front: each frame is
a window on a coronal plane, and from frame to frame the window moves left, right, down, up, back or forth. Where a
clip is in the brain says nothing about its class, so no single frame does: a model has to compare frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import WorkloadError
from memfit.recipes.brain import Slab, load_slabs
from memfit.recipes.language import SeededBatches, check_positive, seeded, step_on
from memfit.workload import Workload

MOTIONS = ("left", "right", "back", "forth", "down", "up")
"""The classes: along each axis of a slab, x, y and z, backwards and forwards."""

_PARTS = 64  # clips that are evaluated at a time


def video(
    *,
    frames: int = 8,
    size: int = 32,
    batch_size: int = 8,
    channels: Sequence[int] = (16, 32, 64),
    speed: int = 1,
    noise: float = 0.1,
    resolution: int = 2,
    learning_rate: float = 2e-3,
    batches_per_epoch: int = 100,
    n_validation_clips: int = 384,
    seed: int = 0,
) -> Workload:
    """Return the training step of a classifier of clips that move through the ICBM152 template.

    Args:
        frames: Frames in a clip (> 1).
        size: Edge of a frame in voxels; a multiple of 2 ** (len(channels) - 1).
        batch_size: Clips in a batch (> 0).
        channels: Channels of each frame's encoder and of each block, two or more; each block halves the frame's size.
        speed: Voxels by which a clip moves from one frame to the next (> 0).
        noise: Standard deviation of the noise of each voxel (>= 0); the brain's intensities have 1.
        resolution: Edge of a voxel in mm, 1 to 4.
        learning_rate: Learning rate of AdamW (> 0).
        batches_per_epoch: Batches of random clips in an epoch (> 0).
        n_validation_clips: Clips that `evaluate` averages over (> 0).
        seed: Seed of the initial weights and of the clips (>= 0). The global random state is left alone.

    Raises:
        WorkloadError: An argument is out of its range, or a clip does not fit in the template.
        MissingExtraError: nilearn or nibabel is not installed.
    """
    check_positive(
        size=size,
        batch_size=batch_size,
        speed=speed,
        learning_rate=learning_rate,
        n_validation_clips=n_validation_clips,
    )
    if frames < 2:
        raise WorkloadError(f"frames={frames} show no motion: give 2 or more")
    if noise < 0:
        raise WorkloadError(f"noise={noise} is negative: give 0 or more")
    with seeded(seed):
        model = ClipClassifier(channels)
    if size % 2 ** (len(channels) - 1):
        raise WorkloadError(
            f"size={size}: with {len(channels)} channels, it must be a multiple of {2 ** (len(channels) - 1)}"
        )
    slabs = load_slabs(resolution)
    path = speed * (frames - 1)
    needed = (size + path, 1 + path, size + path)
    for slab in slabs:
        if any(part > whole for part, whole in zip(needed, slab.image.shape, strict=True)):
            raise WorkloadError(
                f"a clip of frames={frames} of size={size} at speed={speed} moves through {needed} voxels and does not"
                f" fit in {tuple(slab.image.shape)} at resolution={resolution} mm: lower frames, size, speed or"
                " resolution"
            )
    training, validation = (
        partial(random_clips, slab, frames=frames, size=size, speed=speed, noise=noise) for slab in slabs
    )
    batches = SeededBatches(partial(training, batch_size), batches_per_epoch, seed)
    held_out = validation(n_validation_clips, torch.Generator().manual_seed(0))
    return step_on(batches, model, loss, learning_rate, "video", partial(accuracy, clips=held_out))


# The model


class ClipClassifier(nn.Module):
    """An encoder that is called once a frame, and blocks that convolve space and time. See `video` for its argument.

    Since each frame is a call of its own, a plan can have frames recomputed one by one.

    Raises:
        WorkloadError: An argument is out of its range.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        check_positive(**{f"channels[{i}]": n for i, n in enumerate(channels)})
        if len(channels) < 2:
            raise WorkloadError(f"channels={tuple(channels)} has {len(channels)} stages: give 2 or more")
        first = channels[0]
        self.frame = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1), nn.GroupNorm(1, first), nn.GELU(), nn.Conv2d(first, first, 3, padding=1)
        )
        self.blocks = nn.ModuleList(SpaceTimeBlock(a, b) for a, b in zip(channels, channels[1:], strict=False))
        self.head = nn.Linear(channels[-1], len(MOTIONS))

    def forward(self, clips: Tensor) -> Tensor:
        """Return the logits of the classes, [batch, 6], for clips [batch, 1, frame, height, width]."""
        x = torch.stack([self.frame(frame) for frame in clips.unbind(2)], dim=2)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3, 4)))
        return logits


class SpaceTimeBlock(nn.Module):
    """A convolution over space, which halves it, and a residual one over time.

    Source: Tran et al. 2018, *A Closer Look at Spatiotemporal Convolutions for Action Recognition*, section 3.5; here
    with group normalisation, which keeps clips independent.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(in_channels, out_channels, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        self.norm1 = nn.GroupNorm(1, out_channels)
        self.time = nn.Conv3d(out_channels, out_channels, (3, 1, 1), padding=(1, 0, 0))
        self.norm2 = nn.GroupNorm(1, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.space(x)))
        return x + F.gelu(self.norm2(self.time(x)))


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy over the clips, in nats."""
    return F.cross_entropy(model(batch["clips"]), batch["motions"])


def accuracy(model: nn.Module, *, clips: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of clips that a model gives the right class."""
    device = next(model.parameters()).device
    logits = torch.cat([model(part.to(device)).float().cpu() for part in clips["clips"].split(_PARTS)])
    return {"accuracy": (logits.argmax(1) == clips["motions"]).float().mean().item()}


# The data


def random_clips(
    slab: Slab, batch_size: int, generator: torch.Generator, *, frames: int, size: int, speed: int, noise: float
) -> dict[str, Tensor]:
    """Return clips with their middles at random places in the brain.

    Returns:
        "clips", float32 [batch, 1, frames, size, size], and "motions", int64 [batch], the index in `MOTIONS`.
    """
    brain = slab.label.nonzero()
    middles = brain[torch.randint(len(brain), (batch_size,), generator=generator)]
    motions = torch.randint(len(MOTIONS), (batch_size,), generator=generator)
    window, path, clips = (size, 1, size), speed * (frames - 1), list[Tensor]()
    for middle, motion in zip(middles.tolist(), motions.tolist(), strict=True):
        axis, is_forwards = motion // 2, motion % 2
        starts = []
        for index, (place, whole) in enumerate(zip(middle, slab.image.shape, strict=True)):
            length = window[index] + path * (index == axis)
            starts.append(min(max(place - length // 2, 0), whole - length))
        for frame in range(frames):
            moved = speed * (frame if is_forwards else frames - 1 - frame)
            x, y, z = (start + moved * (index == axis) for index, start in enumerate(starts))
            clips.append(slab.image[x : x + size, y, z : z + size])  # on a plane of x and z
    stacked = torch.stack(clips).view(batch_size, 1, frames, size, size)
    return {"clips": stacked + noise * torch.randn(stacked.shape, generator=generator), "motions": motions}
