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
from memfit.planner.capture_failures import first_line
from memfit.planner.confirmation import Excluded
from memfit.planner.measured_steps import (
    ASKED_ROUNDS,
    LONGEST_SECONDS,
    ROUNDS,
    STAGE,
    Timed,
    affordable,
    limit_of,
    notes_of,
    timed_in_turns,
    why_no_room,
)
from memfit.planner.near_ties import Measured, fastest_measured, weighed
from memfit.planner.search import Confirmed
from memfit.planner.verb_options import Measure
from memfit.units import Progress, format_seconds
from memfit.workload import Workload


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
            progress=progress,
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
        if registry.compiles(plan.point.levers)
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
    steps = [
        MeasuredStep(
            levers=plans[i].point.levers,
            uses=plans[i].point.uses,
            predicted_seconds=plans[i].prediction.step_seconds,
            measured_seconds=seconds,
            steps=timed.steps[i],
        )
        for i, seconds in left.items()
    ]
    measured = tuple(sorted(steps, key=lambda step: step.measured_seconds))
    while True:
        indices = list(left)
        found = [
            Measured(left[i], plan.prediction.step_seconds, plan.point.numerics, len(plan.point.uses))
            for i, plan in ((i, plans[i]) for i in indices)
        ]
        index = indices[fastest_measured(weighed(found, timed.ratio_error))]
        if index == 0:
            return Choice(predicted.confirmed, predicted.proof, measured, (*predicted.notes, *notes))
        try:
            proof = prove(plans[index])
            break
        except Excluded:
            del left[index]
    note = (
        f"chosen by measured and predicted times together: {format_seconds(left[index])} a step. The fastest"
        f" plan by prediction ({uses_text(plans[0].point.uses)}) took {format_seconds(left[0])}"
    )
    chosen, taken = predicted.confirmed.point, plans[index]
    bound = min(chosen.bound_seconds, taken.prediction.step_seconds)  # of all combinations that were searched
    point = replace(taken.point, status=chosen.status, bound_seconds=bound)
    return Choice(Confirmed(point, taken.prediction), proof, measured, (*predicted.notes, note, *notes))
