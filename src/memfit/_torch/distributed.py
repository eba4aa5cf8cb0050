"""Parts of shared tensors, and collectives under fake tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit._torch.dispatch import disable_current_modes, replaced
from memfit._torch.tensors import tree_leaves
from memfit._torch.versions import SHARDED_LEAVES_ACCUMULATE


def _is_shared(kind: type) -> bool:
    return hasattr(kind, "_local_tensor")


is_shared: Callable[[Any], bool] = functools.cache(_is_shared)
"""Tells whether tensors of a class are parts of larger ones: DTensors. No distributed package is imported for it."""


def local_part(tensor: Any) -> torch.Tensor:
    """Return a rank's own part of a DTensor; any other tensor as it is."""
    part: torch.Tensor = tensor._local_tensor if is_shared(type(tensor)) else tensor
    return part


def chunk_of(tensor: Any) -> tuple[list[int], list[int]]:
    """Return where a rank's own part of a DTensor begins in it, by dimension, and the part's shape."""
    (chunk,) = tensor.__create_chunk_list__()
    return list(chunk.offsets), list(chunk.sizes)


def is_first_copy(tensor: Any) -> bool:
    """Tell whether this rank is the first of those that have the same part of a DTensor."""
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be the first of some ranks that are not there, until the context is left."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)
    from torch.distributed import _meta_registrations

    numbers = itertools.count(1)
    # PyTorch numbers fake collectives by Python's generator, which the user's step may draw from.
    numbered = replaced(_meta_registrations, "generate_unique_id", lambda: next(numbers))
    with numbered, replaced(sys, "excepthook", sys.excepthook):  # which joining a group wraps each time
        dist.init_process_group("fake", rank=0, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def ranks_of(arguments: Any) -> int:
    """Return how many ranks take part in a collective, by its arguments: an object or a name of their group."""
    import torch.distributed as dist

    for argument in tree_leaves(arguments):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(dist.ProcessGroup.unbox(argument).size())
    names: list[Any] = [argument for argument in tree_leaves(arguments) if isinstance(argument, str)]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return int(resolve(names[-1]).size()) if names else dist.get_world_size()


def collectives_sent(group: Any) -> int:
    """Return how many collectives this rank has sent on a process group."""
    return int(group._get_sequence_number_for_group())


def rebuild_buckets(wrapped: Any) -> None:
    """Put a `DistributedDataParallel`'s parameters into buckets by the order of their gradients, once that is known.

    It does so in its forward pass by itself. Dispatch modes see nothing of it, as all ranks have to do it at once.
    """
    with disable_current_modes():
        wrapped.reducer._rebuild_buckets()


def send_buffers_by(wrapped: Any, hook: Any) -> None:
    """Have a hook make a `DistributedDataParallel`'s buffers equal: `hook(buffers)`, before each forward pass."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    wrapped._register_buffer_comm_hook(
        None, lambda state, named: hook(list(named.values())), _BufferCommHookLocation.PRE_FORWARD
    )


def restart_buckets(wrapped: Any) -> None:
    """Have a `DistributedDataParallel` whose backward pass was aborted begin anew; call it on every rank."""
    wrapped._has_rebuilt_buckets = False
    wrapped.reducer._reset_state()


def initialize_units(root: Any) -> None:
    """Have `fully_shard` do what it does at the first forward pass: `reset_iter_state` fails before it was done."""
    root._get_fsdp_state()._lazy_init()


def drop_unsharded_gradients(root: Any) -> None:
    """Drop the gradients that `fully_shard` has not reduced: `reset_iter_state` leaves them.

    The next step would add to them.
    """
    for module in root.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for group in () if state is None else state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if not SHARDED_LEAVES_ACCUMULATE:
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
