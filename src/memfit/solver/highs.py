"""Linear and mixed-integer programs, solved by HiGHS (Huangfu and Hall 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import highspy
import numpy as np
import numpy.typing as npt

from memfit.foundations import safe_point

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Status = Literal["optimal", "infeasible", "stopped"]

_INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
_OPTIMAL = highspy.HighsModelStatus.kOptimal
_FEASIBLE = 2  # value of HiGHS's primal solution status


@dataclass(frozen=True)
class Rows:
    """Rows of a program: sums with an upper limit, as sparse coefficients (CSR).

    Attributes:
        starts: Start of each row's coefficients, and the end of the last row's.
        columns: The variable of each coefficient.
        upper: Upper limit of each row's sum.
    """

    starts: Ints
    columns: Ints
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
        """Return rows from a matrix of rows × variables."""
        rows, columns = np.nonzero(matrix)
        return cls(np.searchsorted(rows, np.arange(len(matrix) + 1)), columns, matrix[rows, columns], upper)

    def __add__(self, other: Rows) -> Rows:
        """Return these rows and others after them."""
        return Rows(
            np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.upper, other.upper]),
        )


@dataclass(frozen=True)
class MilpResult:
    """The result of HiGHS.

    Attributes:
        status: "infeasible" where no values satisfy the rows; "stopped" at the time limit.
        x: The variables; None without a solution, and for linear programs stopped at the time limit.
        value: The objective of x.
        bound: Lower bound on the objective of all solutions; for linear programs the value.
        reduced: For linear programs, the reduced cost of each variable at its lower bound: the increase of the
            objective by a unit of it.
    """

    status: Status
    x: Floats | None = None
    value: float = np.inf
    bound: float = -np.inf
    reduced: Floats | None = None


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
    """Minimize a linear objective.

    Args:
        whole: Mask of the integer variables; None for a linear program.
        gap: Relative gap to the bound at which a solution is returned before the time limit.
        time_limit_seconds: Limit in wall time, the only clock of HiGHS.
    """
    safe_point()
    solver = _SilentHighs()
    options: dict[str, Any] = {
        "parallel": "off",
        "time_limit": time_limit_seconds,
        "mip_rel_gap": gap,
        "mip_allow_restart": False,  # the presolve of a restart may never end (HiGHS 1.16), whatever the time limit
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
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
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in _INFEASIBLE:  # no program here is unbounded
        return MilpResult("infeasible")
    outcome: Status = "optimal" if status == _OPTIMAL else "stopped"
    bound = -np.inf if whole is None else info.mip_dual_bound
    # A stopped simplex method's values are neither near the optimum nor a bound on it.
    if info.primal_solution_status != _FEASIBLE or (whole is None and outcome == "stopped"):
        return MilpResult(outcome, bound=bound)
    solution, value = solver.getSolution(), info.objective_function_value
    if whole is not None:
        return MilpResult(outcome, np.array(solution.col_value), value, bound)
    return MilpResult(outcome, np.array(solution.col_value), value, value, np.maximum(np.array(solution.col_dual), 0.0))
