"""The time-memory frontier over every combination of levers, and the choice of a plan for each batch.

The choice is online, and learns from measured steps. It is a bandit whose arms are plans, with predictions as the
prior. A prediction error that all plans share for a batch does not matter, only the difference between plans. The plan
with the lowest lower confidence bound on its time is run (Lai and Robbins, 1985, *Asymptotically Efficient Adaptive
Allocation Rules*; Auer et al., 2002, *Finite-time Analysis of the Multiarmed Bandit Problem*; ours is Bayesian, with a
normal prior on the logarithm of measured over predicted time). Only plans that are predicted to fit are run, even for
exploration, and measured peaks correct the predictions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import thread_time

import numpy as np
from msgspec.structs import replace

from memfit.ir import NUMERICS, Candidate, Levers, LeverUse, freest
from memfit.solver.milp import COARSE, FINE, Choice, Solver
from memfit.solver.problem import Problem

SIMPLER_WITHIN = 0.02
"""A plan with fewer levers is preferred to a faster one where the difference is below this share."""
_rank = NUMERICS.index
_LEANEST_SHARE = 0.25  # share of the frontier's time for the lowest peaks
_LEAST_SECONDS = 0.25


@dataclass
class Combination:
    """A combination of levers except regions, with the problem of choosing the regions."""

    levers: Levers
    problem: Problem
    uses_of: Callable[[Levers], tuple[LeverUse, ...]]  # says in words what levers are used

    def __post_init__(self) -> None:
        self.numerics = freest(self.uses_of(self.levers))
        self.solver = Solver(self.problem)

    def plain(self) -> Choice:
        """Return the choice of no checkpointing."""
        x = np.zeros(len(self.problem.options), np.int64)
        return Choice(x, self.problem.peak_bytes(x), self.problem.plain_seconds, "optimal", self.problem.plain_seconds)

    def leanest(self, time_limit_seconds: float) -> Choice:
        """Return the choice of the lowest peak."""
        choice = self.solver.leanest(time_limit_seconds)
        return dataclasses.replace(choice, status="feasible", bound=self.problem.plain_seconds)

    def lowest(self, time_limit_seconds: float) -> Choice:
        """Return the choice of the lowest peak, the same one whatever was solved before."""
        return Solver(self.problem).leanest(time_limit_seconds)

    def candidate(self, choice: Choice, budget_bytes: int) -> Candidate:
        """Return a choice as a point of the frontier."""
        levers = replace(self.levers, regions=self.problem.regions(choice.x))
        uses = self.uses_of(levers)
        return Candidate(
            levers=levers,
            uses=uses,
            numerics=freest(uses),
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
    """Return the fastest point of any combination within a budget; earlier combinations win near ties.

    Its bound is that of all combinations: none of their plans within the budget is faster. When the time limit of all
    of them together is over, it is the best point found by then.
    """
    deadline = thread_time() + time_limit_seconds
    bounds = {i: b for i, c in enumerate(combinations) if (b := c.solver.bound(budget_bytes)) is not None}
    points: dict[int, Candidate] = {}
    index = next(iter(bounds), None)
    if len(bounds) > 1:  # those that can win are solved coarsely first, which raises their bounds
        for rank, i in enumerate(sorted(bounds, key=lambda i: bounds[i])):
            if bounds[i] > min((c.step_seconds for c in points.values()), default=math.inf):
                continue  # already the relaxed problem is slower
            share = (deadline - thread_time()) / (len(bounds) - rank + 1)
            candidate = combinations[i].fastest(budget_bytes, COARSE, max(share, _LEAST_SECONDS))
            if candidate is not None:
                points[i] = candidate
                bounds[i] = max(bounds[i], candidate.bound_seconds)
        within = min((c.step_seconds for c in points.values()), default=0.0) * (1 + SIMPLER_WITHIN)
        index = next((i for i in sorted(points) if points[i].step_seconds <= within), None)  # the first about as fast
    if index is None:
        return None
    left = max(deadline - thread_time(), _LEAST_SECONDS)
    refined = combinations[index].fastest(budget_bytes, FINE, left)  # only the chosen one is worth the last tenths
    if refined is not None:
        bounds[index] = max(bounds[index], refined.bound_seconds)
        points[index] = min(points.get(index, refined), refined, key=lambda c: c.step_seconds)
    if not points:
        return None
    chosen, bound = points[index], min(bounds.values())
    proven = chosen.step_seconds * (1 - FINE) <= bound
    return replace(chosen, status="optimal" if proven else "feasible", bound_seconds=min(bound, chosen.step_seconds))


def frontier(
    combinations: Sequence[Combination],
    points: int = 8,
    progress: Callable[[int, int], None] | None = None,
    time_limit_seconds: float = 10.0,
) -> list[Candidate]:
    """Return the points that no other point of the same or a stricter numerics class beats, fastest first.

    Each combination is solved for as many budgets as `points`, from its plain peak down to its lowest. When the time
    limit of all of them together is about over, remaining budgets are skipped.
    """
    deadline = thread_time() + time_limit_seconds
    total, done = len(combinations) * points, 0
    lowest_seconds = max(_LEANEST_SHARE * time_limit_seconds / len(combinations), _LEAST_SECONDS)
    candidates: list[Candidate] = []

    def is_beaten(combination: Combination, budget_bytes: int) -> bool:  # by a point that fits, at its bound
        strict = (c for c in candidates if _rank(c.numerics) <= _rank(combination.numerics))
        rivals = [c.step_seconds for c in strict if c.peak_bytes <= budget_bytes]
        bound = combination.solver.bound(budget_bytes) if rivals else math.inf
        return bool(rivals) and (bound is None or min(rivals) <= bound)

    budgets: list[list[tuple[Combination, int]]] = [[] for _ in range(points)]
    for combination in combinations:
        seconds = lowest_seconds if thread_time() < deadline else 0.0
        plain, leanest = combination.plain(), combination.leanest(seconds)
        candidates += [combination.candidate(choice, choice.peak_bytes) for choice in (plain, leanest)]
        for step, budget in enumerate(np.linspace(plain.peak_bytes, leanest.peak_bytes, points + 1)[1:]):
            budgets[step].append((combination, int(budget)))
    for combination, budget in (pair for step in _spread(points) for pair in budgets[step]):
        remaining = deadline - thread_time()
        if remaining > 0 and not is_beaten(combination, budget):
            candidate = combination.fastest(budget, COARSE, max(remaining / (total - done), _LEAST_SECONDS))
            candidates += [candidate] if candidate is not None else []
        done += 1
        if progress is not None:
            progress(done, total)
    return undominated(candidates)


def _spread(count: int) -> list[int]:
    """Return the numbers below a count in bisection order: the middle of the largest gap first."""
    order, open_spans = [], [(0, count)]
    while open_spans:
        first, last = open_spans.pop(0)
        if first < last:
            middle = (first + last) // 2
            order.append(middle)
            open_spans += [(first, middle), (middle + 1, last)]
    return order


def dominates(one: Candidate, other: Candidate) -> bool:
    """Tell whether one point is as strict, as fast and as small as another, and better in one of these."""
    own, others = ((_rank(c.numerics), c.step_seconds, c.peak_bytes) for c in (one, other))
    return own != others and all(a <= b for a, b in zip(own, others, strict=True))


def undominated(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates than which no other of as strict a class is as fast and as small, the fastest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (_rank(c.numerics), c.step_seconds, c.peak_bytes)):
        rivals = (c for c in found if _rank(c.numerics) <= _rank(candidate.numerics))
        if not any(r.step_seconds <= candidate.step_seconds and r.peak_bytes <= candidate.peak_bytes for r in rivals):
            found.append(candidate)
    return sorted(found, key=lambda c: c.step_seconds)


PRIOR_SPREAD = 0.08
"""Standard deviation of the plans' prediction errors from one another, in logarithms: about 8 %."""
NOISE = 0.08
"""Standard deviation of one step's time, in logarithms."""
MEMORY = 64
"""Approximate number of steps remembered for each plan and bucket, since machines change."""
_RISE = 1.01
OPTIMISM = 1.0
"""Distance of the confidence bound below the mean, in standard deviations."""


@dataclass
class Belief:
    """Measurements of a plan in a bucket: the mean logarithm of measured over predicted seconds."""

    count: float = 0.0
    mean: float = 0.0

    def learn(self, value: float) -> None:
        """Take a measurement into account; old ones fade."""
        self.count = min(self.count, MEMORY - 1) + 1
        self.mean += (value - self.mean) / self.count


@dataclass(frozen=True)
class ExpectedStep:
    """The prediction for a plan on a batch."""

    peak_bytes: float
    seconds: float


class Controller:
    """The chooser among plans.

    Args:
        peak_error: Relative distance by which a measured peak may exceed the predicted one.

    Attributes:
        correction: Largest ratio of a measured peak to its prediction so far, at least 1; applied to all predictions.
    """

    def __init__(self, budget_bytes: int, peak_error: float) -> None:
        self.budget_bytes = budget_bytes
        self.correction = 1.0
        self._peak_error = peak_error
        self._beliefs: dict[tuple[int, int], Belief] = defaultdict(Belief)
        self._common: dict[int, Belief] = defaultdict(Belief)
        self._ceiling_bytes = float(budget_bytes)

    def fits(self, expected: ExpectedStep) -> bool:
        """Tell whether a plan is predicted to fit the budget, with its error bar and the correction."""
        return expected.peak_bytes * self.correction * (1 + self._peak_error) <= self._ceiling_bytes

    def choose(self, bucket: int, expected: Sequence[ExpectedStep]) -> int | None:
        """Return the plan to run in a bucket of batches, by its position in the predictions; None where none fits."""
        fitting = [arm for arm, prediction in enumerate(expected) if self.fits(prediction)]
        return min(fitting, key=lambda arm: self._bound(bucket, arm, expected[arm].seconds), default=None)

    def learn(
        self, bucket: int, arm: int, expected: ExpectedStep, seconds: float | None, peak_bytes: int | None
    ) -> None:
        """Take a step into account.

        Args:
            seconds: Its measured time (> 0); None where that is not representative.
            peak_bytes: Its measured peak; None where it was not measured.
        """
        if seconds is not None:
            value = math.log(seconds / expected.seconds)
            self._beliefs[bucket, arm].learn(value)
            self._common[bucket].learn(value)
        self._ceiling_bytes = min(self.budget_bytes, self._ceiling_bytes * _RISE)
        if peak_bytes is not None:
            self.correction = max(self.correction, peak_bytes / expected.peak_bytes)

    def ran_out(self, expected: ExpectedStep) -> None:
        """Take into account that a plan ran out of memory: less was free than its predicted peak.

        The budget is lowered to that peak, and rises again with every completed step, since the cause may pass.
        """
        took = expected.peak_bytes * self.correction * (1 + self._peak_error)
        self._ceiling_bytes = min(self._ceiling_bytes, took * (1 - 1e-6))

    def _bound(self, bucket: int, arm: int, seconds: float) -> float:
        belief = self._beliefs.get((bucket, arm), Belief())
        precision = PRIOR_SPREAD**-2 + belief.count * NOISE**-2
        mean = (PRIOR_SPREAD**-2 * self._common[bucket].mean + belief.count * NOISE**-2 * belief.mean) / precision
        return math.log(seconds) + mean - OPTIMISM / math.sqrt(precision)
