"""The processes that share a step, as the step sees them: a single one, the ranks of a group, or ranks that are played.

A step asks them for its part of a batch, for sums over all, and when to send. `each`, `agreed` and `once` are work that
all of them do: it succeeds on all or fails on all, so that none waits for one that failed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from memfit.errors import MemfitError, PlanMismatchError, RankError
from memfit.workload import Workload, part_of, samples_of

T = TypeVar("T")
Number = torch.Tensor | float
_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix64 (Steele, Lea, Flood 2014)
_MASK = 2**64 - 1


@dataclass(frozen=True)
class BatchPart:
    """A rank's part of a global batch.

    Attributes:
        batch: The part; some sample, which counts nothing, where `samples` is 0.
        samples: Its samples (≥ 0).
        mean_samples: Samples of a rank on average: the weight of a mean over `n` samples is `n / mean_samples`.
        most_samples: Samples of the largest part.
    """

    batch: Any
    samples: int
    mean_samples: float
    most_samples: int


class SingleProcess:
    """A process that trains by itself: it agrees with itself.

    Attributes:
        size: Number of processes that share a step (> 0).
        rank: This one's number among them; the first, 0, writes what a run keeps.
        is_updating: Whether ranks may have updated, so that the step can't be undone any more.
    """

    size = 1
    rank = 0
    is_updating = False

    # What a step that may have to be undone asks

    def watch(self) -> None:
        """Have ranks undo steps together, from now on."""

    def close(self) -> None:
        """Watch no more."""

    def begin(self, batch: Any) -> None:
        """Note that a step begins on a global batch."""

    def agree(self, is_sure: bool) -> bool:
        """Agree to update, or that it was done; tell whether all are sure that memory is there for it."""
        return is_sure

    def commit(self) -> None:
        """Note that ranks may have updated, from here on."""

    def finish(self) -> None:
        """Note that a step is done, with an update or without."""

    def failed(self, ran_out: bool) -> bool:
        """Tell the other ranks that this one aborts the step; return whether all aborting ranks ran out of memory."""
        return ran_out

    def reset(self) -> None:
        """Make ready for the next step, after one that was aborted."""

    def all(self, value: bool) -> bool:
        """Tell whether a value is true on every rank."""
        return value

    def most(self, values: list[float]) -> list[float]:
        """Return the maximum over the ranks of each value."""
        return values

    def first(self, value: int) -> int:
        """Return the value of the first rank."""
        return value

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return [value]

    @property
    def buckets(self) -> list[torch.Tensor]:
        """What gradients are sent in, where an engine holds that between steps; known once a step ran in a capture."""
        return []

    def held_bytes(self, workload: Workload) -> int:
        """Return the bytes of what gradients are sent in, where an engine holds that between steps."""
        return 0

    # What a step asks

    def share(self, workload: Workload, batch: Any) -> BatchPart:
        """Return this rank's part of a global batch."""
        samples = samples_of(workload, batch)
        return BatchPart(batch, samples, samples, samples)

    def means(self, values: list[Number]) -> list[Number]:
        """Return the means over all ranks of some numbers."""
        return values

    def mean(self, value: Number) -> Number:
        """Return the mean over all ranks of a number."""
        return self.means([value])[0]

    def norm(self, norm: torch.Tensor, is_part: bool) -> torch.Tensor:
        """Return the norm of all gradients, given that of this rank's; it may have a part of them."""
        return norm

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor whole, of which each rank has a shard or a part of a sum."""
        return tensor

    def syncing(self, is_last: bool) -> AbstractContextManager[object]:
        """Make the context of a microbatch's passes: gradients of the last are sent, of others where that is asked."""
        return contextlib.nullcontext()

    def drawing(self) -> AbstractContextManager[object]:
        """Make the context of a step in which ranks draw different random numbers, and the same afterwards."""
        return contextlib.nullcontext()

    def outside(self, work: Callable[[], T]) -> T:
        """Run work outside of steps that runs the model forward; return its result. All ranks call it."""
        return work()

    def drop_forward(self) -> None:
        """Cut gathered parameters again, after a forward pass without a backward pass. All ranks call it."""


class Group(SingleProcess):
    """The ranks of the default process group, whose messages are on a kind of device ("cpu", "cuda")."""

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
        if self._messages is None:
            return own
        sent = [of_rank[number] for of_rank in self._messages]
        return torch.stack(sent).sum(0) / len(sent)


def each(ranks: SingleProcess, work: Callable[[], T]) -> list[T]:
    """Have each rank do some work; return the results of all, by rank, which pickle must be able to send.

    Raises:
        Exception: That of this rank, where it failed; else that of the first rank that did, or RankError.
    """
    if ranks.size == 1:
        return [work()]
    result, error, sent = None, None, None
    try:
        result = work()
    except Exception as e:
        error, sent = e, e if isinstance(e, MemfitError) else RankError(f"{type(e).__name__}: {e}")
    found = ranks.gathered((result, sent))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            failure.add_note(f"memfit: the error is from rank {rank}")
            raise failure
    return [value for value, _ in found]


def agreed(ranks: SingleProcess, work: Callable[[], T]) -> T:
    """Have each rank do some work; return its own result, once all have succeeded.

    Raises:
        Exception: That of this rank, where it failed; else that of the first rank that did, or RankError.
    """
    own: list[T] = []
    each(ranks, lambda: own.append(work()))
    return own[0]


def once(ranks: SingleProcess, work: Callable[[], T]) -> T:
    """Have the first rank do some work; return its result on all, which pickle must be able to send.

    Raises:
        Exception: That of the first rank, or RankError.
    """
    return each(ranks, lambda: work() if ranks.rank == 0 else None)[0]  # type: ignore[return-value]


def check_same(ranks: SingleProcess, what: str, data: bytes) -> None:
    """Raise PlanMismatchError, on all ranks, unless all give the same data."""
    digests = ranks.gathered(hashlib.sha256(data).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PlanMismatchError(
            f"the ranks have different {what}: rank {others[0]}'s has the SHA-256 {digests[others[0]][:12]}..., and"
            f" rank 0's {digests[0][:12]}.... Save one to a file, and load the same file on every rank"
        )
