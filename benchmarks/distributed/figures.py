"""The tables of the page on ranks."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Case
from benchmarks.markdown import head, made_by, row
from memfit.foundations import format_bytes

Result = dict[str, Any]


def peaks_table(result: Result) -> str:
    """Return how far predicted peaks are from measured ones, by engine and number of ranks."""
    rows = _rows(result, "peaks")
    lines = head(("engine", "ranks", "steps", "median error", "largest", "above the upper end"))
    for engine, ranks in sorted({(r["engine"], r["world_size"]) for r in rows}, key=lambda key: (key[1], key[0])):
        these = [r for r in rows if (r["engine"], r["world_size"]) == (engine, ranks)]
        errors = [abs(r["error"]) for r in these]
        above = sum(max(r["measured_peak_bytes"]) > r["peak_upper_bytes"] for r in these)
        cells = (f"{statistics.median(errors):.4%}", f"{max(errors):.4%}", str(above))
        lines.append(row((engine, str(ranks), str(len(these)), *cells)))
    return _signed(lines, result)


def budgets_table(result: Result) -> str:
    """Return how plans kept their budgets, by model and number of ranks."""
    rows = _rows(result, "budgets")
    lines = head(("model", "ranks", "plans", "budgets", "above", "least headroom"))
    for name, ranks in dict.fromkeys((r["model"], r["world_size"]) for r in rows):
        these = [r for r in rows if (r["model"], r["world_size"]) == (name, ranks)]
        left = [r["budget_bytes"] - max(map(max, r["measured_peak_bytes"])) for r in these]
        given = [r["budget_bytes"] for r in these]
        between = f"{format_bytes(min(given))} to {format_bytes(max(given))}"
        least = f"{min(left)} B"
        lines.append(row((name, str(ranks), str(len(these)), between, str(sum(n < 0 for n in left)), least)))
    return _signed(lines, result)


def interruptions_table(result: Result) -> str:
    """Return what became of trainings whose ranks were killed or ran out of memory."""
    lines = head(("what happens", "engine", "ranks", "times", "survived", "hangs"))
    for part, key in (("kills", "kills"), ("out of memory", "places")):
        for case in _rows(result, part):
            said = {"kills": "`kill -9` of a rank", "out of memory": "a rank runs out of memory"}[part]
            counts = (str(case["ranks"]), str(case[key]), str(case["survived"]), str(case["hangs"]))
            lines.append(row((said, case["engine"], *counts)))
    return _signed(lines, result)


def throughput_table(result: Result) -> str:
    """Return memfit's step against a loop written by hand."""
    lines = head(("engine", "steps", "memfit", "by hand", "ratio", "95 % interval"))
    for case in _rows(result, "throughput"):
        seconds = (f"{case['memfit_seconds'] * 1e3:.1f} ms", f"{case['by_hand_seconds'] * 1e3:.1f} ms")
        interval = f"{case['ratio_lower']:.3f} to {case['ratio_upper']:.3f}"
        lines.append(row((case["engine"], str(case["steps"]), *seconds, f"{case['ratio']:.3f}", interval)))
    return _signed(lines, result)


def choices_table(result: Result) -> str:
    """Return memfit's choice among shardings against the fastest of all that fit."""
    lines = head(("model", "budget", "memfit's choice", "its step", "best of all that fit", "ratio"))
    for case in _rows(result, "choices"):
        best = "nothing else fits" if case["best_seconds"] is None else f"{case['best_seconds'] * 1e3:.1f} ms"
        ratio = "" if case["ratio"] is None else f"{case['ratio']:.3f}"
        cells = (", ".join(case["memfit"]), f"{case['memfit_seconds'] * 1e3:.1f} ms", best, ratio)
        lines.append(row((case["model"], format_bytes(case["budget_bytes"]), *cells)))
    return _signed(lines, result)


def peers_table(result: Result) -> str:
    """Return the peaks and times of what else shares the same step, and FSDPMemTracker's predictions."""
    lines = head(("", "peak, largest rank", "step"))
    for case in _rows(result, "peers"):
        peak = format_bytes(max(case["measured_peak_bytes"]))
        lines.append(row((case["peer"], peak, f"{case['seconds'] * 1e3:.1f} ms")))
    lines += ["", *head(("prediction", "engine", "predicted", "measured", "error"))]
    for case in _rows(result, "predictions"):
        for name, predicted, measured in (
            ("memfit", case["memfit_peak_bytes"], case["measured_by_memfit_bytes"]),
            ("FSDPMemTracker", case["fsdp_mem_tracker_peak_bytes"], case["measured_by_hand_bytes"]),
        ):
            error = f"{predicted / measured - 1:+.2%}"
            lines.append(row((name, case["engine"], format_bytes(predicted), format_bytes(measured), error)))
    return _signed(lines, result)


def searches_table(result: Result) -> str:
    """Return how long searches for many ranks and cards take."""
    lines = head(("search", "model", "rows", "seconds", "processor seconds"))
    said = {"worlds": "1 to 64 ranks of one card, each", "fleet": "1 to 64 ranks of every card of the catalogue"}
    for case in _rows(result, "searches"):
        seconds = (f"{case['seconds']:.0f}", f"{case['processor_seconds']:.0f}")
        lines.append(row((said[case["case"]], f"GPT, {case['model']}", str(case["rows"]), *seconds)))
    return _signed(lines, result)


def _rows(result: Result, part: str) -> list[Case]:
    return [case for case in result["cases"] if case["part"] == part]


def _signed(lines: list[str], result: Result) -> str:
    return "\n".join([*lines, "", f"{made_by(result)}."])
