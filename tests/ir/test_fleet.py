"""The answers of a fleet, held against all of its rows."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from memfit import ir
from memfit.ir import Fleet, FleetRow, Levers


def fleet_of(rows: list[FleetRow], within_hours: float | None = None) -> Fleet:
    return Fleet(
        memfit_version="",
        torch_version="",
        workload="w",
        fingerprint="",
        batch_size=8,
        budget="90%",
        steps=10,
        within_hours=within_hours,
        allowed="reordered",
        step_error=0.3,
        rows=rows,
    )


def row(device: str, ranks: int, hours: float, price: float | None, currency: str = "EUR") -> FleetRow:
    return FleetRow(
        device=device,
        ranks=ranks,
        nodes=1,
        levers=Levers(microbatch_size=1),
        uses=(),
        numerics="exact",
        budget_bytes=1,
        peak_bytes=1,
        held_bytes=1,
        step_seconds=hours * 360,
        hours=hours,
        cost=None if price is None else price * ranks * hours,
        currency="" if price is None else currency,
    )


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        row(rng.choice("abc"), rng.randint(1, 8), rng.choice([1.0, 2.0, 3.5, 5.0]), rng.choice([None, 1.0, 2.5]))
        for _ in range(rng.randint(1, 25))
    ]
    fleet = fleet_of(rows, rng.choice([None, 2.0, 4.0]))
    in_time = [r for r in rows if fleet.within_hours is None or r.hours <= fleet.within_hours]
    assert fleet.in_time == in_time
    assert (fleet.fewest is None) == (not in_time)
    if fleet.fewest is not None:
        assert fleet.fewest.ranks == min(r.ranks for r in in_time)
    priced = [r.cost for r in in_time if r.cost is not None]
    assert (None if fleet.cheapest is None else fleet.cheapest.cost) == min(priced, default=None)
    assert fleet.fastest is not None and fleet.fastest.hours == min(r.hours for r in rows)
    best = {
        (r.ranks, r.hours)
        for r in rows
        if not any(o.ranks <= r.ranks and o.hours <= r.hours and (o.ranks, o.hours) != (r.ranks, r.hours) for o in rows)
    }
    assert {(r.ranks, r.hours) for r in fleet.front} == best
    costs = [(r.cost, r.hours) for r in rows if r.cost is not None]
    cheap = {c for c in costs if not any(o[0] <= c[0] and o[1] <= c[1] and o != c for o in costs)}
    assert {(r.cost, r.hours) for r in fleet.front_by_cost} == cheap


def test_costs_in_several_currencies_are_not_compared() -> None:
    fleet = fleet_of([row("a", 1, 1.0, 1.0), row("b", 1, 1.0, 2.0, "USD")])
    assert fleet.cheapest is None and fleet.front_by_cost == []


def test_a_fleet_survives_the_round_trip() -> None:
    fleet = replace(fleet_of([row("a", 2, 1.0, 1.5)], 3.0), notes=["a note"])
    assert ir.codec.decode(ir.codec.encode(fleet), Fleet, source="here") == fleet
