"""Steps under several plans, run in turns on copies of the workload, to choose the fastest one.

A turn is a few steps under one plan, as a training runs them: the first makes the optimizer's state and fills the
caches, and is timed apart. Steps of two plans one after the other would each find the other's memory and caches. Each
round takes all plans in an order drawn anew, so that a machine that gets slower or faster favours none. A turn has a
copy of the workload of its own, and one is alive at a time. A compiled step makes its code before its first turn and
keeps its copy, which the code is for, until the last one; compilers keep the code too, and the training that takes the
plan finds it there.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from msgspec.structs import replace

from memfit import hardware
from memfit.capture import nothing_changes
from memfit.cost import Pace, Paced, busy_notes, undisturbed_ratios
from memfit.errors import MemfitError
from memfit.foundations import Progress, format_bytes, format_seconds, silent
from memfit.hardware import free_bytes
from memfit.ir import BETWEEN_STEPS, NUMERICS, Device, Levers, MeasuredStep, Proof, freest, uses_text
from memfit.levers import applied_to_copy, compiles
from memfit.planner.candidate_search import Confirmed
from memfit.planner.confirmation import Excluded, first_line
from memfit.planner.verb_options import Measure
from memfit.training import Step
from memfit.workload import LoopWorkload, Workload, has_data, rng_preserved

LIMIT_SECONDS = 30.0
"""Running steps to choose among plans takes no longer, but for a step that is under way then, and for making code."""
LONGEST_SECONDS = 60.0
"""The same where plans are compiled: making their code takes as long anyway."""
ASKED_SECONDS = 120.0
"""The same where one asks to measure, which ends as early where ratios are known."""
CODE_SECONDS = 120.0
"""The code of the plans that are run is predicted to take no longer to make, unless one asks to measure."""
MARGIN = 0.005
"""Plans this near to the fastest count as fast: of them one that changes less is taken."""
RATIO_ERROR = 0.06
"""The standard error of predicted ratios between plans, chosen: half of those in `benchmarks.step_times` are within
2 %, and steps unlike its own, or on a busy machine, are further off."""
ROUNDS, ASKED_ROUNDS = 8, 24
"""Each plan has as many turns, where there is time and rounds differ, and where one asks to measure."""
_LEAST_ROUNDS = 3
_SURE = 0.01  # more rounds make no choice better once ratios are known to that
_STEPS, _MOST_STEPS = 2, 20  # of a turn after its first
_TURN_SECONDS = 0.1  # a turn of short steps has as many as take this long
_SPREAD = 0.05  # by how much rounds' ratios differ on a machine with other work, as a share
_ROOM = 1.1  # the free memory that is asked for, as a multiple of the largest peak


class Clocks(NamedTuple):
    wall: Callable[[], float] = time.perf_counter
    own: Callable[[], float] = time.thread_time  # of the time that this thread computed


_CLOCKS = Clocks()
_STAGE = "measure plans"


@dataclass
class Turn:
    """The times of a turn's steps."""

    first_seconds: float
    seconds: list[float] = field(default_factory=list)
    slowdown: float = 1.0  # of a large operator just before and after, as a multiple of what it took when it was timed
    attended_share: float = 1.0
    """In which a step's thread computed, by the medians of those after the first; 1 on accelerators."""


@dataclass
class Timed:
    """The times of steps under several plans."""

    turns: list[list[Turn]]  # of each plan, one for each round
    errors: dict[int, str] = field(default_factory=dict)  # that a plan's steps ended with, in a line
    wall_seconds: float = 0.0  # of all steps together
    own_seconds: float = 0.0  # what the thread that ran them computed meanwhile

    @property
    def are_first_steps(self) -> bool:
        """Whether first steps are compared, since there was no time for more than those of a plan."""
        return any(not any(turn.seconds for turn in self.turns[index]) for index in self._run())

    @property
    def steps(self) -> dict[int, int]:
        """The number of steps by which plans are compared, of each that was run and did not fail."""
        return {index: sum(map(len, self._compared(index))) for index in self._run()}

    @property
    def step_seconds(self) -> dict[int, float]:
        """The time of a step of each plan that was run and did not fail.

        That of the first plan is the median of its steps. Another one's is a multiple of it: the median of the rounds'
        ratios, since the speed of a machine comes and goes with what else it does, in phases of many seconds.
        """
        run = self._run()
        found: dict[int, float] = {}
        for index in run:
            own = statistics.median(seconds for turn in self._compared(index) for seconds in turn)
            ratios = self._ratios(index, run[0])
            found[index] = found[run[0]] * statistics.median(ratios) if ratios and index != run[0] else own
        return found

    @property
    def ratio_error(self) -> float:
        """The standard error of the ratios between plans, as a share: from how much those of the rounds differ.

        Few rounds say little of that, so what a machine with other work shows counts as one ratio more. 0 for one plan.
        """
        run = self._run()
        if len(run) < 2:
            return 0.0
        logs = [[math.log(ratio) for ratio in self._ratios(index, run[0])] for index in run[1:]]
        squares = sum((log - statistics.fmean(of_plan)) ** 2 for of_plan in logs for log in of_plan)
        free = sum(len(of_plan) - 1 for of_plan in logs if of_plan)
        rounds = max(map(len, logs), default=0)
        return math.sqrt((squares + _SPREAD**2) / (free + 1) / max(1, rounds))

    def _ratios(self, index: int, first: int) -> list[float]:
        """Return the ratios of a plan's times to the first one's.

        Of undisturbed times, since other programs take as much from one plan as from another in the long run, and not
        in few rounds. At the machine's own pace, since the host of a virtual machine takes processors from it for
        seconds at a time, which slows plans of large operators most.
        """

        def paced(index: int) -> list[Paced]:  # turn by turn; the share of a first step is not kept
            turns, shared = self.turns[index], not self.are_first_steps
            return [
                Paced(statistics.median(seconds or [0.0]), turn.slowdown, turn.attended_share if shared else 1.0)
                for seconds, turn in zip(self._compared(index), turns, strict=True)
            ]

        return undisturbed_ratios(paced(index), paced(first), _LEAST_ROUNDS)

    def _run(self) -> list[int]:  # the plans that were run and did not fail
        return [index for index, turns in enumerate(self.turns) if turns and index not in self.errors]

    def _compared(self, index: int) -> list[list[float]]:  # the times by which a plan is, turn by turn
        return [[turn.first_seconds] if self.are_first_steps else turn.seconds for turn in self.turns[index]]

    @property
    def slowdown(self) -> float:
        """How slow the machine was in the median of the turns (`Turn.slowdown`)."""
        return statistics.median([turn.slowdown for turns in self.turns for turn in turns] or [1.0])

    @property
    def attended_share(self) -> float:
        """The share of the steps in which their thread computed; less than all on a busy machine."""
        return self.own_seconds / self.wall_seconds if self.wall_seconds else 1.0


Run = Callable[[int, float], float]
"""Runs a turn of a plan for some seconds at most, and returns what it took before them, to make code."""


def why_not_here(workload: Workload, device: Device, ranks: int) -> str:
    """Return why steps under a plan can't be run and timed here; "" where they can.

    `ranks` share the step, or are processes that each make a plan.
    """
    if not device.is_here:
        return f"{device.name} is not on this machine"
    if ranks > 1:
        return f"the step is shared by {ranks} ranks"
    if isinstance(workload, LoopWorkload):
        return "the step is part of your own loop"
    if not has_data(workload):
        return "the model or the batch has no data here"
    return ""


def why_no_room(device: Device, peak_bytes: int) -> str:
    """Return why a step of some peak can't run beside what is in memory already; "" where it can."""
    free = free_bytes()
    if device.kind != "cpu":
        place = torch.device(device.name)
        free = hardware.accelerators.memory_info(place)[0] + hardware.accelerators.cached_bytes(place)
    if _ROOM * peak_bytes <= free:
        return ""
    return f"the step needs {format_bytes(peak_bytes)} besides the workload, and {format_bytes(free)} is free"


def affordable(predicted_seconds: Sequence[float], limit_seconds: float = LIMIT_SECONDS) -> int:
    """Return how many plans, of the first ones, can be run often enough to compare them within a time."""
    least = _LEAST_ROUNDS * (1 + _STEPS)
    return bisect.bisect_right(list(itertools.accumulate(least * each for each in predicted_seconds)), limit_seconds)


def in_turns(
    run: Run,
    count: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    limit_seconds: float = LIMIT_SECONDS,
    rounds: int = ROUNDS,
    enough: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run plans in turns, each round in an order drawn anew, until each had its turns, or enough, or time is over.

    The first round begins with the plan that is predicted to be fastest, which the others are compared with. No turn
    begins that would end too late, by what the plan's last one took; in the first round all begin that can. A turn ends
    where it would leave others less than their share of `_LEAST_ROUNDS`, however slow this machine turns out to be.
    """
    draws, ends, share_seconds = random.Random(0), clock() + limit_seconds, limit_seconds / (_LEAST_ROUNDS * count)
    expected = [0.0] * count
    for turns in range(rounds):
        if turns >= _LEAST_ROUNDS and enough():
            return
        order = draws.sample(range(count), count)
        for done, index in enumerate(order if turns else sorted(order, key=bool)):
            began = clock()
            if began + (expected[index] if turns else 0.0) >= ends:
                return
            apart_seconds = run(index, min(ends - began, share_seconds))
            ends += apart_seconds
            expected[index] = clock() - began - apart_seconds
            progress(turns * count + done + 1, rounds * count)


def steps_of(seconds: float) -> int:
    """Return how many steps a turn has after its first, by what one takes."""
    return max(_STEPS, min(_MOST_STEPS, int(_TURN_SECONDS / max(seconds, 1e-9))))


def timed_in_turns(
    workload: Workload,
    plans: Sequence[tuple[Levers, float]],
    device: Device,
    *,
    limit_seconds: float,
    rounds: int = ROUNDS,
    clocks: Clocks = _CLOCKS,
    progress: Progress = silent,
) -> Timed:
    """Run steps under several plans on copies of a workload, in turns, and return what they took.

    A plan whose step fails is not run again, and where the first one fails none is. Nothing of the workload or of the
    random generators changes.

    Args:
        plans: The levers of each plan, and its predicted seconds.
        limit_seconds: Steps run no longer, but for making code.
        progress: Told how many turns are done, of how many at most, and before and after code is made for how many
            plans it is, of how many.

    Raises:
        WorkloadError: The loss function uses the original model.
    """
    place, found, code = torch.device(device.name), Timed([[] for _ in plans]), dict[int, Step]()
    pace, latest = Pace() if place.type == "cpu" else None, list[Turn]()

    def timed(step: Step) -> float:
        wall, own = clocks.wall(), clocks.own()
        step(step.workload.batch)
        hardware.accelerators.synchronize(place)  # or the next step would wait for this one's update
        seconds = clocks.wall() - wall
        found.wall_seconds += seconds
        found.own_seconds += clocks.own() - own
        return seconds

    def run(index: int, limit_seconds: float, slowdown: float) -> float:
        levers, predicted_seconds = plans[index]
        with contextlib.ExitStack() as ends:
            began = clocks.wall()
            step = code.get(index)
            if step is None:
                step = ends.enter_context(applied_to_copy(levers, workload, place))
                if compiles(levers):
                    total = sum(compiles(levers) for levers, _ in plans)
                    progress("make code", len(code), total)
                    step(step.workload.batch)
                    code[index] = step
                    kept.push(ends.pop_all())  # the copy with its code, until the last turn
                    progress("make code", len(code), total)
            makes_until = clocks.wall()
            turn = Turn(timed(step), slowdown=slowdown)
            latest.append(turn)
            found.turns[index].append(turn)
            own_seconds = list[float]()
            for _ in range(steps_of(predicted_seconds)):
                if clocks.wall() >= makes_until + limit_seconds:
                    break
                before = found.own_seconds
                turn.seconds.append(timed(step))
                own_seconds.append(found.own_seconds - before)
            if pace is not None and turn.seconds and (middle := statistics.median(turn.seconds)) > 0:
                turn.attended_share = statistics.median(own_seconds) / middle
        return makes_until - began

    def run_unless_failed(index: int, limit_seconds: float) -> float:
        apart_seconds = 0.0
        if index in found.errors or 0 in found.errors:
            return apart_seconds
        slowdown = 1.0 if pace is None else pace.read()
        if latest:  # after it the machine was as slow
            latest[-1].slowdown = max(latest[-1].slowdown, slowdown)
        try:
            with rng_preserved():  # so that all plans draw the same numbers
                apart_seconds = run(index, limit_seconds, slowdown)
        except Exception as e:  # someone's code, which may raise anything
            found.errors[index] = first_line(e)  # and not the error, whose frames hold the copy
        gc.collect()  # the copy, before there is another one
        hardware.accelerators.release_cache()
        return apart_seconds

    with nothing_changes(workload), contextlib.ExitStack() as kept:
        in_turns(
            run_unless_failed,
            len(plans),
            clock=clocks.wall,
            limit_seconds=limit_seconds,
            rounds=rounds,
            enough=lambda: found.ratio_error <= _SURE,
            progress=functools.partial(progress, _STAGE),
        )
    return found


def notes_of(found: Timed, device: Device) -> list[str]:
    """Return what is to be said of measured steps: a busy machine, and plans that could not be run."""
    notes = [f"a plan could not be run to measure it: {error}" for error in found.errors.values()]
    if device.kind == "cpu":
        notes += busy_notes("plans were measured", found.attended_share, found.slowdown)
    if found.are_first_steps:
        notes.append(
            "plans were compared by little more than their first steps, since time ran out; a first step also"
            " makes the optimizer's state"
        )
    return list(dict.fromkeys(notes))


def weighed(measured: Sequence[MeasuredStep], error: float) -> list[MeasuredStep]:
    """Return contenders with the step that measurement and prediction together speak for, of one or more.

    Few steps on a machine that does other work too can't tell apart plans that take about as long, and predictions
    err too. The logarithm of each ratio to the first contender is the mean of the measured and the predicted one, each
    with the inverse of its variance as the weight: the estimate of the least variance where both err independently.
    `error` is the standard error of measured ratios, as a share (≥ 0); 0 leaves measured times as they are.
    """
    first = measured[0]
    share = RATIO_ERROR**2 / (RATIO_ERROR**2 + error**2)  # of what was measured

    def seconds(one: MeasuredStep) -> float:
        measured_ratio = one.measured_seconds / first.measured_seconds
        predicted_ratio = one.predicted_seconds / first.predicted_seconds
        logarithm = share * math.log(measured_ratio) + (1 - share) * math.log(predicted_ratio)
        return first.measured_seconds * math.exp(logarithm)

    return [first, *(replace(one, measured_seconds=seconds(one)) for one in measured[1:])]


def fastest_measured(measured: Sequence[MeasuredStep]) -> int:
    """Return which contender to take, of one or more.

    Of those that are within `MARGIN` of the fastest it is one of the strictest numerics class, with the fewest
    levers, and then the fastest of these. A larger margin would be noise's way to a slow plan: whatever errs by as much
    is taken as equal.
    """
    longest_seconds = (1 + MARGIN) * min(one.measured_seconds for one in measured)
    near = [index for index, one in enumerate(measured) if one.measured_seconds <= longest_seconds]

    def preference(index: int) -> tuple[int, int, float, float, int]:
        one = measured[index]
        return NUMERICS.index(freest(one.uses)), len(one.uses), one.measured_seconds, one.predicted_seconds, index

    return min(near, key=preference)


class ChosenPlan(NamedTuple):
    """The plan that is taken."""

    confirmed: Confirmed
    proof: Proof
    measured: tuple[MeasuredStep, ...] = ()  # the plans that were run, the fastest first
    notes: tuple[str, ...] = ()


def unmeasured(predicted: ChosenPlan, why: str) -> ChosenPlan:
    """Return the plan predicted to be fastest, with a note that says why none was run."""
    return predicted._replace(notes=(f"chosen by predicted times; no plan was run to measure it: {why}",))


def measured_choice(
    predicted: ChosenPlan,
    near: Callable[[], list[Confirmed]],
    prove: Callable[[Confirmed], Proof],
    *,
    workload: Workload,
    device: Device,
    measure: Measure,
    progress: Progress,
) -> ChosenPlan:
    """Return the fastest of the plans that are near the one predicted to be fastest, as they run here.

    "auto" runs steps where there are several plans and enough time to compare them; True for longer, and also where one
    plan can be timed alone. What another plan recomputes is held against the user's step before it is taken.
    """
    plans, limit_seconds, why = plans_to_run(predicted.confirmed, near, device, measure)
    if not plans:
        return unmeasured(predicted, why) if why else predicted
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
    progress(_STAGE, 1, 1)  # also where the time was over before all turns had been
    return taken(predicted, plans, timed, notes_of(timed, device), prove)


def plans_to_run(
    predicted: Confirmed, near: Callable[[], list[Confirmed]], device: Device, measure: Measure
) -> tuple[list[Confirmed], float, str]:
    """Return the plans that are run, the time that they have, and why none is; "" where there is nothing to compare."""
    step_seconds = predicted.prediction.step_seconds
    too_long = f"a step is predicted to take {format_seconds(step_seconds)}, too long to compare plans in"
    if measure == "auto" and affordable([step_seconds] * 2, LONGEST_SECONDS) < 2:
        return [], 0.0, f"{too_long} {LONGEST_SECONDS:.0f} s"
    found = near()
    is_code_made = any(compiles(plan.point.levers) for plan in found)
    limit_seconds = ASKED_SECONDS if measure is True else LONGEST_SECONDS if is_code_made else LIMIT_SECONDS
    plans = found[: max(1, affordable([plan.prediction.step_seconds for plan in found], limit_seconds))]
    if measure == "auto" and len(plans) == 1:
        return [], 0.0, "" if len(found) == 1 else f"{too_long} {limit_seconds:.0f} s"
    # In memory are one step, and the copies that compiled ones keep meanwhile.
    kept = [plan.prediction.by_category for plan in plans if compiles(plan.point.levers)]
    kept_bytes = sum(each.get(category, 0) for each in kept for category in BETWEEN_STEPS)
    why = why_no_room(device, max(plan.prediction.peak_upper_bytes for plan in plans) + kept_bytes)
    return [] if why else plans, limit_seconds, why


def taken(
    predicted: ChosenPlan,
    plans: Sequence[Confirmed],
    timed: Timed,
    notes: Sequence[str],
    prove: Callable[[Confirmed], Proof],
) -> ChosenPlan:
    """Return the one of some plans, the first of which was predicted to be fastest, that is taken by their times."""
    if 0 in timed.errors:
        return unmeasured(predicted, timed.errors[0])
    steps = {
        i: MeasuredStep(
            levers=plans[i].point.levers,
            uses=plans[i].point.uses,
            predicted_seconds=plans[i].prediction.step_seconds,
            measured_seconds=seconds,
            steps=timed.steps[i],
        )
        for i, seconds in timed.step_seconds.items()
    }
    measured, left = tuple(sorted(steps.values(), key=lambda step: step.measured_seconds)), list(steps)
    while True:
        index = left[fastest_measured(weighed([steps[i] for i in left], timed.ratio_error))]
        if index == 0:
            return predicted._replace(measured=measured, notes=tuple(notes))
        try:
            proof = prove(plans[index])
            break
        except Excluded:
            left.remove(index)
    took, first_took = (format_seconds(steps[i].measured_seconds) for i in (index, 0))
    note = (
        f"chosen by measured and predicted times together: {took} a step. The fastest"
        f" plan by prediction ({uses_text(plans[0].point.uses)}) took {first_took}"
    )
    chosen, other = predicted.confirmed.point, plans[index]
    bound = min(chosen.bound_seconds, other.prediction.step_seconds)  # of all combinations that were searched
    point = replace(other.point, status=chosen.status, bound_seconds=bound)
    return ChosenPlan(Confirmed(point, other.prediction), proof, measured, (note, *notes))
