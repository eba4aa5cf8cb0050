"""A fake tensor mode that looks up the outputs of operators with less work.

`FakeTensorMode` keeps operators' outputs by the metadata of their arguments. To look one up it makes a record of 17
fields for each tensor, and it builds each output through a constructor of fifty lines, which is half of a capture. This
mode asks a tensor for the eight values that tell it apart, and copies the attributes of the output that it saw first.
What may be kept at all is left to PyTorch's cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _DispatchCacheValidEntry,
)

_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_UNKNOWN: Any = object()


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
        try:
            entry_key = self._cache_key(_CacheKeyState(None), func, args, kwargs)
        except _BypassDispatchCache:
            return super().dispatch(func, types, args, kwargs)
        out = super().dispatch(func, types, args, kwargs)
        self._kept[arguments] = _kept(FakeTensorMode.cache.get(entry_key), out)
        return out

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
