"""`verify` of plans for several ranks: it proves them, and sees what is wrong on any rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit import planner
from memfit.errors import UsageError
from memfit.hardware import find_device
from memfit.ir import Levers, Plan, Sharding, Verification
from memfit.levers import LeversOn, lever_uses
from memfit.pipeline import _verify
from memfit.planner import capture_levers, costs_of, predict
from memfit.training import Step
from tests.pipeline.test_plan_for_ranks import workload
from tests.processes import on_ranks
from tests.ranks.test_engines import workload as counted
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
    assert one.failures == [] and one.bitwise
    assert len(one.rank_peaks_bytes) == 2
    assert one.measured_peak_bytes == max(one.rank_peaks_bytes) <= plan.predicted.peak_upper_bytes


def tampered(rank: int, plan: Plan) -> Iterator[Any]:
    """Change what the second rank computes, before gradients are reduced and after, and what the plan says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "call_elsewhere", lambda *_, **__: [[]])  # which another test looks at
        yield memfit.verify(plan, workload(3), steps=0)
        if rank == 1:
            whole_loss, whole_gradients = Step.compute_loss, Step.gradients

            def other_loss(step: Step, batch: Any) -> Any:
                loss, count = whole_loss(step, batch)
                return loss * (1 + 2**-20), count

            def other_gradient(step: Step, batch: Any) -> Any:
                loss, gradients = whole_gradients(step, batch)
                gradients[next(iter(gradients))].flatten()[0] += 1e-6
                return loss, gradients

            patch.setattr(Step, "compute_loss", other_loss)
        yield memfit.verify(plan, workload(3), steps=0)
        if rank == 1:
            patch.setattr(Step, "compute_loss", whole_loss)
            patch.setattr(Step, "gradients", other_gradient)
        yield memfit.verify(plan, workload(3), steps=0)
        if rank == 1:
            patch.setattr(Step, "gradients", whole_gradients)
        less = replace(plan.predicted, peak_upper_bytes=plan.predicted.peak_bytes // 2)
        yield memfit.verify(replace(plan, predicted=less), workload(3), steps=0)
        other = workload(3)
        other.batch["x" if "x" in other.batch else next(iter(other.batch))][0, 0] += rank
        with pytest.raises(UsageError) as e:
            memfit.verify(plan, other, steps=0)
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


def counting(rank: int, sharding: Sharding, samples: int) -> Iterator[Any]:
    """Compare the shared step with the one process that plays the ranks, without the rest of a verification."""
    given = counted(samples, counted=True)
    levers = Levers(microbatch_size=2, sharding=sharding)
    place = torch.device("cpu")
    loss, gradients, _ = _verify._gradients(given, levers, place)
    if rank == 0:
        plain_loss, plain = _verify.played(given, levers, place)
        yield loss == plain_loss, [torch.equal(gradients[name], gradient) for name, gradient in plain.items()]


def test_counts_and_parts_that_differ_are_played_bitwise() -> None:
    sharding = Sharding(world_size=2, mode="zero3", units=("blocks.0", "blocks.1"), reduces="last")
    for samples in (7, 4):
        ((is_same, are_equal),), _ = on_ranks(2, counting, sharding, samples)
        assert is_same and all(are_equal)


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
