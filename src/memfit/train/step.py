"""The training step: one object that owns the order of things."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import NonFiniteError, UsageError, WorkloadError
from memfit.ir.trace import Phase
from memfit.workload import Workload, batch_size_of, slice_batch

MAX_SKIPS_IN_A_ROW = 32
"""Updates that fp16's loss scaling may skip one after another: from its initial 2**16 the scale is then 2**-16."""


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

    Gradients that are there before a step are dropped, those of parameters outside the optimizer too.

    Args:
        workload: What to train.
        microbatch_size: Samples in one forward and backward pass (> 0); None for the whole batch.
        autocast: Makes the context of each forward pass.
        scaler: Scales the loss of fp16 steps; one that is not enabled is none.
        predicted_peak_bytes: Goes into the results.

    Attributes:
        steps: Optimizer updates done.
        last: The result of the last call.

    Raises:
        UsageError: `microbatch_size` is not positive.
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
        if microbatch_size is not None and microbatch_size < 1:
            raise UsageError(f"microbatch_size={microbatch_size} is not above 0: give a number of samples, or None")
        self.workload = workload
        self.microbatch_size = microbatch_size
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.steps = 0
        self.last: StepResult | None = None
        self.on_phase: Callable[[Phase, int], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self._autocast = autocast
        self._predicted_peak_bytes = predicted_peak_bytes
        self._skips_in_a_row = 0

    def close(self) -> None:
        """Undo what a plan did to the model; the step is of no use afterwards."""
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            NonFiniteError: The loss or the gradient norm is not finite, outside fp16's loss scaling; or loss
                scaling skipped too many updates in a row. Nothing was updated.
            WorkloadError: The loss function returned something else than a loss, or one that no parameter
                of the optimizer leads to.
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
        self.last = StepResult(loss, grad_norm, skipped, scale, seconds, self._predicted_peak_bytes)
        return self.last

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
        self.workload.model.zero_grad(set_to_none=True)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizer will use."""
        return [p.grad for g in self.workload.optimizer.param_groups for p in g["params"] if p.grad is not None]

    def _all_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of every parameter, in the optimizer or not."""
        parameters = {id(p): p for g in self.workload.optimizer.param_groups for p in g["params"]}
        parameters |= {id(p): p for p in self.workload.model.parameters()}
        return [p.grad for p in parameters.values() if p.grad is not None]

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
        window.finish(self._all_gradients())
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
        gradients = self._all_gradients()
        if self.scaler is not None and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)

    def _update(self, loss: float) -> tuple[float, bool, float]:
        """Unscale, clip, step, update the scale. Return the gradient norm, whether it was skipped, and the scale."""
        optimizer, scale = self.workload.optimizer, self._loss_scale()
        if not self._gradients():
            raise WorkloadError("Workload.loss_fn returned a loss that no parameter of Workload.optimizer leads to")
        if self.scaler is None:
            grad_norm = self._norm()
            self._check_finite(float(grad_norm), loss)
            self._clip(grad_norm)
            optimizer.step()
            skipped = False
        else:
            self.scaler.unscale_(optimizer)
            grad_norm = self._norm()
            overflowing = "" if math.isfinite(grad_norm) else self._first_not_finite()
            self._clip(grad_norm)
            self.scaler.step(optimizer)
            self.scaler.update()
            skipped = self._loss_scale() < scale
            self._count_skips(skipped, overflowing)
        if self.workload.scheduler is not None and not skipped:
            self.workload.scheduler.step()
        return (math.nan if skipped else float(grad_norm)), skipped, scale

    def _norm(self) -> torch.Tensor:
        """Return the global norm of the optimizer's gradients."""
        return torch.nn.utils.get_total_norm([_values(g) for g in self._gradients()])

    def _clip(self, norm: torch.Tensor) -> None:
        if self.workload.max_grad_norm is not None:
            parameters = [p for g in self.workload.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.workload.max_grad_norm, norm)

    def _check_finite(self, grad_norm: float, loss: float) -> None:
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm} at step {self.steps} (loss {loss:g}), first in"
                f" {self._first_not_finite()}: nothing was updated. Look at the batch, or lower the learning rate",
                step=self.steps,
                value=grad_norm,
            )

    def _count_skips(self, skipped: bool, where: str) -> None:
        """Give up on loss scaling once it skips without end.

        Raises:
            NonFiniteError: The last `MAX_SKIPS_IN_A_ROW` updates were skipped.
        """
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise NonFiniteError(
                f"the gradients overflowed in {self._skips_in_a_row} steps in a row at step {self.steps}, last in"
                f" {where}, and the loss scale fell to {self._loss_scale():g}: nothing was updated. The model leaves"
                " the range of fp16: use precision='bf16-mixed'",
                step=self.steps,
                value=math.inf,
            )

    def _first_not_finite(self) -> str:
        """Return the FQN of the first parameter whose gradient is not finite."""
        for name, parameter in self.workload.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not torch.isfinite(_values(gradient)).all():
                return name
        return "no single parameter"


class _Window:
    """The microbatches of one update, and what their losses are to be divided by.

    Means are weighted by their share of the samples. Sums are divided by a guess of the window's count
    from the first microbatch, and the gradients by what the guess was off once all counts are known,
    so that nothing is divided twice and fp16 gradients stay in range.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.divisor: torch.Tensor | float | None = None
        self.count: torch.Tensor | float = 0
        self.total: torch.Tensor | float = 0.0
        self.microbatches = 0

    def weigh(self, loss: torch.Tensor, count: torch.Tensor | float | None, samples: int) -> torch.Tensor:
        """Return what to run backward on.

        Raises:
            WorkloadError: Some microbatches have a count and others have none.
        """
        whole = samples == self.samples
        if self.microbatches and (count is None) != (self.divisor is None):
            raise WorkloadError(
                "Workload.loss_fn returned a mean for one microbatch and (sum, count) for another:"
                " return the same for each"
            )
        self.microbatches += 1
        if count is None:
            weighted = loss if whole else loss * (samples / self.samples)
            self.total = self.total + (weighted.detach() if whole else _widened(weighted))
            return weighted
        if self.divisor is None:
            self.divisor = count if whole else _at_least_one(count) * (self.samples / samples)
        self.count = self.count + count
        self.total = self.total + (loss.detach() if whole else _widened(loss))
        return loss / self.divisor

    def finish(self, gradients: list[torch.Tensor]) -> None:
        """Correct the gradients for the guessed count."""
        if self.divisor is not None and self.microbatches > 1 and gradients:
            divisor = self.divisor.double() if isinstance(self.divisor, torch.Tensor) else self.divisor
            torch._foreach_mul_(gradients, divisor / self.count)

    def mean_loss(self) -> float:
        """Return the mean loss of the window."""
        return float(self.total if self.divisor is None else self.total / self.count)


def _at_least_one(count: torch.Tensor | float) -> torch.Tensor | float:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _widened(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in fp32 at least, so that many can be added."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))


def _checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return a loss and its count.

    Raises:
        WorkloadError: It is neither a scalar that requires gradients nor a pair of one and a count.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if is_pair else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (is_pair and not _is_count(count)):
        parts = value if is_pair else (value,)
        raise WorkloadError(
            f"Workload.loss_fn returned {' and '.join(_described(part) for part in parts)}: it must return a scalar"
            " tensor, or (sum, count) with the count that the sum is to be divided by, which needs no gradient"
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "Workload.loss_fn returned a loss that needs no gradient: no parameter of Workload.model leads to it"
        )
    return loss, count.reshape(()) if isinstance(count, torch.Tensor) and count.dim() else count


def _is_count(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return count.numel() == 1 and not count.requires_grad
    return isinstance(count, int | float)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}{' that requires gradients' if value.requires_grad else ''}"
