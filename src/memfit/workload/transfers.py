"""Operators for copies between a device and the host, which a captured step shows.

Each is issued on the current stream; `wait` marks where the computation waits for a copy, and does nothing itself.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("memfit", "DEF")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _nothing(*_: torch.Tensor) -> None:
    return None


for _schema, _kernel in (
    ("copy_out(Tensor(a!) host, Tensor tensor) -> ()", _copy),
    ("copy_in(Tensor(a!) tensor, Tensor host) -> ()", _copy),
    ("wait(Tensor(a!) tensor) -> ()", _nothing),
):
    _LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memfit::{_name}", _nothing, lib=_LIBRARY)

copy_out = torch.ops.memfit.copy_out.default
copy_in = torch.ops.memfit.copy_in.default
wait = torch.ops.memfit.wait.default


def has_history(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has an autograd node; False for views that autograd no longer allows to be used.

    Autograd raises for their node: for example, views created without gradients of tensors then written to with them.
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def covers_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor covers its whole storage, so that a copy of it can replace the storage."""
    if tensor.layout is not torch.strided or tensor.storage_offset() != 0:
        return False
    nbytes = tensor.numel() * tensor.itemsize
    return 0 < nbytes == tensor.untyped_storage().nbytes()
