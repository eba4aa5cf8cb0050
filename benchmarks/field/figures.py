"""The figures of the scripts, from their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import Case
from benchmarks.markdown import head, made_by, row

WITHIN = 0.01


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    over = [case for case in cases if case["over_budget"]]
    errors = [abs(case["error"]) for case in cases if "error" in case]
    return {
        "scripts": len(cases),
        "as_asked": sum(case["as_asked"] for case in cases),
        "steps": sum(case["steps"] for case in cases),
        "over_budget_silent": sum(not case["said"] for case in over),
        "over_budget_said": sum(case["said"] for case in over),
        "same_parameters": sum(case["same_parameters"] and case["same_lines"] for case in cases),
        "predicted": len(errors),
        "predicted_within_1_percent": sum(error <= WITHIN for error in errors) / len(errors) if errors else None,
    }


def line(case: Case) -> str:
    """Return a row as people read it."""
    told = (
        f"{case['script']:<24}{case['kind']:<24} {max(case['peaks'], default=0) / 2**20:7.1f} of"
        f" {case['budget_bytes'] / 2**20:7.1f} MiB, plain {case['plain_peak_bytes'] / 2**20:7.1f}"
    )
    told += f"  predicted {case['error']:+.2%}" if "error" in case else ""
    if case["over_budget"]:
        told += (
            f"  OVER BUDGET in {case['over_budget']} of {case['steps']} steps, {'said' if case['said'] else 'SILENT'}"
        )
    told += "" if case["as_asked"] else f"  NOT AS ASKED (status {case['status']})"
    return told + ("" if case["same_parameters"] and case["same_lines"] else "  NOT THE SAME")


def table(result: dict[str, Any]) -> str:
    """Return a line for each kind of script, in Markdown."""
    lines = head(("scripts", "number", "steps", "over their budget, said", "silent", "same weights", "largest error"))
    for kind in dict.fromkeys(case["kind"] for case in result["cases"]):
        cases = [case for case in result["cases"] if case["kind"] == kind]
        figures = summarised(cases)
        errors = [abs(case["error"]) for case in cases if "error" in case]
        counts = ("scripts", "steps", "over_budget_said", "over_budget_silent", "same_parameters")
        lines.append(row((kind, *(str(figures[n]) for n in counts), f"{max(errors):.2%}" if errors else "–")))
    summary = result["summary"]
    within = "–" if summary["predicted_within_1_percent"] is None else f"{summary['predicted_within_1_percent']:.0%}"
    return "\n".join(
        [
            *lines,
            "",
            f"{summary['as_asked']} of {summary['scripts']} ended as they should. {within} of {summary['predicted']}"
            f" predictions are within 1 %. A watched step needs ×{summary['watching_overhead']:.3f} a plain one's"
            f" processor time. {made_by(result)}.",
        ]
    )
