"""What ranks agree on while they share a step, so that out of memory on one of them is undone on all, and none waits
for ever.

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

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from memfit._torch.distributed import collectives_sent

FINE, UNSURE, RAN_OUT, FAILED = range(4)
"""A rank's vote. Unsure: it may run out in the optimizer, so that all have to be able to undo the update."""

Answer = Callable[[], int | None]
"""Sends a rank's part of a collective that it failed before; returns the worst vote where the collective tells it."""


@dataclass(frozen=True)
class PendingCollective:
    """What a step is about to send: on one group, or on one after the other.

    Attributes:
        key: What tells it from others.
        answers: For each group, what a rank that failed sends there instead.
    """

    key: tuple[Hashable, ...]
    answers: tuple[tuple[dist.ProcessGroup, Answer], ...] = field(compare=False)


class Agreement:
    """The votes and answers of one rank; see [Answering]. All ranks create it together.

    Args:
        reset: Makes the engine ready for a step after one that was aborted.

    Attributes:
        is_active: Whether a step runs.
        is_updating: Whether ranks may have updated, so that the step can't be undone any more.
        own: The vote of a rank that fails.
    """

    def __init__(self, reset: Callable[[], None]) -> None:
        self._reset = reset
        self._side = dist.new_group(backend="gloo")
        # Written and read through NumPy: a vote is one operator, which fails before it is sent or not at all.
        self._ballot = torch.zeros(1, dtype=torch.int32)
        self._written = self._ballot.numpy()
        self.is_active = self.is_updating = False
        self.own = FINE
        self._is_answering = self._is_opening = False
        self._stopped: int | None = None
        self._sent: list[PendingCollective] = []
        self._counts: list[int] = []
        self._script: list[PendingCollective] | None = None
        self._known: dict[Hashable, list[PendingCollective]] = {}
        self._seen: dict[Hashable, list[PendingCollective]] = {}

    def close(self) -> None:
        """Give up the votes' group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._side)

    # A step

    def begin(self, shapes: Hashable) -> None:
        """Note that a step begins, on a batch of some shapes."""
        self._shapes, self._script = shapes, self._known.get(shapes)
        self._sent, self._counts, self._stopped = [], [], None
        self.is_active, self.is_updating, self._is_opening = True, False, False

    def before(self, what: PendingCollective) -> None:
        """Note that this rank is about to send; vote where it is not yet known what a step sends.

        Raises:
            PeerError: A rank has failed.
        """
        if not self.is_active or self._is_answering:
            return
        self._check(self._stopped or FINE)
        script, number = self._script, len(self._sent)
        if script is not None and (number >= len(script) or script[number] != what):
            self._known.pop(self._shapes, None)
            self._script = None
        if self._script is None:
            self._check(self.vote(FINE))
        counts = [collectives_sent(group) for group, _ in what.answers]
        self._sent.append(what)
        self._counts = counts

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Note that an engine may send what can't be answered, until the context is left without an error.

        Raises:
            PeerError: A rank has failed.
        """
        self.before(PendingCollective(("opening",), ()))
        self._is_opening = self.is_active
        yield
        self._is_opening = False

    def agree(self, is_sure: bool) -> bool:
        """Vote, right before the update or after it; tell whether all are sure.

        Raises:
            PeerError: A rank has failed.
        """
        worst = self.vote(FINE if is_sure else UNSURE)
        self._check(worst)
        return worst == FINE

    def finish(self) -> None:
        """Note that a step is done, with an update or without.

        Raises:
            PeerError: The step made no update, and a rank has failed.
        """
        if not self.is_updating:
            self._check(self.vote(FINE))
        self.is_active = False
        if self._script is not None:
            return
        if self._seen.get(self._shapes) == self._sent:
            self._known[self._shapes] = self._seen.pop(self._shapes)
        else:
            self._seen[self._shapes] = self._sent

    def vote(self, own: int) -> int:
        """Return the worst vote of all ranks."""
        self._written[0] = own
        dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._side)
        return int(self._written[0])

    def heed(self, ran_out: float, failed: float) -> None:
        """Stop where a sum over all ranks says that some failed.

        Raises:
            PeerError: Some did.
        """
        self._check(worst_of(ran_out, failed))

    def _check(self, worst: int) -> None:
        if worst >= RAN_OUT:
            self._stopped = worst
            raise PeerError(worst == RAN_OUT)

    # A step that failed

    def failed(self, own: int) -> int:
        """Tell the others that this rank failed, and answer what they wait for; return the worst vote.

        Its memory has to be free by then.

        Raises:
            UnansweredError: There is no way to tell them.
        """
        if self._stopped is None:
            if self._is_opening:
                raise UnansweredError
            self.own = own
            self._reset()
            self._is_answering = True
            try:
                self._stopped = self._answered()
            finally:
                self._is_answering = False
        return self._stopped

    def reset(self) -> None:
        """Make the engine ready for the next step, after one that was aborted on all ranks."""
        self.is_active = False
        self._known.clear()
        self._seen.clear()
        self._reset()

    def _answered(self) -> int:
        answers = []
        if self._sent:
            last = zip(self._sent[-1].answers, self._counts, strict=True)
            answers += [answer for (group, answer), count in last if collectives_sent(group) == count]
        if self._script is not None:
            answers += [answer for what in self._script[len(self._sent) :] for _, answer in what.answers]
        for answer in answers:
            told = answer()
            if told is not None:
                return told
        return self.vote(self.own)


def worst_of(ran_out: float, failed: float) -> int:
    """Return the worst vote, of how many ranks ran out of memory and how many failed otherwise."""
    if failed:
        return FAILED
    return RAN_OUT if ran_out else FINE


class PeerError(Exception):
    """Another rank aborted a step.

    Args:
        ran_out: Whether all aborting ranks ran out of memory.
    """

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out
        super().__init__("another rank ran out of memory" if ran_out else "another rank failed with an error")


class UnansweredError(Exception):
    """A rank failed where it can't tell the others."""
