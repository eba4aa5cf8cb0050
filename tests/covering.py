"""Which combinations of parameters `make test` runs: each pair of values is in one; `.ci/run` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(names: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Return all values of a parameter, those marked `ci` that differ from the kept ones in nothing that is run."""
    kept = list(kept)
    names = list(names)
    assert all(name in names for name in kept)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.ci) for name in names]


def each(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of some parameters' values, with few that are not marked `ci`: each value is in one."""
    return _marked(axes, lambda row: {(i, value) for i, value in enumerate(row)})


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of some parameters' values, those marked `ci` that hold no pair of values of their own.

    A defect that shows only where three values meet is found by `.ci/run`; any that takes two by `make test`.
    """
    return _marked(axes, _pairs)


def _marked(axes: Iterable[Iterable[Any]], parts: Callable[[tuple[int, ...]], set[Any]]) -> list[Any]:
    """Return all combinations, those marked `ci` that are not needed to have all parts that any has."""
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    taken = set(_covering_rows(rows, parts))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, row, strict=True)), marks=() if row in taken else pytest.mark.ci
        )
        for row in rows
    ]


def _covering_rows(rows: list[tuple[int, ...]], parts: Callable[[tuple[int, ...]], set[Any]]) -> list[tuple[int, ...]]:
    """Return rows that hold every part (a value, or a pair of two columns' values), those with the most new first."""
    left, found = set().union(*map(parts, rows)), list[tuple[int, ...]]()
    while left:
        best = max(rows, key=lambda row: (len(parts(row) & left), _new_pairs(row, found)))
        found.append(best)
        left -= parts(best)
    return found


def _new_pairs(row: tuple[int, ...], found: list[tuple[int, ...]]) -> int:
    return len(_pairs(row).difference(*map(_pairs, found)))


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(row), 2))
