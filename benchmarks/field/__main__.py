"""Training scripts as people write them, run by `memfit run` as they are: each step's peak, from outside memfit.

Each script runs in a process of its own, as it is and then in a budget that is a share of its own peak. Truth is what
PyTorch's CPU allocator reported to the profiler, between each two updates by an optimizer, all that the process holds
included. A step above its budget is silent where memfit told nothing of it. The scripts lie in
`benchmarks/field/scripts`; no line of them knows memfit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import Case, main
from benchmarks.field.cases import TABLE, measured
from benchmarks.field.figures import line, summarised
from benchmarks.field.watching import overhead
from benchmarks.steps.rows import Rows
from memfit.errors import UsageError

QUICK = ("gan_in_turn", "varied_sizes", "losses_kept")
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "metavar": "NAME", "help": "some scripts"},
    "--jobs": {"type": int, "default": 1, "help": "scripts at a time, each on one thread; 1 by default"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
}


def run(
    quick: bool, only: Sequence[str] | None = None, jobs: int = 1, rows: Path | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row of each script, and what they add up to.

    Args:
        quick: A few scripts.
        only: The scripts of these names; None for all.
        jobs: Scripts at a time.
        rows: A file with those that were measured before; None for none.

    Raises:
        UsageError: There is no script of a name.
    """
    unknown = set(only or ()) - TABLE.keys()
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(TABLE)}")
    before = Rows(rows)

    def told(name: str) -> Case:
        found = before.of(name)
        if found is None:
            found = [measured(name)]
            before.add(name, found)
        print(line(found[0]), file=sys.stderr, flush=True)
        return found[0]

    with ThreadPoolExecutor(jobs) as pool:
        cases = list(pool.map(told, only or (QUICK if quick else TABLE)))
    return cases, summarised(cases) | {"watching_overhead": overhead(30 if quick else 400)}


if __name__ == "__main__":
    main("field", run, __doc__, options=OPTIONS)
