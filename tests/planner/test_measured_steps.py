"""Steps under several plans run in turns, within their time, and change nothing of the workload.

Of plans that the prediction can't tell apart, the one that is taken is as fast as any, by what was measured and
predicted.
"""

from __future__ import annotations

import dataclasses
import math
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from memfit.hardware import find_device
from memfit.ir import NUMERICS, Levers, LeverUse, MeasuredStep, Numerics, Proof, freest
from memfit.levers import registry
from memfit.planner import Confirmed, Measure, measured_steps
from memfit.planner.measured_steps import (
    ASKED_ROUNDS,
    LIMIT_SECONDS,
    LONGEST_SECONDS,
    MARGIN,
    RATIO_ERROR,
    ROUNDS,
    ChosenPlan,
    Clocks,
    Excluded,
    Timed,
    Turn,
    affordable,
    fastest_measured,
    in_turns,
    measured_choice,
    notes_of,
    plans_to_run,
    steps_of,
    taken,
    timed_in_turns,
    weighed,
    why_no_room,
    why_not_here,
)
from memfit.workload import Workload
from tests.models import squared_error
from tests.planner.test_search import Applied, combinations
from tests.workloads import lean

CPU = find_device("cpu")
LEAST_ROUNDS = 3


def small() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    batch = (torch.randn(8, 8), torch.randn(8, 1))
    return Workload(model, batch, squared_error, torch.optim.AdamW(model.parameters()))


class Told:
    """Numbers that copies of a workload share, as attributes: what has no container and no tensor is not copied."""

    def __init__(self) -> None:
        self.now = self.own = 0.0
        self.alive = self.most_alive = 0

    def __getitem__(self, name: object) -> int:
        return getattr(self, f"of {name}", 0)

    def __setitem__(self, name: object, number: int) -> None:
        setattr(self, f"of {name}", number)

    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now, lambda: self.own or self.now)

    def saw(self, model: nn.Module) -> None:
        """Count the models that are alive of those that a loss function saw."""
        if not self[id(model)]:
            self[id(model)] = 1
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
            weakref.finalize(model, self._died, id(model))

    def _died(self, name: int) -> None:
        self[name] = 0
        self.alive -= 1


durations = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4)


class World:
    """A clock that moves only where a turn takes its time."""

    def __init__(self, seconds: list[float], code_seconds: float = 0.0) -> None:
        self.now, self.seconds, self.code_seconds = 100.0, seconds, code_seconds
        self.turns: list[int] = []

    def clock(self) -> float:
        return self.now

    def run(self, index: int, seconds: float) -> float:
        self.turns.append(index)
        self.latest = seconds
        self.now += self.seconds[index] + self.code_seconds
        return self.code_seconds


@given(durations, st.floats(0.05, 60.0), st.sampled_from([0.0, 40.0]))
def test_turns_end_within_the_time_but_for_those_of_the_first_round(
    taken: list[float], limit_seconds: float, code_seconds: float
) -> None:
    count, world = len(taken), World(taken, code_seconds)
    in_turns(world.run, count, clock=world.clock, limit_seconds=limit_seconds)
    assert world.turns[0] == 0
    assert world.latest <= limit_seconds / (LEAST_ROUNDS * count) + 1e-9
    spent = world.now - 100.0 - code_seconds * len(world.turns)  # making code is not of the time
    last = world.turns[-1]
    assert spent - world.seconds[last] < limit_seconds  # none began when it was over
    if len(world.turns) > count:
        assert spent <= limit_seconds + 1e-9  # what a plan takes is known by then
    times = Counter(world.turns)
    assert max(times.values()) - min(times[index] for index in range(count)) <= 1
    assert max(times.values()) <= ROUNDS


def turns_of(count: int, **options: Any) -> list[int]:
    """Return the turns of as many equal plans."""
    world = World([0.1] * count)
    in_turns(world.run, count, clock=world.clock, limit_seconds=60.0, **options)
    return world.turns


def test_each_round_has_an_order_of_its_own() -> None:
    turns = turns_of(4)
    rounds = [tuple(turns[start : start + 4]) for start in range(0, 16, 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize("needed", [1, 3, 5, 99])
def test_rounds_end_once_they_tell_enough_and_not_before_the_least_number(needed: int) -> None:
    asked = iter(range(LEAST_ROUNDS, 100))
    assert len(turns_of(2, enough=lambda: next(asked) >= needed)) == 2 * min(max(needed, LEAST_ROUNDS), ROUNDS)


@pytest.mark.parametrize(("ratios", "rounds"), [([1.1] * 8, 5), ([1.0, 1.3] * 4, ROUNDS)], ids=["steady", "unsteady"])
def test_a_steady_machine_needs_fewer_rounds(ratios: list[float], rounds: int) -> None:
    world = Told()

    def loss(model: nn.Module, batch: Any) -> None:
        """Take one second for the whole batch, and a ratio of that for two halves, each round."""
        size = len(batch[0])
        world[size] += 1
        steps = 1 + steps_of(1.0)  # of a turn
        ratio = 1.0 if size == 8 else ratios[(world[size] - 1) // (2 * steps)]
        world.now += ratio * size / 8

    found = timed(seen_by(loss), *sizes(8, 4), clocks=world.clocks(), limit_seconds=600.0, expected_seconds=1.0)
    assert [len(each) for each in found.turns] == [rounds, rounds]
    assert found.step_seconds[1] == pytest.approx(1.1 if rounds == 5 else 1.15)


@given(durations, st.floats(0.1, 100.0))
def test_what_is_affordable_takes_no_longer_than_the_limit(predicted: list[float], limit_seconds: float) -> None:
    def least(count: int) -> float:
        return sum(LEAST_ROUNDS * 3 * seconds for seconds in predicted[:count])

    count = affordable(predicted, limit_seconds)
    assert least(count) <= limit_seconds
    assert count == len(predicted) or least(count + 1) > limit_seconds


@pytest.mark.parametrize(("seconds", "steps"), [(1e-5, 20), (0.01, 10), (0.1, 2), (3.0, 2), (0.0, 20)])
def test_turns_of_short_steps_have_more_of_them(seconds: float, steps: int) -> None:
    assert steps_of(seconds) == steps


# With data


def state_of(workload: Workload) -> Any:
    tensors = [*workload.model.state_dict().values(), *(p.grad for p in workload.model.parameters()), *workload.batch]
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return [None if tensor is None else tensor.tolist() for tensor in tensors], numbers, len(workload.optimizer.state)


def seen_by(loss: Callable[[nn.Module, Any], object]) -> Workload:
    """Return the small workload, whose loss is that of what a function may do before it."""
    workload = small()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss(model, batch)
        return workload.loss_fn(model, batch)

    return dataclasses.replace(workload, loss_fn=loss_fn)


def sizes(*microbatches: int) -> list[Levers]:
    return [Levers(microbatch_size=size) for size in microbatches]


def timed(
    workload: Workload, *levers: Levers, limit_seconds: float = 20.0, expected_seconds: float = 10.0, **options: Any
) -> Timed:
    plans = [(each, expected_seconds) for each in levers]  # as they are long, two steps a turn
    return timed_in_turns(workload, plans, CPU, limit_seconds=limit_seconds, **options)


def test_nothing_of_the_workload_changes() -> None:
    workload = small()
    before = state_of(workload)
    told: list[tuple[str, int, int]] = []
    found = timed(workload, *sizes(8, 4), rounds=1, progress=lambda *at: told.append(at))
    assert state_of(workload) == before
    assert found.steps == {0: 2, 1: 2} and not found.errors
    assert set(found.step_seconds) == {0, 1} and all(seconds > 0 for seconds in found.step_seconds.values())
    turns = [turn for (turn,) in found.turns]
    assert found.wall_seconds == pytest.approx(sum(turn.first_seconds + sum(turn.seconds) for turn in turns))
    assert told == [("measure plans", 1, 2), ("measure plans", 2, 2)]


def test_one_copy_is_alive_at_a_time_and_none_afterwards() -> None:
    world = Told()
    found = timed(seen_by(lambda model, batch: world.saw(model)), *sizes(8, 4))
    assert found.steps[0] >= 2 * LEAST_ROUNDS  # and more, until ratios are sure
    assert (world.most_alive, world.alive) == (1, 0)


def test_copies_that_have_code_are_kept_for_their_turns_and_not_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Told()
    code_is_made_for(monkeypatch, 4, 2)

    def loss(model: nn.Module, batch: Any) -> None:
        world.saw(model)
        if not world[len(batch[0]), id(model)]:
            world[len(batch[0]), id(model)] = 1
            world[len(batch[0])] += 1
        if len(batch[0]) == 2:
            raise RuntimeError("no code")

    told: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        told.extend([(done, total)] if stage == "make code" else [])

    found = timed(seen_by(loss), *sizes(8, 4, 2), progress=progress)
    assert sorted(told) in ([(0, 2), (0, 2), (1, 2)], [(0, 2), (1, 2), (1, 2)])  # whichever is first
    assert found.steps[1] > 2 and world[4] == 1  # its own, in all rounds
    assert found.errors == {2: "RuntimeError: no code"} and world.most_alive == 2  # what failed keeps none
    assert world.alive == 0


def test_a_plan_that_fails_is_not_run_again_and_the_others_are() -> None:
    world = Told()

    def loss(model: nn.Module, batch: Any) -> None:
        world[len(batch[0])] += 1
        if len(batch[0]) == 4:
            raise MemoryError("no room\nfor this")

    workload = seen_by(loss)
    found = timed(workload, *sizes(8, 4))
    assert world[4] == 1 and set(found.step_seconds) == {0}
    (note,) = notes_of(dataclasses.replace(found, own_seconds=found.wall_seconds), CPU)
    assert "could not be run" in note and "no room" in note and "for this" not in note
    first = timed(workload, *sizes(4, 8))
    assert first.errors.keys() == {0} and first.steps.get(1, 0) <= 2  # with nothing to compare it with, it stops


def test_a_time_that_is_over_ends_a_turn_between_two_steps() -> None:
    now = iter(range(10_000))
    clocks = Clocks(lambda: float(next(now)), lambda: 0.0)
    found = timed(small(), *sizes(8), expected_seconds=1e-6, clocks=clocks, limit_seconds=24.0, rounds=1)
    assert 0 < found.steps[0] < steps_of(1e-6)


def code_is_made_for(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """Have microbatches of some sizes count as compiled."""
    for module in (measured_steps, registry):
        monkeypatch.setattr(module, "compiles", lambda levers: levers.microbatch_size in sizes)


def test_making_code_is_timed_apart_and_costs_the_others_none_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Told()
    code_is_made_for(monkeypatch, 4)

    def loss(model: nn.Module, batch: Any) -> None:
        size = len(batch[0])
        world.now += 60.0 if size == 4 and world[size] < 2 else 1.0  # the first step, of two microbatches
        world[size] += 1

    found = timed(seen_by(loss), *sizes(8, 4), clocks=world.clocks(), limit_seconds=1000.0)
    assert found.step_seconds == {0: 1.0, 1: 2.0} and max(turn.first_seconds for turn in found.turns[1]) == 2.0
    rounds = len(found.turns[0])
    assert (world[8], world[4]) == (3 * rounds, 2 * (3 * rounds + 1)) and world.now == 120.0 + 9 * rounds
    world[8] = world[4] = 0
    again = timed(seen_by(loss), *sizes(8, 4), clocks=world.clocks())  # in 20 seconds
    assert again.step_seconds == {0: 1.0, 1: 2.0}


def test_plans_are_compared_by_what_all_of_them_ran_round_by_round() -> None:
    found = Timed([[Turn(9.0, [1.0, 3.0, 2.0])], [Turn(8.0, [4.0])]])
    assert found.step_seconds == {0: 2.0, 1: 4.0} and found.steps == {0: 3, 1: 1} and not found.are_first_steps
    slow = dataclasses.replace(found, turns=[[Turn(9.0, [1.0])], [Turn(8.0)]])
    assert slow.step_seconds == {0: 9.0, 1: 8.0}
    assert any("first step" in note for note in notes_of(slow, find_device("rtx-3090")))
    assert dataclasses.replace(slow, errors={1: "failed"}).step_seconds == {0: 1.0}
    assert dataclasses.replace(found, turns=[[Turn(9.0, [1.0])], []]).step_seconds == {0: 1.0}
    # A machine at half its speed for a round slows all plans, and those with more turns then seem no slower.
    fast, half = Turn(9.0, [1.0, 1.0]), Turn(9.0, [2.0, 2.0])
    second, third = [Turn(9.0, [1.1, 1.1]), Turn(9.0, [2.2, 2.2])], [Turn(9.0, []), Turn(9.0, [1.8])]
    assert Timed([[fast, half, fast], second, third]).step_seconds == pytest.approx({0: 1.0, 1: 1.1, 2: 0.9})
    apart = Timed([[Turn(9.0, [2.0]), Turn(9.0)], [Turn(9.0), Turn(9.0, [3.0])]])  # no round that both ran
    assert apart.step_seconds == {0: 2.0, 1: 3.0}


def of_ratios(*ratios: float) -> Timed:
    """Return two plans' times in as many rounds, of these ratios."""
    return Timed([[Turn(9.0, [1.0]) for _ in ratios], [Turn(9.0, [ratio]) for ratio in ratios]])


def test_the_error_of_ratios_is_of_how_much_rounds_differ() -> None:
    steady, unsteady = of_ratios(*[1.1] * 9), of_ratios(*[1.0, 1.2] * 4, 1.0)
    assert steady.ratio_error < 0.01 < 0.03 < unsteady.ratio_error
    slowed = Timed([[Turn(9.0, [s]) for s in (1.0, 3.0, 1.0)], [Turn(9.0, [1.1 * s]) for s in (1.0, 3.0, 1.0)]])
    assert slowed.ratio_error == pytest.approx(of_ratios(1.1, 1.1, 1.1).ratio_error)  # both plans in that round
    more = of_ratios(*[1.0, 1.2] * 18)
    assert more.ratio_error == pytest.approx(unsteady.ratio_error / 2, rel=0.05)
    errors = [of_ratios(*[1.1] * rounds).ratio_error for rounds in (1, 2, 3, 9)]
    assert errors == sorted(errors, reverse=True) and errors[0] == 0.05  # few rounds leave them unsure
    assert Timed([[Turn(9.0)], [Turn(8.0)]]).ratio_error == 0.05 and Timed([[Turn(9.0, [1.0])]]).ratio_error == 0.0
    twice = Timed([unsteady.turns[0], *[unsteady.turns[1]] * 2])  # as sure of the spread, of each plan's ratio
    assert twice.ratio_error == pytest.approx(unsteady.ratio_error, rel=0.1)


def test_rounds_of_a_slowed_machine_do_not_count_where_there_are_others() -> None:
    """One that slows large operators more: of two plans it slows one only."""
    slowdowns = [1.0, 1.9, 1.0, 2.2, 1.05]
    first = [Turn(9.0, [1.0], slowdown) for slowdown in slowdowns]
    second = [Turn(9.0, [1.1 if slowdown < 1.1 else 2.0]) for slowdown in slowdowns]
    found = Timed([first, second])
    assert found.step_seconds[1] == pytest.approx(1.1)
    assert found.ratio_error == pytest.approx(of_ratios(1.1, 1.1, 1.1).ratio_error)
    slow = Timed([first[1:4], second[1:4]])  # all that there are
    assert slow.step_seconds[1] == pytest.approx(2.0)
    notes = notes_of(Timed([[Turn(9.0, [1.0], 1.6)]], wall_seconds=1.0, own_seconds=1.0), CPU)
    assert any("60%" in note for note in notes)


def test_what_others_take_from_one_plan_does_not_count_for_the_other() -> None:
    """Beside two programs, a step takes 1.0 s where its thread has a processor for 54 % of the time, 1.5 s for 36 %."""
    of_first, of_second = [0.54, 0.54, 0.36, 0.54, 0.36, 0.36], [0.36, 0.54, 0.36, 0.36, 0.36, 0.54]

    def turns(shares: list[float], seconds: float) -> list[Turn]:
        return [Turn(9.0, [seconds * 0.54 / share], 2.0, share) for share in shares]

    found = Timed([turns(of_first, 1.0), turns(of_second, 1.1)])
    assert found.step_seconds[1] / found.step_seconds[0] == pytest.approx(1.1)
    assert found.ratio_error == pytest.approx(of_ratios(*[1.1] * 3).ratio_error)
    ratios = [1.0, 1.2] * 3  # of a plan whose thread waits more by itself: it is as slow as it is
    waits = Timed([[Turn(9.0, [1.0], 1.0, 0.9)] * 6, [Turn(9.0, [ratio], 1.0, 0.5) for ratio in ratios]])
    assert waits.step_seconds[1] == pytest.approx(1.1)
    assert waits.ratio_error == pytest.approx(of_ratios(*ratios).ratio_error)


def test_each_turn_tells_the_share_in_which_its_thread_computed() -> None:
    world = Told()

    def loss(model: nn.Module, batch: Any) -> None:
        world.now += 1.0
        world.own += 0.9 if len(batch[0]) == 8 else 0.4

    found = timed(seen_by(loss), *sizes(8, 4), rounds=1, clocks=world.clocks())
    assert [turn.attended_share for (turn,) in found.turns] == pytest.approx([0.9, 0.4])


def test_the_machine_is_looked_at_before_and_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slowdowns = iter([1.0, 1.3, 1.0, 1.0, 1.0, 1.2])
    monkeypatch.setattr(measured_steps.Pace, "read", lambda self: next(slowdowns))
    found = timed(small(), *sizes(8, 4), rounds=3)
    first, second = ([turn.slowdown for turn in turns] for turns in found.turns)
    assert sorted(first + second) == [1.0, 1.0, 1.2, 1.2, 1.3, 1.3] and first[0] == 1.3


def test_a_plan_that_is_much_slower_than_predicted_leaves_the_others_their_turns() -> None:
    world = Told()

    def loss(model: nn.Module, batch: Any) -> None:
        world.now += 12.0 if len(batch[0]) == 8 else 0.5

    found = timed(seen_by(loss), *sizes(8, 4, 2), clocks=world.clocks())
    assert found.are_first_steps
    assert found.step_seconds == {0: 12.0, 1: 1.0, 2: 2.0}


@pytest.mark.parametrize(("share", "is_busy"), [(1.0, False), (0.95, False), (0.5, True)])
def test_a_busy_machine_is_noticed(share: float, is_busy: bool) -> None:
    now = iter(range(10_000))
    at = [0.0]

    def wall() -> float:
        at[0] = float(next(now))
        return at[0]

    clocks = Clocks(wall, lambda: share * at[0])
    found = timed(small(), Levers(microbatch_size=8), limit_seconds=1e6, rounds=1, clocks=clocks)
    assert found.attended_share == pytest.approx(share)
    notes = notes_of(found, CPU)
    assert [f"{share:.0%}" in note and "using this machine" in note for note in notes] == [True] * is_busy


def test_where_steps_can_not_be_run_it_is_said_why() -> None:
    assert why_not_here(small(), CPU, 1) == ""
    assert "rtx-3090" in why_not_here(small(), find_device("rtx-3090"), 1)
    assert "2 ranks" in why_not_here(small(), CPU, 2)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    meta = Workload(model, torch.ones(2, 4), lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters()))
    assert "no data" in why_not_here(meta, CPU, 1)
    assert why_no_room(CPU, 1) == ""
    assert "is free" in why_no_room(CPU, 2**60)


# The choice


def plans(step_seconds: float = 0.1) -> list[Confirmed]:
    """Return three plans, each of another numerics class, that are predicted to take the same time."""
    found = []
    for combination in combinations():
        point = combination.candidate(combination.plain(), 2**30)
        prediction = Applied()(point)
        found.append(Confirmed(point, replace(prediction, step_seconds=step_seconds)))
    return found


def compiled(plan: Confirmed) -> Confirmed:
    levers = replace(plan.point.levers, compiler="inductor")
    return plan._replace(point=replace(plan.point, levers=levers))


def chosen(
    found: list[Confirmed],
    seconds: list[float],
    differing: tuple[int, ...] = (),
    errors: dict[int, str] | None = None,
    own_seconds: float = 1.0,
) -> ChosenPlan:
    """Return the plan that is taken of some, the first predicted to be fastest, by the times of one round."""

    def prove(plan: Confirmed) -> Proof:
        if found.index(plan) in differing:
            raise Excluded(ValueError("differs"), [], set())
        return Proof(levers="proven")

    failed = errors or {}
    rows = [[] if i in failed else [Turn(s, [s, s, 9 * s])] for i, s in enumerate(seconds)]
    timed = Timed(rows, failed, 1.0, own_seconds)
    return taken(ChosenPlan(found[0], Proof(why="as predicted")), found, timed, notes_of(timed, CPU), prove)


def test_the_fastest_is_taken_with_a_proof_of_its_own() -> None:
    found = plans()
    best = chosen(found, [0.3, 0.1, 0.2])
    assert best.confirmed.point.levers == found[1].point.levers
    assert best.confirmed.prediction == found[1].prediction
    assert best.proof.levers == "proven"
    assert [step.measured_seconds for step in best.measured] == [0.1, 0.2, 0.3]
    assert [step.levers for step in best.measured] == [found[i].point.levers for i in (1, 2, 0)]
    assert all(step.steps == 3 and step.predicted_seconds == 0.1 for step in best.measured)
    (note,) = best.notes
    assert "100.0 ms" in note and "300.0 ms" in note
    point = best.confirmed.point  # the bound of all that was searched stays
    assert point.bound_seconds == min(found[0].point.bound_seconds, 0.1)
    assert point.status == found[0].point.status


@pytest.mark.parametrize("seconds", [[0.1, 0.0997, 0.3], [0.1, 0.2, 0.3]])
def test_the_predicted_plan_is_kept_where_none_is_clearly_faster(seconds: list[float]) -> None:
    found = plans()
    best = chosen(found, seconds)
    assert best.confirmed == found[0] and best.proof.why == "as predicted"
    assert len(best.measured) == 3 and not best.notes


def test_a_plan_measured_faster_by_less_than_the_noise_of_few_rounds_needs_a_prediction_as_good() -> None:
    found = plans()[:2]
    assert chosen(found, [0.1, 0.095]).confirmed.point.levers == found[1].point.levers  # in one round
    slower = [found[0], Confirmed(found[1].point, replace(found[1].prediction, step_seconds=0.108))]
    assert chosen(slower, [0.1, 0.095]).confirmed == slower[0]
    assert chosen(slower, [0.1, 0.08]).confirmed.point.levers == slower[1].point.levers


def test_a_plan_whose_recomputation_differs_is_not_taken() -> None:
    found, seconds = plans(), [0.3, 0.1, 0.2]
    assert chosen(found, seconds, differing=(1,)).confirmed.point.levers == found[2].point.levers
    assert chosen(found, seconds, differing=(1, 2)).confirmed == found[0]


def test_a_step_that_fails_leaves_the_predicted_plan() -> None:
    found, seconds = plans(), [0.3, 0.2, 0.1]
    best = chosen(found, seconds, errors={0: "MemoryError: no room"})
    assert best.confirmed == found[0] and not best.measured and "no room" in best.notes[0]
    best = chosen(found, seconds, errors={2: "MemoryError: no room"})
    assert best.confirmed.point.levers == found[1].point.levers and len(best.measured) == 2
    assert any("no room" in note for note in best.notes)


def test_a_busy_machine_is_said() -> None:
    (note,) = chosen(plans(), [0.1, 0.2, 0.3], own_seconds=0.5).notes
    assert "using this machine" in note and "50%" in note


def to_run(found: list[Confirmed], measure: Measure = "auto") -> tuple[list[Confirmed], float, str]:
    return plans_to_run(found[0], lambda: found, CPU, measure)


def test_long_steps_are_run_only_when_asked_to() -> None:
    found, asked = plans(LONGEST_SECONDS / 2), []
    run, _, why = plans_to_run(found[0], lambda: asked.append(1) or found, CPU, "auto")  # type: ignore[func-returns-value]
    assert not run and not asked  # nor was anything captured for it
    assert "predicted to take 30.00 s" in why and "in 60 s" in why
    assert to_run(found, True)[0] == found[:1]


def test_of_longer_steps_fewer_plans_are_run_but_more_where_they_are_compiled_or_one_asks() -> None:
    found = plans(1.5)
    assert to_run(found)[:2] == (found[:2], LIMIT_SECONDS)
    found = plans(2.5)
    run, _, why = to_run(found)
    assert not run and "predicted to take 2.50 s, too long to compare plans in 30 s" in why
    assert to_run(found, True)[0] == found and to_run(found, True)[1] > LIMIT_SECONDS and ASKED_ROUNDS > ROUNDS
    code = [*found[:2], compiled(found[2])]
    assert to_run(code)[:2] == (code[:2], LONGEST_SECONDS)


def test_a_plan_without_another_near_it_is_run_only_when_asked_to() -> None:
    found = plans()[:1]
    run, _, why = to_run(found)
    assert not run and not why  # the prediction told them apart
    assert to_run(found, True)[0] == found


def test_no_plan_is_run_without_room_for_it_nor_for_the_copies_of_compiled_ones() -> None:
    found, kept = plans(), {"parameters": 2**58, "buffers": 2**58, "optimizer state": 2**58, "activations": 2**60}
    found = [plan._replace(prediction=replace(plan.prediction, by_category=kept)) for plan in found]
    assert to_run(found)[0] == found  # of others none is kept
    run, _, why = to_run([found[0], compiled(found[1]), compiled(found[2])])
    assert not run and "needs 1572864.00 TiB besides" in why  # two times three quarters of 2**60 bytes
    large = plans()[0]._replace(prediction=replace(found[0].prediction, peak_upper_bytes=2**60))
    assert "is free" in to_run([found[0], large])[2]


def test_a_workload_that_can_not_be_run_on_copies_leaves_the_predicted_plan() -> None:
    workload = lean()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return workload.loss_fn(workload.model, batch)

    best = measured_choice(
        ChosenPlan(plans()[0], Proof(why="as predicted")),
        plans,
        lambda plan: Proof(levers="proven"),
        workload=dataclasses.replace(workload, loss_fn=loss_fn),
        device=CPU,
        measure="auto",
        progress=lambda *_: None,
    )
    assert not best.measured and "no plan was run" in best.notes[0]


# Measured and predicted times together


def contender(measured_seconds: float, predicted_seconds: float, numerics: Numerics = "exact", count: int = 0) -> Any:
    """Return a measured step with as many levers, the first of them of a class."""
    classes = [numerics, *["exact"] * count][: max(count, numerics != "exact")]
    uses = tuple(LeverUse(name="", setting="", brief="", numerics=each) for each in classes)
    return MeasuredStep(
        levers=Levers(microbatch_size=1),
        uses=uses,
        predicted_seconds=predicted_seconds,
        measured_seconds=measured_seconds,
        steps=1,
    )


seconds = st.floats(1e-4, 1e3)
classes, counts = st.sampled_from(NUMERICS), st.integers(0, 4)
several = st.lists(st.builds(contender, seconds, seconds, classes, counts), min_size=1, max_size=6)
near_each_other = st.lists(st.builds(contender, st.floats(1.0, 1.01), seconds, classes, counts), min_size=2, max_size=6)


def freeness(one: MeasuredStep) -> tuple[int, int]:
    return NUMERICS.index(freest(one.uses)), len(one.uses)


@given(several | near_each_other, st.integers(-6, 6), st.randoms(use_true_random=False))
def test_what_is_taken_is_about_the_fastest_and_of_such_plans_the_strictest_with_the_fewest_levers(
    measured: list[MeasuredStep], power: int, draws: random.Random
) -> None:
    best = measured[fastest_measured(measured)]
    least = min(one.measured_seconds for one in measured)
    near = [one for one in measured if one.measured_seconds <= (1 + MARGIN) * least]
    assert best in near and freeness(best) == min(map(freeness, near))
    assert best.measured_seconds == min(one.measured_seconds for one in near if freeness(one) == freeness(best))
    # Neither the unit nor the order of the others matters.
    scaled = [replace(one, measured_seconds=2.0**power * one.measured_seconds) for one in measured]
    assert measured[fastest_measured(scaled)] == best
    mixed = [measured[0], *draws.sample(measured[1:], len(measured) - 1)]
    assert mixed[fastest_measured(mixed)] == best


@pytest.mark.parametrize(
    ("measured", "index"),
    [
        ([(1.0, 1.0), (0.99, 1.0), (0.90, 1.0)], 2),
        ([(1.0, 1.0), (0.5, 1.0), (0.505, 1.0)], 1),
        ([(1.0, 1.0)], 0),
        ([(1.0, 1.0), (0.80, 1.0, "reduced"), (0.803, 1.0, "exact")], 2),
        ([(1.0, 1.0), (0.80, 1.0, "reduced"), (0.9, 1.0, "exact")], 1),
    ],
)
def test_worked_numbers(measured: list[Any], index: int) -> None:
    assert fastest_measured([contender(*each) for each in measured]) == index


@given(several, st.floats(0.0, 1.0))
def test_weighed_ratios_are_between_the_measured_and_the_predicted_ones(
    measured: list[MeasuredStep], error: float
) -> None:
    found = weighed(measured, error)
    assert found[0] == measured[0]
    for one, before in zip(found, measured, strict=True):
        by_measuring = before.measured_seconds / measured[0].measured_seconds
        ends = sorted([by_measuring, before.predicted_seconds / measured[0].predicted_seconds])
        assert (1 - 1e-9) * ends[0] <= one.measured_seconds / measured[0].measured_seconds <= (1 + 1e-9) * ends[1]
        assert replace(one, measured_seconds=0.0) == replace(before, measured_seconds=0.0)
    sure = [one.measured_seconds for one in weighed(measured, 0.0)]
    assert sure == pytest.approx([one.measured_seconds for one in measured])


def test_equal_errors_weigh_alike() -> None:
    _, found = weighed([contender(1.0, 1.0), contender(0.9, 1.2)], RATIO_ERROR)
    assert found.measured_seconds == pytest.approx((0.9 * 1.2) ** 0.5)


@pytest.mark.parametrize("noise", [0.02, 0.04])
def test_weighing_takes_a_fast_plan_more_often_than_either_time_alone(noise: float) -> None:
    """Plans that predictions and few rounds know with an error each, drawn many times."""
    draws = random.Random(0)
    took = Counter[str]()
    for _ in range(1000):
        true = [draws.uniform(1.0, 1.1) for _ in range(4)]
        predicted = [seconds * math.exp(draws.gauss(0.0, RATIO_ERROR / 2**0.5)) for seconds in true]
        seen = [seconds * math.exp(draws.gauss(0.0, noise / 2**0.5)) for seconds in true]
        measured = [contender(*times) for times in zip(seen, predicted, strict=True)]
        fast = [seconds <= 1.02 * min(true) for seconds in true]
        took["measured"] += fast[fastest_measured(measured)]
        took["predicted"] += fast[predicted.index(min(predicted))]
        took["both"] += fast[fastest_measured(weighed(measured, noise))]
    assert took["both"] > max(took["measured"], took["predicted"])
