"""Rows that a run of hours measured before it was cut short, in a file of their own, so that the next one goes on."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import memfit
from benchmarks.common import Case
from memfit import ir

_PLACES = (Path(memfit.__file__).parent, Path(__file__).parents[1])


class Rows:
    """The rows of workloads that were measured, a line for each workload. Those of another memfit don't count.

    Args:
        path: Of the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._source, self._lock = path, source(), threading.Lock()
        text = path.read_text() if path is not None and path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        if path is not None and complete != text:  # the last line was cut short
            ir.codec.write_atomic(path, complete.encode())
        found = [json.loads(line) for line in complete.splitlines()]
        self._rows = {line["workload"]: line["rows"] for line in found if line["source"] == self._source}

    def of(self, workload: str) -> list[Case] | None:
        """Return the rows of a workload; None where it was not measured."""
        return self._rows.get(workload)

    def add(self, workload: str, rows: Sequence[Case]) -> None:
        """Write down the rows of a workload."""
        if self._path is None:
            return
        line = {"source": self._source, "workload": workload, "rows": list(rows)}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def source() -> str:
    """Return a digest of all that rows depend on: memfit and its benchmarks."""
    digest = hashlib.sha256()
    for place in _PLACES:
        for path in sorted(place.rglob("*.py")):
            digest.update(f"{path.relative_to(place)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
