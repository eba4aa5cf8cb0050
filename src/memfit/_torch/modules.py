"""Base classes of PyTorch's layers, and the private state of modules."""

import operator
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm

from memfit._torch.replacement import replaced

BatchNormBase = batchnorm._BatchNorm
DropoutBase = dropout._DropoutNd
InstanceNormBase = instancenorm._InstanceNorm
NormBase = batchnorm._NormBase

Hooks = MutableMapping[int, Callable[..., Any]]
"""Hooks by the numbers of their handles, which hold the mapping."""

Apply = Callable[..., nn.Module]
"""A method that applies a function to the tensors of a module, and of its children if asked, and returns the module."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
"""A module's own mappings by name, without its children's; not copies."""

forward_hooks: Callable[[nn.Module], Hooks] = operator.attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[nn.Module], Hooks] = operator.attrgetter("_forward_pre_hooks")
all_forward_hooks: Callable[[nn.Module], tuple[MutableMapping[int, Any], ...]] = operator.attrgetter(
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""A module's forward hooks, and the notes about some of them by the same numbers."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = operator.attrgetter("_compiled_call_impl")
"""The function that a module's call runs after `Module.compile`; None without it."""


def set_forward_hooks(module: nn.Module, hooks: Any, pre_hooks: Any) -> None:
    """Replace the mappings of a module's forward hooks and forward pre-hooks."""
    module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks


def apply_as_its_class(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to the tensors of a module and its children, by its class's own `_apply`."""
    module._apply(fn)


def converted_by(replacement: Callable[[Apply], Apply]) -> AbstractContextManager[None]:
    """Replace the method by which all modules convert tensors (`Module.to`, `.half`), until the context is left."""
    return replaced(nn.Module, "_apply", replacement(nn.Module._apply))
