"""Parts of shared tensors, and collectives under fake tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit._torch.pytree import tree_leaves
from memfit._torch.replacement import replaced


def _is_shared(kind: type) -> bool:
    return hasattr(kind, "_local_tensor")


is_shared: Callable[[Any], bool] = functools.cache(_is_shared)
"""Tells whether tensors of a class are parts of larger ones: DTensors. No distributed package is imported for it."""


def local_part(tensor: Any) -> torch.Tensor:
    """Return a rank's own part of a DTensor; any other tensor as it is."""
    part: torch.Tensor = tensor._local_tensor if is_shared(type(tensor)) else tensor
    return part


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
