"""Steps that nobody tuned memfit on: a second zoo, predicted, planned, and held against a plain loop bit by bit.

Each workload runs in a process of its own. Measured are its plain step and two plans: an exact one for 0.6 of the plain
peak, and a reordered one for 0.45, or for the lowest budget that fits. Truth is the peak that PyTorch's CPU allocator
reported to the profiler over a whole run of two steps. Every exact plan trains beside a loop written by hand: losses,
parameters and buffers must be equal, bit by bit, after two steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.processes import output_of
from benchmarks.steps.cases import KINDS
from benchmarks.steps.figures import line, summarised
from benchmarks.steps.rows import Rows
from memfit.errors import UsageError

TABLE = "benchmarks.steps.zoo:STEPS"
QUICK = (
    *("nearest_points", "hard_pixels", "running_weights", "carried_state", "stacked_codes"),
    *("sparse_bags", "dilated_convolutions", "adversarial_training", "graph_convolution", "packed_lstm"),
)
TIMEOUT_SECONDS = 600
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "metavar": "NAME", "help": "some workloads"},
    "--jobs": {"type": int, "default": 1, "help": "workloads at a time, each on one thread; 1 by default"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
}


def run(
    quick: bool, only: Sequence[str] | None = None, jobs: int = 1, rows: Path | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return the rows of each workload, and what they add up to.

    Args:
        quick: A few workloads.
        only: The workloads of these names; None for all.
        jobs: Workloads at a time.
        rows: A file with those that were measured before; None for none.

    Raises:
        UsageError: The zoo has no workload of a name.
    """
    from benchmarks.steps.zoo import STEPS

    unknown = set(only or ()) - STEPS.keys()
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: the zoo has {', '.join(STEPS)}")
    torch.set_num_threads(1)  # as in the processes; the result says how many
    cases = measured(only or (QUICK if quick else STEPS), TABLE, jobs=jobs, before=Rows(rows))
    return cases, summarised(cases)


def measured(
    names: Iterable[str], table: str, python: str = sys.executable, jobs: int = 1, before: Rows | None = None
) -> list[Case]:
    """Return the rows of some workloads in their order, those of each told when they are there.

    Args:
        names: Of the workloads.
        table: Where they are: "package.module:attribute".
        python: The interpreter that their packages are installed for.
        jobs: Workloads at a time.
        before: Has those that were measured before, and takes new ones.
    """
    before = before or Rows(None)

    def told(name: str) -> list[Case]:
        rows = before.of(name)
        if rows is None:
            rows = list(isolated(name, table, python))
            if all("seconds" in row for row in rows):  # of a process that died there is nothing to keep
                before.add(name, rows)
        print("\n".join(map(line, rows)), file=sys.stderr, flush=True)
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(told, names) for row in rows]


def isolated(name: str, table: str, python: str = sys.executable) -> Iterator[Case]:
    """Yield the rows of a workload from a process of its own; those that it dies before are refusals."""
    output = output_of([python, "-m", "benchmarks.steps.cases", table, name], TIMEOUT_SECONDS)
    yield from output.rows
    if len(output.rows) < len(KINDS) or any("refused" in row for row in output.rows):
        print(output.notices, file=sys.stderr)
    for kind in KINDS[len(output.rows) :]:
        yield {"workload": name, "kind": kind, "refused": output.end}


if __name__ == "__main__":
    main("steps", run, __doc__, options=OPTIONS)
