"""The time-memory frontier over every combination of precision, microbatch size and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from memfit.ir.plan import NUMERICS, Candidate, Levers, Numerics, Precision
from memfit.solve.milp import COARSE, FINE, Choice, Solver
from memfit.solve.problem import Problem

SIMPLER_WITHIN = 0.02
"""A plan with fewer levers is preferred to a faster one where the difference is below this share."""
_POINT_SHARE = 5  # a point of the frontier may take one fifth of the time that the chosen plan may


@dataclass
class Combination:
    """One precision and microbatch size, with the problem of what to checkpoint under them.

    Attributes:
        numerics: The freest class of the two.
    """

    precision: Precision
    microbatch_size: int
    numerics: Numerics
    problem: Problem
    time_limit_seconds: float = 10.0
    solver: Solver = field(init=False)

    def __post_init__(self) -> None:
        self.solver = Solver(self.problem, self.time_limit_seconds)

    def plain(self) -> Choice:
        """Return the choice of no checkpointing."""
        x = np.zeros(len(self.problem.options), np.int64)
        peak = int(self.problem.row_peaks(x).max(initial=0))
        return Choice(x, peak, self.problem.plain_seconds, "optimal", self.problem.plain_seconds)

    def candidate(self, choice: Choice, budget_bytes: int) -> Candidate:
        """Return a choice as a point of the frontier."""
        regions = self.problem.regions(choice.x)
        return Candidate(
            levers=Levers(precision=self.precision, microbatch_size=self.microbatch_size, regions=regions),
            numerics=self.numerics,
            budget_bytes=budget_bytes,
            peak_bytes=choice.peak_bytes,
            step_seconds=choice.seconds,
            status=choice.status,
            bound_seconds=choice.bound,
        )

    def fastest(
        self, budget_bytes: int, tolerance: float = FINE, time_limit_seconds: float | None = None
    ) -> Candidate | None:
        """Return the fastest point within a budget, or None."""
        choice = self.solver.fastest(budget_bytes, tolerance, time_limit_seconds)
        return None if choice is None else self.candidate(choice, budget_bytes)


def fastest(combinations: Sequence[Combination], budget_bytes: int) -> Candidate | None:
    """Return the fastest point of any combination within a budget; combinations given first win near ties.

    Its bound is that of all combinations: none of their plans within the budget is faster.
    """
    found: dict[int, Candidate] = {}
    for index, combination in enumerate(combinations):
        candidate = combination.fastest(budget_bytes, COARSE)
        if candidate is not None:
            found[index] = candidate
    if not found:
        return None
    within = min(c.step_seconds for c in found.values()) * (1 + SIMPLER_WITHIN)
    index = next(i for i, c in found.items() if c.step_seconds <= within)
    refined = combinations[index].fastest(budget_bytes)  # only what is chosen is worth the last tenths of a percent
    if refined is not None and refined.step_seconds <= found[index].step_seconds:
        found[index] = refined
    chosen = found[index]
    bound = min(c.bound_seconds for c in found.values())
    proven = chosen.step_seconds * (1 - FINE) <= bound
    return replace(chosen, status="optimal" if proven else "feasible", bound_seconds=bound)


def frontier(
    combinations: Sequence[Combination], points: int = 8, progress: Callable[[int, int], None] | None = None
) -> list[Candidate]:
    """Return the points that no other point of the same or a stricter numerics class beats, fastest first.

    Args:
        combinations: Each is solved from its plain peak down to its lowest.
        points: Budgets for each combination.
        progress: Called with how many budgets are solved, of how many.
    """
    found: list[Candidate] = []
    total = len(combinations) * points
    for index, combination in enumerate(combinations):
        plain, leanest = combination.plain(), combination.solver.leanest()
        found.append(combination.candidate(plain, plain.peak_bytes))
        for step, budget in enumerate(np.linspace(plain.peak_bytes, leanest.peak_bytes, points + 1)[1:]):
            candidate = combination.fastest(int(budget), COARSE, combination.time_limit_seconds / _POINT_SHARE)
            found += [candidate] if candidate is not None else []
            if progress is not None:
                progress(index * points + step + 1, total)
    return _undominated(found)


def _undominated(candidates: list[Candidate]) -> list[Candidate]:
    order = {numerics: rank for rank, numerics in enumerate(NUMERICS)}
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (order[c.numerics], c.step_seconds, c.peak_bytes)):
        rivals = (other for other in kept if order[other.numerics] <= order[one.numerics])
        if not any(r.step_seconds <= one.step_seconds and r.peak_bytes <= one.peak_bytes for r in rivals):
            kept.append(one)
    return sorted(kept, key=lambda c: c.step_seconds)
