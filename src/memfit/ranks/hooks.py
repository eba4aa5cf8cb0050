"""What engines tell an agreement: before a collective of theirs is sent, and how a rank that failed answers it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memfit._torch.distributed import send_buffers_by
from memfit.ranks.aborted import PeerError
from memfit.ranks.agreement import Agreement, Collective
from memfit.ranks.in_place import Gather, ReduceScatter


def watch_data_parallel(wrapped: DistributedDataParallel, agreement: Agreement) -> None:
    """Tell an agreement of a model's buckets and buffers, which are sent as the engine sends them by itself."""
    source = dist.get_global_rank(wrapped.process_group, 0)

    def reduced(group, bucket):  # type: ignore[no-untyped-def]  # the engine compares annotations with classes
        buffer = bucket.buffer()
        try:
            agreement.before(_bucket(group, buffer))
        except PeerError:  # not to be thrown through the engine: the next sum throws it again
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        buffer.mul_(1.0 / group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def equalized(buffers: list[torch.Tensor]) -> None:
        for kind in dict.fromkeys(buffer.dtype for buffer in buffers):
            _equalize([b for b in buffers if b.dtype == kind], source, wrapped.process_group, agreement)

    wrapped.register_comm_hook(wrapped.process_group, reduced)
    send_buffers_by(wrapped, equalized)


@torch.no_grad()
def _equalize(buffers: list[torch.Tensor], source: int, group: dist.ProcessGroup, agreement: Agreement) -> None:
    """Make buffers of one dtype those of the source, in one message."""
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    made: dict[str, Any] = {"dtype": flat.dtype, "device": flat.device}
    answer = functools.partial(_received, group, flat.shape, made, source)
    agreement.before(Collective(("buffers", flat.shape, flat.dtype), ((group, answer),)))
    dist.broadcast(flat, source, group=group)
    if dist.get_rank() != source:
        for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))


def _received(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], source: int) -> None:
    dist.broadcast(torch.zeros(shape, **made), source, group=group)


def _bucket(group: dist.ProcessGroup, buffer: torch.Tensor) -> Collective:
    made: dict[str, Any] = {"dtype": buffer.dtype, "device": buffer.device, "layout": buffer.layout}
    answer = functools.partial(_all_reduced, group, buffer.shape, made, dist.ReduceOp.SUM)
    return Collective(("bucket", buffer.shape, buffer.dtype, buffer.layout), ((group, answer),))


def watch_fully_sharded(root: FSDPModule, agreement: Agreement, replicas: dist.ProcessGroup | None) -> None:
    """Tell an agreement of the gathers and reductions of a model's units; `replicas` average what shards added up."""
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
    for number, unit in enumerate(units):
        gather: Any = _Gather(agreement, number, unit)
        reduce: Any = _Reduce(agreement, number, replicas)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)


class _Gather(Gather):
    def __init__(self, agreement: Agreement, number: int, unit: FSDPModule) -> None:
        self._agreement, self._number, self._unit = agreement, number, unit

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._agreement.before(Collective(("gather", self._number), ((group, self._answer),)))
        return super().__call__(output_tensor, input_tensor, group, async_op)

    def _answer(self) -> None:
        """Send the shards as they are: what the others compute of them stays within the range of their own values."""
        self._unit.unshard()
        self._unit.reshard()


class _Reduce(ReduceScatter):
    def __init__(self, agreement: Agreement, number: int, replicas: dist.ProcessGroup | None) -> None:
        self._agreement, self._number, self._replicas = agreement, number, replicas

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        made: dict[str, Any] = {"dtype": input_tensor.dtype, "device": input_tensor.device}
        answers = [(group, functools.partial(_reduce_scattered, group, input_tensor.shape, made, op))]
        if self._replicas is not None:
            answers += [
                (self._replicas, functools.partial(_all_reduced, self._replicas, output_tensor.shape, made, op))
            ]
        key = ("reduce", self._number, input_tensor.shape, input_tensor.dtype)
        self._agreement.before(Collective(key, tuple(answers)))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _all_reduced(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], op: Any) -> None:
    dist.all_reduce(torch.zeros(shape, **made), op=op, group=group)


def _reduce_scattered(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], op: Any) -> None:
    given = torch.zeros(shape, **made)
    ReduceScatter()(given.new_empty(given.numel() // group.size()), given, group, op)
