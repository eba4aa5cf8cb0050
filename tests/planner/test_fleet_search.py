"""Plans for many numbers of ranks from few captures, held against captures of each and against brute force."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit import hardware, planner
from memfit.hardware import family, known_devices
from memfit.ir import FleetRow
from memfit.planner import FleetSearch
from tests.planner import fleet_searches
from tests.planner.fleet_searches import Checked, mlp

pytestmark = pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA can't be had here")
DEVICE = "a100-80gb"
BUDGETS = ["200MiB", "320MiB", "2GiB"]
TOLERANCE = 1.05  # what is about as fast is not taken for more levers, and a menu has some points only


@pytest.fixture(scope="module")
def found() -> dict[str, list[Checked]]:
    asked = [{"devices": [DEVICE], "budget": budget, "world_sizes": [1, 4, 16]} for budget in BUDGETS]
    (checked,) = planner.call_elsewhere(fleet_searches.checked, mlp(), [{"asked": asked}], lambda *_: None, sizes=[])
    return dict(zip(BUDGETS, checked, strict=True))


def searched(samples: int, devices: list[str], *others: list[str], **options: Any) -> list[FleetSearch]:
    """Return what is found for some cards, and for others by themselves, in a process with fake CUDA."""
    asked = [{"devices": each, **options} for each in (devices, *others)]
    call: Any = planner.call_elsewhere
    return list(call(fleet_searches.searched, mlp(samples), [{"asked": asked}], lambda *_: None, sizes=[])[0])


@pytest.mark.ci  # `make test` has plans of few rows: `pipeline/test_fleet.py`
def test_every_row_is_what_its_own_capture_takes_and_brute_force_finds_nothing_faster(
    found: dict[str, list[Checked]],
) -> None:
    assert all(rows for rows in found.values())
    for each in (each for rows in found.values() for each in rows):
        assert each.row.held_bytes == each.held_bytes <= each.row.budget_bytes
        assert each.row.step_seconds == pytest.approx(each.step_seconds, rel=1e-6)
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
    names = ["rtx-3090", "a100-40gb", "mi300x"]
    options: dict[str, Any] = {"world_sizes": [1, 4], "numerics": "reduced"}
    together, *alone = searched(32, names, *([name] for name in names), **options)
    rows, own = rows_of(together), rows_of(*alone)
    assert rows.keys() == own.keys() and len(rows) == 6
    for key, row in rows.items():
        assert plan_of(row) == plan_of(own[key]) and row.held_bytes == own[key].held_bytes
        assert row.step_seconds == pytest.approx(own[key].step_seconds, rel=0.02)


@pytest.mark.ci
def test_what_cards_and_ranks_share_is_what_each_finds_alone() -> None:
    """Replays, peaks and what the allocator holds are shared; budgets are not, and one card has no room at all."""
    names = ["a100-80gb", "a100-40gb", "rtx-3070"]
    (together,) = searched(64, names, budget="0.5%", world_sizes=[1, 4])
    alone = [
        each
        for ranks in (1, 4)
        for each in searched(64, *([name] for name in names), budget="0.5%", world_sizes=[ranks])
    ]
    rows, own = rows_of(together), rows_of(*alone)
    assert rows.keys() == own.keys() and len({row.levers for row in rows.values()}) > 2
    for key, row in rows.items():
        assert (plan_of(row), memory_of(row)) == (plan_of(own[key]), memory_of(own[key]))
        assert row.step_seconds == pytest.approx(own[key].step_seconds, rel=1e-9)
    least = [misfit for each in alone for misfit in each.misfits if misfit.device not in {name for name, _ in rows}]
    assert together.misfits == [min(least, key=lambda misfit: misfit.held_bytes)]
    assert together.misfits[0].held_bytes > together.misfits[0].budget_bytes


@pytest.mark.ci
def test_ranks_that_can_not_be_faster_are_left_out_unless_asked() -> None:
    every, some = (
        searched(8, [DEVICE], budget="2GiB", world_sizes=range(1, 13), each=each)[0].rows for each in (True, False)
    )
    assert [row.ranks for row in every] == list(range(1, 9))  # the batch has eight samples
    assert [row.ranks for row in some] == [1, 2, 3, 4, 8]  # five to seven have two samples at most, as four have
    for row in every:
        fewer = min(kept.step_seconds for kept in some if kept.ranks <= row.ranks)
        assert fewer <= row.step_seconds * 1.1, row


def test_cards_of_one_family_are_searched_together_and_none_is_left_out() -> None:
    cards = [device for device in known_devices().values() if device.kind == "cuda"]
    options = fleet_searches.request([card.name for card in cards], numerics="reduced")
    parts = [part.devices for part in options.in_two()]
    assert len(parts) == 2
    assert sorted(device.name for part in parts for device in part) == sorted(device.name for device in cards)
    assert {family(device) for device in parts[0]}.isdisjoint(family(device) for device in parts[1])
    assert abs(len(parts[0]) - len(parts[1])) <= max(len(cards) // 4, 1)
    alone = fleet_searches.request([cards[0].name], numerics="reduced")
    assert alone.in_two() == [alone]


@pytest.mark.ci
def test_searches_in_two_parts_find_what_one_does() -> None:
    names = ["a100-80gb", "h100"]
    together, *apart = searched(64, names, *([name] for name in names), world_sizes=[1, 4], budget="320MiB")
    joined = planner.joined(apart)
    assert rows_of(joined) == rows_of(together)
    assert (joined.notes, joined.step_error) == (together.notes, together.step_error)


def rows_of(*searches: FleetSearch) -> dict[tuple[str, int], FleetRow]:
    return {(row.device, row.ranks): row for each in searches for row in each.rows}


def plan_of(row: FleetRow) -> tuple[object, ...]:
    return row.device, row.ranks, row.levers, row.uses, row.numerics


def memory_of(row: FleetRow) -> tuple[int, int, int]:
    return row.budget_bytes, row.peak_bytes, row.held_bytes
