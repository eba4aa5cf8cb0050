"""The plan that is taken, by what its steps and those of others took; no step runs here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.errors import WorkloadError
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers, Proof
from memfit.planner import measured_choice as module
from memfit.planner import measured_steps
from memfit.planner.confirmation import Excluded
from memfit.planner.measured_choice import Choice, measured_choice
from memfit.planner.measured_steps import LONGEST_SECONDS, Timed, Turn
from memfit.planner.search import Confirmed
from memfit.planner.verb_options import Measure
from memfit.workload import Workload
from tests.planner.test_search import Applied, combinations
from tests.workloads import lean


def plans(step_seconds: float = 0.1) -> list[Confirmed]:
    """Return three plans, each of another numerics class, that are predicted to take the same time."""
    found = []
    for combination in combinations():
        point = combination.candidate(combination.plain(), 2**30)
        prediction = Applied()(point)
        found.append(Confirmed(point, replace(prediction, step_seconds=step_seconds)))
    return found


class Machine:
    """Stands for the machine on which plans run: it has a time for each, and counts who is run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float], **found: Any) -> None:
        self.seconds, self.found, self.run, self.options = seconds, found, list[Levers](), dict[str, Any]()
        monkeypatch.setattr(module, "timed_in_turns", self)

    def __call__(self, workload: Workload, plans: list[tuple[Levers, float]], *_: Any, **options: Any) -> Timed:
        self.run += [levers for levers, _ in plans]
        self.options = options
        errors = self.found.get("errors", {})
        rows = [[] if i in errors else [Turn(s, [s, s, 9 * s])] for i, s in enumerate(self.seconds[: len(plans)])]
        return Timed(rows, errors, 1.0, self.found.get("own_seconds", 1.0))


def choice(
    found: list[Confirmed],
    measure: Measure = "auto",
    prove: Callable[[Confirmed], Proof] = lambda plan: Proof(levers="proven"),
    near: Callable[[], list[Confirmed]] | None = None,
) -> Choice:
    return measured_choice(
        Choice(found[0], Proof(why="as predicted")),
        near or (lambda: found),
        prove,
        workload=lean(),
        device=find_device("cpu"),
        measure=measure,
        progress=lambda *_: None,
    )


def test_the_fastest_is_taken_with_a_proof_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    Machine(monkeypatch, [0.3, 0.1, 0.2])
    taken = choice(found)
    assert taken.confirmed.point.levers == found[1].point.levers
    assert taken.confirmed.prediction == found[1].prediction
    assert taken.proof.levers == "proven"
    assert [step.measured_seconds for step in taken.measured] == [0.1, 0.2, 0.3]
    assert [step.levers for step in taken.measured] == [found[i].point.levers for i in (1, 2, 0)]
    assert all(step.steps == 3 and step.predicted_seconds == 0.1 for step in taken.measured)
    (note,) = taken.notes
    assert "100.0 ms" in note and "300.0 ms" in note


@pytest.mark.parametrize("seconds", [[0.1, 0.0997, 0.3], [0.1, 0.2, 0.3]])
def test_the_predicted_plan_is_kept_where_none_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    found = plans()
    Machine(monkeypatch, seconds)
    taken = choice(found)
    assert taken.confirmed == found[0] and taken.proof.why == "as predicted"
    assert len(taken.measured) == 3 and not taken.notes


def test_a_plan_measured_faster_by_less_than_the_noise_of_few_rounds_needs_a_prediction_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = plans()[:2]
    Machine(monkeypatch, [0.1, 0.095])  # one round
    assert choice(found).confirmed.point.levers == found[1].point.levers
    slower = [found[0], Confirmed(found[1].point, replace(found[1].prediction, step_seconds=0.108))]
    assert choice(slower).confirmed == slower[0]
    Machine(monkeypatch, [0.1, 0.08])
    assert choice(slower).confirmed.point.levers == slower[1].point.levers


def test_a_plan_whose_recomputation_differs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    Machine(monkeypatch, [0.3, 0.1, 0.2])

    def prove(plan: Confirmed, differing: tuple[int, ...]) -> Proof:
        if found.index(plan) in differing:
            raise Excluded(ValueError("differs"), [], set())
        return Proof(levers="proven")

    assert choice(found, prove=functools.partial(prove, differing=(1,))).confirmed.point.levers == found[2].point.levers
    assert choice(found, prove=functools.partial(prove, differing=(1, 2))).confirmed == found[0]


def test_the_bound_of_all_that_was_searched_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    Machine(monkeypatch, [0.3, 0.1, 0.2])
    point = choice(found).confirmed.point
    assert point.bound_seconds == min(found[0].point.bound_seconds, 0.1)
    assert point.status == found[0].point.status


def test_long_steps_are_run_only_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans(LONGEST_SECONDS / 2), Machine(monkeypatch, [12.0, 11.0, 10.0])
    asked = []
    taken = choice(found, near=lambda: asked.append(1) or found)  # type: ignore[func-returns-value]
    assert not asked and not machine.run  # nor was anything captured for it
    assert taken.confirmed == found[0] and not taken.measured
    assert "predicted to take 30.00 s" in taken.notes[0] and "in 60 s" in taken.notes[0]
    taken = choice(found, True)
    assert machine.run == [found[0].point.levers] and len(taken.measured) == 1


def test_of_steps_that_are_not_short_fewer_plans_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans(1.5), Machine(monkeypatch, [1.5, 1.0, 0.5])
    assert len(choice(found).measured) == 2
    assert machine.run == [plan.point.levers for plan in found[:2]]


def test_steps_run_for_longer_where_plans_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans(2.5), Machine(monkeypatch, [2.5, 2.0, 1.5])
    taken = choice(found)
    assert not machine.run and "predicted to take 2.50 s, too long to compare plans in 30 s" in taken.notes[0]
    monkeypatch.setattr(measured_steps.registry, "compiles", lambda levers: levers.precision == "bf16-mixed")
    assert len(choice(found).measured) == 2


def test_steps_run_for_longer_and_more_often_where_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans(2.5), Machine(monkeypatch, [2.5, 2.0, 1.5])
    assert len(choice(found, True).measured) == 3
    asked = machine.options
    choice(plans(0.1))
    assert asked["limit_seconds"] > machine.options["limit_seconds"] and asked["rounds"] > machine.options["rounds"]


def test_a_plan_without_another_near_it_is_run_only_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans()[:1], Machine(monkeypatch, [0.2])
    taken = choice(found)
    assert not machine.run and not taken.measured and not taken.notes  # the prediction told them apart
    assert choice(found, True).measured[0].measured_seconds == 0.2


def test_a_step_that_fails_leaves_the_predicted_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    Machine(monkeypatch, [0.3, 0.2, 0.1], errors={0: "MemoryError: no room"})
    taken = choice(found)
    assert taken.confirmed == found[0] and not taken.measured and "no room" in taken.notes[0]
    Machine(monkeypatch, [0.3, 0.2, 0.1], errors={2: "MemoryError: no room"})
    taken = choice(found)
    assert taken.confirmed.point.levers == found[1].point.levers and len(taken.measured) == 2
    assert any("no room" in note for note in taken.notes)


def test_a_workload_that_can_not_be_run_on_copies_leaves_the_predicted_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **options: Any) -> Timed:
        raise WorkloadError("Workload.loss_fn put gradients on the original model")

    monkeypatch.setattr(module, "timed_in_turns", refuses)
    taken = choice(plans())
    assert not taken.measured and "the original model" in taken.notes[0]


def test_no_plan_is_run_without_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, machine = plans(), Machine(monkeypatch, [0.3, 0.2, 0.1])
    monkeypatch.setattr("memfit.planner.measured_steps.free_bytes", lambda: 1000)
    taken = choice(found)
    assert not machine.run and "1000 B is free" in taken.notes[0]


def test_copies_of_compiled_plans_need_room_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    kept = {"parameters": 1000, "buffers": 100, "optimizer state": 2000, "activations": 5000}
    found = [plan._replace(prediction=replace(plan.prediction, by_category=kept)) for plan in found]
    largest = max(plan.prediction.peak_upper_bytes for plan in found)
    assert module._held_bytes(found) == largest
    monkeypatch.setattr(module.registry, "compiles", lambda levers: levers.precision == "32-true")
    compiled = sum(plan.point.levers.precision == "32-true" for plan in found)
    assert module._held_bytes(found) == largest + compiled * 3100 and 0 < compiled < len(found)


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [0.1, 0.2, 0.3], own_seconds=0.5)
    (note,) = choice(plans()).notes
    assert "using this machine" in note and "50%" in note
