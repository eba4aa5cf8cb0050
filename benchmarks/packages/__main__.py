"""Steps of other people's packages: a third zoo, predicted, planned, and held against a plain loop bit by bit.

The packages have an environment of their own, which `make packages` makes. The rows and their figures are those of
`benchmarks.steps`, which says how each is measured; a row also names its package and the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.packages.zoo import PACKAGES, STEPS
from benchmarks.steps.__main__ import OPTIONS, measured
from benchmarks.steps.figures import summarised
from benchmarks.steps.rows import Rows
from memfit.errors import UsageError

TABLE = "benchmarks.packages.zoo:STEPS"
PYTHON = Path(__file__).parents[2] / "build" / "packages-venv" / "bin" / "python"
"""The interpreter that the packages are installed for."""
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
QUICK = ("vit_lion", "mined_triplets", "finite_scalars")


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
        UsageError: The zoo has no workload of a name, or the packages are not installed.
    """
    unknown = set(only or ()) - STEPS.keys()
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: the zoo has {', '.join(STEPS)}")
    if not PYTHON.exists():
        raise UsageError(f"the packages are not installed: {PYTHON} does not exist; run `make packages` first")
    torch.set_num_threads(1)  # as in the processes; the result says how many
    versions = pinned(REQUIREMENTS.read_text())
    found = measured(only or (QUICK if quick else STEPS), TABLE, str(PYTHON), jobs, Rows(rows))
    cases = [{**row, "package": f"{(name := PACKAGES[row['workload']])} {versions[name]}"} for row in found]
    return cases, summarised(cases)


def pinned(requirements: str) -> dict[str, str]:
    """Return the version of each package by its name, from lines such as "kornia==0.9.0"."""
    lines = (line.partition("#")[0].strip() for line in requirements.splitlines())
    return dict(line.split("==") for line in lines if line)


if __name__ == "__main__":
    main("packages", run, __doc__, options=OPTIONS)
