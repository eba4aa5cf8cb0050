"""The same models with the same weights and data in PyTorch and in Jittor, plain and planned: memory, time, losses.

Each run has a process of its own, with one thread. Jittor's needs `make test-jittor`, which makes its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Case, main
from benchmarks.frameworks.subject import SUBJECTS

ROOT = Path(__file__).parents[2]
JITTOR = ROOT / "build" / "jittor-venv" / "bin" / "python"


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model, framework and kind of step."""
    if not JITTOR.exists():
        sys.exit(f"{JITTOR} does not exist: run make test-jittor")
    names = [name for name in SUBJECTS if name.endswith("small") == quick]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for framework in ("torch", "jittor"):
                plain = _case(name, framework, 0, quick, Path(folder))
                budget = int(SUBJECTS[name].share * plain["own_peak_bytes"])
                cases += [plain, _case(name, framework, budget, quick, Path(folder))]
    return cases, _summary(cases)


def _case(name: str, framework: str, budget_bytes: int, quick: bool, folder: Path) -> Case:
    interpreter = sys.executable if framework == "torch" else str(JITTOR)
    out = folder / "out.json"
    arguments = [name, str(budget_bytes), "6" if quick else "10", str(folder / "weights.npz"), str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**20),  # or the C library keeps freed memory, and the system's peak says less
        "JITTOR_HOME": str(ROOT / "build" / "jittor-home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    command = [interpreter, "-m", f"benchmarks.frameworks.in_{framework}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} in {framework} failed: {done.stderr[-3000:]}")
    found = json.loads(out.read_text())
    print(f"{name}, {framework}, budget {budget_bytes}: {found['own_peak_bytes'] / 2**20:.0f} MiB", file=sys.stderr)
    return {"model": name, "framework": framework, **found}


def _summary(cases: list[Case]) -> dict[str, Any]:
    """Return, for each model, Jittor's figures over PyTorch's, and how far apart their losses are."""
    found: dict[str, Any] = {}
    by = {(c["model"], c["framework"], c["budget_bytes"] > 0): c for c in cases}
    for model in dict.fromkeys(case["model"] for case in cases):
        torch, jittor = by[model, "torch", False], by[model, "jittor", False]
        measures = ("own_peak_bytes", "added_process_bytes", "process_peak_bytes", "step_seconds")
        pairs = zip(torch["losses"], jittor["losses"], strict=True)
        found[model] = {
            **{f"plain_{key}_jittor_over_torch": jittor[key] / torch[key] for key in measures},
            "largest_relative_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
            **{
                f"{framework}_planned_over_plain": by[model, framework, True]["own_peak_bytes"]
                / by[model, framework, False]["own_peak_bytes"]
                for framework in ("torch", "jittor")
            },
            "over_budget": sum(
                by[model, f, True]["own_peak_bytes"] > by[model, f, True]["budget_bytes"] for f in ("torch", "jittor")
            ),
        }
    return found


if __name__ == "__main__":
    main("frameworks", run, __doc__)
