"""The pace of this machine while steps run on its CPU: whether it is the one at which its operators were timed.

Other programs take processors from a step's threads. The host of a virtual machine takes them from the whole machine,
which can't see it: only an operator's time tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from memfit.cost import cpu_costs

T = TypeVar("T")

_ATTENDED = 0.9  # the least share of a step that its thread computes, on a machine at rest
_SLOWER = 1.2
_AT_REST = 1.5
"""The most that an operator takes at the machine's own pace, as a multiple of its earlier time. Two threads take twice
as long on one processor. On a virtual machine an operator's times differ by a third where a step's hardly do: in 83
turns of a BERT the two correlated at 0.27."""
_UNDISTURBED = 0.9
"""The least share of a turn that counts, as a multiple of the plan's largest one: shares of a kind differ by 2 %."""


class Pace:
    """Times a large operator between steps, one that this process timed or checked before; none where there is none.

    Args:
        call: An operator's call and its earlier seconds, in the place of that one.
        clock: Tells what a call takes, by its text and about how long that was.
    """

    def __init__(
        self, call: tuple[str, float] | None = None, clock: Callable[[str, float], float] = cpu_costs.seconds_now
    ) -> None:
        self._call, self._clock = call or cpu_costs.reference_call(), clock
        self._seconds: list[float] = []

    def read(self) -> float:
        """Time the operator; return the time as a multiple of its earlier one, 1 without an operator."""
        if self._call is None:
            return 1.0
        self._seconds.append(self._clock(*self._call))
        return self._seconds[-1] / self._call[1]

    @property
    def slowdown(self) -> float:
        """The median of the times, as a multiple of the operator's earlier time; 1 without any."""
        return statistics.median(self._seconds) / self._call[1] if self._call and self._seconds else 1.0


def at_rest(paced: Sequence[tuple[float, T]], least: int) -> list[T]:
    """Return the measurements at the machine's own pace, or near the least slow one where these are too few.

    A machine may be slower throughout than it was: then all that was measured at about one pace counts, and not the
    least slow few of it only.

    Args:
        paced: How slow the machine was (`Pace.read`), and the measurement of then.
        least: How many are returned at least, of as many or more.
    """
    by_pace = sorted(paced, key=lambda each: each[0])
    slowest = _AT_REST * max([1.0, *(slowdown for slowdown, _ in by_pace[:least])])
    return [value for slowdown, value in by_pace if slowdown <= slowest]


class Paced(NamedTuple):
    """A turn of a plan.

    Attributes:
        seconds: What a step took; 0 where none was run to its end.
        slowdown: How slow the machine was (`Pace.read`).
        attended_share: The share of the time in which the thread that runs the steps computed.
    """

    seconds: float
    slowdown: float = 1.0
    attended_share: float = 1.0


def undisturbed_ratios(turns: Sequence[Paced], others: Sequence[Paced], least: int) -> list[float]:
    """Return the ratios of a plan's times to another one's, of undisturbed turns at the machine's own pace.

    Args:
        turns: Of the plan, one for each round.
        others: Of the other plan, of the same rounds. Those count that both have a time of; of the turns in them, the
            first undisturbed one of either plan is held against the other's first, and so on.
        least: How many ratios are returned at least, of as many or more.
    """
    both = [pair for pair in zip(turns, others, strict=False) if all(turn.seconds for turn in pair)]
    pairs = zip(*(undisturbed(of_plan, least) for of_plan in zip(*both, strict=True)), strict=False)
    return at_rest([(max(own.slowdown, other.slowdown), own.seconds / other.seconds) for own, other in pairs], least)


def undisturbed(turns: Sequence[Paced], least: int) -> list[Paced]:
    """Return the turns of a plan in which other programs took little from it, as if they had taken as little from each.

    The system moves threads among processors as it likes. Beside two programs that compute, a step of two threads
    takes 1.05 s while each shares a processor with one of them, and 1.6 s while one of its threads shares its own with
    both; each lasts for seconds to minutes. The step's own thread computes as long in both, to 10 %, where operators
    are large; where they are small, for 0.44 and 0.70 s. So turns of the first kind count, and others where those are
    too few.

    Args:
        turns: In which the plan had the time for a step.
        least: How many are returned at least, of as many or more.
    """
    by_share = sorted((turn.attended_share for turn in turns), reverse=True)
    most = max(by_share, default=0.0)
    if not most:  # by a coarse clock
        return list(turns)
    enough = min(_UNDISTURBED * most, by_share[:least][-1])
    return [
        Paced(turn.seconds * turn.attended_share / most, turn.slowdown, turn.attended_share)
        for turn in turns
        if turn.attended_share >= enough
    ]


def busy_notes(doing: str, attended_share: float, slowdown: float = 1.0) -> list[str]:
    """Return notes on times that were measured on a busy machine while it was `doing` ("plans were measured")."""
    notes = []
    if attended_share < _ATTENDED:
        notes.append(
            f"other programs were using this machine while {doing}: a step had a processor for {attended_share:.0%} of"
            " the time, and measured times are too long"
        )
    if slowdown > _SLOWER:
        notes.append(
            f"other programs were using this machine, or its host, while {doing}: measured times are about"
            f" {slowdown - 1:.0%} too long"
        )
    return notes
