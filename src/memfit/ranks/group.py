"""What a step asks of the ranks that it is shared with: its part of a batch, sums over all, and when to send."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from memfit._torch.tensors import storage_key_of
from memfit.errors import UsageError
from memfit.ranks.agreement import FAILED, RAN_OUT, Agreement, PendingCollective, worst_of
from memfit.ranks.processes import BatchPart, Number, SingleProcess, T
from memfit.workload import Workload, part_of, samples_of, tensors_of

_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix64 (Steele, Lea, Flood 2014)
_MASK = 2**64 - 1


class Engine(Protocol):
    """One of PyTorch's engines, on a model."""

    def syncing(self, is_last: bool) -> AbstractContextManager[object]:
        """Make the context of a microbatch's passes, given whether it is the last."""

    def watch(self, agreement: Agreement) -> None:
        """Tell an agreement of what is sent, from now on.

        Raises:
            UsageError: What runs here can't be watched.
        """

    def held_bytes(self, workload: Workload) -> int:
        """Return the bytes that it holds for a workload's gradients between steps."""

    def reset(self) -> None:
        """Make the engine ready for the next step, after one that was aborted in the middle."""

    def outside(self, work: Callable[[], T]) -> T:
        """Run work that runs the model forward outside of steps."""

    def drop_forward(self) -> None:
        """Cut gathered parameters again, after a forward pass without a backward pass."""


class Group(SingleProcess):
    """The ranks of the default process group.

    Args:
        kind: Of the devices that messages are on ("cpu", "cuda").
    """

    def __init__(self, kind: str) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._place = torch.device(kind)

    def all(self, value: bool) -> bool:
        return self.most([float(not value)])[0] == 0

    def most(self, values: list[float]) -> list[float]:
        largest = torch.tensor(values, dtype=_widest(self._place), device=self._place)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def first(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._place)
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


class SharedStep(Group):
    """The ranks of a step that an engine shares.

    Args:
        mesh: Of all ranks.
        engine: Shares it.
        shards: Ranks among which gradients are cut, where they are.
        is_part: Whether batches are this rank's parts already, as in a capture; all ranks then have as many samples,
            and random generators are left alone.
    """

    def __init__(self, mesh: DeviceMesh, engine: Engine, *, shards: int = 1, is_part: bool = False) -> None:
        super().__init__(mesh.device_type)
        self.mesh, self._engine, self._shards, self.is_part = mesh, engine, shards, is_part
        self._buckets: dict[int, torch.Tensor] = {}
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD
        self._agreement: Agreement | None = None

    # Steps that may have to be undone

    def watch(self) -> None:
        """Have ranks undo steps together, from now on; call it on all of them.

        Raises:
            UsageError: The engine can't be watched.
        """
        agreement = Agreement(self._engine.reset)
        try:
            self._engine.watch(agreement)
        except UsageError:
            agreement.close()
            raise
        self._agreement = agreement

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    @property
    def _watched(self) -> Agreement:
        assert self._agreement is not None, "watch() comes first"
        return self._agreement

    @property
    def is_updating(self) -> bool:  # type: ignore[override]
        return self._agreement is not None and self._agreement.is_updating

    def begin(self, batch: Any) -> None:
        self._watched.begin(tuple(tensor.shape for tensor in tensors_of(batch)))

    def agree(self, is_sure: bool) -> bool:
        return self._watched.agree(is_sure)

    def commit(self) -> None:
        self._watched.is_updating = True

    def finish(self) -> None:
        self._watched.finish()

    def failed(self, ran_out: bool) -> bool:
        return self._watched.failed(RAN_OUT if ran_out else FAILED) == RAN_OUT

    def reset(self) -> None:
        self._watched.reset()

    def all(self, value: bool) -> bool:
        return super().all(value) if self._agreement is None else self._watched.vote(int(not value)) == 0

    # What a step asks

    @property
    def buckets(self) -> list[torch.Tensor]:
        return list(self._buckets.values())

    def held_bytes(self, workload: Workload) -> int:
        return self._engine.held_bytes(workload)

    def reduce(self, bucket: torch.Tensor) -> None:
        """Average a bucket of gradients in place, as `DistributedDataParallel` does by itself."""
        self._buckets[storage_key_of(bucket)] = bucket.detach()
        dist.all_reduce(bucket.div_(self.size), group=self.mesh.get_group())

    def syncing(self, is_last: bool) -> AbstractContextManager[object]:
        return self._engine.syncing(is_last)

    def share(self, workload: Workload, batch: Any) -> BatchPart:
        """Return this rank's part of a global batch: the first ones have a sample more where it does not divide."""
        self._buckets.clear()  # the engine makes others after its first step
        if self.is_part:
            total = samples_of(workload, batch)
            return BatchPart(batch, total, total, total)
        return share_of(workload, batch, self.rank, self.size)

    def means(self, values: list[Number]) -> list[Number]:
        """Return the means over all ranks of some numbers; all stop here where a rank failed before."""
        message = self._message(values)
        agreement = self._agreement
        if agreement is None or not agreement.is_active:
            dist.all_reduce(message)
        else:
            message = torch.cat([message, message.new_zeros(2)])
            answer = functools.partial(_tell, agreement, message.shape, message.dtype, message.device)
            agreement.before(PendingCollective(("told", len(values)), ((self._world, answer),)))
            dist.all_reduce(message)
            agreement.heed(*message[-2:].tolist())
        return list((message[: len(values)] / self.size).unbind())

    def mean(self, value: Number) -> Number:
        message = self._message([value])
        if self._agreement is not None:
            answer = functools.partial(_zero, message.shape, message.dtype, message.device)
            self._agreement.before(PendingCollective(("number",), ((self._world, answer),)))
        dist.all_reduce(message)
        return (message[0] / self.size).float()  # a loss divided by it is not widened further

    def norm(self, norm: torch.Tensor, is_part: bool) -> torch.Tensor:
        if not is_part:
            return norm
        (mean,) = self.means([norm.double() ** 2 if norm.device.type != "mps" else norm**2])
        return (torch.as_tensor(mean) * self._shards).sqrt().to(norm.dtype)  # replicas have the same parts

    def _message(self, values: list[Number]) -> torch.Tensor:
        return message_of(values, torch.device(self.mesh.device_type))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def outside(self, work: Callable[[], T]) -> T:
        return self._engine.outside(work)

    def drop_forward(self) -> None:
        self._engine.drop_forward()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Have this rank draw other random numbers than the others, until the context is left.

        Afterwards all draw the same again, wherever they were: seeds follow from the one before. So data that is
        shuffled with PyTorch's generator is shuffled alike, and a run that is resumed draws what it would have drawn.
        """
        with contextlib.nullcontext() if self.is_part else drawing_as(self.rank):
            yield


def share_of(workload: Workload, batch: Any, rank: int, size: int) -> BatchPart:
    """Return the part of a global batch that a rank of some runs: the first ones have a sample more if need be."""
    total = samples_of(workload, batch)
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    stop = start + least + (rank < more)
    mean, most = total / size, least + (more > 0)
    if start == stop:
        return BatchPart(part_of(workload, batch, 0, 1), 0, mean, most)
    return BatchPart(part_of(workload, batch, start, stop), stop - start, mean, most)


@contextlib.contextmanager
def drawing_as(rank: int) -> Iterator[None]:
    """Draw the random numbers of a rank until the context is left, and then those that all ranks draw."""
    seed = torch.initial_seed()
    torch.manual_seed(_mixed(seed, rank + 1))
    try:
        yield
    finally:
        torch.manual_seed(_mixed(seed, 0))


def message_of(values: list[Number], place: torch.device) -> torch.Tensor:
    """Return numbers as they are sent to the other ranks, on the device of one of them, or on `place`."""
    place = next((v.device for v in values if isinstance(v, torch.Tensor)), place)
    kind = _widest(place)
    return torch.stack([torch.as_tensor(v, device=place).detach().to(kind).reshape(()) for v in values])


def mean_of(messages: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of the messages of all ranks, in the precision that they are sent in."""
    return torch.stack(messages).sum(0) / len(messages)


def _tell(agreement: Agreement, shape: torch.Size, kind: torch.dtype, device: torch.device) -> int:
    """Send the vote of a rank that failed, in place of its numbers; return the worst of all ranks."""
    message = torch.zeros(shape, dtype=kind, device=device)
    message[-2 if agreement.own == RAN_OUT else -1] = 1
    dist.all_reduce(message)
    return worst_of(*message[-2:].tolist())


def _zero(shape: torch.Size, kind: torch.dtype, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(shape, dtype=kind, device=device))


def _widest(place: torch.device) -> torch.dtype:
    return torch.float32 if place.type == "mps" else torch.float64


def _mixed(seed: int, number: int) -> int:
    """Return another seed: the finalizer of SplitMix64."""
    value = (seed + (number + 1) * _MIX) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PlayedRank(SingleProcess):
    """A rank that a process plays.

    It needs what the others send. So all are played twice where a count is divided by, and the second time each is
    given the messages of the first.

    Args:
        messages: Of all ranks, by rank, from when they were played before; None the first time.

    Attributes:
        sent: Its messages.
        divisor: The count that it divided by before all counts were known; None of means.
        totals: The loss and the count of all ranks, once it has run.
    """

    def __init__(self, rank: int, size: int, messages: list[list[torch.Tensor]] | None) -> None:
        self.rank, self.size, self._messages = rank, size, messages
        self.sent: list[torch.Tensor] = []
        self.divisor: torch.Tensor | None = None
        self.totals: list[torch.Tensor] = []

    def share(self, workload: Workload, batch: Any) -> BatchPart:
        return share_of(workload, batch, self.rank, self.size)

    def drawing(self) -> AbstractContextManager[object]:
        return drawing_as(self.rank)

    def means(self, values: list[Number]) -> list[Number]:
        self.totals = list(self._mean(values).unbind())
        # Gradients are corrected for their count once the ranks' are added up, as the engines do: not here.
        return list(self.totals) if self.divisor is None else [self.totals[0], self.divisor.double()]

    def mean(self, value: Number) -> Number:
        self.divisor = self._mean([value])[0].float()
        return self.divisor

    def _mean(self, values: list[Number]) -> torch.Tensor:
        own = message_of(values, torch.device("cpu"))
        number = len(self.sent)
        self.sent.append(own)
        return own if self._messages is None else mean_of([of_rank[number] for of_rank in self._messages])
