"""The scripts, what is asked of each, and its row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 1200
start = subprocess.run
"""Starts a process; tests have forks of one that is warm."""
LARGER, GROWS, NO_PLAN = r"larger|as large|more than", r"grow", r"no plan"
WARNS = re.compile(
    r"over (its|the) budget|grow|larger than|no plan|not planned|can't be planned|nothing was promised"
    r"|no budget (is|was) held|budget (is|was) not applied",
    re.IGNORECASE,
)
"""What a line of memfit's has that tells of a budget which may be passed."""


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        kind: What it has that others have not.
        budget: Share of the plain script's peak.
        of_first: Whether that is its peak in the first three steps, and not in all.
        status: The exit status of `memfit run`.
        says: What memfit's lines must have, as a regular expression.
        runs: How many times it is started; it goes on where it ended.
    """

    kind: str
    budget: float
    of_first: bool = False
    status: int = 0
    says: str = ""
    runs: int = 1


_TURNS, _BATCHES, _MEMORY = "updates in turn", "batches grow", "memory grows"
TABLE = {
    "gan_in_turn": Script(_TURNS, 0.8),
    "td3_delayed_actor": Script(_TURNS, 0.8),
    "delayed_discriminator": Script(_TURNS, 0.8),
    "alternating_phases": Script(_TURNS, 0.7),
    "head_then_all": Script(_TURNS, 0.7),
    "gradient_penalty": Script(_TURNS, 0.9, status=3, says=NO_PLAN),  # what is within autograd is not recomputed
    "progressive_resizing": Script(_BATCHES, 0.7),
    "varied_sizes": Script(_BATCHES, 0.7),
    "padded_text": Script(_BATCHES, 0.8),
    "crowded_images": Script(_BATCHES, 0.8),
    "batch_warmup": Script(_BATCHES, 0.7),
    "accumulation_grows": Script(_BATCHES, 0.7),
    "losses_kept": Script(_MEMORY, 1.5, of_first=True, says=GROWS),
    "running_total": Script(_MEMORY, 1.5, of_first=True, says=GROWS),
    "features_banked": Script(_MEMORY, 1.5, of_first=True, says=GROWS),
    "outputs_kept": Script(_MEMORY, 1.5, of_first=True, says=GROWS),
    "replay_grows": Script(_MEMORY, 1.5, of_first=True, says=GROWS),
    "ema_by_hook": Script("an average of weights", 0.8),
    "ema_by_hand": Script("an average of weights", 0.8),
    "teacher_and_student": Script("several models", 0.8),
    "two_towers": Script("several models", 0.8),
    "accumulation": Script("accumulation", 0.8),
    "episodes": Script("accumulation", 0.9),
    "bad_batch_skipped": Script("exceptions caught", 0.7),
    "verdict_swallowed": Script("exceptions caught", 0.1, status=3, says=NO_PLAN),
    "evaluation_between": Script("evaluation between", 0.8),
    "loop_in_a_function": Script("a loop in a function", 0.7),
    "loop_in_a_class": Script("a loop in a class", 0.8),
    "generator_loop": Script("a loop in a generator", 0.7),
    "resumed": Script("resumed", 0.7, runs=2),
    "no_optimizer": Script("no optimizer", 0.8, status=2, says="torch.optim.Optimizer"),
    "held_beside": Script("held beside the step", 0.8),
    "lazy_mask": Script("caches filled late", 0.8),
    "two_optimizers": Script("two optimizers", 0.8),
    "saved_often": Script("checkpoints and copies", 0.8),
    "autocast_loop": Script("autocast", 0.8),
}


@dataclass(frozen=True)
class Run:
    """What a script did in a folder of its own.

    Attributes:
        status: Its exit status, of the last start.
        printed: Its own lines.
        told: memfit's lines.
        peaks: Bytes, before each update and after the last.
        plans: As of `benchmarks.field.metered`.
        weights: What it saved, by name.
    """

    status: int
    printed: tuple[str, ...]
    told: tuple[str, ...]
    peaks: tuple[int, ...]
    plans: tuple[dict[str, Any], ...]
    weights: dict[str, torch.Tensor]


def measured(name: str) -> Case:
    """Return the row of a script: as it is, then by `memfit run`, with the exact plans that this takes."""
    script = TABLE[name]
    plain = run(name, ["plain"], script.runs)
    budget_bytes = int(script.budget * max(plain.peaks[:3] if script.of_first else plain.peaks))
    fitted = run(name, ["run", "--budget", str(budget_bytes)], script.runs)
    over = sum(peak > budget_bytes for peak in fitted.peaks)
    told = [line for line in fitted.told if line.startswith(("memfit", "error:"))]
    row: Case = {
        "script": name,
        "kind": script.kind,
        "status": fitted.status,
        "as_asked": fitted.status == script.status and bool(re.search(script.says, "\n".join(fitted.told))),
        "steps": len(fitted.peaks) - script.runs,
        "budget_bytes": budget_bytes,
        "plain_peak_bytes": max(plain.peaks),
        "peaks": list(fitted.peaks),
        "plans": list(fitted.plans),
        "over_budget": over,
        "said": any(WARNS.search(line) for line in told),
        "same_parameters": fitted.status != 0 or _same(plain.weights, fitted.weights),
        "same_lines": fitted.status != 0 or plain.printed == fitted.printed,
        "told": told,
    }
    # Where batches grow, the last plan is for larger ones than came.
    is_for_these = script.kind != _MEMORY and not any("larger than planned" in line for line in told)
    if fitted.plans and is_for_these and not fitted.status:
        last = fitted.plans[-1]  # what the loop holds beside it is told, with the sum
        row["predicted_peak_bytes"] = last["predicted_peak_bytes"] + last["held_beside_bytes"]
        row["error"] = row["predicted_peak_bytes"] / max(fitted.peaks[last["updates"] :]) - 1
    return row


def run(name: str, way: Sequence[str], runs: int = 1) -> Run:
    """Run a script in a new folder, as often as is asked, and measure it.

    Raises:
        RuntimeError: It failed as it is.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    peaks: list[int] = []
    plans: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        report, saved = Path(folder, "report.json"), Path(folder, "last.pt")
        line = [sys.executable, "-m", "benchmarks.field.metered", str(report), *way, str(SCRIPTS / f"{name}.py")]
        for _ in range(runs):
            done = start(
                line, cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
            if way == ["plain"] and done.returncode:
                raise RuntimeError(f"{name} fails as it is:\n{done.stderr}")
            found = json.loads(report.read_text())
            plans += [plan | {"updates": plan["updates"] + len(peaks)} for plan in found["plans"]]
            peaks += found["peaks"]
        weights = dict(_tensors(torch.load(saved))) if saved.exists() else {}
    return Run(
        done.returncode,
        tuple(done.stdout.splitlines()),
        tuple(done.stderr.splitlines()),
        tuple(peaks),
        tuple(plans),
        weights,
    )


def _tensors(states: dict[str, dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for module, state in states.items():
        for name, tensor in state.items():
            yield f"{module}.{name}", tensor


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Tell whether two scripts ended with the same weights, bit by bit."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())
