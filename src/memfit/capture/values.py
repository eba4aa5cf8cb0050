"""Values that are known although the tensors are fake: of small integers and masks, and what follows from them.

A training step reads few values: whether a mask masks anything, how many labels count, the step
counter. They come from the batch's integers and from constants through integer operators, so they are
computed beside the fake tensors. What depends on activations stays unknown.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_CONSTANTS = {
    _aten.arange,
    _aten.eye,
    _aten.full,
    _aten.linspace,
    _aten.ones,
    _aten.scalar_tensor,
    _aten.zeros,
}
_UNSET = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_FINITE = {_aten.isfinite: True, _aten.isnan: False, _aten.isinf: False, _aten.isposinf: False, _aten.isneginf: False}
_SAME = {_aten.eq: True, _aten.ne: False}  # of a number and itself; the opposite of any number and infinity
_LIMIT = 2**20  # elements; masks of a batch have fewer
_ATTRIBUTE = "_memfit_known_values"
_Unknown = object()


class KnownValues(TorchDispatchMode):
    """Follows the values of integer and boolean tensors under a fake tensor mode. Enter it inside that mode."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self._real = WeakIdKeyDictionary()

    @classmethod
    def of(cls, mode: FakeTensorMode) -> KnownValues:
        """Return the values known under a mode: one object for each."""
        known: KnownValues | None = getattr(mode, _ATTRIBUTE, None)
        if known is None:
            known = cls(mode)
            setattr(mode, _ATTRIBUTE, known)
        return known

    def know(self, fake: torch.Tensor, source: torch.Tensor) -> None:
        """Take over the values of another tensor for a fake one, if they are known: of integers, and of scalars."""
        real = self._real.get(source) if isinstance(source, FakeTensor) else source
        if real is not None and (is_followed(real) or real.dim() == 0) and real.device.type != "meta":
            with unset_fake_temporarily():
                self._real[fake] = real.detach().to("cpu", copy=True)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the value of a tensor on the CPU; None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            value = self._value(tensor)
        return None if value is _Unknown else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device, are most of all calls
            return func(*args, **kwargs)
        known = self._known_arguments(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._read(func, args, known)
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            return self._run_with_shape(func, args, kwargs, known)
        if known is not None and all(is_followed(t) for t in tensors_in(out)):
            self._remember(out, _compute(func, *known))
        elif (answer := _if_finite(func, args)) is not None and is_followed(out):
            self._remember(out, _compute(torch.full, (tuple(out.shape), answer), {}))
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return out

    def _known_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with real tensors, None unless the values of all are known."""
        if torch.Tag.nondeterministic_seeded in func.tags or func._overloadpacket in _UNSET:
            return None
        tensors = tensors_in((args, kwargs))
        if not tensors and func._overloadpacket not in _CONSTANTS:
            return None
        if any(self._value(t) is _Unknown for t in tensors):
            return None
        real: tuple[Any, Any] = tree_map(self._value, (args, kwargs))
        return real

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        if not isinstance(argument, torch.Tensor):
            return argument
        if not isinstance(argument, FakeTensor):
            return argument if argument.device.type == "cpu" and is_followed(argument) else _Unknown
        if argument in self._real:
            return self._real[argument]
        if argument.constant is None or device_of(argument).type != "cpu":
            return _Unknown
        return argument.constant.clone()  # the fake tensor mode itself writes to it

    def _read(self, func: Any, args: Any, known: tuple[Any, Any] | None) -> bool | int | float:
        """Answer `.item()`: what is known, else a neutral value (no overflow found, nothing masked)."""
        if known is not None:
            return _compute(func, *known)  # type: ignore[no-any-return]
        try:
            return func(*args)  # type: ignore[no-any-return]
        except DataDependentOutputException:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0

    def _run_with_shape(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, Any] | None) -> Any:
        """Run an operator whose output's shape depends on values that are known.

        Raises:
            DynamicOutputShapeException: They are not.
        """
        if known is not None:
            real = _compute(func, *known)
            out = tree_map(lambda t: self._like(t, device_of(tensors_in((args, kwargs))[0])), real)
            self._remember(out, real)
            return out
        if func is _aten.masked_select.default:
            source, mask = torch.broadcast_tensors(*args)
            if args[1] in self._real:
                self._remember(mask, _compute(torch.Tensor.expand, (self._real[args[1]], mask.shape), {}))
            func, args = _aten.index.Tensor, (source, [mask])
        if func is _aten.index.Tensor:
            return func(args[0], [p for index in args[1] for p in self._positions(func, index)])
        raise DynamicOutputShapeException(func)

    def _positions(self, func: Any, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return a mask as the positions that it selects; other indices as they are."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        if index not in self._real:
            raise DynamicOutputShapeException(func)
        with unset_fake_temporarily():
            positions = self._real[index].nonzero(as_tuple=True)
        return [self._like(p, device_of(index)) for p in positions]

    def _like(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)

    def _remember(self, out: Any, real: Any) -> None:
        for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
            if isinstance(fake, FakeTensor):
                self._real[fake] = value

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Something unknown was written: forget what shares its memory."""
        written: list[Any] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[position] if position < len(args) else kwargs.get(argument.name))
        storages = {t.untyped_storage()._cdata for t in tensors_in(written) if t.layout is torch.strided}
        for fake in [t for t in self._real if t.untyped_storage()._cdata in storages]:
            del self._real[fake]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or outputs: quicker than pytrees, which know more containers."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; of a fake one without a dispatched question."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_followed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are of the kind that steps read."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _LIMIT


def _if_finite(func: Any, args: Any) -> bool | None:
    """Return what a question whether numbers are finite is answered with: they are. None for other operators."""
    name = func._overloadpacket
    if name not in _SAME or len(args) < 2 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return _FINITE.get(name)
    if args[0] is args[1]:
        return _SAME[name]
    infinite = isinstance(args[1], float) and math.isinf(args[1])
    return not _SAME[name] if infinite else None


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


@contextlib.contextmanager
def libraries_run_as_with_data() -> Iterator[None]:
    """Keep libraries from the paths that they take for fake tensors.

    There transformers builds masks that it skips with data, PyTorch goes one by one through gradients that it
    norms and clips as a list, and a loss can't be formatted.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(module, "is_fake_tensor", None)
    both = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    lists = [types for types in both if FakeTensor not in types]
    for types in lists:
        types.append(FakeTensor)
    if asked is not None:
        module.is_fake_tensor = lambda _: False
    FakeTensor.__format__ = _format  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__format__ = torch.Tensor.__format__  # type: ignore[method-assign]
        for types in lists:
            types.remove(FakeTensor)
        if asked is not None:
            module.is_fake_tensor = asked


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)
