"""Menus of what may be recomputed, from nothing to the lowest peak: solved once for all cards and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import thread_time

import numpy as np
import numpy.typing as npt

from memfit.ir.operator_costs import CostTable
from memfit.ir.remat import Regions, enclosing
from memfit.ir.trace import Trace
from memfit.planner.rank_steps import Regionals
from memfit.solver.candidates import options
from memfit.solver.milp import COARSE, Solver
from memfit.solver.problem import Problem, build

_BUDGETS = 16  # that the menu is solved for, where there is time
_MENU_SECONDS = 8.0  # for all of them, and for the lowest peak before
_MENU = 32  # points of the menu, at most

Choices = npt.NDArray[np.int64]


def menu(trace: Trace, costs: CostTable, units: Sequence[str]) -> list[Regionals]:
    """Return what may be recomputed, from nothing to the lowest peak, each point slower and lower than the last.

    A few budgets are solved. Between them lie parts of each solution: modules of a model are much alike, so that half
    of them save about half. Only modules alone are taken, none of them around what `fully_shard` gathers by itself.
    """
    regions = Regions(trace)
    choices = [
        option
        for option in options(regions, costs)
        if all(len(region.modules) == 1 and not _surrounds(region.modules[0], units) for region in option.regions)
    ]
    problem = build(regions, costs, choices)
    solver, nothing = Solver(problem), np.zeros(len(choices), np.int64)
    deadline = thread_time() + _MENU_SECONDS
    lowest = solver.leanest(_MENU_SECONDS / 4)
    solutions = [lowest.x]
    budgets = np.linspace(problem.peak_bytes(nothing), lowest.peak_bytes, _BUDGETS + 1)[1:]
    for budget_bytes in (*budgets[3::4], *budgets[1::4], *budgets[::2]):  # ever closer ones
        if (left := deadline - thread_time()) <= 0:
            break
        choice = solver.fastest(int(budget_bytes), COARSE, min(left, _MENU_SECONDS / 4))
        solutions += [choice.x] if choice is not None else []
    points = [nothing, *(part for x in solutions for part in _parts_of(x))]
    return [problem.regions(x) for x in _thinned(_undominated(points, problem), problem)]


def _parts_of(x: Choices) -> list[Choices]:
    """Return a choice with only its first options, by how many, up to all of them."""
    chosen = np.nonzero(x)[0]
    found = []
    for count in range(1, len(chosen) + 1):
        part = np.zeros_like(x)
        part[chosen[:count]] = 1
        found.append(part)
    return found


def _undominated(points: Sequence[Choices], problem: Problem) -> list[Choices]:
    """Return the choices than which none is as fast and as low, the fastest first."""
    found: list[Choices] = []
    lowest = math.inf
    for x in sorted(points, key=lambda x: (problem.seconds(x), problem.peak_bytes(x))):
        if problem.peak_bytes(x) < lowest:
            found.append(x)
            lowest = problem.peak_bytes(x)
    return found


def _thinned(points: Sequence[Choices], problem: Problem) -> list[Choices]:
    """Return at most so many choices, about evenly by their peaks, the first and the last included."""
    peaks = [problem.peak_bytes(x) for x in points]
    wanted = np.linspace(peaks[0], peaks[-1], _MENU)
    nearest = {min(range(len(peaks)), key=lambda i: abs(peaks[i] - peak)) for peak in wanted}
    return [points[i] for i in sorted({0, *nearest, len(points) - 1})]


def _surrounds(fqn: str, units: Sequence[str]) -> bool:
    return any(fqn != unit and fqn in enclosing(unit) for unit in units)


def valid(points: Sequence[Regionals], trace: Trace) -> list[Regionals]:
    """Return the points of a menu that another program has too."""
    regions = Regions(trace)
    return [point for point in points if all(region.modules[0] in regions.calls for region in point)]
