"""The weights of microbatch losses in one update, with which they add up to the mean of the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit._torch.foreach import foreach_mul_
from memfit._torch.tensors import sparse_values
from memfit.errors import WorkloadError
from memfit.ranks.one_process import SingleProcess
from memfit.workload import described


class Window:
    """The microbatches of one update, with the divisors of their losses.

    Means are weighted by their share of the samples. Sums are divided by an estimate of the window's count from the
    first microbatch, and the gradients are corrected once all counts are known, so that nothing is divided twice and
    fp16 gradients stay in range. Ranks share a window: engines average gradients over them, so that weights and counts
    are of a rank on average.

    Args:
        samples: Samples of the window, of a rank on average.
        ranks: Those that share the window.
    """

    def __init__(self, samples: float, ranks: SingleProcess) -> None:
        self.samples, self._ranks = samples, ranks
        self.divisor: torch.Tensor | float | None = None
        self.count: torch.Tensor | float = 0
        self.total: torch.Tensor | float = 0.0
        self.microbatches = 0
        self._is_estimate = False

    def weigh(self, loss: torch.Tensor, count: torch.Tensor | float | None, samples: int) -> torch.Tensor:
        """Return a microbatch's share of the loss, to run backward on; nothing of one of no samples.

        Raises:
            WorkloadError: Some microbatches have a count and others have none.
        """
        whole = samples == self.samples
        if self.microbatches and (count is None) != (self.divisor is None):
            raise WorkloadError(
                "Workload.loss_fn returned a mean for one microbatch and (sum, count) for another: return the same form"
                " for every microbatch"
            )
        self.microbatches += 1
        if count is None:
            weighted = loss if whole else loss * (samples / self.samples)
            self.total = self.total + (weighted.detach() if whole else _widened(weighted))
            return weighted
        if samples == 0:
            loss, count = loss * 0, count * 0
        if self.divisor is None:
            estimate = count if whole else _at_least_one(count) * (self.samples / max(samples, 1))
            self.divisor, self._is_estimate = self._ranks.mean(estimate), not whole
        self.count = self.count + count
        self.total = self.total + (loss.detach() if whole else _widened(loss))
        return loss / self.divisor

    def finish(self, gradients: list[torch.Tensor]) -> None:
        """Correct the gradients for the estimated count, once all microbatches have run; ranks add up their losses."""
        if self.divisor is None:
            (self.total,) = self._ranks.means([self.total])
            return
        self.total, self.count = self._ranks.means([self.total, self.count])
        if not self._is_estimate and self.microbatches == 1 or not gradients:
            return
        if isinstance(self.divisor, torch.Tensor) or self.divisor != self.count:
            divisor = self.divisor.double() if isinstance(self.divisor, torch.Tensor) else self.divisor
            foreach_mul_(gradients, divisor / self.count)

    def mean_loss(self) -> float:
        """Return the mean loss of the window."""
        return float(self.total if self.divisor is None else self.total / self.count)


def _at_least_one(count: torch.Tensor | float) -> torch.Tensor | float:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def gradient_entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, duplicates of a sparse one not added: enough to check that all are finite."""
    return sparse_values(gradient) if gradient.is_sparse else gradient


def _widened(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in fp32 or wider, so that many can be added."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))


def checked_loss(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return a loss and its count.

    Raises:
        WorkloadError: The value is neither a scalar with a gradient nor a pair of such a scalar and a count.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if is_pair else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (is_pair and not _is_count(count)):
        raise WorkloadError(_wrong_loss(value))
    if not loss.requires_grad:
        raise WorkloadError(
            "Workload.loss_fn returned a loss without a gradient: compute it with the first argument of loss_fn, the"
            " model, and without .detach() or torch.no_grad()"
        )
    return loss, count.reshape(()) if isinstance(count, torch.Tensor) and count.dim() else count


def _is_count(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return count.numel() == 1 and not count.requires_grad
    return isinstance(count, int | float)


def _wrong_loss(value: Any) -> str:
    """Return what a loss function returned in the place of a loss, and how to return one."""
    if value is None:
        return "Workload.loss_fn returned None: end it with `return loss`"
    if isinstance(value, torch.Tensor):
        return (
            f"Workload.loss_fn returned a tensor of shape {tuple(value.shape)}: return one number, such as loss.mean()"
        )
    if isinstance(value, int | float):
        return f"Workload.loss_fn returned the number {value}, not a tensor: return the loss without .item()"
    if isinstance(value, Mapping) and "loss" in value:
        return f"Workload.loss_fn returned {described(value)}: return only the loss, such as output['loss']"
    if isinstance(value, tuple) and len(value) == 2:
        parts = " and ".join(described(part) for part in value)
        return (
            f"Workload.loss_fn returned {parts}: return one scalar tensor, or (sum, count): a sum with a gradient, and"
            " a count without one, its divisor"
        )
    return f"Workload.loss_fn returned {described(value)}: return one scalar tensor, or (sum, count)"
