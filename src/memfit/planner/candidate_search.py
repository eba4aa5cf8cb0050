"""The search: the fastest of captured combinations of levers that fits, and others that may be as fast.

Nothing here runs a step. It needs traces and costs, and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import NamedTuple

from msgspec.structs import replace

from memfit.errors import InfeasibleError
from memfit.foundations import format_bytes
from memfit.ir import Candidate, Levers, Numerics, Prediction, allows, uses_text
from memfit.report import enough_text, infeasible_verdict, place_lines
from memfit.solver import COARSE, SIMPLER_WITHIN, Choice, Combination, dominates, fastest, undominated

_ATTEMPTS = 6
_FIRST_SHARE = 0.9  # of the time for solving that the first attempt may take; the second, of what it leaves; and so on
ADVICE_SECONDS = 1.0
"""The time for solving of each combination that an error may name."""
_WIDEST = 1.1  # more than any error bar, as a multiple of the peak: those of compiled steps are up to 5 %
_SHARE_ON_PAPER = 0.5  # of the time that is left, where a simulation may tell that an attempt's plan is too large
_TRIES_ON_PAPER = 3
_CLEARLY = 1.002  # more of a budget than simulations and captures differ by
_ROUNDING_BYTES = 64  # what floats in the solver may miss

_MOST = 4  # plans that are run, the one predicted to be fastest among them
_SOLVE_SECONDS = 2.0
_LEAST_SOLVE_SECONDS = 0.1
_REFIT_SECONDS = 0.5
_REFITS = 3  # each captures the step once more

Confirm = Callable[[Candidate], Prediction]
"""Predicts a point of the frontier from a capture of the step with its levers applied."""


class Confirmed(NamedTuple):
    """A point of the frontier, with the prediction for its captured step."""

    point: Candidate
    prediction: Prediction

    @property
    def excess(self) -> float:
        """The upper end of the peak, which is held against the budget, as a multiple of the peak."""
        return self.prediction.peak_upper_bytes / max(self.prediction.peak_bytes, 1)

    def as_captured(self) -> Candidate:
        """Return the point with what is predicted for its captured step."""
        return replace(
            self.point,
            peak_bytes=self.prediction.peak_bytes,
            peak_upper_bytes=self.prediction.peak_upper_bytes,
            step_seconds=self.prediction.step_seconds,
            bound_seconds=min(self.point.bound_seconds, self.prediction.step_seconds),
            is_captured=True,
        )


class Saving(NamedTuple):
    """Bytes that would be saved by something that the arguments of a plan forbid, and how, in words."""

    nbytes: int
    how: str


@dataclass(frozen=True)
class Advice:
    """What an error says of a step that does not fit."""

    batch: str
    savings: Callable[[Levers, int], Sequence[Saving]] = lambda *_: []
    """Returns what else would save of a plan of some levers and peak, the most first."""
    plain_bytes: int | None = None  # that the step needs as it is; None where that is not known
    as_run: Callable[[Candidate], Candidate] = lambda point: point
    """Returns a point with the levers that it was predicted with."""
    is_whole: bool = True  # whether nothing that may be lower was left out of the search


Beside = Callable[[Candidate], Sequence[Confirmed]]
"""Returns a plan with each lever that the solver does not combine with its regions, captured."""


class Limits(NamedTuple):
    """The limits of a plan."""

    budget_bytes: int  # that a step may hold
    peak_error: float  # by what share peaks may be above what the solver has
    numerics: Numerics  # the freest class

    def allow(self, combinations: Sequence[Combination]) -> list[Combination]:
        return [c for c in combinations if allows(self.numerics, c.numerics)]

    @property
    def peak_bytes(self) -> int:
        """The largest peak whose upper end, which is rounded down, is within the budget."""
        return math.ceil((self.budget_bytes + 1) / (1 + self.peak_error)) - 1

    def lowered(self, peak_bytes: int, upper_bytes: int) -> int:
        """Return the peak to solve for next, where the upper end of one that was solved for turned out not to fit."""
        over_bytes = upper_bytes - self.budget_bytes
        return int(peak_bytes - over_bytes / (1 + self.peak_error)) - 1

    def fit(self, prediction: Prediction) -> bool:
        return prediction.peak_upper_bytes <= self.budget_bytes


def fastest_that_fits(
    combinations: Sequence[Combination],
    limits: Limits,
    confirm: Confirm,
    seconds: float,
    best: Confirmed | None = None,
    on_paper: Callable[[Levers], int] | None = None,
) -> tuple[Confirmed | None, float]:
    """Return the fastest plan whose applied step is predicted to fit, and the seconds that solving took.

    Where the captured step does not fit, the solver is asked again for a peak that is lower by as much. The best plan
    known before is returned where no other is enough faster.

    Args:
        on_paper: Returns the upper end of a plan's peak without a capture, for steps whose captures take long; None for
            others. A plan that is clearly too large there is not captured.
    """
    target, spent = limits.peak_bytes, 0.0
    for _ in range(_ATTEMPTS if combinations else 0):
        started = thread_time()
        share = _FIRST_SHARE if on_paper is None or spent else _SHARE_ON_PAPER
        candidate = fastest(combinations, target, share * (seconds - spent))
        for _ in range(_TRIES_ON_PAPER if on_paper is not None else 0):
            upper_bytes = 0 if candidate is None or on_paper is None else on_paper(candidate.levers)
            if upper_bytes <= _CLEARLY * limits.budget_bytes:
                break
            lowered, left = limits.lowered(target, upper_bytes), seconds - spent - (thread_time() - started)
            if (again := fastest(combinations, lowered, _SHARE_ON_PAPER * left)) is None:
                break
            target, candidate = lowered, again
        spent += thread_time() - started
        if candidate is None:
            break
        if best is not None and not is_faster(candidate.step_seconds, best.prediction.step_seconds):
            return Confirmed(_bounded(best.point, candidate), best.prediction), spent
        confirmed = Confirmed(candidate, confirm(candidate))
        if limits.fit(confirmed.prediction):
            if best is None:
                return confirmed, spent
            swap = is_faster(confirmed.prediction.step_seconds, best.prediction.step_seconds)
            chosen, loser = (confirmed, best) if swap else (best, confirmed)
            return Confirmed(_bounded(chosen.point, loser.point), chosen.prediction), spent
        target = limits.lowered(target, confirmed.prediction.peak_upper_bytes)
    return best, spent


def leanest_that_fits(
    combinations: Sequence[Combination],
    limits: Limits,
    confirm: Confirm,
    seconds: float,
    beside: Beside = lambda _: [],
    *,
    advice: Advice,
) -> Confirmed:
    """Return the plan that needs the smallest budget if it fits: of the lowest peak with its error bar.

    It is always the same one, so that the budget which is named where it does not fit is one that it fits. Half of the
    time for solving is for all that may be the leanest, the rest for those that may still be.

    Args:
        combinations: All that may hold as little: that none is left out is what "no plan needs less" says.
        beside: Returns the leanest plan with further levers, of which nothing is proven.

    Raises:
        InfeasibleError: It does not fit.
    """
    allowed = limits.allow(combinations)
    choices: dict[int, Choice] = {}
    for index in sorted(range(len(allowed)), key=lambda index: allowed[index].solver.peak_floor_bytes):
        least = min((choice.peak_bytes for choice in choices.values()), default=math.inf)
        if allowed[index].solver.peak_floor_bytes <= _WIDEST * least:  # others need more
            choices[index] = allowed[index].lowest(seconds / 2 / len(allowed))
    least = min(choice.peak_bytes for choice in choices.values())
    open_ = [index for index, choice in choices.items() if choice.status != "optimal" and choice.bound < least]
    for index in open_:
        choices[index] = allowed[index].lowest(seconds / 2 / len(open_))
    found: dict[int, Confirmed] = {}
    for index in sorted(choices, key=lambda index: (choices[index].peak_bytes, index)):
        needed = min((plan.prediction.peak_upper_bytes for plan in found.values()), default=math.inf)
        if (1 + limits.peak_error) * choices[index].peak_bytes < needed:
            candidate = allowed[index].candidate(choices[index], limits.budget_bytes)
            found[index] = Confirmed(candidate, confirm(candidate))
    chosen = min(found, key=lambda index: (found[index].prediction.peak_upper_bytes, index))
    lowest, others = choices[chosen], beside(found[chosen].point)
    candidate, prediction = min([found[chosen], *others], key=lambda plan: plan.prediction.peak_upper_bytes)
    if limits.fit(prediction):
        bound = min(c.problem.plain_seconds for c in allowed)
        return Confirmed(replace(candidate, status="feasible", bound_seconds=bound), prediction)
    is_proven = (
        advice.is_whole
        and not others
        and lowest.status == "optimal"
        and all(c.bound >= lowest.bound for c in choices.values())
    )
    freer = [c for c in combinations if c not in allowed]
    raise _infeasible(Confirmed(candidate, prediction), limits, is_proven, freer, advice)


def held_against(
    points: Sequence[Candidate], chosen: Confirmed, limits: Limits, confirm: Confirm
) -> tuple[Confirmed, list[Candidate]]:
    """Capture the points that seem to fit and to be faster than the plan chosen, or to dominate it.

    Returned are the fastest of them all, and the frontier, with what is predicted for each point that was captured. No
    point of it dominates the plan.
    """

    def is_better(point: Candidate) -> bool:  # enough faster; or no slower, no larger and no freer, and better in one
        faster = is_faster(point.step_seconds, chosen.prediction.step_seconds)
        return faster or dominates(point, chosen.as_captured())

    captured: list[Candidate] = []
    for _ in range(_ATTEMPTS):
        rivals = [
            point
            for point in points
            if allows(limits.numerics, point.numerics) and point.held_bytes <= limits.budget_bytes and is_better(point)
        ]
        if not rivals:
            break
        rival = min(rivals, key=lambda point: point.step_seconds)
        points = [point for point in points if point.levers != rival.levers]
        loser = Confirmed(rival, confirm(rival))
        if limits.fit(loser.prediction) and is_better(loser.as_captured()):
            bound = {"status": chosen.point.status, "bound_seconds": chosen.point.bound_seconds}  # of all combinations
            loser, chosen = chosen, Confirmed(replace(rival, **bound), loser.prediction)
        captured.append(loser.as_captured())
    return chosen, with_plan(undominated([*points, *captured]), chosen, limits)


def with_plan(points: Sequence[Candidate], chosen: Confirmed, limits: Limits) -> list[Candidate]:
    """Return a frontier, the fastest point first, with the point of the plan chosen as it was captured.

    Points that dominate it are left out: they don't fit, or took longer as they ran.
    """
    own = replace(chosen.as_captured(), budget_bytes=limits.budget_bytes)
    others = (point for point in points if point.levers != own.levers and not dominates(point, own))
    return sorted([*others, own], key=lambda point: point.step_seconds)


def is_faster(seconds: float, than: float) -> bool:
    """Tell whether a plan is enough faster to take more levers for it."""
    return than > (1 + SIMPLER_WITHIN) * seconds


def _bounded(chosen: Candidate, other: Candidate) -> Candidate:
    """Return a plan with the bound of what it was chosen of: none of the combinations of either is faster."""
    bound = min(chosen.bound_seconds, other.bound_seconds)
    is_proven = chosen.status == other.status == "optimal" and chosen.bound_seconds <= bound
    return replace(chosen, bound_seconds=bound, status="optimal" if is_proven else "feasible")


def _infeasible(
    leanest: Confirmed, limits: Limits, is_proven: bool, freer: Sequence[Combination], advice: Advice
) -> InfeasibleError:
    prediction, budget_bytes = leanest.prediction, limits.budget_bytes
    saved = advice.savings(leanest.point.levers, prediction.peak_bytes)
    needed_bytes = prediction.peak_upper_bytes + _ROUNDING_BYTES
    to_do = [f"raise budget= to {enough_text(needed_bytes).replace(' ', '')} ({needed_bytes} bytes)"]
    target = limits.peak_bytes
    possible = [c.solver for c in freer if c.solver.peak_floor_bytes <= target]
    if any(solver.leanest(ADVICE_SECONDS).peak_bytes <= target for solver in possible):
        to_do.append("allow numerics='reduced': a plan then fits")
    if saved:
        to_do.append(
            "allow more, largest saving first: " + ", ".join(f"{x.how} (-{format_bytes(x.nbytes)})" for x in saved)
        )
    to_do.append(f"make {advice.batch} smaller, or the model")
    verdict = infeasible_verdict(budget_bytes, needed_bytes, plain_bytes=advice.plain_bytes, is_proven=is_proven)
    is_least = "needs" if is_proven else "that memfit found needs"
    used = uses_text(advice.as_run(leanest.point).uses)
    return InfeasibleError(
        f"{verdict}\nNo plan with numerics={limits.numerics!r} {is_least} less than this one:"
        f" {used}. Its peak is {'; '.join(place_lines(prediction))}.\nWhat to do:"
        f" {'; '.join(to_do)}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=needed_bytes,
        where=prediction.where,
        proven=is_proven,
    )


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
    which is of the same levers set otherwise, the plain step first: whoever plans wants to know what it takes. Then
    come more of a kind, up to four in all.

    Args:
        confirm: Predicts a point of the frontier from its captured step; None where its levers can't be applied.
        step_error: By what share steps may take longer than predicted.
        way: The way in which a step under some levers runs: compiled, or as it is.
    """
    longest_seconds = (1 + step_error) * chosen.prediction.step_seconds

    def kind(point: Candidate) -> frozenset[str]:
        return frozenset(use.name for use in point.uses)

    # The fastest point that fits of each other combination, the most promising first.
    by_levers = {combination.levers: combination for combination in combinations}
    others = [c for c in limits.allow(combinations) if c.levers != replace(chosen.point.levers, regions=())]
    bounds = {index: c.solver.bound(limits.peak_bytes) for index, c in enumerate(others)}
    near = {index: bound for index, bound in bounds.items() if bound is not None and bound <= longest_seconds}
    points, deadline = list[Candidate](), thread_time() + _SOLVE_SECONDS
    for rank, index in enumerate(sorted(near, key=lambda index: near[index])):
        if (left := deadline - thread_time()) <= 0:
            break
        share = max(left / (len(near) - rank), _LEAST_SOLVE_SECONDS)
        point = others[index].fastest(limits.peak_bytes, COARSE, share)
        if point is not None and point.step_seconds <= longest_seconds:
            points.append(point)
    ordered = sorted(points, key=lambda point: (bool(point.uses), point.step_seconds))
    otherwise = [point for point in points if way(point.levers) != way(chosen.point.levers)]
    first = sorted(otherwise, key=lambda point: point.step_seconds)[:1]
    kinds = {kind(point) for point in (chosen.point, *first)}
    for point in ordered:
        if kind(point) not in kinds:
            kinds.add(kind(point))
            first.append(point)
    found = [chosen]
    for expected in [*first, *(point for point in ordered if point not in first)]:
        # The error bars of some levers are wider than what points are solved for: a lower peak may fit.
        candidate: Candidate | None = expected
        target, refits = limits.peak_bytes, 0
        while candidate is not None and len(found) < _MOST and refits < _REFITS:
            if (prediction := confirm(candidate)) is None:
                break
            if limits.fit(prediction):
                found += [Confirmed(candidate, prediction)] if prediction.step_seconds <= longest_seconds else []
                break
            target, refits = limits.lowered(target, prediction.peak_upper_bytes), refits + 1
            candidate = by_levers[replace(expected.levers, regions=())].fastest(target, COARSE, _REFIT_SECONDS)
    return found
