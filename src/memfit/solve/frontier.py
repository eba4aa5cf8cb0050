"""The time-memory frontier over every combination of levers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import thread_time

import numpy as np
from msgspec.structs import replace

from memfit.ir.plan import NUMERICS, Candidate, Levers, Numerics
from memfit.solve.milp import COARSE, FINE, Choice, Solver
from memfit.solve.problem import Problem

SIMPLER_WITHIN = 0.02
"""A plan with fewer levers is preferred to a faster one where the difference is below this share."""
_LEANEST_SHARE = 0.25  # of the frontier's time, for the lowest peaks
_LEAST_SECONDS = 0.25


@dataclass
class Combination:
    """Levers but regions, with the problem of what to checkpoint under them.

    Attributes:
        levers: Without regions.
        numerics: Their freest class.
    """

    levers: Levers
    numerics: Numerics
    problem: Problem
    solver: Solver = field(init=False)

    def __post_init__(self) -> None:
        self.solver = Solver(self.problem)

    def plain(self) -> Choice:
        """Return the choice of no checkpointing."""
        x = np.zeros(len(self.problem.options), np.int64)
        peak = int(self.problem.row_peaks(x).max(initial=0))
        return Choice(x, peak, self.problem.plain_seconds, "optimal", self.problem.plain_seconds)

    def leanest(self, time_limit_seconds: float) -> Choice:
        """Return the choice of the lowest peak, of which no more is known than that it is not faster than plain."""
        choice = self.solver.leanest(time_limit_seconds)
        return dataclasses.replace(choice, status="feasible", bound=self.problem.plain_seconds)

    def candidate(self, choice: Choice, budget_bytes: int) -> Candidate:
        """Return a choice as a point of the frontier."""
        return Candidate(
            levers=replace(self.levers, regions=self.problem.regions(choice.x)),
            numerics=self.numerics,
            budget_bytes=budget_bytes,
            peak_bytes=choice.peak_bytes,
            step_seconds=choice.seconds,
            status=choice.status,
            bound_seconds=choice.bound,
        )

    def fastest(self, budget_bytes: int, tolerance: float, time_limit_seconds: float) -> Candidate | None:
        """Return the fastest point within a budget, or None."""
        choice = self.solver.fastest(budget_bytes, tolerance, time_limit_seconds)
        return None if choice is None else self.candidate(choice, budget_bytes)


def fastest(
    combinations: Sequence[Combination], budget_bytes: int, time_limit_seconds: float = 10.0
) -> Candidate | None:
    """Return the fastest point of any combination within a budget; combinations given first win near ties.

    Its bound is that of all combinations: none of their plans within the budget is faster.

    Args:
        combinations: Those that may be chosen.
        budget_bytes: The budget.
        time_limit_seconds: For all of them together; the best found by then is returned.
    """
    deadline = thread_time() + time_limit_seconds
    bounds = {i: b for i, c in enumerate(combinations) if (b := c.solver.bound(budget_bytes)) is not None}
    several = len(bounds) > 1  # one alone need not be solved coarsely first
    found = _compared(combinations, budget_bytes, bounds, deadline) if several else {}
    index = _simplest(found) if several else next(iter(bounds), None)
    if index is None:
        return None
    left = max(deadline - thread_time(), _LEAST_SECONDS)
    refined = combinations[index].fastest(budget_bytes, FINE, left)  # only what is chosen is worth the last tenths
    if refined is not None:
        bounds[index] = max(bounds[index], refined.bound_seconds)
        found[index] = min(found.get(index, refined), refined, key=lambda c: c.step_seconds)
    if not found:
        return None
    chosen, bound = found[index], min(bounds.values())
    proven = chosen.step_seconds * (1 - FINE) <= bound
    return replace(chosen, status="optimal" if proven else "feasible", bound_seconds=min(bound, chosen.step_seconds))


def _compared(
    combinations: Sequence[Combination], budget_bytes: int, bounds: dict[int, float], deadline: float
) -> dict[int, Candidate]:
    """Return the fastest points, solved coarsely, of the combinations that can win, by number; raise their bounds."""
    found: dict[int, Candidate] = {}
    for rank, index in enumerate(sorted(bounds, key=lambda i: bounds[i])):
        best = min((c.step_seconds for c in found.values()), default=float("inf"))
        if bounds[index] > best:
            continue  # the relaxed problem is already slower: nothing it has can win
        share = (deadline - thread_time()) / (len(bounds) - rank + 1)
        candidate = combinations[index].fastest(budget_bytes, COARSE, max(share, _LEAST_SECONDS))
        if candidate is not None:
            found[index] = candidate
            bounds[index] = max(bounds[index], candidate.bound_seconds)
    return found


def _simplest(found: dict[int, Candidate]) -> int | None:
    """Return the first of the points that are about as fast as the fastest, by number; None of none."""
    within = min((c.step_seconds for c in found.values()), default=0.0) * (1 + SIMPLER_WITHIN)
    return next((i for i in sorted(found) if found[i].step_seconds <= within), None)


def frontier(
    combinations: Sequence[Combination],
    points: int = 8,
    progress: Callable[[int, int], None] | None = None,
    time_limit_seconds: float = 10.0,
) -> list[Candidate]:
    """Return the points that no other point of the same or a stricter numerics class beats, fastest first.

    Args:
        combinations: Each is solved from its plain peak down to its lowest.
        points: Budgets for each combination.
        progress: Called with how many budgets are solved, of how many.
        time_limit_seconds: For all of them together, about: when it is up, budgets that are left are not solved for.
    """
    deadline = thread_time() + time_limit_seconds
    total, done = len(combinations) * points, 0
    lowest_seconds = max(_LEANEST_SHARE * time_limit_seconds / len(combinations), _LEAST_SECONDS)
    found: list[Candidate] = []
    budgets: list[list[tuple[Combination, int]]] = [[] for _ in range(points)]
    for combination in combinations:
        seconds = lowest_seconds if thread_time() < deadline else 0.0
        plain, leanest = combination.plain(), combination.leanest(seconds)
        found += [combination.candidate(choice, choice.peak_bytes) for choice in (plain, leanest)]
        for step, budget in enumerate(np.linspace(plain.peak_bytes, leanest.peak_bytes, points + 1)[1:]):
            budgets[step].append((combination, int(budget)))
    for combination, budget in (one for step in _spread(points) for one in budgets[step]):
        left = deadline - thread_time()
        if left > 0 and not _is_beaten(combination, budget, found):
            candidate = combination.fastest(budget, COARSE, max(left / (total - done), _LEAST_SECONDS))
            found += [candidate] if candidate is not None else []
        done += 1
        if progress is not None:
            progress(done, total)
    return _undominated(found)


def _spread(count: int) -> list[int]:
    """Return the numbers below a count, those in the middle of what is open first."""
    order, open_spans = [], [(0, count)]
    while open_spans:
        first, last = open_spans.pop(0)
        if first < last:
            middle = (first + last) // 2
            order.append(middle)
            open_spans += [(first, middle), (middle + 1, last)]
    return order


def _is_beaten(combination: Combination, budget_bytes: int, found: Sequence[Candidate]) -> bool:
    """Tell whether a point found needs no more bytes than a budget and is faster than a combination can be there."""
    rivals = [c for c in found if c.peak_bytes <= budget_bytes and _rank(c.numerics) <= _rank(combination.numerics)]
    if not rivals:
        return False
    bound = combination.solver.bound(budget_bytes)
    return bound is None or min(c.step_seconds for c in rivals) <= bound


def _rank(numerics: Numerics) -> int:
    return NUMERICS.index(numerics)


def _undominated(candidates: list[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (_rank(c.numerics), c.step_seconds, c.peak_bytes)):
        rivals = (other for other in kept if _rank(other.numerics) <= _rank(one.numerics))
        if not any(r.step_seconds <= one.step_seconds and r.peak_bytes <= one.peak_bytes for r in rivals):
            kept.append(one)
    return sorted(kept, key=lambda c: c.step_seconds)
