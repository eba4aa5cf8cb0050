"""Steps that ranks share, on this machine over gloo: predicted peaks, the search's replay, and throughput.

Each rank has one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common import Case, main
from benchmarks.distributed import peaks, throughput

PARTS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "peaks": peaks.cases,
    "replays": peaks.replays,
    "throughput": throughput.cases,
}


def run(quick: bool, parts: Sequence[str] = tuple(PARTS)) -> tuple[list[Case], dict[str, Any]]:
    """Return the rows of some parts, and what they add up to."""
    rows = [row for name in parts for row in PARTS[name](quick)]
    return rows, peaks.summarised(rows) | throughput.summarised(rows)


if __name__ == "__main__":
    main(
        "distributed",
        run,
        __doc__,
        options={"--parts": {"nargs": "+", "choices": list(PARTS), "default": list(PARTS), "help": "all by default"}},
    )
