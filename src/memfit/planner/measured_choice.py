"""The measured choice: of plans that the prediction can't tell apart, the one that is fastest on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from memfit.errors import MemfitError
from memfit.ir.device import Device
from memfit.ir.plan import MeasuredStep, Proof, uses_text
from memfit.ir.trace import BETWEEN_STEPS
from memfit.levers import registry
from memfit.planner.confirmation import LeftOut
from memfit.planner.contenders import Measure, Measured, fastest_measured, weighed
from memfit.planner.measured_steps import (
    ASKED_ROUNDS,
    LONGEST_SECONDS,
    ROUNDS,
    Timed,
    affordable,
    limit_of,
    notes_of,
    timed_in_turns,
    why_no_room,
)
from memfit.planner.search import Confirmed
from memfit.planner.trials import first_line
from memfit.progress import Progress
from memfit.units import format_seconds
from memfit.workload import Workload

STAGE, CODE_STAGE = "measure plans", "make code"


class Choice(NamedTuple):
    """The plan that is taken.

    Attributes:
        confirmed: The plan.
        proof: Whether what it recomputes was held against the user's step.
        measured: The plans that were run, the fastest first.
        notes: What is to be said of them.
    """

    confirmed: Confirmed
    proof: Proof
    measured: tuple[MeasuredStep, ...] = ()
    notes: tuple[str, ...] = ()


def measured_choice(
    predicted: Choice,
    near: Callable[[], list[Confirmed]],
    prove: Callable[[Confirmed], Proof],
    *,
    workload: Workload,
    device: Device,
    measure: Measure,
    progress: Progress,
) -> Choice:
    """Return the fastest of the plans that are near the one predicted to be fastest, as they run here.

    Args:
        predicted: The plan predicted to be fastest.
        near: Returns that plan and those that are near it.
        prove: Holds what another plan recomputes against the user's step, before it is taken.
        measure: "auto" runs steps where there are several plans and enough time to compare them; True for longer, and
            also where one plan can be timed alone.
    """
    step_seconds = predicted.confirmed.prediction.step_seconds
    predicted_to_take = f"a step is predicted to take {format_seconds(step_seconds)}"
    if measure == "auto" and affordable([step_seconds] * 2, LONGEST_SECONDS) < 2:
        return unmeasured(predicted, f"{predicted_to_take}, too long to compare plans in {LONGEST_SECONDS:.0f} s")
    found = near()
    limit_seconds = limit_of([plan.point.levers for plan in found], is_asked=measure is True)
    too_long = f"{predicted_to_take}, too long to compare plans in {limit_seconds:.0f} s"
    plans = found[: max(1, affordable([plan.prediction.step_seconds for plan in found], limit_seconds))]
    if measure == "auto" and len(plans) == 1:
        return predicted if len(found) == 1 else unmeasured(predicted, too_long)
    if why := why_no_room(device, _held_bytes(plans)):
        return unmeasured(predicted, why)
    try:
        timed = timed_in_turns(
            workload,
            [(plan.point.levers, plan.prediction.step_seconds) for plan in plans],
            device,
            limit_seconds=limit_seconds,
            rounds=ASKED_ROUNDS if measure is True else ROUNDS,
            progress=lambda done, total: progress(STAGE, done, total),
            on_code=lambda done, total: progress(CODE_STAGE, done, total),
        )
    except MemfitError as e:
        return unmeasured(predicted, first_line(e))
    progress(STAGE, 1, 1)  # also where the time was over before all turns had been
    if 0 in timed.errors:
        return unmeasured(predicted, timed.errors[0])
    return _taken(predicted, plans, timed, notes_of(timed, device), prove)


def _held_bytes(plans: Sequence[Confirmed]) -> int:
    """Return the peak of running plans in turns: of one step, beside the copies that compiled ones keep meanwhile."""
    kept = (
        plan.prediction.by_category.get(category, 0)
        for plan in plans
        if registry.compiles(plan.point.levers, plan.point.levers.microbatch_size)
        for category in BETWEEN_STEPS
    )
    return max(plan.prediction.peak_upper_bytes for plan in plans) + sum(kept)


def unmeasured(predicted: Choice, why: str) -> Choice:
    """Return the plan predicted to be fastest, with a note that says why none was run."""
    note = f"chosen by predicted times; no plan was run to measure it: {why}"
    return Choice(predicted.confirmed, predicted.proof, predicted.measured, (*predicted.notes, note))


def _taken(
    predicted: Choice,
    plans: Sequence[Confirmed],
    timed: Timed,
    notes: Sequence[str],
    prove: Callable[[Confirmed], Proof],
) -> Choice:
    """Return the fastest plan, as measured and as predicted, whose recomputation was not found to differ."""
    left = timed.step_seconds
    measured = tuple(sorted((_record(plans[i], timed, i) for i in left), key=lambda step: step.measured_seconds))
    while True:
        indices = list(left)
        found = weighed([_measured(plans[i], left[i]) for i in indices], timed.ratio_error)
        index = indices[fastest_measured(found)]
        if index == 0:
            return Choice(predicted.confirmed, predicted.proof, measured, (*predicted.notes, *notes))
        try:
            proof = prove(plans[index])
            break
        except LeftOut:
            del left[index]
    note = (
        f"chosen by measured and predicted times together: {format_seconds(left[index])} a step. The fastest"
        f" plan by prediction ({uses_text(plans[0].point.uses)}) took {format_seconds(left[0])}"
    )
    taken = _of_same_search(plans[index], predicted.confirmed)
    return Choice(taken, proof, measured, (*predicted.notes, note, *notes))


def _measured(plan: Confirmed, seconds: float) -> Measured:
    return Measured(seconds, plan.prediction.step_seconds, plan.point.numerics, len(plan.point.uses))


def _record(plan: Confirmed, timed: Timed, index: int) -> MeasuredStep:
    return MeasuredStep(
        levers=plan.point.levers,
        uses=plan.point.uses,
        predicted_seconds=plan.prediction.step_seconds,
        measured_seconds=timed.step_seconds[index],
        steps=timed.steps[index],
    )


def _of_same_search(taken: Confirmed, chosen: Confirmed) -> Confirmed:
    """Return a plan with the bound of all combinations that were searched, which the chosen one has."""
    bound = min(chosen.point.bound_seconds, taken.prediction.step_seconds)
    point = replace(taken.point, status=chosen.point.status, bound_seconds=bound)
    return Confirmed(point, taken.prediction)
