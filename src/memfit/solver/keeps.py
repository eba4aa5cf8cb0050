"""The sets of operators whose outputs a region may keep: those undominated in bytes and seconds.

Keeping an output takes its bytes from the forward pass to the recomputation, and saves the seconds of its operator.
Both are sums over the set, so that the sets worth considering are the Pareto set of a knapsack. It is built one
operator after the other (Nemhauser and Ullmann, 1969, Discrete Dynamic Programming and Capital Allocation), dropping
dominated sets at each step. For few operators all sets are enumerated, and the bytes of the recomputation count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memfit.solver.highs import Ints

FEW_OPERATORS = 12
"""Up to as many operators, all sets are enumerated."""
_MOST_STATES = 256


class Worth(NamedTuple):
    """The bytes and seconds of keeping an operator's output."""

    op: int
    nbytes: int
    seconds: float


class _State(NamedTuple):
    nbytes: int
    seconds: float
    kept: int


def keep_sets(worth: Sequence[Worth], most: int) -> list[tuple[int, ...]]:
    """Return undominated sets of operators to keep, by increasing bytes.

    Where there are more than `most`, as many of them are returned, spread evenly over the seconds saved.
    """
    ranked = sorted(worth, key=lambda w: (w.nbytes / max(w.seconds, 1e-12), w.op))
    states = [_State(0, 0.0, 0)]
    for bit, candidate in enumerate(ranked):
        grown = [_State(s.nbytes + candidate.nbytes, s.seconds + candidate.seconds, s.kept | 1 << bit) for s in states]
        states = _spread(_undominated([*states, *grown]), _MOST_STATES)
    chosen = _spread([s for s in states if s.kept], most)
    return [tuple(sorted(w.op for bit, w in enumerate(ranked) if s.kept >> bit & 1)) for s in chosen]


def every_keep_set(worth: Sequence[Worth], added: Ints, changes: Ints) -> list[tuple[int, ...]]:
    """Return the sets of operators to keep that are undominated in bytes, seconds, and bytes while recomputed.

    Args:
        worth: The operators that can be kept, `FEW_OPERATORS` at most.
        added: Bytes that the recomputation adds at each of its operators, with no output kept.
        changes: The change of these bytes by keeping each operator's output, in a row for each.
    """
    sets = np.arange(1 << len(worth))
    kept = sets[:, np.newaxis] >> np.arange(len(worth)) & 1
    nbytes, seconds = kept @ [w.nbytes for w in worth], kept @ [w.seconds for w in worth]
    again = (added + kept @ changes).max(axis=1)
    undominated: list[int] = []
    for candidate in np.lexsort((again, -seconds, nbytes)):  # dominating sets come first
        if not np.any((seconds[undominated] >= seconds[candidate]) & (again[undominated] <= again[candidate])):
            undominated.append(int(candidate))
    return [
        tuple(sorted(w.op for bit, w in enumerate(worth) if candidate >> bit & 1))
        for candidate in undominated
        if candidate
    ]


def _undominated(states: list[_State]) -> list[_State]:
    """Return the undominated states, sorted by bytes and seconds."""
    undominated: list[_State] = []
    for state in sorted(states, key=lambda s: (s.nbytes, -s.seconds)):
        if not undominated or state.seconds > undominated[-1].seconds:
            undominated.append(state)
    return undominated


def _spread(states: list[_State], most: int) -> list[_State]:
    """Return at most `most` states, including the first and the last, about evenly spaced in seconds."""
    if len(states) <= most:
        return states
    step = (states[-1].seconds - states[0].seconds) / max(1, most - 1)
    chosen = [states[0]]
    for state in states[1:-1]:
        if state.seconds >= chosen[-1].seconds + step * 0.999:
            chosen.append(state)
    return [*chosen[: most - 1], states[-1]]
