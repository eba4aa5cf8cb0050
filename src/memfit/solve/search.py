"""Good choices of options, found fast: the same option for all modules alike, then one exchange at a time.

A start for the solver and what there is when its time runs out. A policy takes one kind of option (a module
whole, with a set of operators kept, a run of so many modules, nested) for every module that has it, as
practitioners do. From the fastest that fits, simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983, *Optimization
by Simulated Annealing*) makes exchanges: an option is put in the place of those that it is in conflict with, or
taken away. Choices over the budget are gone through too, at a price that is adapted so that they are about as
many as the others (strategic oscillation: Glover 1977).
"""

from __future__ import annotations

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from memfit.solve.problem import NO_ROOM, Problem

_MOVES = 100  # for each option, at most
_PERIOD = 64  # moves between two looks at the clock, the temperature and the price
_TEMPERATURE = 0.004  # at the start, as a share of the plain step's time
_DEARER = 1.15

Ints = npt.NDArray[np.int64]


class Search:
    """Finds choices of a problem's options.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.conflicting: list[set[int]] = [set() for _ in problem.options]
        for members in problem.conflicts:
            for j in members:
                self.conflicting[j] |= members - {j}
        activities = [(k, lost, members) for k, reasons in enumerate(problem.reasons) for lost, members in reasons]
        self.lost = np.array([lost for _, lost, _ in activities], bool)
        self.first_activity = np.searchsorted([k for k, _, _ in activities], np.arange(len(problem.reasons)))
        acting: list[list[int]] = [[] for _ in problem.options]
        for a, (_, _, members) in enumerate(activities):
            for j in members:
                acting[j].append(a)
        self.activities_of = [np.array(found, np.int64) for found in acting]
        # Columns change at few places: they are added as changes, and summed up along the axis once.
        changes = np.diff(problem.columns, axis=1, prepend=0)
        self.changes_of = [
            (at, changes[j, at]) for j in range(len(problem.options)) for (at,) in [np.nonzero(changes[j])]
        ]
        self.changes_by_reason = csr_array(changes[len(problem.options) :].T)

    def fastest(
        self, budget_bytes: int, deadline: float, enough_seconds: float = 0.0, known: Sequence[Ints] = ()
    ) -> Ints | None:
        """Return a choice within a budget, or None if none was found.

        Args:
            budget_bytes: The budget.
            deadline: When to stop improving it, as `time.monotonic` counts.
            enough_seconds: A step's time with which to stop.
            known: Choices within the budget, to start from.
        """
        fitting = [(seconds, i) for i, (peak, seconds, _) in enumerate(self.policies) if peak <= budget_bytes]
        found = [self.policies[min(fitting)[1]][2]] if fitting else []
        start = min([*found, *known], key=self.problem.seconds, default=None)
        if start is None:
            start = self._lowered(budget_bytes, deadline)
        return self._anneal(start, budget_bytes, deadline, enough_seconds)

    def leanest(self, deadline: float) -> Ints:
        """Return a choice of a low peak."""
        return self._lowered(0, deadline)

    def _lowered(self, budget_bytes: int, deadline: float) -> Ints:
        """Make exchanges that lower the peak, from the leanest policy until it is within a budget or none does."""
        state = _State(self, min(self.policies, key=lambda found: found[:2])[2])
        peak, lowered = state.peak_bytes(), True
        while lowered:
            lowered = False
            for j in range(len(self.problem.options)):
                if peak <= budget_bytes or time.monotonic() > deadline:
                    return state.x
                done = state.exchange(j)
                if state.peak_bytes() < peak:
                    peak, lowered = state.peak_bytes(), True
                else:
                    state.undo(done)
        return state.x

    @cached_property
    def policies(self) -> list[tuple[int, float, Ints]]:
        """Nothing, and a choice for each kind of option, each with its peak and seconds."""
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for j, option in enumerate(self.problem.options):
            names = tuple(re.sub(r"\d+", "#", fqn) for fqn in option.modules)
            kinds[names, option.regions[0].keep, option.regions[0].offload, len(option.regions)].append(j)
        repeated = [members for members in kinds.values() if len(members) > 1]
        found = [np.zeros(len(self.problem.options), np.int64), *(self._all_of(members) for members in repeated)]
        return [(self.problem.peak_bytes(x), self.problem.seconds(x), x) for x in found]

    def _all_of(self, members: Iterable[int]) -> Ints:
        x = np.zeros(len(self.problem.options), np.int64)
        for j in members:
            if not any(x[i] for i in self.conflicting[j]):
                x[j] = 1
        return x

    def _anneal(self, x: Ints, budget_bytes: int, deadline: float, enough_seconds: float) -> Ints | None:
        """Make exchanges at random, of which those that make the step slower become rarer; return the best that fits.

        Bytes over the budget cost time: so much more while most choices are over it, so much less while few are.
        """
        rng, state = random.Random(0), _State(self, x)
        options, plain = self.problem.options, self.problem.plain_seconds
        seconds, over = self.problem.seconds(x), max(0, state.peak_bytes() - budget_bytes)
        best, fastest = (None, math.inf) if over else (state.x.copy(), seconds)
        price, times_over, temperature = plain / budget_bytes, 0, 0.0
        started, count = time.monotonic(), _MOVES * len(options)
        for move in range(count):
            if move % _PERIOD == 0:
                now = time.monotonic()
                if now > deadline or fastest <= enough_seconds:
                    break
                done = max(move / count, (now - started) / max(deadline - started, 1e-9))
                temperature = _TEMPERATURE * plain * (1 - done) ** 2
                price *= _DEARER if times_over > 0.75 * _PERIOD else 1 / _DEARER if times_over < 0.25 * _PERIOD else 1
                times_over = 0
            times_over += over > 0
            worst = seconds + price * over + temperature * rng.expovariate(1.0)
            changed = state.exchange(rng.randrange(len(options)))
            slower = sum(options[i].seconds if state.x[i] else -options[i].seconds for i in changed)
            if seconds + slower <= worst:  # otherwise its bytes do not matter
                excess = max(0, state.peak_bytes() - budget_bytes)
                if seconds + slower + price * excess <= worst:
                    seconds, over = seconds + slower, excess
                    if not over and seconds < fastest:
                        best, fastest = state.x.copy(), seconds
                    continue
            state.undo(changed)
        return best


class _State:
    """A choice, with what the bytes at every row follow from kept up to date."""

    def __init__(self, search: Search, x: Ints) -> None:
        self.search, self.problem = search, search.problem
        self.x = np.zeros_like(x)
        self.counts = np.zeros(len(search.lost), np.int64)
        self.changes = np.zeros(self.problem.columns.shape[1], np.int64)
        for j in np.nonzero(x)[0].tolist():
            self._toggle(j)

    def peak_bytes(self) -> int:
        """Return the largest row; see `Problem.peak_bytes`."""
        problem = self.problem
        if int(problem.host_bytes @ self.x) > problem.host_budget_bytes:
            return NO_ROOM
        changes = self.changes
        if len(problem.reasons):
            activity = np.where(self.search.lost, 1 - self.counts, self.counts)
            changes = changes + self.search.changes_by_reason @ np.maximum.reduceat(
                activity, self.search.first_activity
            )
        live = problem.base + np.cumsum(changes)
        return int(
            (live[problem.row_axis] + problem.row_bytes * np.append(self.x, 0)[problem.row_option]).max(initial=0)
        )

    def exchange(self, j: int) -> list[int]:
        """Take away an option that is chosen, or put it in the place of those in conflict; return what changed."""
        changed = [j] if self.x[j] else [i for i in self.search.conflicting[j] if self.x[i]] + [j]
        for i in changed:
            self._toggle(i)
        return changed

    def undo(self, changed: Sequence[int]) -> None:
        """Change back what an exchange changed."""
        for i in reversed(changed):
            self._toggle(i)

    def _toggle(self, j: int) -> None:
        sign = 1 - 2 * int(self.x[j])
        self.x[j] += sign
        self.counts[self.search.activities_of[j]] += sign
        at, change = self.search.changes_of[j]
        self.changes[at] += sign * change
