"""Which combinations of parameters `make test` runs: each pair of values is in one; `.ci/run` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of some parameters' values, those marked `ci` that hold no pair of values of their own.

    A defect that shows only where three values meet is found by `.ci/run`; any that takes two by `make test`.
    """
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    taken = set(_covering_rows(rows))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, row, strict=True)), marks=() if row in taken else pytest.mark.ci
        )
        for row in rows
    ]


def _covering_rows(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return rows that hold every pair of two columns' values, the ones with the most new pairs first."""
    left, found = set().union(*map(_pairs, rows)), []
    while left:
        best = max(rows, key=lambda row: len(_pairs(row) & left))
        found.append(best)
        left -= _pairs(best)
    return found


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(row), 2))
