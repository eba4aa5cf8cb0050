"""The scripts, how they are started, and their rows."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Case

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 1800
BUDGETS = {"resnet18": "0.8x", "gpt2": "0.7x", "diffusion": "0.7x", "yolov8n": "0.8x"}
"""Each script's budget, as a share of its plain step's peak."""
MOST_STEPS, MOST_SECONDS, MOST_AGAIN_SECONDS = 10, 15.0, 3.0
"""What the first start may cost, plain steps or seconds, whichever is longer, and what the second may."""
start = subprocess.run
"""Starts a process; tests have forks of one that is warm."""


class Clocks(NamedTuple):
    """A run of a script.

    Attributes:
        wall_seconds: From its start to the end of each step.
        processor_seconds: That it and its children used until then.
    """

    wall_seconds: list[float]
    processor_seconds: list[float]


def measured(name: str) -> Case:
    """Return a script's row: as it is, then by `memfit run` without any kept costs and plans, and again with them."""
    with tempfile.TemporaryDirectory() as cache:
        plain = run(name, ["plain"], cache)
        first = run(name, ["run", "--budget", BUDGETS[name]], cache)
        second = run(name, ["run", "--budget", BUDGETS[name]], cache)
    steps = [after - before for before, after in zip(plain.wall_seconds[1:], plain.wall_seconds[2:], strict=False)]
    step_seconds = statistics.median(steps)
    row: Case = {"script": name, "budget": BUDGETS[name], "plain_step_seconds": step_seconds}
    for kind, clocks in (("plain", plain), ("first", first), ("second", second)):
        row[f"{kind}_seconds"] = clocks.wall_seconds[1]
        row[f"{kind}_processor_seconds"] = clocks.processor_seconds[1]
    for kind, most in (("first", max(MOST_STEPS * step_seconds, MOST_SECONDS)), ("second", MOST_AGAIN_SECONDS)):
        row[f"{kind}_costs_seconds"] = row[f"{kind}_seconds"] - row["plain_seconds"]
        row[f"{kind}_costs_processor_seconds"] = row[f"{kind}_processor_seconds"] - row["plain_processor_seconds"]
        row[f"{kind}_is_within"] = row[f"{kind}_costs_seconds"] <= most
    return row


def run(name: str, way: list[str], cache: str) -> Clocks:
    """Run a script in a new folder, with a folder for what memfit keeps.

    Raises:
        RuntimeError: It failed.
    """
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "MEMFIT_CACHE_DIR": cache,
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        line = [sys.executable, "-m", "benchmarks.start.clocked", str(report), *way, str(SCRIPTS / f"{name}.py")]
        started = time.monotonic()
        done = start(
            line, cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} fails by {' '.join(way)}:\n{done.stderr}")
        clocks = json.loads(report.read_text())
    return Clocks([wall - started for wall, _ in clocks], [processor for _, processor in clocks])


def line(case: Case) -> str:
    """Return a row as people read it."""
    told = f"{case['script']:<12} plain step {case['plain_step_seconds']:6.2f} s"
    for kind in ("first", "second"):
        told += f"   {kind} start {case[f'{kind}_costs_seconds']:6.1f} s more"
        told += f" ({case[f'{kind}_costs_processor_seconds']:.1f} s of processors)"
        told += "" if case[f"{kind}_is_within"] else " TOO LONG"
    return told


def summarised(cases: list[Case]) -> dict[str, float]:
    """Return the figures that the docs quote."""
    return {
        "scripts": len(cases),
        "first_within": sum(case["first_is_within"] for case in cases),
        "second_within": sum(case["second_is_within"] for case in cases),
        "first_costs_seconds_at_most": max(case["first_costs_seconds"] for case in cases),
        "second_costs_seconds_at_most": max(case["second_costs_seconds"] for case in cases),
        "first_costs_steps_at_most": max(case["first_costs_seconds"] / case["plain_step_seconds"] for case in cases),
    }
