"""Which operators' outputs a region should keep: the sets that no other set of as few bytes is faster than.

Keeping an output takes its bytes from the forward pass to the recomputation, and saves the seconds of
its operator; what the sets take and save are sums, so that the sets worth having are the Pareto set of a
knapsack. It is built one operator after the other (Nemhauser and Ullmann, 1969, Discrete Dynamic
Programming and Capital Allocation), dropping at each step what another set beats. Of few operators every
set is looked at, and counts also if it needs less than others while the region is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FEW_OPERATORS = 12
"""Of so many, every set is looked at."""
_MOST_STATES = 256

Ints = npt.NDArray[np.int64]


class Worth(NamedTuple):
    """What keeping an operator's output takes and saves."""

    op: int
    nbytes: int
    seconds: float


class _State(NamedTuple):
    nbytes: int
    seconds: float
    kept: int


def keep_sets(worth: Sequence[Worth], most: int) -> list[tuple[int, ...]]:
    """Return sets of operators to keep, from the fewest bytes to the most; none beats another.

    All such sets, where there are no more than `most`; else as many of them, spread evenly over the seconds saved.

    Args:
        worth: The operators that can be kept.
        most: How many sets to return.
    """
    ranked = sorted(worth, key=lambda w: (w.nbytes / max(w.seconds, 1e-12), w.op))
    states = [_State(0, 0.0, 0)]
    for bit, one in enumerate(ranked):
        grown = [_State(s.nbytes + one.nbytes, s.seconds + one.seconds, s.kept | 1 << bit) for s in states]
        states = _spread(_undominated([*states, *grown]), _MOST_STATES)
    chosen = _spread([s for s in states if s.kept], most)
    return [tuple(sorted(w.op for bit, w in enumerate(ranked) if s.kept >> bit & 1)) for s in chosen]


def every_keep_set(worth: Sequence[Worth], added: Ints, changes: Ints) -> list[tuple[int, ...]]:
    """Return the sets of operators to keep that no other beats, in what it needs while recomputed neither.

    Args:
        worth: The operators that can be kept, `FEW_OPERATORS` at most.
        added: Bytes that the recomputation adds at each of its operators, if nothing is kept.
        changes: What keeping each of the operators changes about that, in a row for each.
    """
    sets = np.arange(1 << len(worth))
    kept = sets[:, np.newaxis] >> np.arange(len(worth)) & 1
    nbytes, seconds = kept @ [w.nbytes for w in worth], kept @ [w.seconds for w in worth]
    again = (added + kept @ changes).max(axis=1)
    found: list[int] = []
    for one in np.lexsort((again, -seconds, nbytes)):  # what beats a set comes before it
        if not np.any((seconds[found] >= seconds[one]) & (again[found] <= again[one])):
            found.append(int(one))
    return [tuple(sorted(w.op for bit, w in enumerate(worth) if one >> bit & 1)) for one in found if one]


def _undominated(states: list[_State]) -> list[_State]:
    """Drop states that another of as few bytes is as fast as; those left are sorted by both."""
    found: list[_State] = []
    for state in sorted(states, key=lambda s: (s.nbytes, -s.seconds)):
        if not found or state.seconds > found[-1].seconds:
            found.append(state)
    return found


def _spread(states: list[_State], most: int) -> list[_State]:
    """Return at most so many states, the first and the last among them, about evenly spaced in seconds."""
    if len(states) <= most:
        return states
    step = (states[-1].seconds - states[0].seconds) / max(1, most - 1)
    found = [states[0]]
    for state in states[1:-1]:
        if state.seconds >= found[-1].seconds + step * 0.999:
            found.append(state)
    return [*found[: most - 1], states[-1]]
