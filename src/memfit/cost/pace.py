"""The pace of this machine while steps run on its CPU: whether it is the one at which its operators were timed.

Other programs take processors from a step's threads. The host of a virtual machine takes them from the whole machine,
which can't see it: only an operator's time tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from memfit.cost import calibrate

T = TypeVar("T")

_ATTENDED = 0.9  # the least share of a step that its thread computes, on a machine at rest
_LEAST_SHARE = 0.01  # clocks of processors are coarse
_SLOWER = 1.2
_AT_REST = 1.5
"""The most that an operator takes at the machine's own pace, as a multiple of its earlier time. Two threads take twice
as long on one processor. On a virtual machine an operator's times differ by a third where a step's hardly do: in 83
turns of a BERT the two correlated at 0.27."""
_ALIKE = 1.15
"""The most that the shares of two turns differ by, as a ratio, where they ran under the same conditions. Beside two
programs that compute, a step's main thread has a processor for 54 % of the time where each program shares another
processor with it, and for 37 % where both share one; each lasts for seconds to minutes. Steps of one plan then take
1.05 s or 1.6 s, and within 2 % of these each time."""


class Pace:
    """Times a large operator between steps, one that this process timed or checked before; none where there is none."""

    def __init__(self) -> None:
        self._call = calibrate.reference_call()
        self._seconds: list[float] = []

    def read(self) -> float:
        """Time the operator; return the time as a multiple of its earlier one, 1 without an operator."""
        if self._call is None:
            return 1.0
        self._seconds.append(calibrate.seconds_now(*self._call))
        return self._seconds[-1] / self._call[1]

    @property
    def slowdown(self) -> float:
        """The median of the times, as a multiple of the operator's earlier time; 1 without any."""
        return statistics.median(self._seconds) / self._call[1] if self._call and self._seconds else 1.0


def at_rest(paced: Sequence[tuple[float, T]], least: int, most: float = _AT_REST) -> list[T]:
    """Return the measurements at the machine's own pace, or near the least slow one where these are too few.

    A machine may be slower throughout than it was: then all that was measured at about one pace counts, and not the
    least slow few of it only.

    Args:
        paced: How slow the machine was (`Pace.read`), and the measurement of then.
        least: How many are returned at least, of as many or more.
        most: By how much a pace may be above 1, or above that of the `least`-th one, as a ratio.
    """
    by_pace = sorted(paced, key=lambda each: each[0])
    slowest = most * max([1.0, *(slowdown for slowdown, _ in by_pace[:least])])
    return [value for slowdown, value in by_pace if slowdown <= slowest]


class Conditions(NamedTuple):
    """How the machine was while two plans had a turn each.

    Attributes:
        slowdown: How slow it was (`Pace.read`).
        attended_shares: The shares of the two turns in which the thread that ran the steps computed.
    """

    slowdown: float
    attended_shares: tuple[float, float] = (1.0, 1.0)

    @property
    def unlikeness(self) -> float:
        """By how much the shares differ, as a ratio (≥ 1)."""
        low, high = sorted(max(share, _LEAST_SHARE) for share in self.attended_shares)
        return high / low


def comparable(rounds: Sequence[tuple[Conditions, T]], least: int) -> list[T]:
    """Return the measurements of rounds in which other programs took as much from both plans, at the machine's pace.

    The system moves threads among processors as it likes, and what a plan takes then says nothing of the plan. Where
    shares differ in all rounds, it is the plans that differ, and all count.

    Args:
        rounds: How the machine was, and the measurement of then.
        least: How many are returned at least, of as many or more.
    """
    alike = at_rest([(how.unlikeness, (how.slowdown, value)) for how, value in rounds], least, _ALIKE)
    return at_rest(alike, least)


def busy_notes(doing: str, attended_share: float, slowdown: float = 1.0) -> list[str]:
    """Return notes on times that were measured on a busy machine.

    Args:
        doing: What it did meanwhile, such as "plans were measured".
        attended_share: The share of the time in which the thread that ran the steps computed.
        slowdown: See `Pace`.
    """
    notes = []
    if attended_share < _ATTENDED:
        notes.append(
            f"this machine was busy while {doing}: the thread that runs a step had a processor for {attended_share:.0%}"
            " of the time, so that steps took longer than on a machine at rest"
        )
    if slowdown > _SLOWER:
        notes.append(
            f"this machine was slower while {doing}: an operator took ×{slowdown:.2f} of the time that predictions have"
            " for it, and steps took longer with it; something else takes its processors, or its host's"
        )
    return notes
