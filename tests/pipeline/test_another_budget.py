"""Other budgets, looked up on the frontier of a plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import memfit
from memfit.errors import BudgetError, InfeasibleError
from memfit.ir import Plan
from tests.measuring import step_peak_bytes
from tests.workloads import lean


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(lean(), budget="1GiB", precisions=["32-true"], points=4)


def test_any_budget_is_the_fastest_point_that_fits_and_is_kept(plan: Plan) -> None:
    workload = lean()
    lowest = min(c.held_bytes for c in plan.frontier)
    seconds = []
    for share in (1, 1.3, 1.8):
        found = plan.at(int(share * lowest))
        point = next(c for c in plan.frontier if c.levers == found.levers)
        faster = [c for c in plan.frontier if c.step_seconds < point.step_seconds]
        assert all(c.held_bytes > found.budget_bytes for c in faster)
        assert found.budget_bytes == int(share * lowest)
        peak = step_peak_bytes(workload, found.levers)
        assert found.predicted.peak_bytes == pytest.approx(peak, rel=0.02)
        assert peak <= found.predicted.peak_upper_bytes <= found.budget_bytes
        assert found.solution.bound_seconds <= found.predicted.step_seconds
        seconds.append(point.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_only_what_the_numerics_allow_is_taken(plan: Plan) -> None:
    exact = replace(plan, allowed="exact")
    budget = min(c.held_bytes for c in plan.frontier if c.numerics == "exact")
    found = exact.at(budget)
    assert found.numerics == "exact" and found.levers.microbatch_size == found.batch_size


def test_shares_are_of_what_the_plan_was_made_for(plan: Plan) -> None:
    assert plan.plain.device_bytes is not None
    assert plan.at("50%").budget_bytes == plan.plain.device_bytes // 2
    found = plan.at("1.2x")
    assert found.budget_bytes == int(1.2 * plan.plain.peak_upper_bytes) and "plain step" in found.budget_share
    assert plan.at(plan.budget_bytes).predicted == plan.predicted  # its own point keeps what was captured of it


def test_what_no_point_fits_is_said(plan: Plan) -> None:
    with pytest.raises(InfeasibleError, match="memfit.plan") as caught:
        plan.at("1MiB")
    assert not caught.value.proven and caught.value.lowest_peak_bytes > caught.value.budget_bytes
    assert caught.value.lowest_peak_bytes == min(c.held_bytes for c in plan.frontier)
    with pytest.raises(BudgetError):
        plan.at("much")
