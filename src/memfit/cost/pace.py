"""The pace of this machine while steps run on its CPU: whether it is the one at which its operators were timed.

Other programs take processors from a step's threads. The host of a virtual machine takes them from the whole machine,
which can't see it: only an operator's time tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

from memfit.cost import calibrate

T = TypeVar("T")

_ATTENDED = 0.9  # the least share of a step that its thread computes, on a machine at rest
_SLOWER = 1.2
_AT_REST = 1.5
"""The most that an operator takes at the machine's own pace, as a multiple of its earlier time. Two threads take twice
as long on one processor. On a virtual machine an operator's times differ by a third where a step's hardly do: in 83
turns of a BERT the two correlated at 0.27."""


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


def undisturbed(turns: Sequence[tuple[float, float]]) -> list[float]:
    """Return the times of a plan's turns as if other programs had taken no more than in the turn of the least.

    The system moves threads among processors as it likes. Beside two programs that compute, a step of two threads
    takes 1.05 s while each shares a processor with one of them, and 1.6 s while one of its threads shares its own with
    both; each lasts for seconds to minutes. What the step's own thread computes is the same to 10 %.

    Args:
        turns: Seconds, and the share of them in which the thread that runs the steps computed; 0 seconds are no turn.
    """
    most = max((share for seconds, share in turns if seconds), default=0.0)
    return [seconds * share / most if most else seconds for seconds, share in turns]  # 0 by a coarse clock


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
