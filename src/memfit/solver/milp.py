"""The fastest choice of options within a budget, and the choice of the lowest peak, by mixed-integer programming.

HiGHS (Huangfu and Hall 2018) solves the programs. A program starts with a few rows, and rows that its solution violates
are added until there are none, first for the relaxed problem, which is fast. Leaving rows out only widens the feasible
set, so that every bound of the solver is a bound of the whole problem. The options of the relaxed solution are tried
first (kernel search: Angelelli, Mansini, Speranza 2010). Solutions are rounded and evaluated again, since the solver's
floats are inexact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter, thread_time
from typing import Any, Literal

import highspy
import numpy as np
import numpy.typing as npt

from memfit.foundations import safe_point
from memfit.solver.alike import Uniform, uniform
from memfit.solver.candidates import Ints
from memfit.solver.problem import Problem

Floats = npt.NDArray[np.float64]

_FEASIBLE = 2  # value of HiGHS's primal solution status


@dataclass(frozen=True)
class Rows:
    """Rows of a program: sums with an upper limit, as sparse coefficients (CSR)."""

    starts: Ints  # of each row's coefficients, and the end of the last row's
    columns: Ints  # the variable of each coefficient
    values: Floats
    upper: Floats

    @classmethod
    def of_entries(cls, entries: Sequence[tuple[int, int, float]], upper: Sequence[float]) -> Rows:
        """Return rows from (row, variable, coefficient) triples, in any order, without duplicates."""
        rows, columns, values = zip(*sorted(entries), strict=True) if entries else ((), (), ())
        starts = np.searchsorted(np.array(rows, np.int64), np.arange(len(upper) + 1))
        return cls(starts, np.array(columns, np.int64), np.array(values, np.float64), np.array(upper, np.float64))

    @classmethod
    def of_matrix(cls, matrix: Floats, upper: Floats) -> Rows:
        rows, columns = np.nonzero(matrix)
        return cls(np.searchsorted(rows, np.arange(len(matrix) + 1)), columns, matrix[rows, columns], upper)

    def __add__(self, other: Rows) -> Rows:
        return Rows(
            np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.upper, other.upper]),
        )


@dataclass(frozen=True)
class MilpResult:
    """The result of HiGHS."""

    status: Literal["optimal", "infeasible", "stopped"]  # the last one at the time limit
    x: Floats | None = None  # None without a solution, and for linear programs stopped at the time limit
    value: float = np.inf
    bound: float = -np.inf  # on the objective of all solutions, from below; for linear programs the value
    reduced: Floats | None = None
    """For linear programs, what the objective grows by with a unit of each variable that is at its lower bound."""


class _SilentHighs(highspy.Highs):
    """HiGHS without output, since standard output is the user's, and may be a JSON document."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.setOptionValue("output_flag", False)

    def enableCallbacks(self) -> None:
        """Turn output off before the constructor's first call that logs: HiGHS 1.16 prints a banner."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def minimized(
    cost: Floats,
    rows: Rows,
    lower: Floats,
    upper: Floats,
    *,
    whole: npt.NDArray[np.bool_] | None = None,
    gap: float = 0.0,
    time_limit_seconds: float,
) -> MilpResult:
    """Minimize a linear objective over variables of which those in the mask `whole` are integers, if there is one.

    A solution is returned once it is within a relative gap of the bound, and else at the limit of wall time, the only
    clock of HiGHS.
    """
    safe_point()
    solver = _SilentHighs()
    solver.setOptionValue("parallel", "off")
    solver.setOptionValue("time_limit", time_limit_seconds)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_allow_restart", False)  # its presolve may never end (HiGHS 1.16), despite the limit
    solver.passModel(
        len(cost),
        len(rows.upper),
        len(rows.values),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        cost,
        lower,
        upper,
        np.full(len(rows.upper), -np.inf),
        rows.upper,
        rows.starts.astype(np.int32),
        rows.columns.astype(np.int32),
        rows.values,
        np.zeros(len(cost), np.int32) if whole is None else whole.astype(np.int32),
    )
    solver.run()
    status, info, known = solver.getModelStatus(), solver.getInfo(), highspy.HighsModelStatus
    if status in (known.kInfeasible, known.kUnboundedOrInfeasible):  # no program here is unbounded
        return MilpResult("infeasible")
    is_optimal = status == known.kOptimal
    found = MilpResult("optimal" if is_optimal else "stopped", bound=-np.inf if whole is None else info.mip_dual_bound)
    # A stopped simplex method's values are neither near the optimum nor a bound on it.
    if info.primal_solution_status != _FEASIBLE or (whole is None and not is_optimal):
        return found
    solution = solver.getSolution()
    found = replace(found, x=np.array(solution.col_value), value=info.objective_function_value)
    if whole is not None:
        return found
    return replace(found, bound=found.value, reduced=np.maximum(np.array(solution.col_dual), 0.0))


_UNIT = float(2**20)  # bytes are solved in MiB, so that coefficients stay near one
_ROWS_A_ROUND = 24
_LEAST_SECONDS = 0.1
_PEAK_TOLERANCE = 2e-4
_NEAR = 2e-3  # share of the limit: rows further from it in the relaxed solution are left out of the integer program
_TIE = 1e-4  # MiB by which the slowest choice of a peak counts more than the fastest
_LEAST_KERNEL = 16
_TAKEN = 1e-9
_LEANER = (0.75, 0.5)
_MANY_OPTIONS = 500  # from which on modules that are alike are first treated alike
_UNIFORM_SECONDS = 2.0  # for that; for the lowest peak beside the limit, since building such a problem takes longer
EXACT, FINE, COARSE = 1e-4, 1e-3, 5e-3
"""Relative gaps at which the solver stops: the last tenths of a percent of the step's time take longest."""


@dataclass(frozen=True)
class Choice:
    """A choice of options."""

    x: Ints  # 1 for each chosen option
    peak_bytes: int
    seconds: float
    status: Literal["optimal", "feasible"]
    bound: float  # from below, on the seconds (`fastest`) or the peak bytes (`leanest`) of every choice


@dataclass(frozen=True)
class _Goal:
    """An objective to minimise, with a coefficient of each option, each keeper, and one more variable.

    In `fastest` that is always 1 with the plain step's time as coefficient, so that the objective is the step's time;
    in `leanest` it is the peak in MiB.
    """

    cost: Floats
    scale: float  # of the seconds in the objective
    budget_bytes: int | None  # upper limit of the rows; None for the last variable


@dataclass(frozen=True)
class _Relaxed:
    """A solution of the relaxed problem."""

    value: float  # of the objective, a lower bound for every choice
    x: Floats  # the fraction of each option
    reduced: Floats  # the least increase of the objective by choosing each option
    rows: tuple[int, ...] = ()  # those in use whose limit it comes near


class Solver:
    """The solver of one problem for many budgets; rows that the relaxed problem needed once are kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._n_x, self._n_z = len(problem.options), len(problem.reasons)
        self._active: list[int] = []
        self._lowest: Choice | None = None
        self._lowest_seconds = 0.0  # time limit of that solution
        self._own_seconds = self._wall_seconds = 0.0  # thread and wall time of all runs of HiGHS
        self._relaxations: dict[int, _Relaxed | None] = {}
        self._found: list[Ints] = policies(problem)
        # At most one option of a conflict, z at least each of its activities, the host's budget.
        entries: list[tuple[int, int, float]] = []
        upper: list[float] = []
        for members in problem.conflicts:
            entries += [(len(upper), j, 1.0) for j in sorted(members)]
            upper.append(1.0)
        for k, reasons in enumerate(problem.reasons):
            for lost, members in sorted(reasons, key=lambda r: (r[0], sorted(r[1]))):
                entries.append((len(upper), self._n_x + k, -1.0))
                entries += [(len(upper), j, -1.0 if lost else 1.0) for j in sorted(members)]
                upper.append(-1.0 if lost else 0.0)
        entries += [(len(upper), int(j), problem.host_bytes[j] / _UNIT) for j in np.nonzero(problem.host_bytes)[0]]
        upper.append(problem.host_budget_bytes / _UNIT)
        self._structure = Rows.of_entries(entries, upper)
        self._take_up(self._active, problem.row_peaks(np.zeros(self._n_x, np.int64)), -1)

    def fastest(self, budget_bytes: int, tolerance: float = EXACT, time_limit_seconds: float = 10.0) -> Choice | None:
        """Return the fastest choice whose peak is within a budget; None if there is none, or none was found in time.

        Its relative gap to the bound is `tolerance`, where all rounds together keep their limit of the thread's time.
        """
        if not self._n_x:
            nothing = self._nothing_to_choose()
            return nothing if nothing.peak_bytes <= budget_bytes else None
        deadline = thread_time() + time_limit_seconds
        goal = self._goal(budget_bytes)
        relaxed = self._relaxed_for(budget_bytes, deadline)
        if relaxed is None:
            return None
        # Integer solutions round up: choices for smaller budgets help.
        for share in _LEANER if thread_time() < deadline else ():
            floor = self.peak_floor_bytes
            leaner = self._relaxed_for(int(floor + share * (budget_bytes - floor)), deadline)
            relaxed = relaxed if leaner is None else replace(relaxed, x=relaxed.x + leaner.x)
        known = self._known(budget_bytes)
        if known is None or self.problem.seconds(known) * (1 - tolerance) > relaxed.value / goal.scale:
            seconds = min(_UNIFORM_SECONDS, (deadline - thread_time()) / 4)
            self._take_uniform(lambda solver: solver.fastest(budget_bytes, COARSE, max(seconds, _LEAST_SECONDS)))
            known = self._known(budget_bytes)
        best, bound = self._best(goal, relaxed, known, tolerance, deadline)
        if best is None:  # only the leanest choice can be found in time
            self.leanest(max(_LEAST_SECONDS, time_limit_seconds / 2))
            best = self._known(budget_bytes)
        return None if best is None else self._choice(best, max(self.problem.plain_seconds, bound / goal.scale))

    def _known(self, budget_bytes: int) -> Ints | None:
        fitting = [x for x in self._found if self.problem.peak_bytes(x) <= budget_bytes]
        return min(fitting, key=self.problem.seconds, default=None)

    def bound(self, budget_bytes: int, time_limit_seconds: float = 10.0) -> float | None:
        """Return a quick lower bound on the seconds of every choice within a budget; None if there is no choice."""
        if not self._n_x:
            nothing = self._nothing_to_choose()
            return nothing.seconds if nothing.peak_bytes <= budget_bytes else None
        relaxed = self._relaxed_for(budget_bytes, thread_time() + time_limit_seconds)
        scale = self._goal(budget_bytes).scale
        return None if relaxed is None else max(self.problem.plain_seconds, relaxed.value / scale)

    def _relaxed_for(self, budget_bytes: int, deadline: float) -> _Relaxed | None:
        """Return the relaxed solution for a budget, kept once it was solved within the time limit."""
        if budget_bytes in self._relaxations:
            return self._relaxations[budget_bytes]
        relaxed = self._relaxed(self._goal(budget_bytes), deadline)
        if thread_time() < deadline:
            self._relaxations[budget_bytes] = relaxed
        return relaxed

    def leanest(self, time_limit_seconds: float = 10.0) -> Choice:
        """Return a choice of the lowest peak, the fastest one at ties; without time, among known choices.

        It is solved once, and again with a larger time limit if it was not proven optimal.
        """
        if self._lowest is None and time_limit_seconds <= 0:
            x = min(self._found, key=self.problem.peak_bytes)
            return Choice(x, self.problem.peak_bytes(x), self.problem.seconds(x), "feasible", 0.0)
        known = self._lowest
        if known is not None and (known.status == "optimal" or time_limit_seconds <= self._lowest_seconds):
            return known
        self._lowest_seconds = time_limit_seconds
        if not self._n_x:
            nothing = self._nothing_to_choose()
            self._lowest = replace(nothing, bound=float(nothing.peak_bytes))
            return self._lowest
        goal = self._goal(None)
        self._take_uniform(lambda solver: solver.leanest(_UNIFORM_SECONDS))
        deadline = thread_time() + time_limit_seconds
        relaxed = self._relaxed(goal, deadline) or _Relaxed(0.0, np.ones(self._n_x), np.zeros(self._n_x))
        start = min(self._found, key=lambda x: self._value(goal, x))
        best, bound = self._best(goal, relaxed, start, _PEAK_TOLERANCE, deadline)
        assert best is not None  # the search starts from a choice
        self._found.append(best)
        peak, bound = self.problem.peak_bytes(best), max(0.0, bound - _TIE) * _UNIT
        proven = bound >= peak * (1 - _PEAK_TOLERANCE)
        self._lowest = Choice(best, peak, self.problem.seconds(best), "optimal" if proven else "feasible", bound)
        return self._lowest

    @cached_property
    def peak_floor_bytes(self) -> float:
        """A quick lower bound on the peak of every choice."""
        if not self._n_x:
            return float(self._nothing_to_choose().peak_bytes)
        relaxed = self._relaxed(self._goal(None), thread_time() + 1.0)
        return 0.0 if relaxed is None else max(0.0, relaxed.value - _TIE) * _UNIT

    def _goal(self, budget_bytes: int | None) -> _Goal:
        """Return the objective of `fastest` within a budget; without one that of `leanest`."""
        slower, keepers = np.array([o.seconds for o in self.problem.options]), np.zeros(self._n_z)
        if budget_bytes is None:
            tie = _TIE / max(float(slower.sum()), 1e-12)
            return _Goal(np.concatenate([slower * tie, keepers, [1.0]]), 1.0, None)
        scale = 1.0 / max(float(slower.max()), 1e-12)
        return _Goal(np.concatenate([slower, keepers, [self.problem.plain_seconds]]) * scale, scale, budget_bytes)

    def _value(self, goal: _Goal, x: Ints) -> float:
        last = 1.0 if goal.budget_bytes is not None else self.problem.peak_bytes(x) / _UNIT
        return float(goal.cost[: self._n_x] @ x + goal.cost[-1] * last)

    def _best(
        self, goal: _Goal, relaxed: _Relaxed, best: Ints | None, tolerance: float, deadline: float
    ) -> tuple[Ints | None, float]:
        """Return the best choice found, and a lower bound on the objective of all choices.

        The search covers first the options of the relaxed solution, then all options whose reduced cost allows a
        better choice. More kernels between the two took longer than they saved.
        """
        order, bound = np.lexsort((relaxed.reduced, -relaxed.x)), relaxed.value
        rows = list(relaxed.rows)
        kernel = max(_LEAST_KERNEL, int(np.count_nonzero(relaxed.x > _TAKEN)))
        for size in (kernel, self._n_x):
            value = np.inf if best is None else self._value(goal, best)
            if value * (1 - tolerance) <= bound or thread_time() > deadline:
                break
            wanted = value * (1 - tolerance / 2)
            useful = order[relaxed.value + relaxed.reduced[order] <= wanted]
            is_last = size >= len(useful)
            seconds = (deadline - thread_time()) / (1 if is_last else 2)
            # The cutoff soon rules out a kernel without a better choice; over all options it slows HiGHS down.
            cutoff = np.inf if is_last else wanted
            candidate, proven = self._among(useful[:size], goal, rows, cutoff, tolerance, thread_time() + seconds)
            if candidate is not None and self._value(goal, candidate) < value:
                best = candidate
            if is_last:
                bound = max(bound, min(proven, wanted))  # choices with options left out are not below `wanted`
                break
        return best, bound if best is None else min(bound, self._value(goal, best))

    def _among(
        self, kernel: Ints, goal: _Goal, rows: list[int], cutoff: float, tolerance: float, deadline: float
    ) -> tuple[Ints | None, float]:
        """Return the best choice of some options with an objective of at most `cutoff`, or None, and a bound on it.

        Rows that solutions violate are added to `rows`.
        """
        allowed = np.zeros(self._n_x)
        allowed[kernel] = 1.0
        margin, proven, best = 0, -np.inf, None
        while True:
            limits = self._row_limit(goal, rows, margin)
            if np.isfinite(cutoff):
                limits += Rows.of_matrix(goal.cost[np.newaxis], np.array([cutoff]))
            result = self._run(goal, limits, allowed, deadline, tolerance)
            if margin == 0:
                proven = np.inf if result.status == "infeasible" else max(proven, result.bound)
            if result.x is None:
                return best, proven
            x = np.round(result.x[: self._n_x]).astype(np.int64)
            if goal.budget_bytes is None:
                best = x if best is None else min(x, best, key=lambda one: self._value(goal, one))
                violated = self._take_up(rows, self.problem.row_peaks(x), result.x[-1] * _UNIT + 1024)
                if not violated or thread_time() > deadline:
                    return best, proven
                continue
            if self._take_up(rows, self.problem.row_peaks(x), goal.budget_bytes):
                continue
            excess = self.problem.peak_bytes(x) - goal.budget_bytes
            if excess <= 0:
                return x, proven
            margin = max(2 * margin, excess)  # the solver's tolerance allowed a choice that does not fit

    def _relaxed(self, goal: _Goal, deadline: float) -> _Relaxed | None:
        """Solve the relaxed problem, adding the rows that its solutions violate; None if the budget is infeasible.

        At the time limit the solution is that of fewer rows, whose value is a lower bound too.
        """
        solution = _Relaxed(0.0, np.ones(self._n_x), np.zeros(self._n_x))
        while True:
            result = self._run(goal, self._row_limit(goal, self._active, 0), np.ones(self._n_x), deadline)
            if result.x is None or result.reduced is None:
                return None if result.status == "infeasible" else solution
            reduced = result.reduced[: self._n_x]
            allowed = result.x[-1] * _UNIT if goal.budget_bytes is None else float(goal.budget_bytes)
            peaks = self.problem.live_bytes(result.x[: self._n_x], result.x[self._n_x : -1])
            near = tuple(row for row in self._active if peaks[row] >= (1 - _NEAR) * allowed)
            solution = _Relaxed(result.value, result.x[: self._n_x], reduced, near)
            if not self._take_up(self._active, peaks, allowed + 1024) or thread_time() > deadline:
                return solution

    def _take_uniform(self, solved: Callable[[Solver], Choice | None]) -> None:
        """Add a choice in which modules that are alike have the same option to those found, in a large problem."""
        if self._uniform is not None:
            whole, solver = self._uniform
            choice = solved(solver)
            if choice is not None:
                self._found.append(whole.spread(choice.x, self._n_x))

    @cached_property
    def _uniform(self) -> tuple[Uniform, Solver] | None:
        found = uniform(self.problem) if self._n_x >= _MANY_OPTIONS else None
        return None if found is None else (found, Solver(found.problem))

    def _nothing_to_choose(self) -> Choice:
        return self._choice(np.zeros(0, np.int64), self.problem.plain_seconds)

    def _choice(self, x: Ints, bound: float) -> Choice:
        self._found.append(x)
        seconds = self.problem.seconds(x)
        bound = min(bound, seconds)
        proven = bound >= seconds * (1 - FINE)
        return Choice(x, self.problem.peak_bytes(x), seconds, "optimal" if proven else "feasible", bound)

    def _run(
        self, goal: _Goal, limits: Rows, allowed: Floats, deadline: float, tolerance: float | None = None
    ) -> MilpResult:
        """Run HiGHS over the allowed options, the keepers, and one more variable, which is continuous.

        Without a tolerance the relaxed problem is solved. HiGHS's limit is in wall time, its only clock: it is larger
        on a busy machine.
        """
        low, high = (1.0, 1.0) if goal.budget_bytes is not None else (0.0, np.inf)
        lower = np.append(np.zeros(self._n_x + self._n_z), low)
        upper = np.concatenate([allowed, np.ones(self._n_z), [high]])
        whole = np.arange(len(lower)) < len(lower) - 1  # keepers follow from options, but branching on them is faster
        own, wall = thread_time(), perf_counter()
        busy = max(1.0, self._wall_seconds / self._own_seconds) if self._own_seconds else 1.0  # by other programs
        solution = minimized(
            goal.cost,
            limits + self._structure,
            lower,
            upper,
            whole=None if tolerance is None else whole,
            gap=tolerance or 0.0,
            time_limit_seconds=busy * max(_LEAST_SECONDS, deadline - own),
        )
        self._own_seconds += thread_time() - own
        self._wall_seconds += perf_counter() - wall
        return solution

    def _row_limit(self, goal: _Goal, rows: Sequence[int], margin: int) -> Rows:
        """Return rows, in MiB, limited by the budget less a margin, or by the last variable."""
        problem = self.problem
        active = np.array(rows, np.int64)
        coefficients = (problem.columns[:, problem.row_axis[active]] / _UNIT).T
        options = problem.row_option[active]
        with_option = np.nonzero(options >= 0)[0]
        coefficients[with_option, options[with_option]] += problem.row_bytes[active][with_option] / _UNIT
        base = problem.base[problem.row_axis[active]].astype(np.float64)
        last = np.full((len(active), 1), -1.0 if goal.budget_bytes is None else 0.0)
        upper = (0 if goal.budget_bytes is None else goal.budget_bytes - margin) - base
        return Rows.of_matrix(np.hstack([coefficients, last]), upper / _UNIT)

    def _take_up(self, rows: list[int], peaks: npt.NDArray[Any], allowed_bytes: float) -> bool:
        """Add the largest violated rows, the highest of neighbours, to those in use; tell whether there are any."""
        over = np.setdiff1d(np.nonzero(peaks > allowed_bytes)[0], rows)
        over = over[np.argsort(self.problem.row_axis[over], kind="stable")]
        around = np.concatenate([[-np.inf], peaks[over], [-np.inf]])
        highest = over[(around[1:-1] >= around[:-2]) & (around[1:-1] >= around[2:])]
        rows += highest[np.argsort(-peaks[highest], kind="stable")][:_ROWS_A_ROUND].tolist()
        return bool(over.size)


def policies(problem: Problem) -> list[Ints]:
    """Return the empty choice, and a choice for each kind of option that several modules have.

    A kind is a module with a set of kept operators, a run of a number of modules, or a module with inner regions.
    """
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for j, option in enumerate(problem.options):
        names = tuple(re.sub(r"\d+", "#", fqn) for fqn in option.modules)
        kinds[names, option.regions[0].keep, option.regions[0].offload, len(option.regions)].append(j)
    choices = [np.zeros(len(problem.options), np.int64)]
    for members in kinds.values():
        if len(members) > 1:
            choices.append(np.zeros(len(problem.options), np.int64))
            for j in members:
                if not any(choices[-1][sorted(conflict)].any() for conflict in problem.conflicts if j in conflict):
                    choices[-1][j] = 1
    return choices
