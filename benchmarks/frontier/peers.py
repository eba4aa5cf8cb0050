"""Which peers of an earlier result may decide a cell: to compile the others again would take a minute and more each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from benchmarks.common import Case
from benchmarks.frontier import cells
from benchmarks.frontier.methods import OURS, PLAINS, Method, Sort, Task, compiled_name

SORTS: tuple[Sort, ...] = ("eager", "compiled")
Peers = Set[tuple[str, str]]
"""Methods, as kind "all" calls them, each with a setting as text."""


def name_in_all(name: str, sort: Sort) -> str:
    """Return what a method of a kind is called in kind "all"."""
    return compiled_name(name) if sort == "compiled" else name


def peers_of(rows: Sequence[Case], model: str, shares: Sequence[float]) -> dict[Sort, Peers]:
    """Return which peers to run, by kind; a kind that nothing was measured of on this model is not there.

    They are those that go on after the first rounds of their own kind, and the one with the lowest peak.
    """
    found: dict[Sort, Peers] = {}
    for sort in SORTS:
        measured = {str(index): row for index, row in enumerate(rows) if _is_measured(row, model, sort)}
        others = {key: row for key, row in measured.items() if row["method"] != OURS}
        if not others:
            continue
        kept = cells.contenders(others, shares)
        right = [key for key, row in others.items() if not cells.is_wrong(row)]
        kept |= set(sorted(right, key=lambda key: float(others[key]["peak_bytes"]))[:1])
        found[sort] = {(name_in_all(others[key]["method"], sort), str(others[key]["setting"])) for key in kept}
    return found


def _is_measured(row: Case, model: str, sort: Sort) -> bool:
    return bool(row["model"] == model and row["kind"] == sort and "ratio" in row)


def only(methods: Sequence[Method], peers: Mapping[Sort, Peers]) -> tuple[Method, ...]:
    """Return methods with the settings that are among the peers; memfit's and the plain ones are left as they are."""
    return tuple(
        m if m.name in (OURS, *PLAINS) or m.sort not in peers else _restricted(m, peers[m.sort]) for m in methods
    )


def _restricted(method: Method, peers: Peers) -> Method:
    def settings(task: Task) -> list[Any]:
        return [setting for setting in method.settings(task) if (method.name, str(setting)) in peers]

    return dataclasses.replace(method, settings=settings)
