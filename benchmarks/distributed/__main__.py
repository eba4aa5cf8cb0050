"""Steps that ranks share, on this machine over gloo: predicted peaks, the search's replay, and throughput.

Each rank has one thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Case, main
from benchmarks.distributed import budgets, choices, interruptions, peaks, peers, searches, throughput

PARTS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "peaks": peaks.cases,
    "replays": peaks.replays,
    "budgets": budgets.cases,
    "kills": interruptions.kills,
    "out of memory": interruptions.out_of_memory,
    "throughput": throughput.cases,
    "choices": choices.cases,
    "searches": searches.cases,
    "peers": peers.cases,
}


def run(
    quick: bool, parts: Sequence[str] = tuple(PARTS), keep: Path | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return the rows of some parts, and of a result file those of others, with what they add up to."""
    rows = [row for name in parts for row in PARTS[name](quick)]
    if keep is not None:
        made = {row["part"] for row in rows}
        rows = [row for row in json.loads(keep.read_text())["cases"] if row["part"] not in made] + rows
    summary: dict[str, Any] = {}
    for part in (peaks, budgets, interruptions, throughput, choices, searches):
        summary |= part.summarised(rows)
    return rows, summary


if __name__ == "__main__":
    main(
        "distributed",
        run,
        __doc__,
        options={
            "--parts": {"nargs": "+", "choices": list(PARTS), "default": list(PARTS), "help": "all by default"},
            "--keep": {"type": Path, "metavar": "FILE", "help": "a result of which the other parts are kept"},
        },
    )
