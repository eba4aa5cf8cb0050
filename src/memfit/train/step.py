"""The training step: one object that owns the order of things."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import NonFiniteError, WorkloadError
from memfit.ir.trace import Phase
from memfit.workload import Workload, batch_size_of, slice_batch


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: Mean loss over the global batch.
        grad_norm: Global norm of the gradients before clipping; NaN when the update was skipped.
        skipped: Whether the update was skipped since gradients overflowed (fp16 only).
        loss_scale: The loss scale of the step; 1.0 without scaling.
        seconds: Wall time.
        predicted_peak_bytes: What the plan predicts that the step allocates at its peak; None without a plan.
    """

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    seconds: float
    predicted_peak_bytes: int | None


class Step:
    """A training step: forward, backward, unscale, clip, step, update, zero.

    Gradients are those of the mean over the global batch, however it is cut into microbatches: means
    are weighted by their samples, sums are divided once by the count of the whole window.

    Args:
        workload: What to train.
        microbatch_size: Samples in one forward and backward pass; None for the whole batch.
        autocast: Makes the context of each forward pass.
        scaler: Scales the loss of fp16 steps.
        predicted_peak_bytes: Goes into the results.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        microbatch_size: int | None = None,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        predicted_peak_bytes: int | None = None,
    ) -> None:
        self.workload = workload
        self.microbatch_size = microbatch_size
        self.scaler = scaler
        self.steps = 0
        self.on_phase: Callable[[Phase, int], None] | None = None
        self._autocast = autocast
        self._predicted_peak_bytes = predicted_peak_bytes
        self._parameters = [p for g in workload.optimizer.param_groups for p in g["params"]]

    def split(self, batch: Any) -> list[Any]:
        """Return the microbatches of a batch, as views; the last may be smaller."""
        size = batch_size_of(batch)
        piece = self.microbatch_size or size
        if piece >= size:
            return [batch]
        return [slice_batch(batch, start, min(start + piece, size)) for start in range(0, size, piece)]

    def compute_loss(self, microbatch: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        """Return the loss of a microbatch, and the count it is to be divided by (None if it is a mean)."""
        if self._autocast is None:
            value = self.workload.loss_fn(self.workload.model, microbatch)
        else:
            with self._autocast():
                value = self.workload.loss_fn(self.workload.model, microbatch)
        return _checked(value)

    def __call__(self, batch: Any) -> StepResult:
        """Run one optimizer update.

        Args:
            batch: A global batch, shaped like the workload's.

        Raises:
            NonFiniteError: The loss is not finite, outside fp16's loss scaling. Nothing was updated.
            WorkloadError: The loss function returned something else than a loss.
        """
        started = time.perf_counter()
        self._clear_gradients()
        try:
            loss = self._accumulate(batch)
            self._phase("optimizer", 0)
            grad_norm, skipped, scale = self._update(loss)
        finally:
            self._clear_gradients()
        if not skipped:
            self.steps += 1
        seconds = time.perf_counter() - started
        return StepResult(loss, grad_norm, skipped, scale, seconds, self._predicted_peak_bytes)

    def gradients(self, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and the unclipped gradient of every parameter by FQN, and update nothing."""
        self._clear_gradients()
        try:
            loss = self._accumulate(batch)
            self._unscale(self._loss_scale())
            named = self.workload.model.named_parameters()
            return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}
        finally:
            self._clear_gradients()

    def _phase(self, phase: Phase, microbatch: int) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, microbatch)

    def _clear_gradients(self) -> None:
        self.workload.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, batch: Any) -> float:
        """Run every microbatch forward and backward; return the mean loss of the whole batch."""
        self._phase("optimizer", 0)
        samples = batch_size_of(batch)
        window = _Window(samples)
        for index, microbatch in enumerate(self.split(batch)):
            self._phase("forward", index)
            loss, count = self.compute_loss(microbatch)
            loss = window.weigh(loss, count, batch_size_of(microbatch))
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            self._phase("backward", index)
            scaled.backward()
            del loss, scaled
        window.finish(self._parameters)
        mean = window.mean_loss()
        if self.scaler is None and not math.isfinite(mean):
            raise NonFiniteError(
                f"the loss is {mean} at step {self.steps}: nothing was updated. Look at the batch, lower the"
                " learning rate, or give Workload.max_grad_norm",
                step=self.steps,
                value=mean,
            )
        return mean

    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _unscale(self, scale: float) -> None:
        if self.scaler is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / scale)

    def _update(self, loss: float) -> tuple[float, bool, float]:
        """Unscale, clip, step, update the scale. Return the gradient norm, whether it was skipped, and the scale."""
        optimizer, scale = self.workload.optimizer, self._loss_scale()
        if self.scaler is None:
            grad_norm = self._clip()
            if not math.isfinite(grad_norm):
                raise NonFiniteError(
                    f"the gradient norm is {grad_norm} at step {self.steps} (loss {loss:g}): nothing was updated."
                    " Look at the batch, or lower the learning rate",
                    step=self.steps,
                    value=grad_norm,
                )
            optimizer.step()
            skipped = False
        else:
            self.scaler.unscale_(optimizer)
            grad_norm = self._clip()
            self.scaler.step(optimizer)
            self.scaler.update()
            skipped = self._loss_scale() < scale
        if self.workload.scheduler is not None and not skipped:
            self.workload.scheduler.step()
        return (math.nan if skipped else grad_norm), skipped, scale

    def _clip(self) -> float:
        """Return the global gradient norm, after clipping to it where the workload asks."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.workload.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.workload.max_grad_norm, norm)
        return float(norm)


class _Window:
    """The microbatches of one update, and what their losses are to be divided by.

    Means are weighted by their share of the samples. Sums are divided by a guess of the window's count
    from the first microbatch, and the gradients by what the guess was off once all counts are known,
    so that nothing is divided twice and fp16 gradients stay in range.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.divisor: torch.Tensor | float | None = None
        self.count: torch.Tensor | float = 0.0
        self.total: torch.Tensor | float = 0.0
        self.microbatches = 0

    def weigh(self, loss: torch.Tensor, count: torch.Tensor | float | None, samples: int) -> torch.Tensor:
        """Return what to run backward on."""
        self.microbatches += 1
        whole = samples == self.samples
        if count is None:
            weighted = loss if whole else loss * (samples / self.samples)
            self.total = self.total + weighted.detach()
            return weighted
        if self.divisor is None:
            self.divisor = count if whole else _at_least_one(count) * (self.samples / samples)
        self.count = self.count + count
        self.total = self.total + loss.detach()
        return loss / self.divisor

    def finish(self, parameters: list[torch.nn.Parameter]) -> None:
        """Correct the gradients for the guessed count."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.divisor is not None and self.microbatches > 1 and gradients:
            torch._foreach_mul_(gradients, self.divisor / self.count)

    def mean_loss(self) -> float:
        """Return the mean loss of the window."""
        return float(self.total if self.divisor is None else self.total / self.count)


def _at_least_one(count: torch.Tensor | float) -> torch.Tensor | float:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def _checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return a loss and its count.

    Raises:
        WorkloadError: It is neither a scalar that requires gradients nor a pair of one and a count.
    """
    loss, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(count, torch.Tensor | int | float | None):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise WorkloadError(
            f"Workload.loss_fn returned a {type(value).__name__}{shape}: it must return a scalar tensor, or"
            " (sum, count) with the count that the sum is to be divided by"
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "Workload.loss_fn returned a loss that needs no gradient: no parameter of Workload.model leads to it"
        )
    return loss, count
