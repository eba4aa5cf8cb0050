from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import memfit
from memfit.recipes import MOTIONS, load_slabs, random_clips
from tests.recipes.test_recipes import small as recipe

pytest.importorskip("nilearn")


small = functools.partial(recipe, "video")


def drawn(n: int = 60, **changes: Any) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"frames": 3, "size": 8, "speed": 1, "noise": 0.0, **changes}
    return random_clips(load_slabs(4)[0], n, torch.Generator().manual_seed(0), **options)


# Data


def test_a_clip_moves_as_its_class_says() -> None:
    clips = drawn()
    assert clips["clips"].shape == (60, 1, 3, 8, 8) and clips["clips"].dtype == torch.float32
    for clip, motion in zip(clips["clips"][:, 0], clips["motions"].tolist(), strict=True):
        earlier, later = (clip[0], clip[1]) if motion % 2 else (clip[1], clip[0])
        if MOTIONS[motion] in ("left", "right"):
            assert torch.equal(earlier[1:], later[:-1])
        if MOTIONS[motion] in ("down", "up"):
            assert torch.equal(earlier[:, 1:], later[:, :-1])


def test_every_class_is_there_every_frame_shows_the_brain_and_noise_has_its_size() -> None:
    quiet, noisy = drawn(300), drawn(300, noise=0.5)
    assert set(quiet["motions"].tolist()) == set(range(len(MOTIONS)))
    assert all(float(frame.std()) > 0 for frame in quiet["clips"][:, 0, 1])
    assert float((noisy["clips"] - quiet["clips"]).std()) == pytest.approx(0.5, rel=0.05)


def test_backwards_and_forwards_have_the_same_frames() -> None:
    """So that no single frame tells the way."""
    slab, label = load_slabs(4)[0], torch.zeros_like(load_slabs(4)[0].label)
    label[25, 18, 20] = 1  # the middle of every clip
    drawn = random_clips(
        dataclasses.replace(slab, label=label), 60, torch.Generator().manual_seed(0), frames=4, size=8, speed=1, noise=0
    )
    by_motion = dict(zip(drawn["motions"].tolist(), drawn["clips"][:, 0], strict=True))
    for axis in range(3):
        assert torch.equal(by_motion[2 * axis], by_motion[2 * axis + 1].flip(0))


# The model


def test_the_encoder_is_called_once_a_frame_and_clips_do_not_know_each_other() -> None:
    model, calls, clips = small().model.double(), [], torch.randn(3, 1, 5, 8, 8, dtype=torch.float64)
    model.get_submodule("frame").register_forward_hook(lambda *_: calls.append(1))
    whole = model(clips)
    assert whole.shape == (3, len(MOTIONS)) and len(calls) == 5
    torch.testing.assert_close(whole[1:], model(clips[1:]))


def test_frames_are_recomputed_one_by_one_and_bits_stay() -> None:
    clips = small(size=16)
    plan = memfit.plan(clips, budget="0.7x", numerics="exact", precisions=["32-true"], points=1)
    assert "frame" in {module for region in plan.levers.regions for module in region.modules}
    verified = memfit.verify(plan, clips, steps=0)
    assert verified.holds and verified.bitwise
