"""Operators on fake sparse tensors: fake ones don't tell how many entries an output has, nor whose memory it shares.

Both follow from the indices alone. So such an operator runs once more with real tensors of the same sparsity, whose
indices are those of the batch where they are known, and its fake outputs are made alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memfit.capture.values import KnownValues, device_of, tensors_in
from memfit.sparse import assembled, parts, spread_indices

_aten = torch.ops.aten
_ASKING = {
    *(_aten._indices, _aten._values, _aten.indices, _aten.values, _aten.is_coalesced, _aten._nnz, _aten.sparse_dim),
    *(_aten.dense_dim, _aten._dimI, _aten._dimV, _aten._coalesced_, _aten._local_scalar_dense),
}
"""Operators that only look at a sparse tensor: the fake ones answer as with data."""
_LIMIT_BYTES = 2**31  # of real tensors made for one operator


class SparseOperators:
    """Runs operators on sparse COO tensors of one fake tensor mode.

    Args:
        values: The values known under the mode.
    """

    def __init__(self, values: KnownValues) -> None:
        self.values = values
        self._indices = WeakIdKeyDictionary()  # real indices, by the storage of the fake ones and where they are in it

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator makes of its arguments."""
        given = [t for t in tensors_in((args, kwargs)) if t.layout is torch.sparse_coo]
        if not given or not self._needs_data(func, args, kwargs, given):
            out = func(*_with_bags(func, args), **kwargs)
            self._know_outputs(out, args)
            return out
        if _is_taken_over(func, args):
            indices, values = parts(args[0])
            return assembled(indices, values, args[0].shape, _coalesced(args[0]))
        return self._as_with_data(func, args, kwargs)

    def _needs_data(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        written = written_by(func, args, kwargs)
        made = [part for t in (*given, *written) for part in parts(t)]
        if func._overloadpacket in _ASKING or sum(part.nbytes for part in made) > _LIMIT_BYTES:
            return False
        return not written or any(t.layout is torch.sparse_coo for t in written)

    def _as_with_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator with real tensors alike, and return fake outputs that share memory as the real ones do."""
        stood_for: dict[int, torch.Tensor] = {}
        written = written_by(func, args, kwargs)
        with _disable_current_modes():
            alike: dict[int, Any] = {id(t): self._alike(t, stood_for) for t in tensors_in((args, kwargs))}
            alike |= {id(t): alike[id(t)].clone() for t in written if t.layout is torch.strided}
            real_args, real_kwargs = tree_map(lambda leaf: _on_cpu(leaf, alike), (args, kwargs))
            out = func(*real_args, **real_kwargs)
        device = kwargs.get("device") or device_of(tensors_in((args, kwargs))[0])
        for tensor in written:
            if tensor.layout is torch.sparse_coo:
                tensor.data = self._fake(alike[id(tensor)], stood_for, device)
        fakes = {id(real): tensor for tensor in tensors_in((args, kwargs)) for real in [alike[id(tensor)]]}
        return tree_map(lambda leaf: fakes.get(id(leaf), self._fake(leaf, stood_for, device)), out)

    def _alike(self, tensor: torch.Tensor, stood_for: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a real tensor like a fake one; of one that is not sparse only the shape."""
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
        stood_for |= {known.untyped_storage()._cdata: indices, filled.untyped_storage()._cdata: values}
        return assembled(known, filled, tensor.shape, _coalesced(tensor))

    def _fake(self, real: Any, stood_for: dict[int, torch.Tensor], device: torch.device) -> Any:
        """Return the fake tensor of a real output; other outputs as they are."""
        if not isinstance(real, torch.Tensor):
            return real
        if real.layout is not torch.sparse_coo:
            return _fake_part(real, stood_for, device)
        with _disable_current_modes():
            indices, values, coalesced = real._indices(), real._values(), real.is_coalesced()
            known = indices.clone()
        fake = _fake_part(indices, stood_for, device)
        self._know(fake, known)
        return assembled(fake, _fake_part(values, stood_for, device), real.shape, coalesced)

    def _know_outputs(self, out: Any, args: Any) -> None:
        """Remember the real indices of new sparse outputs, whose storage is that of integers with known values."""
        for made in tensors_in(out):
            if made.layout is not torch.sparse_coo:
                continue
            indices = parts(made)[0]
            storage = indices.untyped_storage()._cdata
            for source in tensors_in(args):
                if source.layout is torch.strided and source.untyped_storage()._cdata == storage:
                    real = self.values.value_of(source)
                    if real is not None and real.numel() == indices.numel():
                        with _disable_current_modes():
                            self._know(indices, real.reshape(indices.shape))

    def _know(self, indices: torch.Tensor, real: torch.Tensor) -> None:
        self._indices.setdefault(indices.untyped_storage(), {})[_place(indices)] = real


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape)


def _coalesced(tensor: torch.Tensor) -> bool:
    with _disable_current_modes():
        return tensor.is_coalesced()


def _is_taken_over(func: Any, args: Any) -> bool:
    """Tell whether autograd makes a sparse gradient a parameter's own: a mode's reference has it clone instead."""
    node = torch._C._current_autograd_node()
    return func is _aten.clone.default and node is not None and node.name().endswith("AccumulateGrad")


def one_by_one(func: Any, args: Any) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return what an operator on a list does to each tensor in place, where one is sparse; None for other operators.

    The kernels for lists take them one by one then, so that each gives up its memory before the next gets more.
    """
    if not func._schema.name.startswith("aten::_foreach_"):
        return None
    name = func._schema.name.removeprefix("aten::_foreach_")
    if not name.endswith("_") or len(args) != 2 or not any(t.layout is torch.sparse_coo for t in args[0]):
        return None
    others = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(args[0])
    packet = getattr(_aten, name)
    return [
        (packet.Tensor if isinstance(other, torch.Tensor) else packet.Scalar, (tensor, other))
        for tensor, other in zip(args[0], others, strict=True)
    ]


def _with_bags(func: Any, args: Any) -> Any:
    """Return arguments that name the bag of each index: where the forward pass names none, the kernel finds them."""
    if func is not _aten._embedding_bag_backward.default or args[3].numel() == args[1].numel():
        return args
    return *args[:3], torch.empty_like(args[1]), *args[4:]


def _on_cpu(leaf: Any, alike: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return alike[id(leaf)]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _fake_part(real: torch.Tensor, stood_for: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a fake tensor like a real one, in the storage of what that one's storage stands for, else in a new one."""
    storage = real.untyped_storage()
    fake = stood_for.get(storage._cdata)
    size, stride, offset = real.size(), real.stride(), real.storage_offset()
    if fake is not None:
        return fake.as_strided(size, stride, fake.storage_offset() + offset)
    whole = torch.empty(storage.nbytes() // real.itemsize, dtype=real.dtype, device=device)
    return whole.as_strided(size, stride, offset)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operator writes in place."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tensors_in(found)
