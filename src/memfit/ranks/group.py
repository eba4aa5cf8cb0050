"""What a step asks of the ranks that it is shared with: its part of a batch, sums over all, and when to send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from memfit._torch.tensors import storage_key_of
from memfit.ranks.one_process import Number, Share, SingleProcess
from memfit.workload import Workload, part_of, samples_of

_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix64 (Steele, Lea, Flood 2014)
_MASK = 2**64 - 1


class SharedStep(SingleProcess):
    """The ranks of a step that an engine shares.

    Args:
        mesh: Of all ranks.
        syncing: Makes the context of a microbatch's passes, given whether it is the last.
        is_part: Whether batches are this rank's parts already, as in a capture; all ranks then have as many samples,
            and random generators are left alone.
    """

    def __init__(
        self, mesh: DeviceMesh, syncing: Callable[[bool], AbstractContextManager[object]], *, is_part: bool = False
    ) -> None:
        self.mesh, self._syncing, self.is_part = mesh, syncing, is_part
        self._buckets: dict[int, torch.Tensor] = {}
        self.size, self.rank = mesh.size(), dist.get_rank()

    @property
    def buckets(self) -> list[torch.Tensor]:
        return list(self._buckets.values())

    def reduce(self, bucket: torch.Tensor) -> None:
        """Average a bucket of gradients in place, as `DistributedDataParallel` does by itself."""
        self._buckets[storage_key_of(bucket)] = bucket.detach()
        dist.all_reduce(bucket.div_(self.size), group=self.mesh.get_group())

    def syncing(self, is_last: bool) -> AbstractContextManager[object]:
        return self._syncing(is_last)

    def share(self, workload: Workload, batch: Any) -> Share:
        """Return this rank's part of a global batch: the first ones have a sample more where it does not divide."""
        total = samples_of(workload, batch)
        self._buckets.clear()  # the engine makes others after its first step
        if self.is_part:
            return Share(batch, total, total, total)
        least, more = divmod(total, self.size)
        start = self.rank * least + min(self.rank, more)
        stop = start + least + (self.rank < more)
        mean, most = total / self.size, least + (more > 0)
        if start == stop:
            return Share(part_of(workload, batch, 0, 1), 0, mean, most)
        return Share(part_of(workload, batch, start, stop), stop - start, mean, most)

    def means(self, values: list[Number]) -> list[Number]:
        place = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device(self.mesh.device_type))
        kind = torch.float32 if place.type == "mps" else torch.float64
        message = torch.stack([torch.as_tensor(v, device=place).detach().to(kind).reshape(()) for v in values])
        dist.all_reduce(message)
        return list((message / self.size).unbind())

    def mean(self, value: Number) -> Number:
        return torch.as_tensor(self.means([value])[0]).float()  # a loss divided by it is not widened further

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Have this rank draw other random numbers than the others, until the context is left.

        Afterwards all draw the same again, wherever they were: seeds follow from the one before. So data that is
        shuffled with PyTorch's generator is shuffled alike, and a run that is resumed draws what it would have drawn.
        """
        if self.is_part:
            yield
            return
        seed = torch.initial_seed()
        torch.manual_seed(_mixed(seed, self.rank + 1))
        try:
            yield
        finally:
            torch.manual_seed(_mixed(seed, 0))


def _mixed(seed: int, number: int) -> int:
    """Return another seed: the finalizer of SplitMix64."""
    value = (seed + (number + 1) * _MIX) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
