"""The user's own training loop, as `Workload.loop` describes it: a step in its order, with its lifetimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from memfit._torch.pytree import tree_map
from memfit.ir.trace import Phase
from memfit.training.optimizers import parameters_of
from memfit.training.step import Step
from memfit.workload import Loop, samples_of


class DescribedLoop:
    """A step that runs a workload in the order of the user's loop, without memfit's checks.

    Args:
        step: Runs the forward pass and cuts the batch; nothing else of it is used.
    """

    def __init__(self, step: Step, loop: Loop) -> None:
        self.step, self.loop = step, loop
        self.workload = step.workload
        self.on_phase: Callable[[Phase, int], None] | None = None
        self.buckets: list[torch.Tensor] = []
        self.held_bytes = 0
        self._outputs: Any = None
        self._loss: torch.Tensor | None = None
        self._inputs: Any = None

    def split(self, batch: Any) -> list[Any]:
        """Return the microbatches of a batch."""
        return self.step.split(batch)

    def compute_loss(self, microbatch: Any) -> Any:
        """Run the forward pass as the loop does."""
        return self.step.compute_loss(self._as_inputs(microbatch))

    def drop_forward(self) -> None:
        """Make the model ready for another forward pass, after one without a backward pass."""
        self.step.drop_forward()

    def __call__(self, batch: Any) -> None:
        """Run one step."""
        loop = self.loop
        self._phase("optimizer", 0)
        if loop.zero_grad == "before-forward":
            self._zero_gradients()
        samples = samples_of(self.workload, batch)
        for index, microbatch in enumerate(self.split(batch)):
            self._phase("forward", index)
            self._inputs = None
            self._inputs = inputs = self._as_inputs(microbatch)
            self._loss = self._mean_loss(inputs, samples_of(self.workload, microbatch) / samples)
            if loop.zero_grad == "after-forward" and index == 0:
                self._zero_gradients()
            self._phase("backward", index)
            self._backward()
            del inputs
        self._phase("optimizer", 0)
        self._update()
        if loop.zero_grad == "after-step":
            self._zero_gradients()
        if loop.holds_outputs == "step":
            self._outputs = self._loss = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the model's outputs alive while the context is entered, as a variable of the loop does."""
        if not self.loop.holds_outputs:
            yield
            return
        with self.workload.model.register_forward_hook(self._hold):
            try:
                yield
            finally:
                self._outputs = self._loss = None

    def _hold(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs = output

    def _mean_loss(self, inputs: Any, share: float) -> torch.Tensor:
        """Return the loss that the loop runs backward on: a microbatch's mean, times its share of the batch."""
        loss, count = self.step.compute_loss(inputs)
        mean = loss if count is None else loss / count
        return mean if share == 1 else mean * share

    def _backward(self) -> None:
        assert self._loss is not None
        scaler = self.step.scaler if self.loop.scales_loss else None
        with self.step.autocast() if self.loop.autocast_backward else nullcontext():
            (self._loss if scaler is None else scaler.scaled(self._loss)).backward(retain_graph=self.loop.retain_graph)
        if self.loop.holds_outputs in ("", "backward"):
            self._outputs = self._loss = None

    def _update(self) -> None:
        """Unscale and clip where the workload asks for it, and step."""
        updated = parameters_of(self.workload.optimizer)
        if self.step.scaler is not None and self.loop.scales_loss:
            self.step.scaler.unscale([p.grad for p in updated if p.grad is not None])
        if self.workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(updated, self.workload.max_grad_norm)
        self.step.update_parameters()

    def _zero_gradients(self) -> None:
        """Drop the gradients of every parameter, or fill them with zeros, as `Module.zero_grad` does."""
        for parameter in self.step.parameters():
            if not self.loop.set_to_none and parameter.grad is not None:
                parameter.grad.detach_().zero_()
            else:
                parameter.grad = None

    def _as_inputs(self, microbatch: Any) -> Any:
        """Return a microbatch whose floating-point tensors require gradients, where the loop's do."""
        if not self.loop.inputs_require_grad:
            return microbatch
        return tree_map(_requiring_gradient, microbatch)

    def _phase(self, phase: Phase, microbatch: int) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, microbatch)


def _requiring_gradient(leaf: Any) -> Any:
    is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if is_floating else leaf
