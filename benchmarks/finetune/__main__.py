"""Fine-tuning on one card: memfit's plans beside the stacks that people put together by hand, and an 8 B on paper.

A small Llama runs on the CPU, where peaks are what PyTorch's allocator reported and times those of the processor, in
turns. The stacks are written from the papers (`benchmarks.finetune.peers`). A Llama of 8 billion parameters is planned
for cards that are not here. Each part has a process of its own, and goes without another's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.finetune import figures
from benchmarks.finetune.parts import PARTS, QUICK
from benchmarks.processes import output_of
from benchmarks.steps.rows import Rows
from memfit.errors import UsageError

MINUTES = 120.0
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "metavar": "NAME", "help": "some parts, such as 'cpu, 4k tokens' or lora_8k_gib"},
    "--minutes": {"type": float, "default": MINUTES, "help": f"that a part may take; {MINUTES:g} by default"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
}


def run(
    quick: bool, only: Sequence[str] | None = None, minutes: float = MINUTES, rows: Path | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return the rows of all parts, and what they add up to.

    Args:
        quick: A smaller model, and slices of 2 and 4 layers.
        only: Parts of these names; None for all.
        minutes: That a part may take.
        rows: A file with those that were found before; None for none.

    Raises:
        UsageError: There is no part of a name.
    """
    parts = QUICK if quick else PARTS
    unknown = set(only or ()) - parts.keys()
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(parts)}")
    torch.set_num_threads(1)  # as in the processes; the result says how many
    before, cases = Rows(rows), list[Case]()
    for name in only or parts:
        found = before.of(name)
        if found is None:
            print(name, file=sys.stderr, flush=True)
            output = output_of([sys.executable, "-m", "benchmarks.finetune.parts", name], 60 * minutes)
            found = output.rows
            print(output.notices, file=sys.stderr, flush=True)
            if output.end == "exit status 0":
                before.add(name, found)
            else:
                found = [*found, {"part": name, "error_message": output.end}]
        cases += found
    return cases, figures.summarised(cases)


if __name__ == "__main__":
    main("finetune", run, __doc__, options=OPTIONS)
