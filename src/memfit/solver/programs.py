"""Linear programs and mixed-integer ones, as HiGHS solves them (Huangfu and Hall 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import highspy
import numpy as np
import numpy.typing as npt

from memfit.foundations import safe_point
from memfit.solver.candidates import Ints

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


class Program:
    """A linear objective to minimize over variables with bounds, under rows; more rows may be added.

    Args:
        whole: The mask of the variables that are integers, if there are any.
    """

    def __init__(
        self, cost: Floats, rows: Rows, lower: Floats, upper: Floats, whole: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self._solver, self._is_linear = _SilentHighs(), whole is None
        self._solver.setOptionValue("parallel", "off")
        self._solver.setOptionValue("mip_allow_restart", False)  # its presolve may never end (HiGHS 1.16)
        self._solver.passModel(
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

    def add(self, rows: Rows) -> None:
        """Add rows: the next solution begins where the last one ended, which takes a fraction of the time."""
        self._solver.addRows(
            len(rows.upper),
            np.full(len(rows.upper), -np.inf),
            rows.upper,
            len(rows.values),
            rows.starts[:-1].astype(np.int32),
            rows.columns.astype(np.int32),
            rows.values,
        )

    def solved(self, gap: float = 0.0, *, time_limit_seconds: float) -> MilpResult:
        """Solve the program; see `minimized`."""
        safe_point()
        solver = self._solver
        solver.setOptionValue("time_limit", solver.getRunTime() + time_limit_seconds)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.run()
        status, info, known = solver.getModelStatus(), solver.getInfo(), highspy.HighsModelStatus
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):  # no program here is unbounded
            return MilpResult("infeasible")
        is_optimal = status == known.kOptimal
        bound = -np.inf if self._is_linear else info.mip_dual_bound
        found = MilpResult("optimal" if is_optimal else "stopped", bound=bound)
        # A stopped simplex method's values are neither near the optimum nor a bound on it.
        if info.primal_solution_status != _FEASIBLE or (self._is_linear and not is_optimal):
            return found
        solution = solver.getSolution()
        found = replace(found, x=np.array(solution.col_value), value=info.objective_function_value)
        if not self._is_linear:
            return found
        return replace(found, bound=found.value, reduced=np.maximum(np.array(solution.col_dual), 0.0))


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
    return Program(cost, rows, lower, upper, whole).solved(gap, time_limit_seconds=time_limit_seconds)
