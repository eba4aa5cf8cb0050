"""What the injections add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Case = dict[str, Any]


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how many faults there were, were survived, lost updates or doubled them, and what was done again."""
    return {
        "injected": len(cases),
        "survived": sum(case["survived"] for case in cases),
        "updates_lost": sum(case["updates_lost"] for case in cases),
        "updates_doubled": sum(case["updates_doubled"] for case in cases),
        "without_restart": sum(len(case["statuses"]) == 1 for case in cases),
        "repeated_per_injection": sum(case["repeated"] for case in cases) / max(1, len(cases)),
    }


def table(cases: Sequence[Case]) -> str:
    """Return a line for each fault, in Markdown."""
    lines = [
        "| fault | injected | survived | updates lost | updates doubled | without a restart | run again, each |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in dict.fromkeys(case["fault"] for case in cases):
        *counts, repeated = summarised([case for case in cases if case["fault"] == fault]).values()
        lines.append(f"| {fault} | {' | '.join(map(str, counts))} | {repeated:.1f} |")
    return "\n".join(lines)
