"""The published rows and their page: what can be held without predicting them again."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from benchmarks.published import figures, page
from benchmarks.published.rows import every_row, sources
from benchmarks.tables import results
from memfit.hardware.catalogue import catalogue


def test_rows_have_ids_of_their_own_a_card_of_the_catalogue_and_a_figure() -> None:
    rows = [row for source in sources().values() for row in source.rows]
    assert len(rows) == len(every_row()) >= 60
    for row in rows:
        assert row.device in catalogue()
        told = [row.allocated, row.after, row.reserved, row.process, row.step, row.fits]
        assert any(value is not None for value in told), row.id


@pytest.mark.parametrize("module", ["operators", "book", "lit", "language", "hub"])
def test_functions_take_the_options_of_their_rows(module: str) -> None:
    for row in every_row().values():
        where, _, name = row.build.partition(":")
        if where == module:
            make = getattr(importlib.import_module(f"benchmarks.published.{module}"), name)
            inspect.signature(make).bind(**{**row.options, **row.timed})


def test_the_page_is_that_of_the_result_file() -> None:
    assert page.PAGE.read_text() == page.page(results("published"))


def test_the_summary_is_that_of_the_cases() -> None:
    result = results("published")
    assert figures.summarised(result["cases"], sources()) == result["summary"]


def a_case(**errors: float) -> dict[str, Any]:
    return {"id": "a/1", "source": "s", "device": "d", "published": errors, "errors": errors, "within": {}}


def test_ratios_compare_neighbours_of_one_group() -> None:
    cases = [a_case(step=0.5), a_case(step=0.5), a_case(step=0.2)]
    assert figures.ratio_errors(cases) == pytest.approx([0, 0.2])
    other = [a_case(step=0.5), {**a_case(step=0.5), "id": "b/1"}]
    assert figures.ratio_errors(other) == []
