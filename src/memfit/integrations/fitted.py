"""A plan for a step that another library's trainer runs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from memfit.ir.plan import Plan, Precision
from memfit.pipeline import plan
from memfit.pipeline.switching import switched
from memfit.workload import Workload

MIXED: tuple[Precision, ...] = ("32-true", "bf16-mixed", "16-mixed")
"""Precisions that these trainers have under memfit's names or their own."""

NAMES: dict[Precision, str] = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""As accelerate calls them."""


class Fitted:
    """What a plan asks of a trainer, and what memfit does to the model itself.

    Args:
        workload: The step at the global batch.
        options: Of `memfit.plan`, `budget` at least.

    Attributes:
        plan: The plan.
        precision: Of the step.
        microbatch_size: For the trainer's loader.
        accumulation: Microbatches in one update.
    """

    def __init__(self, workload: Workload, **options: Any) -> None:
        kind = next((p.device.type for p in workload.model.parameters()), "cpu")
        self.plan: Plan = plan(workload, **({"device": kind} | options), optimizers=())  # the trainer updates
        self.precision = self.plan.levers.precision
        size = self.plan.batch_size
        self.microbatch_size = next(d for d in range(self.plan.levers.microbatch_size, 0, -1) if size % d == 0)
        self.accumulation = size // self.microbatch_size
        self._stack = contextlib.ExitStack()

    def checkpoint(self, model: nn.Module) -> None:
        """Checkpoint the plan's regions of a model, make it lean and chunk its loss as the plan says, until `close`."""
        self.close()
        self._stack.enter_context(switched(model, self.plan.levers))

    def close(self) -> None:
        """Undo it."""
        self._stack.close()


def optimizer_like(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer to plan with where the trainer makes its own later: AdamW's state is most trainers'."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
