"""Gathers and reductions of `fully_shard` over gloo, in the engine's own buffers.

By themselves gloo's gather and reduce-scatter copy all that they send, as no other backend does, and its threads hold
what was sent for a moment after it has arrived: a rank would take several units more than predicted, by chance. These
send the same sums in place, and wait until the threads have let go.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit._torch import disable_current_modes, storage_key_of, storage_use_count

_LONGEST_SECONDS = 1.0
"""For which gloo's threads are waited for: they only have to be given a processor."""


class Allocating:
    """Allocates as the engine does by itself."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Allocating):
    """A gather of shards: in place over gloo, as the backend does it elsewhere."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not is_gloo(group):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        held = _holders(output_tensor), _holders(input_tensor)
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with disable_current_modes():  # nothing is allocated: a rank sends all of it, or fails before
            for rank, part in enumerate(parts):
                dist.broadcast(part, group_src=rank, group=group)
        del own, parts, part
        _wait_for_release((output_tensor, held[0]), (input_tensor, held[1]))
        return None


class ReduceScatter(Allocating):
    """A reduction of which each rank keeps its part: in place over gloo, as the backend does it elsewhere."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not is_gloo(group):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        held = _holders(input_tensor)
        # A view: gloo's threads then hold a tensor of their own, which shows in the count of the storage.
        dist.all_reduce(input_tensor.view(-1), op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        _wait_for_release((input_tensor, held))
        return None


def send_in_place(model: nn.Module) -> None:
    """Have all units of a fully sharded model gather and reduce in place, where they do so over gloo."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gather: Any = Gather()
            reduce: Any = ReduceScatter()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Tell whether a process group sends over gloo."""
    return bool(dist.get_backend(group) == "gloo")


def _holders(tensor: torch.Tensor) -> int:
    return storage_use_count(storage_key_of(tensor))


def _wait_for_release(*tensors: tuple[torch.Tensor, int]) -> None:
    """Wait until storages are held as often as before; no longer than that takes by any chance."""
    until = time.monotonic() + _LONGEST_SECONDS
    while any(_holders(tensor) > before for tensor, before in tensors) and time.monotonic() < until:
        time.sleep(0)
