"""From rows to cells, and from cells to the figures that the docs quote.

A row is a method at one setting on one model. A cell is a model under a budget: memfit's row for this budget, and the
fastest row of the others whose measured peak is within it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Case
from benchmarks.frontier.measuring import LEAST_ROUNDS, median_ratio
from benchmarks.frontier.methods import OURS, PLAINS, Kind

SHARES = (0.9, 0.75, 0.6, 0.45, 0.35, 0.3, 0.25, 0.2)
"""Budgets, of the plain step's measured peak."""
QUICK_SHARES = (0.75, 0.6, 0.45)

FIGURED: tuple[Kind, ...] = ("eager", "compiled", "all")
"""The kinds whose figures are taken alike; those of "joint" are others."""

LIMIT = 1.02
"""memfit's time, over the best peer's, up to which it is as fast."""
FASTER = 0.97
AT_BOUND = 0.01
"""The gap up to which a plan is at its proven bound."""
WRONG = 0.01
"""How far a gradient may be off beyond rounding, relative to the largest of its parameter, in one and the same step.

A dropout mask that is drawn again moves gradients by a tenth and more. Microbatches draw masks of their own, so that
joint rows are not held to this, nor memfit's of kinds "compiled" and "all", whose plans may use them.
"""
SURE = 3
"""How many standard errors a measured difference has at least, to count."""
_BELOW = 0.6
_CLOSE = 1.06
_MOST_CONTENDERS = 3


@dataclass(frozen=True)
class Cell:
    """A model under a budget.

    Attributes:
        ours: memfit's row; one with "error_message" where it has no plan.
        best: The fastest row of the others that fits; None where none does.
        others: All that fit.
    """

    model: str
    kind: str
    share: float
    budget_bytes: int
    ours: Case
    best: Case | None
    others: tuple[Case, ...] = ()

    @property
    def name(self) -> str:
        """What lists of failures call it."""
        return f"{self.model} {self.kind} {self.share:.0%}"

    @property
    def reached(self) -> bool:
        """Whether memfit's step is within the budget."""
        return _peak(self.ours) <= self.budget_bytes

    @property
    def ratio(self) -> float | None:
        """memfit's time over the best peer's, where both fit: the median over the rounds that both took part in."""
        if self.best is None or not self.reached:
            return None
        return _ratio(self.ours, self.best)

    @property
    def faster_or_at_bound(self) -> bool:
        """Whether memfit is clearly faster than every peer that fits, or within a small gap of what is provable."""
        if not self.reached:
            return False
        ratio = self.ratio
        return ratio is None or ratio <= FASTER or float(self.ours.get("gap", math.inf)) <= AT_BOUND


def read(path: Path) -> list[Case]:
    """Return the rows of a result, or of a partial file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    rows: list[Case] = json.loads(text)["cases"]
    return rows


def cells_of(rows: Sequence[Case], kind: str) -> list[Cell]:
    """Return the cells of a kind that anyone was measured for, by model and falling budget."""
    return [cell for model in _models(rows, kind) for cell in _of_model(rows, model, kind)]


def _of_model(rows: Sequence[Case], model: str, kind: str) -> Iterator[Cell]:
    here = [row for row in rows if row["model"] == model and row["kind"] == kind]
    measured = [row for row in here if "peak_bytes" in row]
    peers = [row for row in measured if row["method"] != OURS and not is_wrong(row)]
    if not measured:
        return
    plans = [row for row in here if row["method"] == OURS and "share" in row]
    for ours in sorted(plans, key=lambda row: float(row["share"]), reverse=True):
        budget = int(ours["share"] * measured[0]["plain_peak_bytes"])
        fitting = [p for p in peers if _peak(p) <= budget and p.get("share", ours["share"]) == ours["share"]]
        best = min(_well_timed(fitting), key=lambda row: float(row["ratio"]), default=None)
        yield Cell(model, kind, ours["share"], budget, ours, best, tuple(fitting))


def is_wrong(row: Case) -> bool:
    """Tell whether a step has other gradients than the plain one of its kind, by more than rounding; NaN is other."""
    key = "gradient_difference_beyond_rounding"
    off = row[key] if key in row else row["gradient_difference"]  # earlier results lack the first
    draws_again = row["kind"] == "joint" or (row["kind"] != "eager" and row["method"] == OURS)
    return not draws_again and not off <= WRONG


def _well_timed(rows: Sequence[Case]) -> Sequence[Case]:
    """Return the rows that were timed in enough rounds, of which every budget has some where any row fits it."""
    return [row for row in rows if sum(t is not None for t in row["times"]) >= LEAST_ROUNDS] or rows


def contenders(rows: Mapping[str, Case], shares: Sequence[float]) -> set[str]:
    """Return which rows may decide a cell: memfit's, plain ones, and the fastest few of others that fit a budget."""
    found = {key for key, row in rows.items() if row["method"] in (OURS, *PLAINS)}
    for share in shares:
        fitting = [
            key
            for key, row in rows.items()
            if row["method"] != OURS and not is_wrong(row) and _peak(row) <= share * row["plain_peak_bytes"]
        ]
        fitting.sort(key=lambda key: float(rows[key]["ratio"]))
        found |= {k for k in fitting[:_MOST_CONTENDERS] if rows[k]["ratio"] <= _CLOSE * rows[fitting[0]]["ratio"]}
    return found


def summarised(rows: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote: eager and compiled apart, and one plan beside all of both."""
    summary: dict[str, Any] = {kind: _summary(rows, kind) for kind in FIGURED if _models(rows, kind)}
    by_model = {
        model: [1 / cell.ratio for cell in _of_model(rows, model, "joint") if cell.ratio is not None]
        for model in _models(rows, "joint")
    }
    joint = [ratio for found in by_model.values() for ratio in found]
    return {
        **summary,
        "joint_throughput_ratio": statistics.median(joint) if joint else None,
        "worst_joint_throughput_ratio": min(joint, default=None),
        "joint_throughput_ratio_by_model": {
            model: statistics.median(found) for model, found in by_model.items() if found
        },
        "joint_failures": failures(cells_of(rows, "joint")),
    }


def _summary(rows: Sequence[Case], kind: str) -> dict[str, Any]:
    cells = cells_of(rows, kind)
    compared = [cell.ratio for cell in cells if cell.ratio is not None]
    below = [cell for cell in cells if cell.share < _BELOW and (cell.best is not None or cell.reached)]
    gaps = [row["gap"] for row in _ours(rows, kind) if "gap" in row and "share" in row]
    return {
        "worst_ratio_to_best_peer": max(compared, default=None),
        "median_ratio_to_best_peer": statistics.median(compared) if compared else None,
        "share_below_60_faster_or_at_bound": (
            sum(cell.faster_or_at_bound for cell in below) / len(below) if below else None
        ),
        "budget_violations": sum(_peak(row) > row.get("budget_bytes", math.inf) for row in _measured_ours(rows, kind)),
        "lowest_peak_ratio_to_best_peer": {model: _lowest_ratio(rows, model, kind) for model in _models(rows, kind)},
        "largest_gap": max(gaps, default=None),
        "cells": len(cells),
        "compared": len(compared),
        "reached_by_memfit_only": sum(cell.best is None and cell.reached for cell in cells),
        "failures": failures(cells),
        "not_bitwise": [f"{r['model']} {r['setting']}" for r in _measured_ours(rows, kind) if not r["bitwise"]],
        "predicted_time_grows": _growing(rows, kind, _predicted_longer),
        "measured_time_grows": _growing(rows, kind, _measured_longer),
        "wrong_gradients": [
            f"{r['model']} {r['method']} {r['setting']}"
            for r in rows
            if r["kind"] == kind and "peak_bytes" in r and is_wrong(r)
        ],
    }


def failures(cells: Sequence[Cell]) -> list[str]:
    """Return the cells that a peer reaches and memfit does not, goes over, or is slower in, with what it is about."""
    found = []
    for cell in cells:
        if cell.reached and (cell.ratio is None or cell.ratio <= LIMIT):
            continue
        if not cell.reached and cell.best is None and "peak_bytes" not in cell.ours:
            continue  # nobody is there
        found.append(f"{cell.name}: {_why(cell)}")
    return found


def _why(cell: Cell) -> str:
    best = "" if cell.best is None else f"{cell.best['method']} {cell.best['setting']}".strip()
    if "peak_bytes" not in cell.ours:
        return f"{best} fits, memfit has no plan ({cell.ours['error_message'][:80]})"
    if not cell.reached:
        return f"memfit's peak is {_peak(cell.ours) / cell.budget_bytes - 1:.2%} over the budget"
    return f"memfit takes {cell.ratio:.3f} times as long as {best}"


def _lowest_ratio(rows: Sequence[Case], model: str, kind: str) -> float | None:
    """Return memfit's lowest measured peak over the lowest of all others."""
    here = [row for row in rows if row["model"] == model and row["kind"] == kind and "peak_bytes" in row]
    ours = [_peak(row) for row in here if row["method"] == OURS]
    others = [_peak(row) for row in here if row["method"] != OURS and not is_wrong(row)]
    return min(ours) / min(others) if ours and others else None


def _growing(rows: Sequence[Case], kind: str, longer: Callable[[Case, Case], bool]) -> list[str]:
    """Return where a plan for a larger budget takes longer than one for a smaller budget."""
    found = []
    for model in _models(rows, kind):
        plans = [r for r in _measured_ours(rows, kind) if r["model"] == model and "share" in r]
        plans.sort(key=lambda row: float(row["share"]))
        for smaller, larger in zip(plans[:-1], plans[1:], strict=True):
            if longer(larger, smaller):
                found.append(f"{model} {kind} {smaller['share']:.0%} to {larger['share']:.0%}")
    return found


def _predicted_longer(row: Case, other: Case) -> bool:
    return bool(row["predicted_seconds"] > other["predicted_seconds"] * (1 + 1e-9))


def _measured_longer(row: Case, other: Case) -> bool:
    """Tell whether a step takes longer than another one in the same rounds, by more than what noise makes likely."""
    rounds = [a / b for a, b in zip(row["times"], other["times"], strict=True) if a is not None and b is not None]
    return bool(statistics.mean(rounds) > 1 + SURE * statistics.stdev(rounds) / len(rounds) ** 0.5)


def _ours(rows: Sequence[Case], kind: str) -> list[Case]:
    return [row for row in rows if row["kind"] == kind and row["method"] == OURS]


def _measured_ours(rows: Sequence[Case], kind: str) -> list[Case]:
    return [row for row in _ours(rows, kind) if "peak_bytes" in row]


def _models(rows: Sequence[Case], kind: str) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows if row["kind"] == kind))


def _peak(row: Case) -> float:
    return float(row.get("peak_bytes", math.inf))


def _ratio(ours: Case, other: Case) -> float:
    return median_ratio(ours["times"], other["times"])
