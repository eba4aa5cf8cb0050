"""A step's loss: the weights of its microbatches, its scale in fp16, and what is not finite in a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit._torch import current_graph_task_id, foreach_mul_, sparse_values
from memfit.errors import WorkloadError
from memfit.ranks import SingleProcess
from memfit.workload import LossScaling, tensors_of


class Window:
    """The microbatches of one update, with the divisors of their losses.

    Means are weighted by their share of the samples. Sums are divided by an estimate of the window's count from the
    first microbatch, and the gradients are corrected once all counts are known, so that nothing is divided twice and
    fp16 gradients stay in range. Ranks share a window: engines average gradients over them, so that weights and counts
    are of a rank on average.

    Args:
        samples: Samples of the window, of a rank on average.
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
            estimate = count
            if not whole:
                least = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
                estimate = least * (self.samples / max(samples, 1))
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


def gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def gradient_entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, duplicates of a sparse one not added: enough to check that all are finite."""
    return sparse_values(gradient) if gradient.is_sparse else gradient


def _widened(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in fp32 or wider, so that many can be added."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))


class LossScaler:
    """A loss scale, its rule of growth and backoff, and the number of skipped updates.

    The rule is that of dynamic loss scaling (Micikevicius et al. 2018, *Mixed Precision Training*, section 3.2) as
    `torch.amp.GradScaler` has it. The scale stays between a floor and a ceiling; it is a Python number, so that reading
    it does not wait for the device; and an update is skipped for all optimizers or none.

    Attributes:
        skips: Number of updates skipped so far.
        skips_in_a_row: Number of updates skipped since the last one that was made.
    """

    def __init__(self, settings: LossScaling | None = None) -> None:
        self.settings = settings or LossScaling()
        self.scale = self.settings.initial
        self.skips = self.skips_in_a_row = 0
        self._steps_since_change = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, to run backward on."""
        return (loss if loss.itemsize >= 4 else loss.float()) * self.scale

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if gradients:
            foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after a step, and count a skipped update."""
        self.skips += overflowed
        self.skips_in_a_row = self.skips_in_a_row + 1 if overflowed else 0
        if self.settings.growth_interval is None:
            return
        self._steps_since_change = 0 if overflowed else self._steps_since_change + 1
        if overflowed:
            self.scale = max(self.scale * self.settings.backoff_factor, self.settings.floor)
        elif self._steps_since_change == self.settings.growth_interval:
            self.scale = min(self.scale * self.settings.growth_factor, self.settings.ceiling)
            self._steps_since_change = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "steps_since_change": self._steps_since_change,
            "skips": self.skips,
            "skips_in_a_row": self.skips_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.scale = float(state["scale"])
        self._steps_since_change = int(state["steps_since_change"])
        self.skips, self.skips_in_a_row = int(state["skips"]), int(state["skips_in_a_row"])


@dataclass
class FirstNotFinite:
    """The first places at which a step's values were not finite, in the order of execution.

    Attributes:
        forward: FQN of the module with the first such output; None where the forward pass was finite.
        backward: Owner of the first such gradient, a module's output or a parameter; None where all were finite.
    """

    forward: str | None = None
    backward: str | None = None

    def __str__(self) -> str:
        forward = f"first the output of {self.forward!r}" if self.forward is not None else "all finite"
        backward = f"first the gradient of {self.backward}" if self.backward is not None else "all finite"
        return f"forward: {forward}; backward: {backward}"


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[FirstNotFinite]:
    """Watch every module's outputs and their gradients."""
    first = FirstNotFinite()

    def see_gradient(what: str, gradient: torch.Tensor) -> None:
        if first.backward is None and not torch.isfinite(gradient_values(gradient)).all():
            first.backward = what

    def see_outputs(name: str, module: nn.Module, args: Any, out: Any) -> None:
        if current_graph_task_id() != -1:
            return  # a region that runs again in the backward pass
        for tensor in tensors_of(out):
            if not tensor.is_floating_point():
                continue
            if first.forward is None and not torch.isfinite(tensor.detach()).all():  # autograd would save for abs()
                first.forward = name or "the model"
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(see_gradient, f"the output of {name or 'the model'!r}"))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(functools.partial(see_outputs, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                see = functools.partial(see_gradient, f"the parameter {name!r}")
                stack.enter_context(parameter.register_hook(see))
        yield first
