"""How long it takes to plan a GPT of a billion parameters for 1 to 64 ranks, and for every card of the catalogue."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import memfit
from benchmarks.common import Case, main
from examples.large_gpt import gpt
from memfit.ir import Fleet

BATCH_SIZE = 64
STEPS = 10_000
SIZES = {"1 B": {"n_layer": 24, "width": 1792, "n_head": 14}, "0.1 B": {"n_layer": 12, "width": 768, "n_head": 12}}
SEARCHES: dict[str, dict[str, Any]] = {
    "worlds": {"devices": ["a100-80gb"], "world_sizes": range(1, 65), "each": True},
    "fleet": {"devices": None, "world_sizes": range(1, 65)},
}


def run(quick: bool, only: str | None) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each search, or for one; `--quick` takes a GPT of 0.1 billion parameters."""
    cases = [_case(name, "0.1 B" if quick else "1 B") for name in SEARCHES if only in (None, name)]
    summary = {f"{case['case']}_seconds": case["seconds"] for case in cases}
    return cases, summary | {f"{case['case']}_processor_seconds": case["processor_seconds"] for case in cases}


def _case(name: str, size: str) -> Case:
    with torch.device("meta"):
        workload = gpt(f"gpt {size}", batch_size=BATCH_SIZE, **SIZES[size])
    started, before = time.perf_counter(), _processor_seconds()
    options = SEARCHES[name]
    found = memfit.fleet(workload, steps=STEPS, within="24h", numerics="reduced", **options)
    case = {
        "case": name,
        "model": size,
        "seconds": time.perf_counter() - started,
        "processor_seconds": _processor_seconds() - before,
        "load_average": os.getloadavg()[0],
        "rows": len(found.rows),
        "misfits": len(found.misfits),
        "answers": found.answers(),
    }
    print(f"{name:<8}{case['seconds']:7.1f} s, {_said(found)}", file=sys.stderr, flush=True)
    return case


def _processor_seconds() -> float:
    """Return the time that this process and those that it waited for had a processor."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _said(found: Fleet) -> str:
    row = found.fewest or found.fastest
    assert row is not None
    return f"{len(found.rows)} rows, the fewest {row.ranks} x {row.device} in {row.hours:.1f} h"


if __name__ == "__main__":
    main("fleet", run, __doc__, {"--only": {"choices": list(SEARCHES), "help": "One of the searches."}})
