"""Conversions of modules within a step (`module.to(device)`, `.float()`), under fake tensors as with data.

`nn.Module._apply` replaces the data of a parameter by the converted tensor. Of a fake parameter it swaps the whole
tensor: that loses its hooks, and fails where a weak reference exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memfit._torch.fake import FakeTensor
from memfit._torch.modules import Apply, apply_as_its_class, converted_by, own_buffers, own_parameters
from memfit.capture.known_values import device_of

_Convert = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def in_place_conversions() -> Iterator[None]:
    """Convert modules with fake parameters as modules with data, until the context is left."""
    with converted_by(_replacement):
        yield


def _replacement(original: Apply) -> Apply:
    def apply(self: nn.Module, fn: _Convert, recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                apply_as_its_class(child, fn)
        fakes = all(isinstance(p, FakeTensor) for p in own_parameters(self).values() if p is not None)
        if not fakes or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(self, fn, recurse=False)
        for parameter in own_parameters(self).values():
            if parameter is not None:
                _convert(parameter, fn)
                if parameter.grad is not None:
                    _convert(parameter.grad, fn)
        own_buffers(self).update({name: t if t is None else fn(t) for name, t in own_buffers(self).items()})
        return self

    return apply


def _convert(tensor: torch.Tensor, fn: _Convert) -> None:
    """Replace a tensor's data by its conversion, which must be on the same device: a fake tensor can't be moved."""
    with torch.no_grad():
        converted = fn(tensor)
    if converted is tensor:
        return
    if device_of(converted) != device_of(tensor):
        raise RuntimeError(f"a module was moved from {device_of(tensor)} to {device_of(converted)} within the step")
    tensor.data = converted
