"""Extents of batches: what is within another, whichever containers loaders make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.workload import covers, extent_of

LONG, SHORT = torch.zeros(4, 9), torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((LONG, SHORT), [LONG, SHORT]),
        ([LONG, LONG], (LONG, LONG)),
        (((LONG, LONG), SHORT), [[LONG, LONG], SHORT]),
        ({"x": (LONG, LONG)}, {"x": [LONG, LONG]}),
        ([{"x": LONG}, {"x": SHORT}], ({"x": LONG}, {"x": SHORT})),
    ],
    ids=["pair", "alike", "nested", "in a dict", "of dicts"],
)
def test_a_loaders_list_of_a_tuples_parts_is_no_larger(one: Any, other: Any) -> None:
    assert covers(extent_of(one), extent_of(other)) and covers(extent_of(other), extent_of(one))


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        ((LONG, SHORT), [LONG, LONG]),
        ([LONG, SHORT], [LONG, SHORT, SHORT]),
        ({"images": [SHORT, SHORT]}, {"images": [SHORT, LONG]}),
        ({"images": [SHORT, SHORT]}, {"images": [SHORT, SHORT, SHORT]}),
        ({"images": [SHORT, SHORT]}, {"images": (SHORT, LONG)}),
        ({"images": [SHORT, SHORT]}, {"images": (SHORT, SHORT, SHORT)}),
        ({"images": (SHORT, SHORT)}, {"images": [SHORT, SHORT, SHORT]}),
        ({"images": (SHORT, SHORT)}, {"images": [SHORT, LONG]}),
        ({"images": [SHORT]}, {"pictures": [SHORT]}),
    ],
)
def test_a_part_that_grew_is_larger_though_another_one_is_as_large(planned: Any, given: Any) -> None:
    assert not covers(extent_of(planned), extent_of(given))


def test_images_of_a_list_are_within_it_in_any_order() -> None:
    assert covers(extent_of({"images": [LONG, SHORT, SHORT]}), extent_of({"images": [SHORT, LONG]}))
