"""The benchmark's parts, each in a process of its own: `python -m benchmarks.finetune.parts NAME`, one row a line."""

from __future__ import annotations

import argparse
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable

import torch

from benchmarks.common import Case
from benchmarks.finetune import combinations, curves, measured, paper, published
from benchmarks.finetune.models import SMALL, TINY
from benchmarks.finetune.stacks import ALST, ALST_HOST, LIGER, STACKS

Part = Callable[[], Iterable[Case]]

_LONG = (LIGER, ALST, ALST_HOST)
_LAST_SLICE = {setup.key: functools.partial(paper.extrapolated, setup) for setup in paper.SETUPS}

QUICK: dict[str, Part] = {
    "cpu, tiny, 512 tokens": functools.partial(measured.rows, TINY, 512, STACKS, classes=("reordered",), rounds=3),
    "slices of lora_8k_gib": _LAST_SLICE["lora_8k_gib"],
}
"""About two minutes on two quiet cores."""

PARTS: dict[str, Part] = {
    "cpu, 4k tokens": functools.partial(measured.rows, SMALL, 4096, STACKS),
    "cpu, LoRA, 4k tokens": functools.partial(
        measured.rows, SMALL, 4096, _LONG, lora=True, classes=("reordered",), rounds=3
    ),
    "cpu, 16k tokens": functools.partial(measured.rows, SMALL, 16_384, _LONG, classes=("reordered",), rounds=1),
    "combinations": combinations.rows,
    "published": published.rows,
    "curves, finetune": functools.partial(curves.rows, curves.FINETUNE),
    "curves, sentence_encoder": functools.partial(curves.rows, curves.ENCODER),
    **{f"slices of {key}": part for key, part in _LAST_SLICE.items()},
    "fits lora_8k_gib": lambda: [paper.fitting(paper.SETUPS[0])],
    **{setup.key: functools.partial(lambda setup: [paper.lowest(setup)], setup) for setup in paper.SETUPS},
    **{f"context on {device}": functools.partial(paper.context, device) for device in paper.UNSLOTH},
}
"""All of them: those on the CPU take minutes, those of 32 layers as long as a plan of 8 B takes."""


def main() -> None:
    """Print the rows of a part as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune.parts", description=__doc__)
    parser.add_argument("name", choices=[*QUICK, *PARTS])
    part = {**QUICK, **PARTS}[parser.parse_args().name]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # of which the process's time is told
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print notices
    for row in part():
        if "setup" in row:
            paper.report(row)
        if "recipe" in row:
            curves.report(row)
        print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
