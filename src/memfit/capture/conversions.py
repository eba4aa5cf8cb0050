"""Modules that are converted within a step (`module.to(device)`, `.float()`), under fake tensors as with data.

`nn.Module._apply` puts what a conversion makes into the place of a parameter's data. Of a fake parameter it swaps the
whole tensor: with the hooks that are on it, and not where something refers to it weakly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.capture.values import device_of

_Convert = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def converted_as_with_data() -> Iterator[None]:
    """Have modules with fake parameters converted as those with data are, until the context is left."""
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: nn.Module, fn: _Convert, recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        fakes = all(isinstance(p, FakeTensor) for p in self._parameters.values() if p is not None)
        if not fakes or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(self, fn, recurse=False)
        for parameter in self._parameters.values():
            if parameter is not None:
                _convert(parameter, fn)
                if parameter.grad is not None:
                    _convert(parameter.grad, fn)
        self._buffers.update({name: t if t is None else fn(t) for name, t in self._buffers.items()})
        return self

    setting: Any = nn.Module
    setting._apply = apply
    try:
        yield
    finally:
        setting._apply = original


def _convert(tensor: torch.Tensor, fn: _Convert) -> None:
    """Put the result of a conversion into a tensor's place.

    Raises:
        RuntimeError: It is on another device, which a fake tensor can't be moved to.
    """
    with torch.no_grad():
        made = fn(tensor)
    if made is tensor:
        return
    if device_of(made) != device_of(tensor):
        raise RuntimeError(f"a module was moved from {device_of(tensor)} to {device_of(made)} within the step")
    tensor.data = made
