"""Predictions held against measurements that other people published, of training steps on real GPUs.

Each row of `rows.toml` is rebuilt and predicted in a process with fake CUDA tensors, and held against the published
figure of its kind: allocated, reserved, or the whole process with the context. `docs/results/published.md` shows them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.packages.__main__ import PYTHON
from benchmarks.processes import output_of
from benchmarks.published.figures import compared, summarised
from benchmarks.published.rows import Row, sources
from benchmarks.steps.rows import source as digest
from memfit import hardware
from memfit.errors import UsageError

QUICK = ("LK-01", "LK-03", "LK-19", "LS-08")
TIMEOUT_SECONDS = 1200
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "metavar": "ID", "help": "rows whose id begins so"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
}


def run(quick: bool, only: Sequence[str] | None = None, rows: Path | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each published row, and what they add up to.

    Args:
        quick: A few rows.
        only: Rows whose id begins so; None for all.
        rows: A file with those that were predicted before; None for none.

    Raises:
        UsageError: No row has such an id, or packages are not installed.
    """
    torch.set_num_threads(1)  # as in the processes; the result says how many
    every = sources()
    wanted = tuple(only or (QUICK if quick else ("",)))
    chosen = {name: [row for row in source.rows if row.id.startswith(wanted)] for name, source in every.items()}
    if not any(chosen.values()):
        raise UsageError(f"--only {' '.join(wanted)}: no row's id begins so")
    if any(row.environment for found in chosen.values() for row in found) and not PYTHON.exists():
        raise UsageError(f"the packages are not installed: {PYTHON} does not exist; run `make packages` first")
    before = _Kept(rows)
    cases = []
    for name, found in chosen.items():
        for row, case in _predicted(found, before):
            cases.append(compared(name, row, case))
            print(line(cases[-1]), file=sys.stderr, flush=True)
    return cases, summarised(cases, every)


class _Kept:
    """Predictions that were made before by the same memfit, a line each."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.digest = path, digest()
        text = path.read_text() if path is not None and path.exists() else ""
        found = [json.loads(part) for part in text[: text.rfind("\n") + 1].splitlines()]
        self.cases = {case["id"]: case for case in found if case["digest"] == self.digest}

    def add(self, case: Case) -> None:
        """Write a prediction down."""
        if self.path is not None and "failed" not in case:
            with self.path.open("a") as file:
                file.write(json.dumps({**case, "digest": self.digest}) + "\n")


def _predicted(rows: Sequence[Row], before: _Kept) -> Iterator[tuple[Row, Case]]:
    """Yield the prediction of each row. Neighbours share a process; where it dies, the next begins a new one."""
    left = list(rows)
    while left:
        if left[0].id in before.cases:
            row = left.pop(0)
            yield row, before.cases[row.id]
            continue
        environment = left[0].environment
        count = next(
            (i for i, row in enumerate(left) if row.environment != environment or row.id in before.cases), None
        )
        batch = left[:count]
        output = output_of(_command(batch), TIMEOUT_SECONDS)
        for row, case in zip(batch, output.rows, strict=False):
            before.add(case)
            yield row, case
        left = left[len(output.rows) :]
        if len(output.rows) < len(batch):
            print(output.notices, file=sys.stderr)
            yield left.pop(0), {"id": batch[len(output.rows)].id, "failed": output.end}


def _command(rows: Sequence[Row]) -> list[str]:
    """Return the command that predicts rows of one environment."""
    command = hardware.shim.command("benchmarks.published.case", *(row.id for row in rows))
    return [str(PYTHON), *command[1:]] if rows[0].environment else command


def line(case: Case) -> str:
    """Return a row in words."""
    if "failed" in case:
        return f"{case['id']:<34} FAILED {case['failed']}"
    told = [f"{name} {error:+.2%}" for name, error in case["errors"].items()]
    told += [f"fits {case['fits']}, was {case['published_fits']}"] if "published_fits" in case else []
    return f"{case['id']:<34} {'  '.join(told)}"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(sys.path[:1]))
    main("published", run, __doc__, options=OPTIONS)
