"""What the docs' tables are written with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def row(cells: Iterable[str]) -> str:
    """Return a table's row."""
    return f"| {' | '.join(cells)} |"


def head(headings: Iterable[str]) -> list[str]:
    """Return a table's first two lines."""
    cells = list(headings)
    return [row(cells), row(["---"] * len(cells))]


def made_by(result: dict[str, Any]) -> str:
    """Return the command, machine, version and day of a result."""
    machine, threads = result["machine"], result["machine"]["threads"]
    where = f"{name} in a machine with {machine['description']}" if (name := machine.get("accelerator")) else ""
    return (
        f"`{result['command']}`, {where or machine['description']}, {threads} thread{'s' * (threads > 1)},"
        f" torch {result['versions']['torch']}, {result['date']}"
    )
