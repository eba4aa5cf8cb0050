"""A fleet as a table and as a page."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from memfit.ir import Fleet, Misfit, Sharding
from memfit.report import fleet_page, fleet_table, text_of
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
    text = text_of(fleet_table(some()), width=140)
    for part in (
        "Fewest cards: 1 × <big>, in 20.0 h (14.0 h to 26.0 h)",
        "Cheapest: 8 × small, for 36.00 EUR",
        "Fastest: 4 × <big>, in 6.0 h",
        "tiny: no plan fits; the smallest one found needs 2.0 GiB of 1.0 GiB, on 8 ranks",
        "zero3 in 2 copies",
    ):
        assert part in text
    assert set(re.findall("^.  (small|<big>) ", text, re.M)) == {"small", "<big>"}  # every card has a row
    nearest = "No fleet finishes within 1.0 h. Fastest: 4 × <big>, in 6.0 h (4.2 h to 7.8 h)"
    assert nearest in text_of(fleet_table(replace(some(), within_hours=1.0)), width=140)


def test_the_page_escapes_names_and_has_a_mark_for_every_row() -> None:
    page = fleet_page(some())
    assert "<big>" not in page and "&lt;big&gt;" in page
    assert page.count('<span class="mark ') == len(some().rows)
    assert "<script src" not in page and not re.search(r"https?://(?!www\.w3\.org)", page)


def test_a_logarithmic_axis_has_its_powers() -> None:
    rows = [row("card", ranks, 64.0 / ranks, None) for ranks in (1, 2, 4, 8, 16, 32, 64)]
    page = fleet_page(fleet_of(rows))
    ticks = re.findall(r'<span class="tx" style="left:([\d.]+)%">(\d+)</span>', page)
    assert [text for _, text in ticks] == ["1", "2", "4", "8", "16", "32", "64"]
    marks = [float(at) for at in re.findall(r'<span class="mark [^"]*" style="left:([\d.]+)%', page)]
    assert sorted(marks) == sorted(float(at) for at, _ in ticks)
    places = [float(at) for at, _ in ticks]
    assert places == pytest.approx(sorted(np.linspace(places[0], places[-1], len(places))), abs=0.02)
