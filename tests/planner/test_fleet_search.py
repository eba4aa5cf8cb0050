"""Plans for many numbers of ranks from few captures, held against captures of each and against brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import memfit
from memfit import hardware, planner
from memfit.hardware import family, known_devices
from memfit.ir import FleetRow
from memfit.planner import fleet_search
from memfit.workload import Workload
from tests.planner import fleet_searches
from tests.planner.fleet_searches import Checked, mlp

pytestmark = pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA can't be had here")
DEVICE = "a100-80gb"
BUDGETS = ["200MiB", "320MiB", "2GiB"]
TOLERANCE = 1.05  # what is about as fast is not taken for more levers, and a menu has some points only


@pytest.fixture(scope="module")
def found() -> dict[str, list[Checked]]:
    return asked(fleet_searches.searched, mlp(), device=DEVICE, budgets=BUDGETS, world_sizes=[1, 4, 16])


def asked(function: Callable[..., Any], workload: Workload, **options: Any) -> Any:
    """Return what a function finds in a process with fake CUDA."""
    return planner.call_elsewhere(function, workload, [options], lambda *_: None, sizes=[])[0]


@pytest.mark.ci  # `make test` has plans of few rows: `pipeline/test_fleet.py`
def test_every_row_is_what_its_own_capture_is_predicted_to_take(found: dict[str, list[Checked]]) -> None:
    assert all(rows for rows in found.values())
    for each in (each for rows in found.values() for each in rows):
        assert each.row.held_bytes == each.held_bytes <= each.row.budget_bytes
        assert each.row.step_seconds == pytest.approx(each.step_seconds, rel=1e-6)


@pytest.mark.ci
def test_brute_force_finds_nothing_faster(found: dict[str, list[Checked]]) -> None:
    for each in (each for rows in found.values() for each in rows):
        assert each.row.step_seconds <= each.fastest_seconds * TOLERANCE, each.row


@pytest.mark.ci
def test_no_step_is_slower_with_a_larger_budget(found: dict[str, list[Checked]]) -> None:
    by_ranks: dict[int, list[float]] = {}
    for budget in BUDGETS:
        for each in found[budget]:
            by_ranks.setdefault(each.row.ranks, []).append(each.row.step_seconds)
    for seconds in by_ranks.values():
        assert all(later <= earlier * 1.021 for earlier, later in zip(seconds, seconds[1:], strict=False))
    assert any(seconds[-1] < seconds[0] for seconds in by_ranks.values())


@pytest.mark.ci
def test_tight_budgets_need_recomputation_or_shards(found: dict[str, list[Checked]]) -> None:
    tight = {each.row.ranks: each.row for each in found[BUDGETS[0]]}
    assert tight[min(tight)].levers.regions or tight[min(tight)].levers.microbatch_size < 64
    assert all(not each.row.levers.regions for each in found[BUDGETS[-1]])


@pytest.mark.ci
def test_one_rank_is_planned_as_memfit_plan_does(found: dict[str, list[Checked]]) -> None:
    budget = BUDGETS[1]
    one = next(each.row for each in found[budget] if each.row.ranks == 1)
    chosen = memfit.plan(mlp(), budget=budget, device=DEVICE, precisions=["32-true"], optimizers=["as-is"], points=1)
    if one.levers == chosen.levers:  # the time of its capture leaves out what checkpointing costs the host
        assert one.held_bytes == pytest.approx(chosen.predicted.peak_upper_bytes, rel=0.01)
    else:
        assert one.step_seconds == pytest.approx(chosen.predicted.step_seconds, rel=TOLERANCE - 1)


@pytest.mark.ci
def test_cards_that_share_captures_are_predicted_as_alone() -> None:
    devices = ["rtx-3090", "a100-40gb", "mi300x"]
    pairs = asked(fleet_searches.grouped, mlp(32), devices=devices)
    assert len(pairs) == 6
    for together, alone in pairs:
        assert plan_of(together) == plan_of(alone) and together.held_bytes == alone.held_bytes
        assert together.step_seconds == pytest.approx(alone.step_seconds, rel=0.02)


@pytest.mark.ci
def test_what_cards_and_ranks_share_is_what_each_finds_alone() -> None:
    """Replays, peaks and what the allocator holds are shared; budgets are not, and one card has no room at all."""
    options: dict[str, Any] = {
        "devices": ["a100-80gb", "a100-40gb", "rtx-3070"],
        "budget": "0.5%",
        "world_sizes": [1, 4],
    }
    together, alone = asked(fleet_searches.in_parts, mlp(), **options)
    rows = {(row.device, row.ranks): row for row in together.rows}
    rows_alone = {(row.device, row.ranks): row for each in alone for row in each.rows}
    assert rows.keys() == rows_alone.keys() and len({row.levers for row in rows.values()}) > 2
    for key, row in rows.items():
        assert (plan_of(row), memory_of(row)) == (plan_of(rows_alone[key]), memory_of(rows_alone[key]))
        assert row.step_seconds == pytest.approx(rows_alone[key].step_seconds, rel=1e-9)
    least = [misfit for each in alone for misfit in each.misfits if misfit.device not in {name for name, _ in rows}]
    assert together.misfits == [min(least, key=lambda misfit: misfit.held_bytes)]
    assert together.misfits[0].held_bytes > together.misfits[0].budget_bytes


@pytest.mark.ci
def test_ranks_that_can_not_be_faster_are_left_out_unless_asked() -> None:
    def rows(each: bool) -> list[FleetRow]:
        options = {"devices": [DEVICE], "budget": "2GiB", "world_sizes": range(1, 13), "each": each}
        found: list[FleetRow] = asked(fleet_searches.found, mlp(8), **options).rows
        return found

    every, some = rows(True), rows(False)
    assert [row.ranks for row in every] == list(range(1, 9))  # the batch has eight samples
    assert {row.ranks for row in some} < {row.ranks for row in every}
    assert [row.ranks for row in some] == [1, 2, 3, 4, 8]  # five to seven have two samples at most, as four have
    kept = {row.ranks: row for row in some}
    for row in every:
        fewer = min(kept[ranks].step_seconds for ranks in kept if ranks <= row.ranks)
        assert fewer <= row.step_seconds * 1.1, row


def test_cards_of_one_family_are_searched_together_and_none_is_left_out() -> None:
    cards = [device for device in known_devices().values() if device.kind == "cuda"]
    options = fleet_searches.options_of([card.name for card in cards], numerics="reduced")
    parts = [part.devices for part in options.in_two()]
    assert len(parts) == 2
    assert sorted(device.name for part in parts for device in part) == sorted(device.name for device in cards)
    assert {family(device) for device in parts[0]}.isdisjoint(family(device) for device in parts[1])
    assert abs(len(parts[0]) - len(parts[1])) <= max(len(cards) // 4, 1)
    alone = fleet_searches.options_of([cards[0].name], numerics="reduced")
    assert alone.in_two() == [alone]


@pytest.mark.ci
def test_searches_in_two_parts_find_what_one_does() -> None:
    options: dict[str, Any] = {"world_sizes": [1, 4], "budget": "320MiB"}
    names = ["a100-80gb", "h100"]
    together = asked(fleet_searches.found, mlp(), **options, devices=names)
    calls = [{**options, "devices": [name]} for name in names]
    apart = planner.call_elsewhere(fleet_searches.found, mlp(), calls, lambda *_: None, sizes=[])
    joined = fleet_search.joined(apart)
    assert sorted(joined.rows, key=by_card) == sorted(together.rows, key=by_card)
    assert (joined.notes, joined.step_error) == (together.notes, together.step_error)


def plan_of(row: FleetRow) -> tuple[object, ...]:
    return row.device, row.ranks, row.levers, row.uses, row.numerics


def memory_of(row: FleetRow) -> tuple[int, int, int]:
    return row.budget_bytes, row.peak_bytes, row.held_bytes


def by_card(row: FleetRow) -> tuple[str, int]:
    return row.device, row.ranks
