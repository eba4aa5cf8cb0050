"""Near ties: a plan, others that may be as fast, by the error of predicted times; and the fastest as measured.

Nothing here runs a step. It needs traces and costs, and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from time import thread_time
from typing import NamedTuple

from msgspec.structs import replace

from memfit.ir.plan import NUMERICS, Candidate, Levers, Numerics, Prediction
from memfit.planner.search import Confirmed, Limits
from memfit.solver.frontier import Combination
from memfit.solver.milp import COARSE

MOST = 4
"""The most plans that are run, the one predicted to be fastest among them."""
MARGIN = 0.005
"""Plans this near to the fastest count as fast: of them one that changes less is taken."""
RATIO_ERROR = 0.06
"""The standard error of predicted ratios between plans, chosen: half of those in `benchmarks.step_times` are within
2 %, and steps unlike its own, or on a busy machine, are further off."""
_SOLVE_SECONDS = 2.0
_LEAST_SOLVE_SECONDS = 0.1
_REFIT_SECONDS = 0.5
_ATTEMPTS = 3  # each captures the step once more


def near_ties(
    combinations: Sequence[Combination],
    limits: Limits,
    chosen: Confirmed,
    confirm: Callable[[Candidate], Prediction | None],
    *,
    step_error: float,
    way: Callable[[Levers], object] = lambda levers: None,
) -> list[Confirmed]:
    """Return the plan that is predicted to be fastest, and others that the prediction can't tell from it.

    Others fit, and their predicted step is longer by no more than the error of predicted times. The first of them is
    one that runs in another way, since predictions of steps that run alike err alike. Then one of each kind is taken,
    which is of the same levers set otherwise; then more of a kind, up to `MOST` in all.

    Args:
        combinations: The combinations of levers that were searched.
        chosen: The plan that is predicted to be fastest.
        confirm: Predicts a point of the frontier from its captured step; None where its levers can't be applied.
        step_error: By what share steps may take longer than predicted.
        way: The way in which a step under some levers runs: compiled, or as it is.
    """
    longest_seconds = (1 + step_error) * chosen.prediction.step_seconds
    found = [chosen]
    others = list(_others(combinations, limits, chosen.point, longest_seconds))
    by_levers = {combination.levers: combination for combination in combinations}
    for point in _in_order(others, chosen.point, way):
        if len(found) == MOST:
            break
        plan = _fitting(by_levers[_bare(point)], point, limits, confirm)
        if plan is not None and plan.prediction.step_seconds <= longest_seconds:
            found.append(plan)
    return found


def _fitting(
    combination: Combination,
    point: Candidate,
    limits: Limits,
    confirm: Callable[[Candidate], Prediction | None],
) -> Confirmed | None:
    """Return a point once its captured step fits, or where it does not, one of a lower peak; None where there is none.

    The error bars of some levers are wider than what points are solved for.
    """
    target: int = limits.peak_bytes
    for _ in range(_ATTEMPTS):
        prediction = confirm(point)
        if prediction is None:
            return None
        if limits.fit(prediction):
            return Confirmed(point, prediction)
        target = limits.lowered(target, prediction)
        lower = combination.fastest(target, COARSE, _REFIT_SECONDS)
        if lower is None:
            return None
        point = lower
    return None


def _others(
    combinations: Sequence[Combination], limits: Limits, chosen: Candidate, longest_seconds: float
) -> Iterator[Candidate]:
    """Yield the fastest point that fits of each allowed combination but the chosen plan's, the most promising first."""
    allowed = [c for c in limits.allow(combinations) if c.levers != _bare(chosen)]
    bounds = {index: c.solver.bound(limits.peak_bytes) for index, c in enumerate(allowed)}
    near = {index: bound for index, bound in bounds.items() if bound is not None and bound <= longest_seconds}
    deadline = thread_time() + _SOLVE_SECONDS
    for rank, index in enumerate(sorted(near, key=lambda index: near[index])):
        left = deadline - thread_time()
        if left <= 0:
            return
        share = max(left / (len(near) - rank), _LEAST_SOLVE_SECONDS)
        point = allowed[index].fastest(limits.peak_bytes, COARSE, share)
        if point is not None and point.step_seconds <= longest_seconds:
            yield point


def _in_order(points: Sequence[Candidate], chosen: Candidate, way: Callable[[Levers], object]) -> list[Candidate]:
    """Return points in the order in which they are to be run: one that runs otherwise, one of each kind, the others.

    Of the kinds the plain step comes first: whoever plans wants to know what it takes.
    """
    ordered = sorted(points, key=lambda point: (bool(point.uses), point.step_seconds))
    otherwise = [point for point in points if way(point.levers) != way(chosen.levers)]
    first = sorted(otherwise, key=lambda point: point.step_seconds)[:1]
    kinds = {_kind(point) for point in (chosen, *first)}
    for point in ordered:
        if _kind(point) not in kinds:
            kinds.add(_kind(point))
            first.append(point)
    return [*first, *(point for point in ordered if point not in first)]


def _bare(point: Candidate) -> Levers:
    """Return the levers of a point without regions, which its combination has."""
    return replace(point.levers, regions=())


def _kind(point: Candidate) -> frozenset[str]:
    return frozenset(use.name for use in point.uses)


class Measured(NamedTuple):
    """A contender and its measured step.

    Attributes:
        measured_seconds: Its measured step, or what `weighed` makes of it.
        predicted_seconds: Its predicted step.
        numerics: Its class.
        levers: How many levers it uses.
    """

    measured_seconds: float
    predicted_seconds: float
    numerics: Numerics = "exact"
    levers: int = 0


def weighed(measured: Sequence[Measured], error: float) -> list[Measured]:
    """Return contenders with the step that measurement and prediction together speak for, of one or more.

    Few steps on a machine that does other work too can't tell apart plans that take about as long, and predictions
    err too. The logarithm of each ratio to the first contender is the mean of the measured and the predicted one, each
    with the inverse of its variance as the weight: the estimate of the least variance where both err independently.

    Args:
        measured: The first is what the others' ratios are to.
        error: The standard error of measured ratios, as a share (≥ 0); 0 leaves measured times as they are.
    """
    first = measured[0]
    share = RATIO_ERROR**2 / (RATIO_ERROR**2 + error**2)  # of what was measured

    def seconds(one: Measured) -> float:
        measured_ratio = one.measured_seconds / first.measured_seconds
        predicted_ratio = one.predicted_seconds / first.predicted_seconds
        return first.measured_seconds * math.exp(
            share * math.log(measured_ratio) + (1 - share) * math.log(predicted_ratio)
        )

    return [first, *(Measured(seconds(one), *one[1:]) for one in measured[1:])]


def fastest_measured(measured: Sequence[Measured], margin: float = MARGIN) -> int:
    """Return which contender to take, of one or more.

    Of those that are within the margin of the fastest it is one of the strictest numerics class, with the fewest
    levers, and then the fastest of these. A larger margin would be noise's way to a slow plan: whatever errs by as much
    is taken as equal.

    Args:
        margin: A share of the time that is not counted as a difference (≥ 0).
    """
    longest_seconds = (1 + margin) * min(one.measured_seconds for one in measured)
    near = [index for index, one in enumerate(measured) if one.measured_seconds <= longest_seconds]

    def preference(index: int) -> tuple[int, int, float, float, int]:
        one = measured[index]
        return NUMERICS.index(one.numerics), one.levers, one.measured_seconds, one.predicted_seconds, index

    return min(near, key=preference)
