"""Outputs of fake operators with the storages, layouts and dtypes of the device's kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch import (
    current_autograd_node,
    disable_current_modes,
    packet_of,
    schema_of,
    select_conv_backend,
    sparse_indices,
    sparse_values,
    storage_key,
    storage_key_of,
    suggest_memory_format,
    tree_map,
    unset_fake_temporarily,
)
from memfit.capture.known_values import KnownValues
from memfit.capture.operator_calls import device_of, tensors_in, written_by
from memfit.hardware import with_reserve
from memfit.workload import TO_SPARSE, assembled, parts, rebuild, signature, sparse_dims_of, spread_indices

_aten = torch.ops.aten
_NORMS = {_aten.native_batch_norm.default, _aten.native_group_norm.default, _aten.native_layer_norm.default}
_LOSSES = {_aten.mse_loss, _aten.smooth_l1_loss, _aten.soft_margin_loss, _aten.binary_cross_entropy}
_MADE_LIKE_THEIR_INPUT = {_aten.im2col.default, _aten.col2im.default}
"""Operators that allocate their output as large as their input, and keep that storage (ATen/native/Col2Im.cpp)."""
_LAYOUTS: dict[Any, int] = {
    **dict.fromkeys((_aten._batch_norm_with_update, _aten._native_batch_norm_legit), 0),
    **dict.fromkeys((_aten.batch_norm_backward, _aten.native_batch_norm_backward), 1),
    **dict.fromkeys((_aten.reflection_pad2d, _aten.reflection_pad3d), 0),
    **dict.fromkeys((_aten.reflection_pad2d_backward, _aten.reflection_pad3d_backward), 1),
    **dict.fromkeys((_aten.replication_pad2d, _aten.replication_pad3d), 0),
    **dict.fromkeys((_aten.replication_pad2d_backward, _aten.replication_pad3d_backward), 1),
    **dict.fromkeys((_aten.max_unpool2d, _aten.channel_shuffle, _aten.roll), 0),
}
"""CPU operators whose (first) output has the memory format of an argument, with the argument's position."""
_ELEMENTWISE = {
    *(_aten.copysign.Tensor, _aten.div.Tensor_mode, _aten.floor_divide.default, _aten.heaviside.default),
    *(_aten.logaddexp.default, _aten.logaddexp2.default, _aten.special_xlog1py.default, _aten.xlogy.Tensor),
    *(_aten.logical_and.default, _aten.logical_or.default, _aten.logical_xor.default),
    *(_aten.elu_backward.default, _aten.hardsigmoid_backward.default, _aten.hardswish_backward.default),
    *(_aten.hardtanh_backward.default, _aten.logit_backward.default, _aten.softplus_backward.default),
    _aten.native_dropout_backward.default,
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
_QUERIES = {
    *(_aten._indices, _aten._values, _aten.indices, _aten.values, _aten.is_coalesced, _aten._nnz, _aten.sparse_dim),
    *(_aten.dense_dim, _aten._dimI, _aten._dimV, _aten._coalesced_, _aten._local_scalar_dense),
}
"""Operators that only query a sparse tensor: their fake kernels answer as with data."""
_LIMIT_BYTES = 2**31  # size of the real tensors made for one operator


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
    if func in _SCATTERS and not any(d == 0 and n > 1 for d, n in zip(args[0].stride(), args[0].shape, strict=True)):
        # The elements share no memory, as those of an expanded tensor do (`has_internal_overlap` in ATen).
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
    if func in _UNIQUE:  # values and counts are in storages as large as there are elements, or slices, and then cut
        dim = kwargs.get("dim", args[1] if func is _aten.unique_dim.default else args[3] if len(args) > 3 else None)
        if dim is None or args[0].dim() == 1 and func is _aten.unique_consecutive.default:
            return tuple(t if t.numel() == 0 else _in_memory_of(t, args[0].numel()) for t in out)
        counts = out[2]
        return *out[:2], counts if counts.numel() == 0 else _in_memory_of(counts, args[0].shape[dim])
    if func is _aten.mkldnn_rnn_layer.default:
        return *out[:3], out[3].new_empty(_rnn_workspace_bytes(signature(func, args, kwargs)))
    if func is _aten.mkldnn_rnn_layer_backward.default:  # before torch 2.13 the fake kernel gave the input's dtype
        return tuple(t if t is None else t.new_empty(t.shape, dtype=torch.float32) for t in out)
    if func is _aten.convolution.default and out.numel() < args[0].numel() and args[6] and args[1].dim() == 5:
        # Transposed convolutions over volumes without a oneDNN kernel allocate their output as large as their input,
        # and keep that storage (ATen/native/NaiveConvolutionTranspose3d.cpp).
        with unset_fake_temporarily():
            like = [None if t is None else torch.empty(1, dtype=t.dtype).expand(t.shape) for t in args[:3]]
            is_slow = select_conv_backend(*like, *args[3:]).name == "SlowTranspose3d"
        return _in_memory_of(out, args[0].numel()) if is_slow else out
    return out


def _like_sum(out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Return an output in the layout that elementwise kernels give it; a number beside a tensor changes none."""
    if len(tensors) == 1:
        return out
    return torch.empty_like(torch.add(*tensors), dtype=out.dtype)


def _laid_out_as(out: Any, given: torch.Tensor) -> Any:
    """Return an output, or a tuple's first output, in the memory format of an argument."""
    if isinstance(out, tuple):
        return _laid_out_as(out[0], given), *out[1:]
    return out if out is None else out.contiguous(memory_format=suggest_memory_format(given))


def _in_memory_of(out: torch.Tensor, elements: int, offset: int = 0) -> torch.Tensor:
    """Return an output like the given one, in a storage of more elements."""
    return out.new_empty(elements).as_strided(out.shape, out.stride(), offset)


@functools.cache
def _rnn_workspace_bytes(text: str) -> int:
    """Return the workspace bytes that an RNN layer saves, by running it once: the fake kernel says 0."""
    with unset_fake_temporarily():
        func, args, kwargs = rebuild(text, "cpu")
        workspace = func(*args, **kwargs)[3]
        return 0 if workspace is None else workspace.numel()


# Operators on sparse tensors
#
# Numbers of entries and aliases follow from the indices alone. So such an operator runs on real tensors of the same
# sparsity, with the batch's indices where they are known, and its fake outputs are made like the real ones.


class SparseOperators:
    """Operators on sparse COO tensors of one fake tensor mode."""

    def __init__(self, values: KnownValues) -> None:
        self.values = values
        self._indices = WeakIdKeyDictionary()  # real indices, by the fake ones' storage and place in it

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [t for t in tensors_in((args, kwargs)) if t.layout is torch.sparse_coo]
        if func in TO_SPARSE and not given and kwargs.get("layout") in (None, torch.sparse_coo):
            return self._made_sparse(func, args, kwargs)
        written = written_by(func, args, kwargs) if given and packet_of(func) not in _QUERIES else []
        if (
            not given
            or packet_of(func) in _QUERIES
            or sum(part.nbytes for t in (*given, *written) for part in parts(t)) > _LIMIT_BYTES
            or (written and not any(t.layout is torch.sparse_coo for t in written))
        ):
            if func is _aten._embedding_bag_backward.default and args[3].numel() != args[1].numel():
                # The kernel computes the bag of each index, where the forward pass gives none.
                args = *args[:3], torch.empty_like(args[1]), *args[4:]
            out = func(*args, **kwargs)
            for output in (t for t in tensors_in(out) if t.layout is torch.sparse_coo):
                indices = parts(output)[0]
                for source in tensors_in(args):  # integers with known values that the indices alias
                    if source.layout is torch.strided and storage_key_of(source) == storage_key_of(indices):
                        real = self.values.value_of(source)
                        if real is not None and real.numel() == indices.numel():
                            with disable_current_modes():
                                self._store_indices(indices, real.reshape(indices.shape))
            return out
        node = current_autograd_node() if func is _aten.clone.default else None
        # Autograd takes over a sparse gradient for a parameter, which it clones only under a mode.
        if node is not None and node.name().endswith("AccumulateGrad"):
            indices, values = parts(args[0])
            return assembled(indices, values, args[0].shape, _coalesced(args[0]))
        return self._run_on_real(func, args, kwargs, written)

    def _made_sparse(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the sparse form of a dense tensor: its entries are values that are read; all of them, by a guess."""
        dense: torch.Tensor = args[0]
        dims, device, replay = sparse_dims_of(func, args, kwargs), device_of(dense), self.values.replay
        real, logged = self.values.value_of(dense), replay.logged(str(func), dense)
        with disable_current_modes():
            if real is not None:
                indices = sparse_indices(func(real, *args[1:], **kwargs)).clone()
            elif logged is not None:
                indices = logged.tensor()
            else:
                indices = None  # spread evenly, where an operator needs them
        if indices is None:
            replay.guessed_shape(func, dense)
        count = math.prod(dense.shape[:dims]) if indices is None else indices.shape[1]
        fake = torch.empty((dims, count), dtype=torch.long, device=device)
        if indices is not None:
            self._store_indices(fake, indices)
        values = torch.empty((count, *dense.shape[dims:]), dtype=dense.dtype, device=device)
        return assembled(fake, values, dense.shape, coalesced=True)

    def _run_on_real(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Run an operator on real tensors alike, and return fake outputs that alias as the real ones do."""
        stood_for: dict[int, torch.Tensor] = {}
        with disable_current_modes():
            alike: dict[int, Any] = {id(t): self._real_like(t, stood_for) for t in tensors_in((args, kwargs))}
            alike |= {id(t): alike[id(t)].clone() for t in written if t.layout is torch.strided}
            real_args, real_kwargs = tree_map(
                lambda leaf: torch.device("cpu") if isinstance(leaf, torch.device) else alike.get(id(leaf), leaf),
                (args, kwargs),
            )
            out = func(*real_args, **real_kwargs)
        device = kwargs.get("device") or device_of(tensors_in((args, kwargs))[0])
        for tensor in written:
            if tensor.layout is torch.sparse_coo:
                tensor.data = self._fake(alike[id(tensor)], stood_for, device)
        fakes = {id(alike[id(tensor)]): tensor for tensor in tensors_in((args, kwargs))}
        return tree_map(lambda leaf: fakes.get(id(leaf), self._fake(leaf, stood_for, device)), out)

    def _real_like(self, tensor: torch.Tensor, stood_for: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a real tensor like a fake one; an expanded scalar for a dense one."""
        number = 0.5 if tensor.is_floating_point() else 0
        if tensor.layout is not torch.sparse_coo:
            return torch.full((), number, dtype=tensor.dtype).expand(tensor.shape)
        indices, values = parts(tensor)
        known = self._indices.get(indices.untyped_storage(), {}).get(_place(indices))
        if known is None:
            known = spread_indices(list(tensor.shape)[: indices.shape[0]], indices.shape[1])
        known = known.clone()
        filled = torch.full(values.shape, number, dtype=values.dtype)
        stood_for |= {storage_key_of(known): indices, storage_key_of(filled): values}
        return assembled(known, filled, tensor.shape, _coalesced(tensor))

    def _fake(self, real: Any, stood_for: dict[int, torch.Tensor], device: torch.device) -> Any:
        """Return the fake tensor for a real output; another output as it is."""
        if not isinstance(real, torch.Tensor):
            return real
        if real.layout is not torch.sparse_coo:
            return _fake_part(real, stood_for, device)
        with disable_current_modes():
            indices, values, coalesced = sparse_indices(real), sparse_values(real), real.is_coalesced()
            known = indices.clone()
        fake = _fake_part(indices, stood_for, device)
        self._store_indices(fake, known)
        return assembled(fake, _fake_part(values, stood_for, device), real.shape, coalesced)

    def _store_indices(self, indices: torch.Tensor, real: torch.Tensor) -> None:
        self._indices.setdefault(indices.untyped_storage(), {})[_place(indices)] = real


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape)


def _coalesced(tensor: torch.Tensor) -> bool:
    with disable_current_modes():
        return tensor.is_coalesced()


def per_tensor_calls(func: Any, args: Any) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return the calls that an in-place operator on a list makes, where one tensor is sparse; None for others.

    The kernels then take the tensors one by one, so that each gives up its memory before the next allocates.
    """
    if not schema_of(func).name.startswith("aten::_foreach_"):
        return None
    name = schema_of(func).name.removeprefix("aten::_foreach_")
    if not name.endswith("_") or len(args) != 2 or not any(t.layout is torch.sparse_coo for t in args[0]):
        return None
    operands = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(args[0])
    packet = getattr(_aten, name)
    return [
        (packet.Tensor if isinstance(operand, torch.Tensor) else packet.Scalar, (tensor, operand))
        for tensor, operand in zip(args[0], operands, strict=True)
    ]


def _fake_part(real: torch.Tensor, stood_for: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a fake tensor like a real one, in the storage that the real one's stands for, or in a new one."""
    storage = real.untyped_storage()
    fake = stood_for.get(storage_key(storage))
    size, stride, offset = real.size(), real.stride(), real.storage_offset()
    if fake is not None:
        return fake.as_strided(size, stride, fake.storage_offset() + offset)
    whole = torch.empty(storage.nbytes() // real.itemsize, dtype=real.dtype, device=device)
    return whole.as_strided(size, stride, offset)
