"""Outputs of fake operators with the storages, layouts and dtypes of the device's kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from memfit._torch.dispatch import select_conv_backend, suggest_memory_format
from memfit._torch.fake import unset_fake_temporarily
from memfit._torch.operators import packet_of
from memfit.fake_gpu.recurrent import with_reserve
from memfit.signature import rebuild, signature

_aten = torch.ops.aten
_NORMS = {_aten.native_batch_norm.default, _aten.native_group_norm.default, _aten.native_layer_norm.default}
_LOSSES = {_aten.mse_loss, _aten.smooth_l1_loss, _aten.soft_margin_loss, _aten.binary_cross_entropy}
_MADE_LIKE_THEIR_INPUT = {_aten.im2col.default, _aten.col2im.default}
"""Operators that allocate their output as large as their input, and keep that storage (ATen/native/Col2Im.cpp)."""
_LAYOUTS = {
    _aten._batch_norm_with_update: 0,
    _aten._native_batch_norm_legit: 0,
    _aten.batch_norm_backward: 1,
    _aten.native_batch_norm_backward: 1,
    _aten.reflection_pad2d: 0,
    _aten.reflection_pad2d_backward: 1,
    _aten.reflection_pad3d: 0,
    _aten.reflection_pad3d_backward: 1,
    _aten.replication_pad3d: 0,
    _aten.replication_pad3d_backward: 1,
    _aten.replication_pad2d: 0,
    _aten.replication_pad2d_backward: 1,
    _aten.max_unpool2d: 0,
    _aten.channel_shuffle: 0,
    _aten.roll: 0,
}
"""CPU operators whose (first) output has the memory format of an argument, with the argument's position."""
_ELEMENTWISE = {
    _aten.copysign.Tensor,
    _aten.div.Tensor_mode,
    _aten.elu_backward.default,
    _aten.floor_divide.default,
    _aten.hardsigmoid_backward.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.heaviside.default,
    _aten.logaddexp.default,
    _aten.logit_backward.default,
    _aten.logaddexp2.default,
    _aten.logical_and.default,
    _aten.logical_or.default,
    _aten.logical_xor.default,
    _aten.native_dropout_backward.default,
    _aten.softplus_backward.default,
    _aten.special_xlog1py.default,
    _aten.xlogy.Tensor,
}
"""Operators on two tensors whose fake kernels are decompositions, with outputs in another layout."""
_ROWS = {_aten.glu_backward, _aten.log_sigmoid_forward, _aten.rrelu_with_noise}
"""CPU operators whose outputs are contiguous whatever their arguments are."""
_CONTIGUOUS = {
    *(_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default),
    *(_aten._log_softmax_backward_data.default, _aten.nll_loss2d_forward.default),
    *(_aten.normal.Tensor_Tensor, _aten.pow.Scalar),
}
"""Operators whose (first) output is contiguous whatever their arguments are."""
_SCATTERS = {
    *(_aten.as_strided_scatter.default, _aten.diagonal_scatter.default),
    *(_aten.select_scatter.default, _aten.slice_scatter.default),
}
"""Operators that copy the whole storage of their input (`clone_preserve_strides` in ATen)."""
_UNIQUE = {_aten.unique_consecutive.default, _aten.unique_dim.default}
_BAGS = {_aten._embedding_bag, _aten._embedding_bag_forward_only}


def grouped_product(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the product of groups of fake rows: the fake kernel takes bfloat16 only, the device's any dtype."""
    left, right, *rest = args
    return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(kwargs.get("out_dtype") or left.dtype)


def kernel_outputs(out: Any, func: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """Return the outputs of a fake operator with the storages that the device's kernel allocates."""
    if device_type == "cpu":
        out = _as_on_cpu(out, func, args, kwargs)
    elif func is _aten._cudnn_rnn.default:
        return with_reserve(out, args)
    if func in _ELEMENTWISE:
        return _like_sum(out, *[a for a in args if isinstance(a, torch.Tensor)])
    if func is _aten.ldexp.Tensor:  # of a power of two, which is contiguous
        return _like_sum(out, args[0], args[1].contiguous())
    if func in _SCATTERS and not _overlaps(args[0]):
        return _in_memory_of(out, args[0].untyped_storage().nbytes() // args[0].itemsize, args[0].storage_offset())
    if func in _MADE_LIKE_THEIR_INPUT and out.numel() < args[0].numel():
        return _in_memory_of(out, args[0].numel())
    if packet_of(func) in _LOSSES and out.dim() == 0:  # reduced in place, in the storage of the terms
        terms = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return out.new_empty(terms).as_strided((), ()) if math.prod(terms) else out
    if func in _CONTIGUOUS:
        return (out[0].contiguous(), *out[1:]) if isinstance(out, tuple) else out.contiguous()
    if func is _aten.native_layer_norm_backward.default:  # whatever the strides of gradient and weight are
        return tuple(t if t is None else t.contiguous() for t in out)
    return out


def _as_on_cpu(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if func in _NORMS:  # saves statistics in the dtype of its parameters, which the fake kernel ignores
        dtype = next((t.dtype for t in args[1:5] if isinstance(t, torch.Tensor)), out[1].dtype)
        statistics = [statistic.new_empty(out[1].shape, dtype=dtype) for statistic in out[1:]]
        is_layer = func is _aten.native_layer_norm.default
        return out[0] if is_layer else _laid_out_as(out[0], args[0]), *statistics
    if packet_of(func) in _LAYOUTS:
        return _laid_out_as(out, args[_LAYOUTS[packet_of(func)]])
    if packet_of(func) in _ROWS:
        return tuple(t.contiguous() for t in out) if isinstance(out, tuple) else out.contiguous()
    if func is _aten.native_group_norm_backward.default and out[0] is not None:
        return _laid_out_as(torch.empty_like(out[0], dtype=args[1].dtype), args[1]), *out[1:]
    if packet_of(func) in _BAGS and out[1].numel():  # the kernel allocates one element more
        bags = out[1].new_empty(out[1].numel() + 1)
        return out[0], bags.as_strided(out[1].size(), out[1].stride()), *out[2:]
    if func in _UNIQUE:
        return _unique_outputs(out, func, args, kwargs)
    if func is _aten.mkldnn_rnn_layer.default:
        nbytes = _rnn_workspace_bytes(signature(func, args, kwargs))
        return *out[:3], out[3].new_empty(nbytes)
    if func is _aten.mkldnn_rnn_layer_backward.default:  # before torch 2.13 the fake kernel gave the input's dtype
        return tuple(t if t is None else t.new_empty(t.shape, dtype=torch.float32) for t in out)
    if func is _aten.convolution.default and out.numel() < args[0].numel() and _is_made_like_its_input(*args):
        return _in_memory_of(out, args[0].numel())
    return out


def _unique_outputs(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return values and counts in storages as large as there are elements, or slices, and then cut."""
    dim = kwargs.get("dim", args[1] if func is _aten.unique_dim.default else args[3] if len(args) > 3 else None)
    if dim is None or args[0].dim() == 1 and func is _aten.unique_consecutive.default:
        return tuple(t if t.numel() == 0 else _in_memory_of(t, args[0].numel()) for t in out)
    counts = out[2]
    return *out[:2], counts if counts.numel() == 0 else _in_memory_of(counts, args[0].shape[dim])


def _like_sum(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Return an output in the layout that elementwise kernels give it."""
    return torch.empty_like(torch.add(*tensors), dtype=out.dtype)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor share memory, as those of an expanded one (`has_internal_overlap`)."""
    return any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True))


def _laid_out_as(out: Any, given: torch.Tensor) -> Any:
    """Return an output, or a tuple's first output, in the memory format of an argument."""
    if isinstance(out, tuple):
        return _laid_out_as(out[0], given), *out[1:]
    return out if out is None else out.contiguous(memory_format=suggest_memory_format(given))


def _in_memory_of(out: torch.Tensor, elements: int, offset: int = 0) -> torch.Tensor:
    """Return an output like the given one, in a storage of more elements."""
    return out.new_empty(elements).as_strided(out.shape, out.stride(), offset)


def _is_made_like_its_input(given: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Any) -> bool:
    """Tell whether a convolution allocates its output as large as its input, and keeps that storage.

    So do transposed convolutions over volumes without a oneDNN kernel (ATen/native/NaiveConvolutionTranspose3d.cpp).
    """
    transposed = options[3]
    if not transposed or weight.dim() != 5:
        return False
    with unset_fake_temporarily():
        like = [None if t is None else torch.empty(1, dtype=t.dtype).expand(t.shape) for t in (given, weight, bias)]
        backend = select_conv_backend(*like, *options)
    return bool(backend.name == "SlowTranspose3d")


@functools.cache
def _rnn_workspace_bytes(text: str) -> int:
    """Return the workspace bytes that an RNN layer saves, by running it once: the fake kernel says 0."""
    with unset_fake_temporarily():
        func, args, kwargs = rebuild(text, "cpu")
        workspace = func(*args, **kwargs)[3]
        return 0 if workspace is None else workspace.numel()
