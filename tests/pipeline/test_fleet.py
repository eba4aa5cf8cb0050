"""`memfit.fleet`: its rows, its costs, and what it refuses."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import memfit
from memfit import hardware
from memfit.errors import BudgetError, InfeasibleError, UsageError
from memfit.ir import CardPrice, Fleet
from tests.planner.fleet_searches import mlp

there = pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA can't be had here")
CARDS = ["a100-80gb", "rtx-3090"]


def fleet(**options: Any) -> Fleet:
    given: dict[str, Any] = {"budget": "90%", "steps": 1000, "devices": CARDS, "world_sizes": [1, 2, 4, 8, 16]}
    return memfit.fleet(mlp(16), **(given | options))


@there
@pytest.mark.ci
def test_hours_nodes_and_costs_follow_from_the_steps() -> None:
    price = CardPrice(per_hour=2.5, currency="EUR", date=datetime.date(2026, 11, 1))
    found = fleet(prices={"rtx-3090": price}, within="30min")
    assert {row.device for row in found.rows} == set(CARDS) and found.within_hours == 0.5
    for row in found.rows:
        assert row.hours == row.step_seconds * 1000 / 3600
        assert row.nodes == -(-row.ranks // 8)
        priced = row.device == "rtx-3090"
        assert row.cost == (2.5 * row.ranks * row.hours if priced else None)
        assert row.currency == ("EUR" if priced else "")
        assert (row.levers.sharding.world_size if row.levers.sharding else 1) == row.ranks
    assert found.cheapest is not None and found.cheapest.device == "rtx-3090"
    assert list(found.prices) == ["rtx-3090"] and "no price for a100-80gb" in found.notes
    assert any("30%" in note for note in found.notes)
    assert {row.levers.precision for row in found.rows} == {"bf16-mixed"}
    assert any("in 32-true" in note and " more: numerics=" in note for note in found.notes)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fleet) == found


@pytest.mark.ci
@there
def test_what_is_not_in_time_names_the_nearest() -> None:
    found = fleet(within="1s", devices=["a100-80gb"])
    assert found.in_time == [] and found.fewest is None and found.fastest is not None
    assert "No fleet finishes within 1.0 s. Fastest: " in str(found)


@pytest.mark.ci
@there
@pytest.mark.parametrize("mebibytes", [2, 60])  # the second has room for live bytes, and not for what is reserved
def test_where_nothing_fits_the_nearest_card_is_named(mebibytes: int) -> None:
    with pytest.raises(InfeasibleError, match="Does not fit any of 2 cards: the nearest, ") as caught:
        fleet(budget=f"{mebibytes}MiB", world_sizes=[1, 2, 4])
    assert caught.value.budget_bytes == mebibytes * 2**20 < caught.value.lowest_peak_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"world_sizes": []}, "world_sizes="),
        ({"world_sizes": [0]}, "world_sizes="),
        ({"world_sizes": [1, True]}, "world_sizes="),
        ({"sharding": "zero4"}, "sharding='zero4'"),
        ({"numerics": "exact"}, "numerics='exact' does not allow several ranks"),
        ({"numerics": "loose"}, "numerics='loose'"),
        ({"precisions": ["bf16-mixed"], "numerics": "reordered"}, "are not allowed by numerics='reordered'"),
        ({"within": "soon"}, "within='soon'"),
        ({"within": 0}, "within=0"),
        ({"devices": []}, "devices="),
        ({"devices": "a100-80gb"}, "devices='a100-80gb'"),
        ({"devices": ["a100-80gb", "cpu"]}, "several kinds"),
        ({"devices": ["a1000-80gb"]}, "not in the catalogue"),
        ({"prices": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_bad_input_is_refused_before_a_step_is_captured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fleet(**options)


def test_shares_of_the_plain_step_are_no_budget_for_many_cards() -> None:
    with pytest.raises(BudgetError, match=r"budget='0\.5x'"):
        fleet(budget="0.5x")


@there
def test_a_model_that_normalises_over_its_batch_has_one_rank() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coupled = memfit.Workload(model, torch.randn(8, 8), lambda model, x: model(x).square().mean(), optimizer)
    found = memfit.fleet(coupled, steps=10, devices=["l4"], world_sizes=[1, 2])
    assert [(row.ranks, row.levers.microbatch_size) for row in found.rows] == [(1, 8)]
    assert any("one rank and one microbatch only" in note for note in found.notes)
    with pytest.raises(UsageError, match="world_sizes= has no 1"):
        memfit.fleet(coupled, steps=10, devices=["l4"], world_sizes=[2])


@there
@pytest.mark.ci
def test_more_ranks_than_samples_are_refused_or_left_out() -> None:
    with pytest.raises(UsageError, match="the batch has 16 samples"):
        fleet(world_sizes=[17, 32])
    found = fleet(world_sizes=[1, 32], devices=["a100-80gb"])
    assert [row.ranks for row in found.rows] == [1]
    assert any("numbers of ranks above 16 are left out" in note for note in found.notes)
