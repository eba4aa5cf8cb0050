"""Tensor subclasses in copies of a batch: kept where there is data, and imitated by fake tensors, which are plain.

`torch.Tensor.__torch_function__` makes each result of a function the subclass by `as_subclass`, which is a view. Where
an operator then writes in place, as `ReLU(inplace=True)` does, autograd keeps the base and copies its gradient
(`CopySlices` in torch/csrc/autograd/functions/tensor.h): a step takes more memory with MONAI's `MetaTensor` than with
plain tensors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from memfit._torch.dispatch import disabled_torch_function
from memfit._torch.fake import FakeTensor
from memfit.capture.known_values import tensors_in

_MARK = "_memfit_makes_subclasses"


def as_class_of(new: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a converted tensor as the subclass of the original, with its attributes; a fake one is marked instead."""
    kind = type(tensor)
    if isinstance(new, FakeTensor):
        if _converts(kind) or hasattr(tensor, _MARK):
            setattr(new, _MARK, True)
        return new
    if not _converts(kind):
        return new
    made = new.detach().as_subclass(kind).requires_grad_(new.requires_grad)
    vars(made).update(copy.deepcopy(vars(tensor), memo))
    return made


def _converts(kind: Any) -> bool:
    """Tell whether functions of a class of tensors return tensors of that class."""
    return kind is not torch.Tensor and kind.__torch_function__ is not disabled_torch_function


def aliasing(batch: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which functions of marked tensors return aliases, if the batch has such tensors."""
    return _Aliasing() if any(hasattr(tensor, _MARK) for tensor in batch) else contextlib.nullcontext()


class _Aliasing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in get_default_nowrap_functions() or not any(hasattr(t, _MARK) for t in tensors_in((args, kwargs))):
            return out
        return self._aliased(out)

    def _aliased(self, out: Any) -> Any:
        if isinstance(out, FakeTensor):
            if hasattr(out, _MARK):  # written in place
                return out
            alias = torch.ops.aten.alias.default(out)
            setattr(alias, _MARK, True)
            return alias
        return type(out)(map(self._aliased, out)) if type(out) in (list, tuple) else out
