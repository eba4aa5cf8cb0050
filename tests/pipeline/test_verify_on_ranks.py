"""`verify` of plans for several ranks: it proves them, and sees what is wrong on any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit.errors import UsageError
from memfit.hardware import find_device
from memfit.ir import Levers, Plan, Sharding, Verification
from memfit.levers import LeversOn, lever_uses
from memfit.planner import capture_levers, costs_of, predict
from memfit.training import Step
from tests.pipeline.test_plan_for_ranks import workload
from tests.processes import on_ranks
from tests.ranks.test_engines import workload as counted
from tests.ranks.trainings import plan_for
from tests.ranks.trainings import workload as trained
from tests.training.conftest import make_plan

UNITS = ("blocks.0", "blocks.1", "blocks.2")
DDP = Sharding(world_size=2, mode="ddp", gradient_as_bucket_view=True)
ZERO2 = Sharding(world_size=2, mode="zero2", units=UNITS)
ZERO3 = Sharding(world_size=2, mode="zero3", units=UNITS)


def predicted(sharding: Sharding) -> Plan:
    """Return a plan that predicts what its step holds, however small that is."""
    plan, cpu = make_plan(workload(3), sharding=sharding), find_device("cpu")
    levers: Levers = replace(plan.levers, microbatch_size=8 // sharding.world_size)
    plan = replace(plan, levers=levers)
    trace = capture_levers(workload(3), plan.levers, cpu)
    prediction, _ = predict(trace, costs_of([trace], cpu), cpu)
    named = lever_uses(LeversOn(plan.levers, plan.batch_size))
    budget = prediction.peak_upper_bytes
    return replace(plan, predicted=prediction, budget_bytes=budget, uses=named, numerics="reordered")


def verifying(rank: int, plans: list[Plan]) -> Iterator[Verification]:
    for plan in plans:
        yield memfit.verify(plan, workload(3), steps=0)


@pytest.mark.ci  # in `make test`, what is wrong on one rank, and `ranks/test_engines.py`, bitwise
def test_two_ranks_are_what_their_plan_says_bitwise() -> None:
    plan = predicted(ZERO2)
    (one,), (other,) = on_ranks(2, verifying, [plan])
    assert one == other
    assert one.failures == [] and one.bitwise and len(one.rank_peaks_bytes) == 2
    assert one.measured_peak_bytes == max(one.rank_peaks_bytes) <= plan.predicted.peak_upper_bytes


def tampered(rank: int, plan: Plan) -> Iterator[Any]:
    """Change what the second rank computes, before gradients are reduced and after, and what the plan says."""

    def verified(plan: Plan = plan, **changes: Any) -> Verification:
        return memfit.verify(plan, dataclasses.replace(workload(3), **changes), steps=0)

    def other_loss(model: torch.nn.Module, batch: Any) -> Any:
        loss: Any = workload(3).loss_fn(model, batch)
        return loss * (1 + 2**-20 * rank)

    yield verified()
    yield verified(loss_fn=other_loss)
    with pytest.MonkeyPatch.context() as patch:
        own = Step.gradients

        def other_gradient(step: Step, batch: Any) -> Any:
            loss, gradients = own(step, batch)
            gradients[next(iter(gradients))].flatten()[0] += 1e-6 * rank
            return loss, gradients

        patch.setattr(Step, "gradients", other_gradient)
        yield verified()
    less = replace(plan.predicted, peak_upper_bytes=plan.predicted.peak_bytes // 2)
    yield verified(replace(plan, predicted=less))
    batch = workload(3).batch
    next(iter(batch.values()))[0, 0] += rank
    with pytest.raises(UsageError) as e:
        verified(batch=batch)
    yield str(e.value)


@pytest.mark.ci
def test_what_is_wrong_on_one_rank_is_seen_on_all() -> None:
    plan = predicted(DDP)
    first, second = on_ranks(2, tampered, plan)
    assert first == second
    fine, loss, gradient, peak, batch = first
    assert fine.holds and fine.bitwise
    assert fine.measured_peak_bytes == max(fine.rank_peaks_bytes) <= plan.predicted.peak_upper_bytes
    assert not loss.bitwise and any("two halves, but the loss or a gradient is not" in f for f in loss.failures)
    assert len(gradient.failures) == 1 and gradient.failures[0].startswith("rank 1 has another gradient of ")
    assert [failure.split(" has")[0] for failure in peak.failures] == ["rank 0", "rank 1"]
    assert batch.startswith("Workload.batch of rank 1 has other values")


def counting(rank: int, sharding: Sharding, samples: int) -> Iterator[bool]:
    """Compare the shared step with the one process that plays the ranks."""
    given = counted(samples, counted=True)
    plan = make_plan(given, sharding=sharding)
    plan = replace(plan, batch_size=samples, levers=replace(plan.levers, microbatch_size=2))
    yield memfit.verify(plan, given, steps=0).bitwise


def test_counts_and_parts_that_differ_are_played_bitwise() -> None:
    sharding = Sharding(world_size=2, mode="zero3", units=("blocks.0", "blocks.1"), reduces="last")
    for samples in (7, 4):
        assert on_ranks(2, counting, sharding, samples) == [[True], [True]]


@pytest.mark.ci
@pytest.mark.slow
def test_four_ranks_are_what_their_plan_says_within_rounding() -> None:
    plan = predicted(replace(ZERO3, world_size=4, kept=UNITS[2:]))
    found = on_ranks(4, verifying, [plan])
    assert all(rank == found[0] for rank in found)
    (verification,) = found[0]
    assert verification.failures == []
    assert 0 <= verification.gradient_difference <= 1e-6
    assert len(verification.rank_peaks_bytes) == 4


GIB = 2**30


def comparing(rank: int) -> Iterator[Any]:
    given = trained()
    given.model.eval()  # without dropout, of which the two steps draw different masks
    plan = plan_for(given, replace(ZERO3, units=UNITS[:2]))
    yield memfit.verify(plan, given, steps=3).comparison
    some = replace(plan, plain=replace(plan.plain, peak_bytes=3 * GIB, peak_reserved_bytes=None))
    memory = psutil.virtual_memory()
    least = memory._replace(available=2 * GIB) if rank else memory  # the ranks see different amounts
    with mock.patch.object(psutil, "virtual_memory", return_value=least):
        yield memfit.verify(some, given, steps=2).notes[-1]


def test_ranks_compare_with_data_parallelism_and_agree() -> None:
    (first, text), (second, other) = on_ranks(2, comparing)
    assert text == other and "cpu has 2.0 GiB: memfit can't run it to compare the plan with it" in text
    assert first == second
    assert len(first.plain_losses) == len(first.planned_losses) == 3
    assert first.planned_losses == pytest.approx(first.plain_losses, rel=1e-4)
    assert 0 < first.planned_peak_bytes != first.plain_peak_bytes > 0
    assert first.plain_step_seconds > 0 and first.planned_step_seconds > 0
