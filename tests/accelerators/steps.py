"""Steps that are built on the CPU, as their users build them, and are to run on an accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from memfit import Workload
from memfit.recipes import byte_lm
from tests import models

SECONDS_OF_A_STEP = 0.05


def language_model(**options: Any) -> Workload:
    """A byte-level GPT with dropout, a tied head, its own batches, and an evaluation."""
    sizes = {"n_layer": 2, "d_model": 64, "n_head": 2, "context": 64, "batch_size": 8, "max_bytes": 200_000}
    return byte_lm(**{**sizes, **options})


def convnet() -> Workload:
    """Convolutions with BatchNorm: buffers that a step changes."""
    return models.BUILDERS["convnet"](**models.LARGE["convnet"])


def distilled() -> Workload:
    """A student whose loss function holds a teacher, on the CPU as everything."""
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)).requires_grad_(False)
    blocks = [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)]
    model = nn.Sequential(*blocks)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch), teacher(batch))

    return Workload(model, torch.randn(256, 32), loss, torch.optim.AdamW(model.parameters()), name="distilled")


def frozen() -> Workload:
    """A frozen first block, and the rest fine-tuned with clipped gradients."""
    workload = models.BUILDERS["transformer"](**models.LARGE["transformer"])
    first = next(iter(workload.model.children()))
    first.requires_grad_(False)
    return dataclasses.replace(workload, max_grad_norm=1.0)


STEPS: dict[str, Callable[[], Workload]] = {
    "language_model": language_model,
    "convnet": convnet,
    "distilled": distilled,
    "frozen": frozen,
}


def slow() -> Workload:
    """The language model, with steps that take long enough for a signal to come between two of them."""
    workload = language_model()
    inner = workload.loss_fn

    def loss(model: nn.Module, batch: Any) -> Any:
        import time

        time.sleep(SECONDS_OF_A_STEP)
        return inner(model, batch)

    return dataclasses.replace(workload, loss_fn=loss)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's checkpoint."""
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def state_of(workload: Workload) -> dict[str, torch.Tensor]:
    """Return a trained workload's parameters, buffers and optimizer state, on the CPU."""
    found = {name: tensor.detach().cpu() for name, tensor in workload.model.state_dict().items()}
    for index, state in workload.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value.cpu() for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Tell whether tensors of the same names have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
