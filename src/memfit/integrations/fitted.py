"""A plan for a step that another library's trainer runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.ir.plan import Plan, Precision
from memfit.levers.switch import switched
from memfit.pipeline import estimate, plan
from memfit.training.trainer import evaluation_mode
from memfit.units import format_bytes
from memfit.workload import Workload

MIXED: tuple[Precision, ...] = ("32-true", "bf16-mixed", "16-mixed")
"""Precisions that these trainers offer, under memfit's names or their own."""

NAMES: dict[Precision, str] = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Names of these precisions in accelerate."""


class Fitted:
    """A plan's settings for a trainer, and the checkpointing that memfit applies to the model itself.

    Args:
        workload: The step at the global batch.
        options: Options of `memfit.plan`, `budget` at least.

    Attributes:
        microbatch_size: Batch size for the trainer's loader.
        accumulation: Number of microbatches in one update.
    """

    def __init__(self, workload: Workload, **options: Any) -> None:
        self._device = {"device": device_of(workload.model)} | options
        self.plan: Plan = plan(workload, **self._device, optimizers=())  # the trainer updates
        self.precision = self.plan.levers.precision
        size = self.plan.batch_size
        self.microbatch_size = next(d for d in range(self.plan.levers.microbatch_size, 0, -1) if size % d == 0)
        self.accumulation = size // self.microbatch_size
        self._stack = contextlib.ExitStack()

    def check_evaluation(
        self, workload: Workload, batch: Any, evaluate: Callable[[nn.Module, Any], object], argument: str
    ) -> None:
        """Check that an evaluation fits the plan's budget, between two steps of the training.

        Args:
            evaluate: Evaluates the model on the batch; runs without gradients and in evaluation mode.
            argument: The user's argument for the size of the batch, with its value, for the error.

        Raises:
            UsageError: The evaluation does not fit the budget.
        """

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            with evaluation_mode(model):
                evaluate(model, batch)
            # A step of nothing else: it keeps the optimizer's state in memory, and its backward pass needs no more
            # than gradients, which training has too.
            return torch.stack([p.flatten()[0].float() for p in model.parameters() if p.requires_grad]).sum()

        evaluation = dataclasses.replace(workload, batch=batch, loss_fn=loss_fn, batch_size=1)
        prediction = estimate(evaluation, device=self._device["device"], precision=self.precision)
        if prediction.peak_upper_bytes > self.plan.budget_bytes:
            raise UsageError(
                f"{argument}: an evaluation needs {format_bytes(prediction.peak_upper_bytes)} at its peak, more than"
                f" budget={format_bytes(self.plan.budget_bytes)}: evaluate at most {self.microbatch_size} samples at"
                " once, which need no more than the training does, or raise budget="
            )

    def checkpoint(self, model: nn.Module) -> None:
        """Checkpoint the plan's regions of a model, and apply its lean modules and chunked loss, until `close`."""
        self.close()
        self._stack.enter_context(switched(model, self.plan.levers))

    def close(self) -> None:
        """Undo `checkpoint`."""
        self._stack.close()


def device_of(model: nn.Module) -> str:
    """Return the kind of device that a model is on."""
    return next((p.device.type for p in model.parameters()), "cpu")
