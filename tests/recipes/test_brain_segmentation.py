from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import MissingExtraError
from memfit.recipes import CLASSES, dice_coefficients, load_slabs
from tests.recipes.test_recipes import small as recipe

pytest.importorskip("monai")
pytest.importorskip("nilearn")


small = functools.partial(recipe, "brain_segmentation")


# Data


def test_both_slabs_are_a_brain() -> None:
    for slab in load_slabs(4):
        shares = torch.bincount(slab.label.flatten().long(), minlength=len(CLASSES)) / slab.label.numel()
        assert len(shares) == 3 and 0.6 < shares[0] < 0.95 and shares[1] > shares[2] > 0.02
        background, grey, white = (slab.image[slab.label == index].mean() for index in range(3))
        assert background < grey < white
    training, _ = load_slabs(4)
    tissue = training.image[training.label > 0]
    assert tissue.mean().item() == pytest.approx(0.2, abs=0.2) and tissue.std().item() == pytest.approx(0.8, abs=0.2)
    assert training.image.min() < -3


def test_slabs_are_disjoint_from_back_to_front() -> None:
    training, validation = load_slabs(4)
    n_all = 59
    assert training.image.shape[1] == 36  # voxels at -134, -130, ..., 6 mm
    assert n_all - validation.image.shape[1] == 39  # the first one is at 22 mm
    assert training.image.shape[::2] == validation.image.shape[::2]


def test_template_is_mirror_symmetric_so_that_hemispheres_can_not_be_the_split() -> None:
    training, _ = load_slabs(1)
    assert torch.equal(training.image, training.image.flip(0))


def test_batch_is_cut_from_the_training_slab() -> None:
    batch = small(augment=False).batch
    assert batch["image"].shape == batch["label"].shape == (2, 1, 16, 16, 16)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].dtype == torch.uint8
    image = load_slabs(4)[0].image
    places = image.unfold(0, 16, 1).unfold(1, 16, 1).unfold(2, 16, 1)
    for patch in batch["image"][:, 0]:
        assert (places == patch).flatten(3).all(-1).any()


def test_augmentation_keeps_image_and_label_together() -> None:
    plain, augmented = small(augment=False, batch_size=16), small(batch_size=16)
    for batch in (plain.batch, augmented.batch):
        white, grey = (batch["image"][batch["label"] == index].mean() for index in (2, 1))
        assert white - grey > 0.5
    levels = augmented.batch["image"].amin((1, 2, 3, 4))
    assert len(levels.unique()) > 8


# Model and loss


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_gradient_reaches_every_weight(norm: Any) -> None:
    workload = small(norm=norm)
    loss = workload.loss_fn(workload.model, workload.batch)
    loss.backward()
    assert 0.5 < loss.item() < 3
    assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in workload.model.parameters() if p.dim() > 1)


@pytest.mark.parametrize(("norm", "independent"), [("instance", True), ("group", True), ("batch", False)])
def test_samples_are_independent_unless_batch_norm(norm: Any, independent: bool) -> None:
    workload = small(norm=norm, dropout=0.0)
    with torch.no_grad():
        whole = workload.loss_fn(workload.model, workload.batch)
        parts = [{name: t[i : i + 1] for name, t in workload.batch.items()} for i in range(2)]
        mean_of_parts = sum(workload.loss_fn(workload.model, part) for part in parts) / 2
    assert torch.allclose(whole, mean_of_parts, rtol=1e-5) is independent


def test_dropout_is_in_the_model() -> None:
    assert any(isinstance(m, nn.Dropout) and m.p == 0.25 for m in small(dropout=0.25).model.modules())


# Evaluation


class Truth(nn.Module):
    """Looks the label up in the image, whose values it holds."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold))

    def forward(self, image: Tensor) -> Tensor:
        return F.one_hot((image[:, 0] > self.threshold).long() * 2, 3).movedim(-1, 1).float()


def test_dice_by_hand() -> None:
    label = load_slabs(4)[1].label
    assert dice_coefficients(label, label) == {"dice/grey": 1.0, "dice/white": 1.0, "dice/mean": 1.0}
    figures = dice_coefficients(torch.tensor([1, 1, 2, 0]), torch.tensor([1, 2, 2, 2]))
    assert figures == pytest.approx({"dice/grey": 2 / 3, "dice/white": 1 / 2, "dice/mean": 7 / 12})


def test_sliding_windows_put_every_voxel_in_its_place() -> None:
    slab = load_slabs(4)[1]
    figures = small().evaluate(Truth(0.3))
    expected = dice_coefficients((slab.image > 0.3).long() * 2, slab.label)
    assert figures == pytest.approx(expected)
    assert figures["dice/white"] > 0.4
    assert figures["dice/grey"] == 0


@pytest.mark.parametrize("package", ["monai", "nilearn", "nibabel"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    load_slabs.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[brain\]'") as raised:
        small()
    assert raised.value.missing == package
    assert raised.value.extra == "brain"
