"""Operators on fake sparse tensors, with the numbers of entries and the aliases that they have with data.

Both follow from the indices alone. So such an operator runs on real tensors of the same sparsity, with the batch's
indices where they are known, and its fake outputs are made like the real ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch.autograd import current_autograd_node
from memfit._torch.dispatch import disable_current_modes
from memfit._torch.operators import packet_of, schema_of
from memfit._torch.pytree import tree_map
from memfit._torch.tensors import sparse_indices, sparse_values, storage_key, storage_key_of
from memfit.argument_values import TO_SPARSE, sparse_dims_of
from memfit.capture.known_values import KnownValues, device_of, tensors_in, written_by
from memfit.sparse import assembled, parts, spread_indices

_aten = torch.ops.aten
_QUERIES = {
    *(_aten._indices, _aten._values, _aten.indices, _aten.values, _aten.is_coalesced, _aten._nnz, _aten.sparse_dim),
    *(_aten.dense_dim, _aten._dimI, _aten._dimV, _aten._coalesced_, _aten._local_scalar_dense),
}
"""Operators that only query a sparse tensor: their fake kernels answer as with data."""
_LIMIT_BYTES = 2**31  # size of the real tensors made for one operator


class SparseOperators:
    """Operators on sparse COO tensors of one fake tensor mode."""

    def __init__(self, values: KnownValues) -> None:
        self.values = values
        self._indices = WeakIdKeyDictionary()  # real indices, by the fake ones' storage and place in it

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an operator."""
        given = [t for t in tensors_in((args, kwargs)) if t.layout is torch.sparse_coo]
        if func in TO_SPARSE and not given and kwargs.get("layout") in (None, torch.sparse_coo):
            return self._made_sparse(func, args, kwargs)
        if not given or not self._needs_data(func, args, kwargs, given):
            out = func(*_with_bags(func, args), **kwargs)
            self._store_output_indices(out, args)
            return out
        node = current_autograd_node() if func is _aten.clone.default else None
        # Autograd takes over a sparse gradient for a parameter, which it clones only under a mode.
        if node is not None and node.name().endswith("AccumulateGrad"):
            indices, values = parts(args[0])
            return assembled(indices, values, args[0].shape, _coalesced(args[0]))
        return self._run_on_real(func, args, kwargs)

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

    def _needs_data(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        written = written_by(func, args, kwargs)
        involved = [part for t in (*given, *written) for part in parts(t)]
        if packet_of(func) in _QUERIES or sum(part.nbytes for part in involved) > _LIMIT_BYTES:
            return False
        return not written or any(t.layout is torch.sparse_coo for t in written)

    def _run_on_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on real tensors alike, and return fake outputs that alias as the real ones do."""
        stood_for: dict[int, torch.Tensor] = {}
        written = written_by(func, args, kwargs)
        with disable_current_modes():
            alike: dict[int, Any] = {id(t): self._real_like(t, stood_for) for t in tensors_in((args, kwargs))}
            alike |= {id(t): alike[id(t)].clone() for t in written if t.layout is torch.strided}
            real_args, real_kwargs = tree_map(lambda leaf: _on_cpu(leaf, alike), (args, kwargs))
            out = func(*real_args, **real_kwargs)
        device = kwargs.get("device") or device_of(tensors_in((args, kwargs))[0])
        for tensor in written:
            if tensor.layout is torch.sparse_coo:
                tensor.data = self._fake(alike[id(tensor)], stood_for, device)
        fakes = {id(real): tensor for tensor in tensors_in((args, kwargs)) for real in [alike[id(tensor)]]}
        return tree_map(lambda leaf: fakes.get(id(leaf), self._fake(leaf, stood_for, device)), out)

    def _real_like(self, tensor: torch.Tensor, stood_for: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a real tensor like a fake one; an expanded scalar for a dense one."""
        if tensor.layout is not torch.sparse_coo:
            filled = torch.full((), 0.5 if tensor.is_floating_point() else 0, dtype=tensor.dtype)
            return filled.expand(tensor.shape)
        indices, values = parts(tensor)
        known = self._indices.get(indices.untyped_storage(), {}).get(_place(indices))
        shape = list(tensor.shape)[: tensor.dim() - values.dim() + 1]
        if known is None:
            known = spread_indices(shape, indices.shape[1])
        known = known.clone()
        filled = torch.full(values.shape, 0.5 if values.is_floating_point() else 0, dtype=values.dtype)
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

    def _store_output_indices(self, out: Any, args: Any) -> None:
        """Store the real indices of new sparse outputs, where they alias integers with known values."""
        for output in tensors_in(out):
            if output.layout is not torch.sparse_coo:
                continue
            indices = parts(output)[0]
            storage = storage_key_of(indices)
            for source in tensors_in(args):
                if source.layout is torch.strided and storage_key_of(source) == storage:
                    real = self.values.value_of(source)
                    if real is not None and real.numel() == indices.numel():
                        with disable_current_modes():
                            self._store_indices(indices, real.reshape(indices.shape))

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


def _with_bags(func: Any, args: Any) -> Any:
    """Return arguments with the bag of each index, which the kernel computes where the forward pass gives none."""
    if func is not _aten._embedding_bag_backward.default or args[3].numel() == args[1].numel():
        return args
    return *args[:3], torch.empty_like(args[1]), *args[4:]


def _on_cpu(leaf: Any, alike: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return alike[id(leaf)]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _fake_part(real: torch.Tensor, stood_for: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a fake tensor like a real one, in the storage that the real one's stands for, or in a new one."""
    storage = real.untyped_storage()
    fake = stood_for.get(storage_key(storage))
    size, stride, offset = real.size(), real.stride(), real.storage_offset()
    if fake is not None:
        return fake.as_strided(size, stride, fake.storage_offset() + offset)
    whole = torch.empty(storage.nbytes() // real.itemsize, dtype=real.dtype, device=device)
    return whole.as_strided(size, stride, offset)
