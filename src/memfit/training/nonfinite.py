"""Finds the first module whose outputs or gradients are not finite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit._torch.autograd import current_graph_task_id
from memfit.training.accumulation_window import gradient_values
from memfit.workload import tensors_of


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
    """Watch every module's outputs and their gradients, until the context is left."""
    first = FirstNotFinite()
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(functools.partial(_see_outputs, first, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                see = functools.partial(_see_gradient, first, f"the parameter {name!r}")
                stack.enter_context(parameter.register_hook(see))
        yield first


def _see_outputs(first: FirstNotFinite, name: str, module: nn.Module, args: Any, out: Any) -> None:
    if current_graph_task_id() != -1:
        return  # a region that runs again in the backward pass
    for tensor in tensors_of(out):
        if not tensor.is_floating_point():
            continue
        if first.forward is None and not torch.isfinite(tensor.detach()).all():  # autograd would save for abs()
            first.forward = name or "the model"
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(_see_gradient, first, f"the output of {name or 'the model'!r}"))


def _see_gradient(first: FirstNotFinite, what: str, gradient: torch.Tensor) -> None:
    if first.backward is None and not torch.isfinite(gradient_values(gradient)).all():
        first.backward = what
