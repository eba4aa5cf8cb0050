"""The fastest choice of options within a budget, and the leanest one, by mixed-integer programming with HiGHS.

Points that can't be the peak are left out: the program starts with a few rows, and rows that its
solution violates are added until there are none, first for fractions of options, which is fast. Leaving
rows out only widens the feasible set, so every bound of the solver is a bound of the whole problem. What
`solve.search` finds is where it starts: it looks for something faster only. Solutions are rounded and
evaluated again; the solver's own floats are not believed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, lil_array

from memfit.solve.problem import Problem
from memfit.solve.search import Search

_UNIT = float(2**20)  # bytes are solved in MiB, so that coefficients stay near one
_ROWS_A_ROUND = 24
_LEAST_SECONDS = 0.1
_PEAK_TOLERANCE = 2e-3
_SEARCH_SHARE = 0.6  # of the time limit, for a start
_INFEASIBLE = 2
EXACT, FINE, COARSE = 1e-4, 1e-3, 5e-3
"""How near to its bound the solver stops, as a share of the step's time: the last tenths of a percent take longest."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """A choice of options.

    Attributes:
        x: 1 for each option that is chosen.
        peak_bytes: The largest row.
        seconds: The step's time.
        status: "optimal" where the solver proved it.
        bound: Lower bound on the seconds (`fastest`) or the peak bytes (`leanest`) of every choice.
    """

    x: Ints
    peak_bytes: int
    seconds: float
    status: Literal["optimal", "feasible"]
    bound: float


class Solver:
    """Solves one problem for many budgets; rows that were needed once are kept.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.search = Search(problem)
        self._n_x, self._n_z = len(problem.options), len(problem.reasons)
        self._active: list[int] = []
        self._lowest: Choice | None = None
        self._found: list[Ints] = []
        self._structure = self._structural_constraints()
        nothing = np.zeros(self._n_x, np.int64)
        self._add_rows(nothing, -1)

    def fastest(self, budget_bytes: int, tolerance: float = EXACT, time_limit_seconds: float = 10.0) -> Choice | None:
        """Return the fastest choice whose peak is within a budget.

        Args:
            budget_bytes: The budget.
            tolerance: How much slower than the bound it may be, as a share of the step's time.
            time_limit_seconds: Of all rounds together.

        Returns:
            None when there is none: proven, or none was found within the time limit.
        """
        if not self._n_x:
            nothing = self._nothing_to_choose()
            return nothing if nothing.peak_bytes <= budget_bytes else None
        started = time.monotonic()
        deadline = started + time_limit_seconds
        cost, scale = self._step_cost()
        relaxed = self._relaxed(cost, budget_bytes, deadline)
        if relaxed is None:
            return None
        proven = max(self.problem.plain_seconds, relaxed / scale)
        enough = proven / (1 - tolerance)
        best = self._start(budget_bytes, started + _SEARCH_SHARE * time_limit_seconds, enough)
        if best is not None and self.problem.seconds(best) * (1 - tolerance) <= proven:
            return self._choice(best, min(proven, self.problem.seconds(best)))
        margin = 0
        while True:
            rows, base = self._row_matrix()
            limits = [LinearConstraint(_with_column(rows, 0.0), -np.inf, (budget_bytes - margin - base) / _UNIT)]
            faster = np.inf if best is None else self.problem.seconds(best) * (1 - tolerance / 2)
            limits.append(LinearConstraint(csr_array(cost[np.newaxis]), -np.inf, faster * scale))
            result = self._run(cost, limits, deadline, (1.0, 1.0), tolerance)
            if margin == 0:
                bound = float(result.mip_dual_bound or 0.0) / scale
                proven = max(proven, bound if np.isfinite(bound) else 0.0)
                if result.status == _INFEASIBLE and best is not None:
                    proven = max(proven, faster)
            if result.x is None:
                return None if best is None else self._choice(best, min(proven, self.problem.seconds(best)))
            x = np.round(result.x[: self._n_x]).astype(np.int64)
            if self._add_rows(x, budget_bytes):
                continue
            excess = self._peak_bytes(x) - budget_bytes
            if excess <= 0:
                return self._choice(x, min(proven, self.problem.seconds(x)))
            margin = max(2 * margin, excess)  # the solver's tolerance let through what does not fit

    def _start(self, budget_bytes: int, deadline: float, enough_seconds: float) -> Ints | None:
        """Return the best choice within a budget of what the search finds and what was found for other budgets."""
        known = [x for x in self._found if self._peak_bytes(x) <= budget_bytes]
        return self.search.fastest(budget_bytes, deadline, enough_seconds, known)

    def bound(self, budget_bytes: int, time_limit_seconds: float = 10.0) -> float | None:
        """Return a lower bound on the seconds of every choice within a budget, found fast; None if there is none."""
        if not self._n_x:
            nothing = self._nothing_to_choose()
            return nothing.seconds if nothing.peak_bytes <= budget_bytes else None
        cost, scale = self._step_cost()
        relaxed = self._relaxed(cost, budget_bytes, time.monotonic() + time_limit_seconds)
        return None if relaxed is None else max(self.problem.plain_seconds, relaxed / scale)

    def leanest(self, time_limit_seconds: float = 10.0) -> Choice:
        """Return a choice of the lowest peak, the faster of two alike; solved once."""
        if self._lowest is None:
            self._lowest = self._solve_leanest(time_limit_seconds)
        return self._lowest

    def _step_cost(self) -> tuple[Floats, float]:
        """Return the scaled cost of each variable, and the scale.

        The last variable is always 1: with the plain step's time in it, the objective is the step's time.
        """
        slower = [o.seconds for o in self.problem.options]
        scale = 1.0 / max(max(slower), 1e-12)
        return np.concatenate([slower, np.zeros(self._n_z), [self.problem.plain_seconds]]) * scale, scale

    def _solve_leanest(self, time_limit_seconds: float) -> Choice:
        if not self._n_x:
            nothing = self._nothing_to_choose()
            return replace(nothing, bound=float(nothing.peak_bytes))
        seconds = np.concatenate([[o.seconds for o in self.problem.options], np.zeros(self._n_z)])
        cost = np.append(seconds * (1e-3 / max(float(seconds.sum()), 1e-12)), 1.0)
        started = time.monotonic()
        deadline = started + time_limit_seconds
        lowest = self.search.leanest(started + _SEARCH_SHARE * time_limit_seconds)
        bound = max(0.0, (self._relaxed(cost, None, deadline) or 0.0) - 1e-3) * _UNIT
        while True:
            rows, base = self._row_matrix()
            limit = LinearConstraint(_with_column(rows, -1.0), -np.inf, -base / _UNIT)
            result = self._run(cost, [limit], deadline, (0.0, np.inf), _PEAK_TOLERANCE)
            if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
                bound = max(bound, (float(result.mip_dual_bound) - 1e-3) * _UNIT)
            if result.x is None:
                break
            x = np.round(result.x[: self._n_x]).astype(np.int64)
            lowest = min(x, lowest, key=lambda one: (self._peak_bytes(one), self.problem.seconds(one)))
            if not self._add_rows(x, int(round(result.x[-1] * _UNIT)) + 1024):
                break
        self._found.append(lowest)
        peak = self._peak_bytes(lowest)
        status: Literal["optimal", "feasible"] = "optimal" if bound >= peak * (1 - _PEAK_TOLERANCE) else "feasible"
        return Choice(lowest, peak, self.problem.seconds(lowest), status, bound)

    def _relaxed(self, cost: Floats, budget_bytes: int | None, deadline: float) -> float | None:
        """Solve the problem with fractions of options, which is fast, taking up the rows that it violates.

        Args:
            cost: Of each variable.
            budget_bytes: The budget; None where the last variable is the peak.
            deadline: When to stop, as `time.monotonic` counts.

        Returns:
            The lowest cost, or of fewer rows when time is up, which is no more; None if nothing is within the budget.
        """
        lowest = 0.0
        while True:
            rows, base = self._row_matrix()
            upper = -base if budget_bytes is None else budget_bytes - base
            limit = LinearConstraint(_with_column(rows, -1.0 if budget_bytes is None else 0.0), -np.inf, upper / _UNIT)
            last = (0.0, np.inf) if budget_bytes is None else (1.0, 1.0)
            result = self._run(cost, [limit], deadline, last, FINE, integral=False)
            if result.x is None:
                return None if result.status == _INFEASIBLE else lowest
            lowest = float(result.fun)
            allowed = result.x[-1] * _UNIT if budget_bytes is None else float(budget_bytes)
            peaks = self.problem.live_bytes(result.x[: self._n_x], result.x[self._n_x : -1])
            if not self._take_up(peaks, allowed + 1024) or time.monotonic() > deadline:
                return lowest

    def _peak_bytes(self, x: Ints) -> int:
        return self.problem.peak_bytes(x)

    def _nothing_to_choose(self) -> Choice:
        return self._choice(np.zeros(0, np.int64), self.problem.plain_seconds)

    def _choice(self, x: Ints, bound: float) -> Choice:
        """Return a choice with a lower bound on the seconds of all."""
        self._found.append(x)
        seconds = self.problem.seconds(x)
        proven = bound >= seconds * (1 - FINE)
        return Choice(x, self._peak_bytes(x), seconds, "optimal" if proven else "feasible", bound)

    def _run(
        self,
        cost: Floats,
        limits: list[LinearConstraint],
        deadline: float,
        last: tuple[float, float],
        tolerance: float,
        integral: bool = True,
    ) -> Any:
        """Run HiGHS over the options, the keepers and one more variable, which is continuous within `last`."""
        structure, low, high = self._structure
        count = self._n_x + self._n_z
        bounds = Bounds(np.append(np.zeros(count), last[0]), np.append(np.ones(count), last[1]))
        whole = np.concatenate([np.full(self._n_x, float(integral)), np.zeros(self._n_z + 1)])
        constraints = list(limits)
        if structure.shape[0]:
            constraints.append(LinearConstraint(_with_column(structure, 0.0), low, high))
        options = {"time_limit": max(_LEAST_SECONDS, deadline - time.monotonic()), "mip_rel_gap": tolerance}
        with _silent_output():
            return milp(cost, constraints=constraints, bounds=bounds, integrality=whole, options=options)

    def _structural_constraints(self) -> tuple[csr_array, Floats, Floats]:
        """At most one option along each chain; each z at least each of its activities; no more than the host has."""
        n_rows = len(self.problem.conflicts) + sum(len(r) for r in self.problem.reasons) + 1
        matrix = lil_array((n_rows, self._n_x + self._n_z))
        low, high = np.full(n_rows, -np.inf), np.full(n_rows, np.inf)
        for row, members in enumerate(self.problem.conflicts):
            matrix[row, sorted(members)] = 1.0
            high[row] = 1.0
        row = len(self.problem.conflicts)
        for k, reasons in enumerate(self.problem.reasons):
            for lost, members in sorted(reasons, key=lambda r: (r[0], sorted(r[1]))):
                matrix[row, self._n_x + k] = 1.0
                for j in members:
                    matrix[row, j] = 1.0 if lost else -1.0
                low[row] = 1.0 if lost else 0.0
                row += 1
        moving = np.nonzero(self.problem.host_bytes)[0]
        matrix[row, moving] = self.problem.host_bytes[moving] / _UNIT
        high[row] = self.problem.host_budget_bytes / _UNIT
        return matrix.tocsr(), low, high

    def _row_matrix(self) -> tuple[csr_array, Floats]:
        """Return the coefficients of the rows in use, in MiB, and their constant parts, in bytes."""
        problem = self.problem
        active = np.array(self._active)
        coefficients = (problem.columns[:, problem.row_axis[active]] / _UNIT).T
        options = problem.row_option[active]
        with_option = np.nonzero(options >= 0)[0]
        coefficients[with_option, options[with_option]] += problem.row_bytes[active][with_option] / _UNIT
        return csr_array(coefficients), problem.base[problem.row_axis[active]].astype(np.float64)

    def _add_rows(self, x: Ints, budget_bytes: int) -> bool:
        """Take up the largest rows above a budget that are not in use; tell whether there were any."""
        return self._take_up(self.problem.row_peaks(x), budget_bytes)

    def _take_up(self, peaks: npt.NDArray[Any], allowed_bytes: float) -> bool:
        over = np.nonzero(peaks > allowed_bytes)[0]
        used = set(self._active)
        new = [int(i) for i in over[np.argsort(-peaks[over], kind="stable")] if int(i) not in used]
        self._active += new[:_ROWS_A_ROUND]
        return bool(new)


def _with_column(rows: csr_array, value: float) -> csr_array:
    return csr_array(np.hstack([rows.toarray(), np.full((rows.shape[0], 1), value)]))


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    """Keep HiGHS from writing to the process's standard output, which it does even when told not to."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nothing:
        kept = os.dup(1)
        try:
            os.dup2(nothing.fileno(), 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
