"""Good choices of options, found fast: the same option for all modules alike, then one exchange at a time.

A start for the solver and what there is when its time runs out. A policy takes one kind of option (a module
whole, with a set of operators kept, a run of so many modules, nested) for every module that has it, as
practitioners do; exchanges then put one option in the place of those that it is in conflict with, or take one
away, as long as the step gets faster and fits.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.solve.problem import NO_ROOM, Problem

_STARTS = 3

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
        self.activities: list[tuple[int, bool, frozenset[int]]] = [
            (k, lost, members) for k, reasons in enumerate(problem.reasons) for lost, members in reasons
        ]
        self.activities_of: list[list[int]] = [[] for _ in problem.options]
        self.activities_in: list[list[int]] = [[] for _ in problem.reasons]
        for a, (k, _, members) in enumerate(self.activities):
            self.activities_in[k].append(a)
            for j in members:
                self.activities_of[j].append(a)
        self.rows_of: dict[int, Ints] = {
            j: np.nonzero(problem.row_option == j)[0] for j in set(problem.row_option.tolist()) - {-1}
        }

    def fastest(self, budget_bytes: int, deadline: float) -> Ints | None:
        """Return a choice within a budget, or None if none was found.

        Args:
            budget_bytes: The budget.
            deadline: When to stop improving it, as `time.monotonic` counts.
        """
        fitting = sorted((seconds, i) for i, (peak, seconds, _) in enumerate(self.policies) if peak <= budget_bytes)
        states = [_State(self, self.policies[i][2]) for _, i in fitting[:_STARTS]]
        if not states:
            states = [_State(self, min(self.policies, key=lambda found: found[:2])[2])]
            self._lower(states[0], budget_bytes, deadline)
            if states[0].peak_bytes > budget_bytes:
                return None
        for state in states:
            while time.monotonic() < deadline and self._exchange(state, budget_bytes, deadline):
                pass
        return min((state.x for state in states), key=self.problem.seconds)

    def leanest(self, deadline: float) -> Ints:
        """Return a choice of a low peak."""
        state = _State(self, min(self.policies, key=lambda found: found[:2])[2])
        self._lower(state, 0, deadline)
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

    def _exchange(self, state: _State, budget_bytes: int, deadline: float) -> bool:
        """Make the exchanges that save time and fit, those that save most first; tell whether there were any."""
        improved = False
        for _, j in sorted((self._slower(state, j), j) for j in range(len(self.problem.options))):
            slower = self._slower(state, j)
            if slower < 0 and time.monotonic() < deadline:
                done = state.exchange(j)
                if state.peak_bytes <= budget_bytes:
                    improved = True
                else:
                    state.undo(done)
        return improved

    def _slower(self, state: _State, j: int) -> float:
        options = self.problem.options
        if state.x[j]:
            return -options[j].seconds
        return options[j].seconds - sum(options[i].seconds for i in self.conflicting[j] if state.x[i])

    def _lower(self, state: _State, budget_bytes: int, deadline: float) -> None:
        """Make exchanges that lower the peak, until it is within a budget or none does."""
        lowered = True
        while lowered and state.peak_bytes > budget_bytes and time.monotonic() < deadline:
            lowered = False
            for j in range(len(self.problem.options)):
                before = state.peak_bytes
                done = state.exchange(j)
                if state.peak_bytes < before:
                    lowered = True
                else:
                    state.undo(done)
                if state.peak_bytes <= budget_bytes or time.monotonic() > deadline:
                    break


class _State:
    """A choice, with the bytes at every row kept up to date."""

    def __init__(self, search: Search, x: Ints) -> None:
        self.search, self.problem = search, search.problem
        self.x = np.zeros_like(x)
        self.counts = [0] * len(search.activities)
        self.z = [max(int(lost) for _, lost, _ in self._acts(k)) for k in range(len(self.problem.reasons))]
        self.live = self.problem.base + sum(
            (self.problem.columns[len(x) + k] for k, z in enumerate(self.z) if z), np.zeros_like(self.problem.base)
        )
        self.extra = np.zeros(len(self.problem.rows), np.int64)
        self.host_bytes = 0
        for j in np.nonzero(x)[0].tolist():
            self._toggle(j)

    def _acts(self, k: int) -> list[tuple[int, bool, frozenset[int]]]:
        return [self.search.activities[a] for a in self.search.activities_in[k]]

    @property
    def peak_bytes(self) -> int:
        """The largest row; see `Problem.peak_bytes`."""
        if self.host_bytes > self.problem.host_budget_bytes:
            return NO_ROOM
        return int((self.live[self.problem.row_axis] + self.extra).max(initial=0))

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
        self.host_bytes += sign * int(self.problem.host_bytes[j])
        self.live += sign * self.problem.columns[j]
        rows = self.search.rows_of.get(j)
        if rows is not None:
            self.extra[rows] = self.problem.row_bytes[rows] * self.x[j]
        touched = set()
        for a in self.search.activities_of[j]:
            self.counts[a] += sign
            touched.add(self.search.activities[a][0])
        for k in touched:
            z = max(
                1 - self.counts[a] if self.search.activities[a][1] else self.counts[a]
                for a in self.search.activities_in[k]
            )
            if z != self.z[k]:
                self.live += (z - self.z[k]) * self.problem.columns[len(self.x) + k]
                self.z[k] = z
