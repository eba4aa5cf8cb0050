"""Plans that were run before one was chosen: the fastest is taken, it is what it says, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit import hardware
from memfit.cost import Pace
from memfit.ir import Levers, Plan, allows
from memfit.planner import measured_steps
from memfit.planner.measured_steps import Timed, Turn
from memfit.solver import dominates
from tests.pipeline.plans import exact
from tests.workloads import quick

pytestmark = pytest.mark.harmless
OPTIONS: Any = {"budget": "0.8x", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 10}
"""With time for other plans to be found on a busy machine too."""


@pytest.fixture(scope="module")
def predicted() -> Plan:
    """The plan that is predicted to be fastest."""
    return memfit.plan(quick(), **OPTIONS)


def times_are(
    monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[Levers], float], runs: bool = True
) -> list[Levers]:
    """Have steps of plans take what a function says, though they run; return a list of the plans that do.

    Args:
        runs: Whether they do run.
    """
    timing, ran = measured_steps.timed_in_turns, list[Levers]()

    def timed(workload: Any, plans: Any, device: Any, **options: Any) -> Timed:
        ran.extend(levers for levers, _ in plans)
        if runs:
            timing(workload, plans, device, **options | {"rounds": 1})
        taken = [[Turn(seconds_of(levers), [seconds_of(levers)] * 2)] for levers, _ in plans]
        return Timed(taken, wall_seconds=1.0, own_seconds=1.0)

    monkeypatch.setattr(measured_steps, "timed_in_turns", timed)
    return ran


def test_the_plan_that_ran_fastest_is_taken_and_holds(
    predicted: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = times_are(monkeypatch, lambda levers: 2.0 if levers == predicted.levers else 1.0)
    workload = quick()
    before = [p.clone() for p in workload.model.parameters()]
    state = torch.get_rng_state()
    plan = memfit.plan(workload, measure=True, **OPTIONS)
    assert predicted.levers in ran and 2 <= len(ran) <= 4
    assert plan.levers != predicted.levers
    assert plan.measured_seconds == 1.0
    assert {step.levers for step in plan.measured} == set(ran)
    assert plan.predicted.peak_upper_bytes <= plan.budget_bytes
    assert allows(plan.allowed, plan.numerics)
    assert any("chosen by measured and predicted times" in note for note in plan.notes)
    assert [c.levers for c in plan.frontier].count(plan.levers) == 1
    chosen = next(c for c in plan.frontier if c.levers == plan.levers)
    assert not any(dominates(c, chosen) for c in plan.frontier)  # as predicted, the one that ran slower did
    assert plan.solution.bound_seconds <= plan.predicted.step_seconds
    assert "Measured" in str(plan)
    assert memfit.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert all(map(torch.equal, before, workload.model.parameters())) and not workload.optimizer.state
    assert torch.equal(state, torch.get_rng_state())
    assert memfit.verify(plan, workload, steps=0).holds


def test_noise_changes_nothing(predicted: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = times_are(monkeypatch, lambda levers: 1.0 if levers == predicted.levers else 0.99)
    plan = memfit.plan(quick(), measure=True, **OPTIONS)
    assert len(plan.measured) == len(ran) >= 2
    assert (plan.levers, plan.numerics, plan.notes) == (predicted.levers, predicted.numerics, predicted.notes)
    assert plan.predicted.step_seconds == predicted.predicted.step_seconds
    assert [c.levers for c in plan.frontier] == [c.levers for c in predicted.frontier]


@pytest.mark.ci
def test_auto_measures_where_the_environment_does_not_forbid_it(
    predicted: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = times_are(monkeypatch, lambda levers: 1.0)
    assert not memfit.plan(quick(), **OPTIONS).measured and not ran
    monkeypatch.delenv("MEMFIT_MEASURE")
    assert not memfit.plan(quick(), measure=False, **OPTIONS).measured and not ran
    assert len(memfit.plan(quick(), **OPTIONS).measured) == len(ran) >= 2


@pytest.mark.filterwarnings("ignore:.*script_method")  # as Inductor is imported
@pytest.mark.parametrize("seconds", [50.0, 130.0])
@pytest.mark.ci
def test_auto_runs_the_compiled_plans_whose_code_is_made_in_time(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMFIT_MEASURE")
    monkeypatch.setattr("memfit.planner.assembly.code_seconds", lambda trace, processes: seconds)
    ran = times_are(monkeypatch, lambda levers: 1.0, runs=False)
    plan = memfit.plan(quick(), compile="auto", **OPTIONS)
    compiled = [levers for levers in ran if levers.compiler != "none"]
    too_long = any("compiling it is predicted to take 2.2 min: measure=True" in note for note in plan.notes)
    if seconds == 50.0:
        assert 1 <= len(compiled) <= 2 and not too_long  # two take 100 of 120 seconds
    else:
        assert not compiled and too_long == (plan.levers.compiler != "none")
        memfit.plan(quick(), compile="auto", measure=True, **OPTIONS)
        assert any(levers.compiler != "none" for levers in ran)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*script_method")  # as Inductor is imported
def test_compiled_plans_are_timed_beside_others() -> None:
    plan = memfit.plan(quick(), compile="auto", measure=True, **OPTIONS)
    compilers = {step.levers.compiler for step in plan.measured}
    assert compilers == {"none", "inductor"}, plan.measured
    assert all(0 < step.measured_seconds < 60 and step.steps > 1 for step in plan.measured)


def test_without_any_class_but_exact_only_exact_plans_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    times_are(monkeypatch, lambda levers: 1.0)
    plan = memfit.plan(quick(), measure=True, numerics="exact", **OPTIONS)
    assert plan.measured and all(use.numerics == "exact" for step in plan.measured for use in step.uses)


@pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA can't be had here")
def test_for_a_device_that_is_not_here_nothing_is_run_and_the_plan_says_so() -> None:
    plan = memfit.plan(quick(), device="rtx-3090", measure=True, **OPTIONS | {"budget": "1GiB"})
    assert not plan.measured
    assert any("no plan was run" in note and "rtx-3090 is not on this machine" in note for note in plan.notes)


def test_a_comparison_says_that_the_machine_was_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "slowdown", 1.5)
    comparison = memfit.verify(exact(quick()), quick(), steps=2).comparison
    assert comparison and any("measured times are about 50% too long" in note for note in comparison.notes)


@pytest.mark.ci
def test_times_are_those_of_a_clock() -> None:
    plan = memfit.plan(quick(), measure=True, **OPTIONS)
    assert plan.measured and all(0 < step.measured_seconds < 60 and step.steps > 1 for step in plan.measured)
    times = [step.measured_seconds for step in plan.measured]
    assert times == sorted(times) and plan.measured_seconds is not None
    assert plan.measured_seconds <= 1.02 * times[0]
