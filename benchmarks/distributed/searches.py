"""How long it takes to plan for 1 to 64 ranks, and for every card of the catalogue: `benchmarks.fleet`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import fleet
from benchmarks.common import Case


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each search."""
    for row in fleet.run(quick, None)[0]:
        yield {"part": "searches", **row}


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    seconds = {row["case"]: row["seconds"] for row in rows if row["part"] == "searches"}
    return {"worlds_seconds": seconds.get("worlds"), "fleet_seconds": seconds.get("fleet")}
