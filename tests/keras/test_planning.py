from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import memfit
import memfit.keras as mk
from memfit.errors import BudgetError, InfeasibleError, PlanMismatchError
from memfit.keras import measured_peak
from memfit.keras.planning import KerasPlanner
from memfit.keras.recompute import Recomputed
from tests.keras.models import difference, keras, layers, mlp, resnet, tf, unet, values_after_step, workload

CASES = {"chain": (mlp, 2048), "residual": (resnet, 32), "U-Net": (unet, 32)}
EAGER = {"residual", "U-Net"}  # peaks of functions with branches differ from trace to trace


@pytest.fixture(scope="module")
def planners() -> Callable[[str], KerasPlanner]:
    known: dict[str, KerasPlanner] = {}

    def planner(name: str) -> KerasPlanner:
        if name not in known:
            make, samples = CASES[name]
            known[name] = KerasPlanner(
                workload(make(), samples, run_eagerly=name in EAGER), points=4, time_limit_seconds=1.0
            )
        return known[name]

    return planner


def recomputed_layers(model: Any) -> int:
    return sum(len(piece.body.units) for piece in model.layers if isinstance(piece, Recomputed))


@pytest.mark.parametrize("name", CASES)
def test_measured_peaks_are_within_budgets_and_gradients_stay(
    name: str, planners: Callable[[str], KerasPlanner]
) -> None:
    make, samples = CASES[name]
    planner = planners(name)
    mine = planner.workload
    plain_bytes = measured_peak(mine.step(mine.model))
    assert planner.frontier[0].peak_bytes == pytest.approx(plain_bytes, rel=0.25)
    plain = values_after_step(make, lambda model: model, samples, run_eagerly=name in EAGER)
    seconds = []
    lowest_bytes = min(planner.upper_bytes(index) or plain_bytes for index in range(len(planner.frontier)))
    assert lowest_bytes <= (0.5 if name == "chain" else 0.9) * plain_bytes
    for budget in (int(1.2 * plain_bytes), (plain_bytes + lowest_bytes) // 2, lowest_bytes):
        plan = planner.plan(budget)
        lean = mk.apply(plan, mine.model)
        peak = measured_peak(mine.step(lean))
        seconds.append(plan.predicted.step_seconds)
        print(
            f"{name}, {budget / 2**20:.1f} of {plain_bytes / 2**20:.1f} MiB: {peak / 2**20:.1f} MiB, predicted"
            f" {next(c for c in plan.frontier if c.levers == plan.levers).peak_bytes / 2**20:.1f} MiB,"
            f" {1e3 * (plan.predicted.step_seconds - plan.plain.step_seconds):.1f} ms more"
        )
        assert peak <= budget
        assert plan.predicted.peak_upper_bytes <= budget
        assert recomputed_layers(lean) == sum(len(region.modules) for region in plan.levers.regions)
        planned = values_after_step(
            make, lambda model, plan=plan: mk.apply(plan, model), samples, run_eagerly=name in EAGER
        )
        assert difference(plain, planned) <= (1e-5 if name == "chain" else 0.0)  # a GELU may be fused otherwise
    assert seconds == sorted(seconds)
    assert seconds[-1] > plan.plain.step_seconds


@pytest.mark.parametrize("name", CASES)
def test_time_never_grows_with_the_budget(name: str, planners: Callable[[str], KerasPlanner]) -> None:
    planner = planners(name)
    points = planner.frontier
    assert all(a.step_seconds <= b.step_seconds and a.peak_bytes >= b.peak_bytes for a, b in itertools.pairwise(points))
    # Every measured peak that could be: plans follow the predicted order whatever is measured.
    random = np.random.RandomState(0)
    known = dict(planner.measured)
    for _ in range(20):
        planner.measured = {i: int(c.peak_bytes * random.uniform(0.8, 1.3)) for i, c in enumerate(points)}
        found = []
        for budget in np.linspace(points[-1].peak_bytes, points[0].peak_bytes * 1.4, 12):
            try:
                found.append(planner.plan(int(budget)).predicted.step_seconds)
            except InfeasibleError:
                found.append(float("inf"))
        assert found == sorted(found, reverse=True)
    planner.measured = known


def test_below_the_lowest_peak_numbers_are_said(planners: Callable[[str], KerasPlanner]) -> None:
    planner = planners("chain")
    with pytest.raises(InfeasibleError, match=r"^Does not fit: needs .* of 1 MiB\. Smallest budget") as e:
        planner.plan("1MiB")
    assert e.value.budget_bytes == 2**20
    fitting = planner.plan(e.value.lowest_peak_bytes)  # what it says to do
    assert fitting.predicted.peak_upper_bytes <= e.value.lowest_peak_bytes
    with pytest.raises(BudgetError, match="'half'"):
        planner.plan("half")


def test_a_plan_is_kept_in_a_file_and_refused_for_another_model(tmp_path: Any, planners: Any) -> None:
    planner = planners("chain")
    plan = planner.plan("0.7x")
    plan.save(tmp_path / "plan.json")
    again = memfit.Plan.load(tmp_path / "plan.json")
    assert again == plan and recomputed_layers(mk.apply(again, mlp())) > 0
    with pytest.raises(PlanMismatchError, match="plan again with memfit.keras.plan"):
        mk.apply(again, mlp(depth=5))


def test_shares_of_the_plain_peak() -> None:
    make, samples = CASES["chain"]  # in a function; with branches its peaks would differ by a tenth from trace to trace
    mine = workload(make(), samples)
    before = [v.numpy() for v in mine.model.variables]
    plan = mk.plan(mine, budget="0.8x", points=3, time_limit_seconds=10.0)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, mine.model.variables, strict=True))
    assert "0.8x of the plain step's peak" in plan.budget_share
    assert plan.numerics == "reordered"
    assert plan.levers.regions
    assert plan.predicted.peak_upper_bytes <= plan.budget_bytes
    changes = (lambda model: model), (lambda model: mk.apply(plan, model))
    plain, planned = (values_after_step(make, change, samples) for change in changes)
    assert difference(plain, planned) <= 1e-5  # a GELU may be fused otherwise


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_goes_with_it(policy: str) -> None:
    keras.mixed_precision.set_global_policy(policy)
    try:
        mine = workload(mlp(depth=6), 8192, run_eagerly=True)
        plan = mk.plan(mine, budget="0.75x", points=3, time_limit_seconds=1.0)
        assert measured_peak(mine.step(mk.apply(plan, mine.model))) <= plan.budget_bytes
        plain, planned = (
            values_after_step(lambda: mlp(depth=6), change, 8192, run_eagerly=True)
            for change in (lambda model: model, lambda model: mk.apply(plan, model))
        )
        assert difference(plain, planned) == 0.0
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Noise(layers.Layer):  # type: ignore[misc]
    """Adds random numbers that no variable of the layer decides."""

    def call(self, inputs: Any) -> Any:
        return inputs + tf.random.normal(tf.shape(inputs))


class Penalty(layers.Layer):  # type: ignore[misc]
    """Adds a loss in its call."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(tf.reduce_mean(inputs))
        return inputs * 2.0


def test_layers_that_differ_when_called_again_are_left_out() -> None:
    dense = [layers.Dense(64, activation="gelu") for _ in range(4)]
    mine = workload(
        keras.Sequential([keras.Input((64,)), *dense[:2], Noise(name="noise"), Penalty(name="penalty"), *dense[2:]]),
        8192,
        run_eagerly=True,
    )
    planner = KerasPlanner(mine, points=4, time_limit_seconds=1.0)
    plan = planner.plan("0.9x")
    assert any("noise is not recomputed: it returns other values when it is called again" in n for n in plan.notes)
    assert any("penalty is not recomputed: it adds a loss in its call" in n for n in plan.notes)
    for candidate in plan.frontier:
        assert not {"noise", "penalty"} & {name for region in candidate.levers.regions for name in region.modules}


def test_modules_are_known_by_the_public_name_too() -> None:
    """Code imports them by it, and pickles of older versions name them so."""
    assert importlib.import_module("memfit.keras.workload").Workload is mk.Workload
