"""Fake tensors: shapes, dtypes and devices without data, and a mode with a quicker cache of operators' outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses import fake_tensor as fake_tensor
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import (
    _BypassDispatchCache,
    _DispatchCacheValidEntry,
    in_kernel_invocation_manager,
)
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# A fake tensor mode that looks up the outputs of operators with less work
#
# `FakeTensorMode` keeps operators' outputs by the metadata of their arguments. To look one up it makes a record of 17
# fields for each tensor, and it builds each output through a constructor of fifty lines, which is half of a capture.
# This mode asks a tensor for the eight values that tell it apart, and copies the attributes of the output that it saw
# first. What may be kept at all is left to PyTorch's cache.
#
# The first call with some metadata is the slow one, at a millisecond and more: PyTorch decomposes even a view into
# several operators that it looks up in its turn. In a small step, or the first of a process, most calls are first ones.
# So views, and operators by element on contiguous tensors of one shape, are not asked of PyTorch: what they return
# follows from their arguments.

_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_UNKNOWN: Any = object()


def _named(names: str) -> frozenset[Any]:
    """Return operators of ATen by name, with the overload where it is not the default one."""
    split = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in split)


_VIEWS = _named(
    "_unsafe_view alias as_strided detach expand permute select.int slice.Tensor squeeze.dim t transpose.int "
    "unsqueeze view"
)
"""Views of their first argument, whose own kernels run on tensors without data."""
_BY_ELEMENT = _named(
    "add.Tensor addcdiv addcmul clone div.Tensor exp gelu gelu_backward lerp.Scalar mul.Tensor neg ones_like "
    "pow.Tensor_Scalar relu rsqrt sigmoid sigmoid_backward silu silu_backward sqrt sub.Tensor tanh tanh_backward "
    "threshold_backward zeros_like"
)
"""Operators that return a tensor like their arguments, where these are alike."""
_IN_PLACE = _named(
    "add_.Tensor addcdiv_ addcmul_ copy_ div_.Tensor fill_.Scalar lerp_.Scalar mul_.Tensor sqrt_ sub_.Tensor zero_"
)
"""Operators that write to their first argument, and return it."""
_REAL_SCALARS = frozenset({int, float, str})
_DEFAULTS = (None, torch.preserve_format)


class _New(NamedTuple):
    """A tensor that an operator makes: its metadata, the argument that it is a view of, and its Python attributes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device
    viewed: int | None
    attributes: dict[str, Any]


class _Argument(NamedTuple):
    """An argument that an operator writes to and returns."""

    position: int


class _Kept(NamedTuple):
    outputs: tuple[Any, ...]
    is_tuple: bool


class CachedFakeTensorMode(FakeTensorMode):
    """`FakeTensorMode` for shapes without symbols, with a quicker look-up of outputs."""

    _kept: dict[tuple[Any, ...], _Kept | None] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an operator's outputs, from kept metadata where the arguments' are known."""
        kwargs = kwargs or {}
        key = [func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        key.append(len(args))
        if not self.cache_enabled or not self._describe(key, (*args, *kwargs, *kwargs.values())):
            return super().dispatch(func, types, args, kwargs)
        arguments = tuple(key)
        kept = self._kept.get(arguments, _UNKNOWN)
        if kept is _UNKNOWN:
            return self._dispatch_and_keep(arguments, func, types, args, kwargs)
        if kept is None:
            return super().dispatch(func, types, args, kwargs)
        outputs = [self._output(output, args) for output in kept.outputs]
        return tuple(outputs) if kept.is_tuple else outputs[0]

    def _describe(self, key: list[Any], values: Any) -> bool:
        """Append the metadata of values to a key; return False where a value has none that can be kept."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
                    return False
                key += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.fake_device,
                    value.requires_grad,
                    torch._C._dispatch_keys(value).raw_repr(),  # conjugate, negative, quantized, made for inference
                )
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

    def _dispatch_and_keep(self, arguments: tuple[Any, ...], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (output := self._known_output(func, args, kwargs)) is not None:
            self._kept[arguments] = _Kept((output,), is_tuple=False)
            return self._output(output, args)
        try:
            entry_key = self._cache_key(_CacheKeyState(None), func, args, kwargs)
        except _BypassDispatchCache:
            return super().dispatch(func, types, args, kwargs)
        out = super().dispatch(func, types, args, kwargs)
        self._kept[arguments] = _kept(FakeTensorMode.cache.get(entry_key), out)
        return out

    def _known_output(self, func: Any, args: Any, kwargs: Any) -> _New | _Argument | None:
        """Return the metadata of an output that follows from the arguments; None where PyTorch has to be asked."""
        first = args[0] if args else None
        if type(first) is not FakeTensor or torch.is_inference_mode_enabled() or first.is_neg():
            return None
        if func in _VIEWS:
            if kwargs or first.is_complex() or first.is_quantized:
                return None
            with in_kernel_invocation_manager(self):
                elem = func(*args)
            return self._new(elem.shape, elem.stride(), elem.storage_offset(), first, viewed=0)
        if func not in _BY_ELEMENT and func not in _IN_PLACE:
            return None
        values = (*args, *kwargs.values())
        if not all(_is_plain_like(v, first) if type(v) is FakeTensor else _is_plain_option(v) for v in values):
            return None
        if func in _IN_PLACE:
            return _Argument(0)
        return self._new(first.shape, first.stride(), 0, first, viewed=None)

    def _new(self, shape: Any, stride: Any, offset: int, like: FakeTensor, viewed: int | None) -> _New:
        elem = torch.empty((), dtype=like.dtype, device="meta")
        attributes = {k: v for k, v in vars(FakeTensor(self, elem, like.fake_device)).items() if k != "fake_mode"}
        return _New(shape, stride, offset, like.dtype, False, like.fake_device, viewed, attributes)

    def _output(self, output: Any, args: Any) -> Any:
        if not isinstance(output, _New):
            return args[output.position] if isinstance(output, _Argument) else output
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
            if output.viewed is not None:
                elem.set_(args[output.viewed].untyped_storage(), output.offset, output.shape, output.stride)
            made = torch.Tensor._make_subclass(
                FakeTensor, elem, output.requires_grad, dispatch_device=True, device_for_backend_keys=output.device
            )
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(output.attributes)
        made.__dict__["fake_mode"] = self
        return made


def _is_plain_like(tensor: FakeTensor, other: FakeTensor) -> bool:
    """Tell whether a tensor of real floats is contiguous, and alike in shape, dtype and device to another one."""
    if not tensor.is_floating_point() or tensor.is_neg() or tensor.fake_device != other.fake_device:
        return False
    if tensor.shape != other.shape or tensor.dtype is not other.dtype:
        return False
    count, strides = 1, []
    for size in reversed(tensor.shape):
        strides.append(count)
        count *= size
    return count > 0 and tensor.stride() == tuple(reversed(strides))


def _is_plain_option(value: Any) -> bool:
    return type(value) in _REAL_SCALARS or any(value is default for default in _DEFAULTS)


def _kept(entry: Any, out: Any) -> _Kept | None:
    """Return the metadata of an operator's outputs; None where PyTorch keeps none, or they can't be made here."""
    if not isinstance(entry, _DispatchCacheValidEntry):
        return None
    outputs: list[Any] = []
    for info, made in zip(entry.output_infos, out if entry.is_output_tuple else (out,), strict=True):
        metadata = info.metadata
        if info.inplace_idx is not None:
            outputs.append(_Argument(info.inplace_idx))
        elif metadata is None:
            outputs.append(info.constant_value)
        elif metadata.is_conj or metadata.is_neg or metadata.layout is not torch.strided:
            return None
        else:
            attributes = {name: value for name, value in vars(made).items() if name != "fake_mode"}
            form: list[Any] = [metadata.shape, metadata.stride, metadata.storage_offset, metadata.dtype]
            form += [metadata.requires_grad, metadata.device, info.view_idx, attributes]
            outputs.append(_New(*form))
    return _Kept(tuple(outputs), entry.is_output_tuple)
