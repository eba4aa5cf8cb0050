"""A step that ranks share, and their agreement in it: out of memory on one is undone on all, and none waits for ever.

Note [Answering]
DistributedDataParallel and `fully_shard` send in the middle of the passes, where the others wait for a rank that fails.

1. What a step sends, and in which order, is known once two steps in a row sent the same, with batches of the same
   shapes under the same plan. Until then all ranks vote before each collective, on a group of their own: one that
   failed says so in place of its next one.
2. From then on nobody votes within the passes. A rank that fails frees its memory, and answers what the others still
   wait for: gathers with its shards, reductions with zeros. The answers end with the sum of the losses, or of the
   norms, which carries who failed. It costs the others the rest of their passes, and steps in which nobody fails two
   more numbers in each sum.
3. Right before the optimizer changes anything, with its memory at hand, all vote once.

Which collectives a rank has sent when it fails is read off their groups' sequence numbers, since it may have failed
between the vote and the sending.

What is left: a loss function that calls other parts of the model at each step, by values that are not its shapes, may
send something else than the step before. A rank that fails in such a step answers wrongly, and the others wait until
their process group's timeout ends them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memfit._torch import collectives_sent, is_shared, storage_key_of
from memfit.ranks.group import BatchPart, Group, Number, drawing_as, message_of, share_of
from memfit.workload import Loss, Workload, tensors_of

FINE, UNSURE, RAN_OUT, FAILED = range(4)
"""A rank's vote. Unsure: it may run out in the optimizer, so that all have to be able to undo the update."""

Answer = Callable[[], int | None]
"""Sends a rank's part of a collective that it failed before; returns the worst vote where the collective tells it."""


@dataclass(frozen=True)
class PendingCollective:
    """What a step is about to send, by what tells it from others; a rank that failed answers on each group."""

    key: tuple[Hashable, ...]
    answers: tuple[tuple[dist.ProcessGroup, Answer], ...] = field(compare=False)


class SharedStep(Group, abc.ABC):
    """The ranks of a step that one of PyTorch's engines shares; the engines are its subclasses.

    Args:
        mesh: Of all ranks.
        shards: Ranks among which gradients are cut, where they are.
        is_part: Whether batches are this rank's parts already, as in a capture; all ranks then have as many samples,
            and random generators are left alone.
    """

    def __init__(self, mesh: DeviceMesh, *, shards: int = 1, is_part: bool = False) -> None:
        super().__init__(mesh.device_type)
        self.mesh, self._shards, self.is_part = mesh, shards, is_part
        self._buckets: dict[int, torch.Tensor] = {}
        self._side: dist.ProcessGroup | None = None  # on which ranks vote, while they watch
        self.is_updating = self._is_active = self._is_answering = self._is_opening = False

    # What an engine does

    @abc.abstractmethod
    def loss(self, batch: Any) -> Loss:
        """Run the forward pass."""

    @abc.abstractmethod
    def tell(self) -> None:
        """Say `before` each collective what is sent, from now on.

        Raises:
            UsageError: What runs here can't be watched.
        """

    @abc.abstractmethod
    def restart(self) -> None:
        """Make the engine ready for the next step, after one that was aborted in the middle."""

    # Votes and answers: see [Answering]

    def watch(self) -> None:
        """Have ranks undo steps together, from now on; call it on all of them.

        Raises:
            UsageError: The engine can't be watched.
        """
        self.tell()  # first: a rank that gave up a group at once would break the others' connections to it
        self._side = dist.new_group(backend="gloo")
        # Written and read through NumPy: a vote is one operator, which fails before it is sent or not at all.
        self._ballot = torch.zeros(1, dtype=torch.int32)
        self._written = self._ballot.numpy()
        self._own = FINE  # the vote of this rank where it fails
        self._known: dict[Hashable, list[PendingCollective]] = {}
        self._seen: dict[Hashable, list[PendingCollective]] = {}

    def close(self) -> None:
        if self._side is not None and dist.is_initialized():
            dist.destroy_process_group(self._side)
        self._side, self.is_updating, self._is_active = None, False, False

    def begin(self, batch: Any) -> None:
        assert self._side is not None, "watch() comes first"
        self._shapes: Hashable = tuple(tensor.shape for tensor in tensors_of(batch))
        self._script = self._known.get(self._shapes)
        self._sent: list[PendingCollective] = []
        self._counts: list[int] = []
        self._stopped: int | None = None
        self._is_active, self.is_updating, self._is_opening = True, False, False

    def before(self, key: tuple[Hashable, ...], *answers: tuple[dist.ProcessGroup, Answer]) -> None:
        """Note that this rank is about to send; vote where it is not yet known what a step sends.

        Raises:
            PeerError: A rank has failed.
        """
        if not self._is_active or self._is_answering:
            return
        self._check(self._stopped or FINE)
        what, script, number = PendingCollective(key, answers), self._script, len(self._sent)
        if script is not None and (number >= len(script) or script[number] != what):
            self._known.pop(self._shapes, None)
            self._script = None
        if self._script is None:
            self._check(self._vote(FINE))
        counts = [collectives_sent(group) for group, _ in answers]
        self._sent.append(what)
        self._counts = counts

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Note that an engine may send what can't be answered, until the context is left without an error.

        Raises:
            PeerError: A rank has failed.
        """
        self.before(("opening",))
        self._is_opening = self._is_active
        yield
        self._is_opening = False

    def agree(self, is_sure: bool) -> bool:
        """Vote, right before the update or after it; tell whether all are sure.

        Raises:
            PeerError: A rank has failed.
        """
        worst = self._vote(FINE if is_sure else UNSURE)
        self._check(worst)
        return worst == FINE

    def commit(self) -> None:
        self.is_updating = True

    def finish(self) -> None:
        """Note that a step is done, with an update or without.

        Raises:
            PeerError: The step made no update, and a rank has failed.
        """
        if not self.is_updating:
            self._check(self._vote(FINE))
        self._is_active = False
        if self._script is not None:
            return
        if self._seen.get(self._shapes) == self._sent:
            self._known[self._shapes] = self._seen.pop(self._shapes)
        else:
            self._seen[self._shapes] = self._sent

    def all(self, value: bool) -> bool:
        return super().all(value) if self._side is None else self._vote(int(not value)) == FINE

    def _vote(self, own: int) -> int:
        """Return the worst vote of all ranks."""
        self._written[0] = own
        dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._side)
        return int(self._written[0])

    def _check(self, worst: int) -> None:
        if worst >= RAN_OUT:
            self._stopped = worst
            raise PeerError(worst == RAN_OUT)

    def failed(self, ran_out: bool) -> bool:
        """Tell the others that this rank failed, and answer what they wait for; return whether all ran out of memory.

        Its memory has to be free by then.

        Raises:
            UnansweredError: There is no way to tell them.
        """
        if self._stopped is not None:
            return self._stopped == RAN_OUT
        if self._is_opening:
            raise UnansweredError
        self._own = RAN_OUT if ran_out else FAILED
        self.restart()
        answers: list[Answer] = []
        if self._sent:
            last = zip(self._sent[-1].answers, self._counts, strict=True)
            answers += [answer for (group, answer), count in last if collectives_sent(group) == count]
        if self._script is not None:
            answers += [answer for what in self._script[len(self._sent) :] for _, answer in what.answers]
        self._is_answering = True
        try:
            worst = next((told for answer in answers if (told := answer()) is not None), None)
            self._stopped = self._vote(self._own) if worst is None else worst
        finally:
            self._is_answering = False
        return self._stopped == RAN_OUT

    def reset(self) -> None:
        """Make the engine ready for the next step, after one that was aborted on all ranks."""
        self._is_active = False
        self._known.clear()
        self._seen.clear()
        self.restart()

    # What a step asks

    @property
    def buckets(self) -> list[torch.Tensor]:
        return list(self._buckets.values())

    def reduce(self, bucket: torch.Tensor) -> None:
        """Average a bucket of gradients in place, as `DistributedDataParallel` does by itself."""
        self._buckets[storage_key_of(bucket)] = bucket.detach()
        dist.all_reduce(bucket.div_(self.size), group=self.mesh.get_group())

    def share(self, workload: Workload, batch: Any) -> BatchPart:
        """Return this rank's part of a global batch: the first ones have a sample more where it does not divide."""
        self._buckets.clear()  # the engine makes others after its first step
        if self.is_part:
            return super().share(workload, batch)
        return share_of(workload, batch, self.rank, self.size)

    def means(self, values: list[Number]) -> list[Number]:
        """Return the means over all ranks of some numbers; all stop here where a rank failed before."""
        message = message_of(values, self._place)
        if not self._is_active:
            dist.all_reduce(message)
        else:
            message = torch.cat([message, message.new_zeros(2)])  # how many ranks ran out, and failed otherwise

            def worst_of(message: torch.Tensor) -> int:
                dist.all_reduce(message)
                ran_out, failed = message[-2:].tolist()
                return FAILED if failed else RAN_OUT if ran_out else FINE

            def vote(message: torch.Tensor) -> int:
                """Send the vote of a rank that failed, in place of its numbers."""
                message[-2 if self._own == RAN_OUT else -1] = 1
                return worst_of(message)

            self._before_message(("told", len(values)), vote, message)
            self._check(worst_of(message))
        return list((message[: len(values)] / self.size).unbind())

    def mean(self, value: Number) -> Number:
        message = message_of([value], self._place)
        self._before_message(("number",), dist.all_reduce, message)
        dist.all_reduce(message)
        return (message[0] / self.size).float()  # a loss divided by it is not widened further

    def _before_message(self, key: tuple[Hashable, ...], answer: Callable[..., int | None], like: torch.Tensor) -> None:
        """Note that a message is about to be sent; a rank that failed answers by zeros like it."""
        assert dist.group.WORLD is not None
        zeros = functools.partial(torch.zeros, like.shape, dtype=like.dtype, device=like.device)
        self.before(key, (dist.group.WORLD, lambda: answer(zeros())))

    def norm(self, norm: torch.Tensor, is_part: bool) -> torch.Tensor:
        if not is_part:
            return norm
        (mean,) = self.means([norm.double() ** 2 if norm.device.type != "mps" else norm**2])
        return (torch.as_tensor(mean) * self._shards).sqrt().to(norm.dtype)  # replicas have the same parts

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = tensor.full_tensor() if is_shared(type(tensor)) else tensor  # type: ignore[attr-defined]
        return full

    def drawing(self) -> AbstractContextManager[object]:
        """Have this rank draw other random numbers than the others, until the context is left.

        Afterwards all draw the same again, wherever they were: seeds follow from the one before. So data that is
        shuffled with PyTorch's generator is shuffled alike, and a run that is resumed draws what it would have drawn.
        """
        return contextlib.nullcontext() if self.is_part else drawing_as(self.rank)


class PeerError(Exception):
    """Another rank aborted a step; `ran_out` where all that did so ran out of memory."""

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out
        super().__init__("another rank ran out of memory" if ran_out else "another rank failed with an error")


class UnansweredError(Exception):
    """A rank failed where it can't tell the others."""
