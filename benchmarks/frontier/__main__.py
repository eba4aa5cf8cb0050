"""The frontier of time and memory on nine models: memfit's plans, and what others reach.

Each method's peak, parameters included, is what PyTorch's allocator reported of a steady step (on a GPU, what it
reserved); its time is that of a
step over the plain one's, run in turns; its gradients are held against the plain ones. A full run is long: rows are
written to a file as they come, and `--resume` takes the models that are not run from an earlier result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.frontier.cells import read, summarised
from benchmarks.frontier.methods import KINDS
from benchmarks.frontier.models import QUICK, SUBJECTS
from benchmarks.on_accelerator import python
from memfit.errors import UsageError

QUICK_SECONDS = 5.0
OPTIONS: dict[str, dict[str, Any]] = {
    "--models": {"nargs": "+", "metavar": "NAME", "help": f"of {', '.join(SUBJECTS)}"},
    "--kinds": {"nargs": "+", "choices": KINDS, "default": ["eager"], "help": "eager by default"},
    "--seconds": {
        "type": float,
        "default": 120.0,
        "help": "of timing each model and kind, after the first rounds",
    },
    "--threads": {
        "type": int,
        "default": torch.get_num_threads(),
        "help": "with 1, times are those of the process",
    },
    "--shares": {"nargs": "+", "type": float, "help": "budgets, of the plain step's peak; fewer than all"},
    "--device": {"default": "cpu", "help": "where the steps run: cpu, or cuda; write cuda's result elsewhere"},
    "--partial": {
        "type": Path,
        "default": Path("runs/frontier-partial.jsonl"),
        "metavar": "FILE",
        "help": "where rows are added as they come",
    },
    "--peers": {
        "type": Path,
        "metavar": "FILE",
        "help": "a result or a partial file, for kind all: of the peers, run those only that in FILE's rows of kinds"
        " eager and compiled may decide a cell of their own kind, of each kind the one with the lowest peak, and the"
        " plain ones. It spares compilations, of a minute or more each; a kind that FILE has no times of is run whole",
    },
    "--resume": {"type": Path, "metavar": "FILE", "help": "a result or a partial file: what is not run is from there"},
}


def run(
    quick: bool,
    models: Sequence[str] | None = None,
    kinds: Sequence[str] = ("eager",),
    seconds: float = 120.0,
    threads: int = 2,
    shares: Sequence[float] | None = None,
    device: str = "cpu",
    partial: Path = Path("runs/frontier-partial.jsonl"),
    peers: Path | None = None,
    resume: Path | None = None,
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each model, method and setting, and what they add up to.

    Raises:
        UsageError: There is no model of a name.
    """
    unknown = set(models or ()) - SUBJECTS.keys()
    if unknown:
        raise UsageError(f"--models {' '.join(sorted(unknown))}: there are {', '.join(SUBJECTS)}")
    wanted = list(models or (QUICK if quick else SUBJECTS))
    earlier = [] if resume is None else read(resume)
    timing = ["--seconds", str(QUICK_SECONDS if quick else seconds), "--threads", str(threads)]
    options = ["--kinds", *kinds, *timing, *(["--quick"] * quick), "--device", device]
    options += [] if shares is None else ["--shares", *map(str, shares)]
    options += [] if peers is None else ["--peers", str(peers)]
    rows = []
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a") as file:
        for name in wanted:
            for row in isolated(name, options, device):
                print(json.dumps(row), file=file, flush=True)
                rows.append(row)
    merged = merge(earlier, rows)
    return merged, summarised(merged)


def merge(earlier: Sequence[Case], rows: Sequence[Case]) -> list[Case]:
    """Return the rows by model, where those of a model and kind that were run anew take the place of earlier ones."""
    latest: dict[tuple[str, str], list[Case]] = {}
    for source in (earlier, rows):
        found: dict[tuple[str, str], list[Case]] = {}
        for row in source:
            found.setdefault((row["model"], row["kind"]), []).append(row)
        latest |= found
    order = sorted(latest, key=lambda key: (list(SUBJECTS).index(key[0]), KINDS.index(key[1])))
    return [row for key in order for row in latest[key]]


def isolated(name: str, options: Sequence[str], device: str = "cpu") -> Iterator[Case]:
    """Yield the rows of a model from a process of its own, as they come.

    Raises:
        RuntimeError: The process ended with an error; the rows before it are in the partial file.
    """
    command = [*python(device), "benchmarks.frontier.subject", name, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        print(f"{name} ended with status {process.returncode}: its later rows are missing", file=sys.stderr)


if __name__ == "__main__":
    main("frontier", run, __doc__, options=OPTIONS)
