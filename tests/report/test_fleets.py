"""A fleet as a table and as a page."""

from __future__ import annotations

import re

from msgspec.structs import replace

from memfit.ir import Fleet, Misfit, Sharding
from memfit.report import GRID, show_records
from memfit.report.surveys import LogAxis, answer_lines, fleet_chart, fleet_page, shown_rows
from tests.ir.test_fleet import fleet_of, row


def some() -> Fleet:
    rows = [
        row("small", 1, 60.0, 0.5),
        row("small", 8, 9.0, 0.5),
        row("<big>", 1, 20.0, 3.0),
        row("<big>", 4, 6.0, 3.0),
    ]
    shared = replace(rows[1].levers, sharding=Sharding(world_size=8, mode="zero3", replicas=2))
    rows[1] = replace(rows[1], levers=shared)
    return replace(fleet_of(rows, 24.0), misfits=[Misfit(device="tiny", ranks=8, held_bytes=2**31, budget_bytes=2**30)])


def test_the_table_has_the_answers_and_the_front() -> None:
    show_records()
    text = str(some())
    assert "Fewest cards: 1 × <big>, in 20.0 h (14.0 h to 26.0 h)" in text
    assert "Cheapest: 8 × small, for 36.00 EUR" in text
    assert "Fastest: 4 × <big>, in 6.0 h" in text
    assert "tiny: no plan fits; the smallest one found needs 2.0 GiB of 1.0 GiB, on 8 ranks" in text
    assert "zero3 in 2 copies" in text


def test_every_card_has_a_row() -> None:
    assert {each.device for each in shown_rows(some())} == {"small", "<big>"}


def test_the_page_escapes_names_and_has_a_mark_for_every_row() -> None:
    found = some()
    page = fleet_page(found)
    assert "<big>" not in page and "&lt;big&gt;" in page
    assert len(fleet_chart(found).marks) == len(found.rows)
    assert "<script src" not in page and not re.search(r"https?://(?!www\.w3\.org)", page)


def test_nothing_in_time_names_the_nearest() -> None:
    late = replace(some(), within_hours=1.0)
    assert answer_lines(late) == ["No fleet finishes within 1.0 h. Fastest: 4 × <big>, in 6.0 h (4.2 h to 7.8 h)"]


def test_a_logarithmic_axis_has_its_powers() -> None:
    axis = LogAxis(1.0, 64.0, "cards")
    assert [text for _, text in axis.ticks()] == ["1", "2", "4", "8", "16", "32", "64"]
    assert axis.at(1) == 0 and axis.at(8) == GRID / 2 and axis.at(64) == GRID
