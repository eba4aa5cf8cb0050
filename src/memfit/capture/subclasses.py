"""Tensor subclasses in copies: kept where there is data, and imitated by fake tensors.

Subclasses of `nn.Parameter` (those of bitsandbytes) keep their class, with the class of fake tensors before it. Batches
of other subclasses are of plain fake tensors that are marked.

`torch.Tensor.__torch_function__` makes each result of a function the subclass by `as_subclass`, which is a view. Where
an operator then writes in place, as `ReLU(inplace=True)` does, autograd keeps the base and copies its gradient
(`CopySlices` in torch/csrc/autograd/functions/tensor.h): a step takes more memory with MONAI's `MetaTensor` than with
plain tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from memfit._torch import FakeTensor, FakeTensorMode, disabled_torch_function, inner_tensors, is_wrapper
from memfit.capture.operator_calls import tensors_in

_MARK = "_memfit_makes_subclasses"


def parameter_of(kind: type, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a tensor as a parameter of a class, made without the class's constructor."""
    made: Any = nn.Parameter(tensor, requires_grad)
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter) and not is_wrapper(kind):
        made.__class__ = _fake_kind(kind) if isinstance(made, FakeTensor) and not issubclass(kind, FakeTensor) else kind
    return made  # type: ignore[no-any-return]


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that code gave to a tensor, without those of fake tensors and inner tensors."""
    own: Any = _names_of_fake() if isinstance(tensor, FakeTensor) else ("_is_param",)
    if is_wrapper(type(tensor)):
        own = {*own, *inner_tensors(tensor)}
    return {name: value for name, value in vars(tensor).items() if name not in own}


@functools.cache
def _names_of_fake() -> frozenset[str]:
    """Return the attributes that fake tensors have. The first mode imports Dynamo, which takes seconds."""
    made = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
    return frozenset(vars(made)) | {"_is_param", _MARK}


@functools.cache
def _fake_kind(kind: type) -> type:
    """Return the class of fake parameters that stand for those of a class."""
    return type(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


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
    plain = kind is torch.Tensor or is_wrapper(kind)
    return not plain and kind.__torch_function__ is not disabled_torch_function


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
