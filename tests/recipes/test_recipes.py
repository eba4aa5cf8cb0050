"""What holds for every recipe: batches of their seeds, a training that learns, and arguments that are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from memfit import recipes
from memfit.errors import WorkloadError
from memfit.training import Step
from memfit.workload import Workload, tensors_of

SMALL: dict[str, dict[str, Any]] = {
    "byte_lm": {
        "n_layer": 2, "d_model": 32, "n_head": 2, "context": 32, "batch_size": 4, "batches_per_epoch": 6,
        "n_validation_windows": 10, "max_bytes": 50_000,
    },
    "brain_segmentation": {
        "patch": (16, 16, 16), "channels": (8, 16, 32), "resolution": 4, "batches_per_epoch": 5,
    },
    "finetune": {
        "n_layer": 1, "d_model": 32, "n_head": 2, "context": 32, "batch_size": 4, "base_steps": 3,
        "batches_per_epoch": 5, "n_validation_windows": 10,
    },
    "video": {
        "frames": 4, "size": 8, "batch_size": 3, "channels": (4, 8), "resolution": 4, "batches_per_epoch": 3,
        "n_validation_clips": 24,
    },
}  # fmt: skip
NEEDS = {
    "byte_lm": (),
    "brain_segmentation": ("monai", "nilearn"),
    "finetune": ("transformers", "peft"),
    "video": ("nilearn",),
}


def small(name: str, **changes: Any) -> Any:
    """Return a small step of a recipe; its fields that may be None are there."""
    for package in NEEDS[name]:
        pytest.importorskip(package)
    return getattr(recipes, name)(**(SMALL[name] | changes))


@pytest.mark.parametrize("name", SMALL)
def test_batches_and_weights_are_those_of_their_seed_and_the_global_state_stays(name: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = small(name)
    assert torch.equal(torch.rand(3), expected)
    other, differs = small(name), small(name, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    for a, b in zip(one.batches, other.batches, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(tensors_of(one.batch)[0], tensors_of(differs.batch)[0])


LEARNED: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "byte_lm": (
        {"learning_rate": 3e-3, "batches_per_epoch": 60, "batch_size": 16}, "validation_loss", -3.5, 1.5
    ),
    "brain_segmentation": (
        {"batches_per_epoch": 40, "batch_size": 4, "patch": (24, 24, 24), "resolution": 2, "learning_rate": 5e-3},
        "dice/mean", 0.6, 0.2,
    ),
    "finetune": (
        {"n_layer": 2, "d_model": 64, "context": 64, "batch_size": 16, "base_steps": 120, "learning_rate": 1e-2,
         "batches_per_epoch": 60, "n_validation_windows": 32},
        "validation_loss", -2.95, 0.12,
    ),
    "video": (
        {"frames": 6, "size": 16, "channels": (8, 16, 32), "batch_size": 16, "speed": 2, "batches_per_epoch": 200,
         "resolution": 2, "n_validation_clips": 384},
        "accuracy", 1 / 3, 0.1,
    ),
}  # fmt: skip
"""Changes of each, the figure that its training improves, what it is to reach, and by how much."""


def evaluated(workload: Workload) -> dict[str, float]:
    assert workload.evaluate is not None
    with torch.no_grad():
        figures = dict(workload.evaluate(workload.model.eval()))
    workload.model.train()
    return figures


@pytest.mark.parametrize(
    "name",
    ["byte_lm", "finetune", *(pytest.param(name, marks=pytest.mark.ci) for name in ("brain_segmentation", "video"))],
)
def test_training_improves_what_is_evaluated(name: str) -> None:
    torch.manual_seed(0)
    changes, figure, wanted, gain = LEARNED[name]
    workload = small(name, **changes)
    sign = 1 if wanted > 0 else -1  # losses are to fall
    before, step = sign * evaluated(workload)[figure], Step(workload)
    for batch in workload.batches:
        step(batch)
    after = sign * evaluated(workload)[figure]
    assert after > wanted and after > before + gain


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "byte_lm": [
        ({"d_model": 30, "n_head": 4}, "d_model=30 is not a multiple of n_head=4"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_bytes": 32}, r"context=32 .* \(max_bytes=32\)"),
        *(({name: 0}, f"{name}=0") for name in ("n_layer", "n_head", "context", "batch_size", "max_bytes")),
        *(({name: 0}, f"{name}=0") for name in ("batches_per_epoch", "n_validation_windows")),
    ],
    "brain_segmentation": [
        ({"patch": (16, 16, 18)}, "each must be a multiple of 4"),
        ({"patch": (16, 16)}, "patch=.* give 3"),
        ({"patch": (4, 4, 4)}, "leaves one voxel"),
        ({"patch": (16, 40, 16)}, r"does not fit .* \(50, 36, 48\)"),
        ({"channels": (8,)}, "channels="),
        ({"channels": (8, 0)}, r"channels\[1\]=0"),
        ({"norm": "layer"}, "norm='layer' is not one of 'instance', 'batch', 'group'"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"resolution": 5}, "resolution=5"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        *(({name: 0}, f"{name}=0") for name in ("batch_size", "n_residual_units", "batches_per_epoch")),
    ],
    "finetune": [
        ({"method": "dora"}, "method='dora' is not one of 'lora', 'full'"),
        ({"d_model": 36, "n_head": 4}, r"d_model=36 is not a multiple of 2 \* n_head=8"),
        ({"base_steps": -1}, "base_steps=-1 is negative"),
        ({"context": 200_000}, "context=200000"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        *(({name: 0}, f"{name}=0") for name in ("rank", "n_layer", "n_head", "context", "batch_size")),
        *(({name: 0}, f"{name}=0") for name in ("batches_per_epoch", "n_validation_windows")),
    ],
    "video": [
        ({"frames": 1}, "frames=1"),
        ({"size": 7}, "size=7"),
        ({"noise": -1.0}, "noise=-1"),
        ({"channels": (4,)}, "1 stages"),
        ({"speed": 0}, "speed=0"),
        ({"frames": 40}, "does not fit"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [(name, *case) for name, cases in WRONG.items() for case in [*cases, ({"seed": -1}, "seed=-1")]],
)
def test_an_argument_out_of_range_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        small(name, **changes)


def test_importing_the_recipes_imports_no_optional_package() -> None:
    code = (
        "import sys; from memfit.recipes import *; "
        "print(sorted({'monai', 'nilearn', 'nibabel', 'peft', 'sklearn', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
