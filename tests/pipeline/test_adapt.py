"""Batches of varying shapes: each is predicted before it runs, none exceeds the budget, and the numbers stay."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest
import torch

import memfit
from memfit.errors import PlanError, UsageError
from memfit.ir import Levers, Plan
from memfit.levers import applied
from memfit.levers.precision import casts_of
from memfit.pipeline.adaptive import Adaptive, ShapeInterpolation, shapes_of
from memfit.training import Step
from memfit.workload import fingerprint
from tests.models import transformer

TOKENS = 64


def workload() -> memfit.Workload:
    return without_state(transformer(batch=4, tokens=TOKENS, dim=32, layers=2, dropout=0.0))


def without_state(made: memfit.Workload) -> memfit.Workload:
    """Of fewer operators than with AdamW: each shape is captured."""
    return dataclasses.replace(made, optimizer=torch.optim.SGD(made.model.parameters(), lr=1e-3))


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = workload()
    budget = int(0.75 * memfit.estimate(made).peak_bytes)
    return memfit.plan(made, budget=budget, numerics="exact", precisions=["32-true"], points=3, time_limit_seconds=1)


def cut(work: memfit.Workload, tokens: int, samples: int = 4) -> Any:
    return {name: tensor[:samples, :tokens].contiguous() for name, tensor in work.batch.items()}


def adaptive_of(step: Step) -> Adaptive:
    assert isinstance(step.recovery, Adaptive)
    return step.recovery


@pytest.mark.ci
def test_every_batch_stays_within_the_budget_and_its_prediction(plan: Plan) -> None:
    work, rng = workload(), random.Random(1)
    with memfit.apply(plan, work, limit_bytes=plan.budget_bytes, adaptive=True) as step:
        adaptive = adaptive_of(step)
        for _ in range(8):
            batch = cut(work, rng.randrange(4, TOKENS + 1, 20), rng.choice([4, 4, 4, 1]))
            step(batch)
            predicted = step.options.predicted_peak_bytes
            measured = step.memory_summary().peak_bytes
            assert predicted is not None and measured is not None and measured <= 1.001 * predicted
        assert adaptive.events == [] and adaptive.controller.correction < 1.001
        assert sum(adaptive.taken.values()) == 8
        buckets = {arm: {b for b, a in adaptive.taken if a == arm} for _, arm in adaptive.taken}
        assert 0 in buckets and len(buckets) > 1  # short batches run plain, long ones don't
        assert "batches, from the smallest shapes" in str(adaptive)


@pytest.mark.ci
def test_weights_are_those_of_the_plain_step_whatever_was_taken(plan: Plan) -> None:
    lengths = [64, 8, 64, 20]
    planned, plain = workload(), workload()
    with memfit.apply(plan, planned, adaptive=True) as step:
        losses = [step(cut(planned, tokens)).loss for tokens in lengths]
    single = Step(plain)
    assert losses == [single(cut(plain, tokens)).loss for tokens in lengths]
    for one, other in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_that_runs_out_all_the_same_is_run_again_under_a_lower_plan(plan: Plan) -> None:
    planned, plain = workload(), workload()
    with memfit.apply(plan, planned, adaptive=True) as step:
        adaptive = adaptive_of(step)
        step(cut(planned, 48))
        failures = iter([True])

        def fail(*_: object) -> None:
            if next(failures, False):
                raise MemoryError

        handle = planned.model.register_forward_hook(fail)
        step(cut(planned, 48))
        handle.remove()
        (event,) = adaptive.events
        assert event.lower is not None and event.lower.predicted.peak_bytes < event.plan.predicted.peak_bytes
        assert adaptive.plan is plan
    single = Step(plain)
    for _ in range(2):
        single(cut(plain, 48))
    for one, other in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_larger_than_the_workloads_is_refused_before_it_runs(plan: Plan) -> None:
    work = workload()
    larger = {name: torch.cat([tensor, tensor], 1) for name, tensor in work.batch.items()}
    with memfit.apply(plan, work, adaptive=True) as step:
        with pytest.raises(UsageError, match=r"\(4, 128\).* is not within the largest"):
            step(larger)
        with pytest.raises(UsageError, match="is not within"):
            step({"x": work.batch["x"]})
        assert step.steps == 0


def test_places_on_the_way_are_the_smallest_that_cover_a_batch() -> None:
    largest, smaller = ((8, 100), (8, 101), (8, 100, 100)), ((8, 40), (8, 41), (8, 40, 40))
    way = ShapeInterpolation(largest, smaller)
    batch = [torch.zeros(shape) for shape in largest]
    for place in (0.0, 0.3, 1.0):
        shapes = shapes_of(way.batch_at(batch, place))
        assert shapes[0][1] + 1 == shapes[1][1] and shapes[2] == (8, shapes[0][1], shapes[0][1])
        assert way.place(shapes) == pytest.approx(place, abs=0.01)
    assert shapes_of(way.batch_at(batch, 0.0))[0] == (8, 7)
    assert way.place(((8, 40), (8, 41), (8, 90, 40))) == way.place(((8, 90), (8, 91), (8, 90, 90)))
    assert way.place(((2, 3), (2, 3), (2, 3, 3))) == 0.0
    assert way.covers(((8, 9), (8, 8), (8, 7, 6))) and not way.covers(((7, 100), (8, 101), (8, 100, 100)))


@pytest.mark.ci
def test_modules_in_fp32_stay_so_while_plans_change() -> None:
    """Another shape is predicted from the modules as they were made; what runs is cast as before."""

    def mixed() -> memfit.Workload:
        made = without_state(transformer(batch=1, tokens=TOKENS, dim=32, layers=2, dropout=0.0))
        return dataclasses.replace(made, fp32_modules=("head", "blocks.0.mlp.*"))

    budget = int(0.95 * memfit.estimate(mixed(), precision="bf16-mixed").peak_bytes)
    made = memfit.plan(
        mixed(),
        budget=budget,
        numerics="reduced",
        precisions=["bf16-mixed"],
        optimizers=(),
        points=2,
        time_limit_seconds=1,
    )
    planned, plain = mixed(), mixed()
    lengths = [64, 20]
    with memfit.apply(made, planned, adaptive=True) as step:
        losses = [step(cut(planned, tokens, 1)).loss for tokens in lengths]
        assert casts_of(planned.model)
    assert not casts_of(planned.model)
    with applied(Levers(precision="bf16-mixed", microbatch_size=1), plain) as single:
        assert losses == pytest.approx([single(cut(plain, tokens, 1)).loss for tokens in lengths], rel=1e-3)


def test_weights_in_bf16_are_refused_with_the_table_s_row(plan: Plan) -> None:
    work = dataclasses.replace(workload(), bf16_updates="master-weights")
    lower = msgspec.structs.replace(plan.levers, precision="bf16-true")
    other = msgspec.structs.replace(plan, levers=lower, fingerprint=fingerprint(work), allowed="reduced")
    with pytest.raises(PlanError, match="predictions for other shapes need the original model"):
        memfit.apply(other, work, adaptive=True)
    assert not casts_of(work.model)
