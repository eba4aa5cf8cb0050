"""The same models with the same weights and data in PyTorch and in Jittor, plain and planned: memory, time, losses.

Each run has a process of its own, with one thread. Jittor's needs `make test-jittor`, which makes its environment. With
--keras, the ways to save memory in Keras are compared instead, which needs `make test-keras`.
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
KERAS = ROOT / "build" / "keras-venv" / "bin" / "python"
KERAS_SUBJECTS = ("U-Net 2-D", "Transformer")


def run(quick: bool, keras: bool = False) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model, framework and kind of step."""
    if keras:
        return _run_keras(quick)
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


def _run_keras(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model and way to save memory in Keras."""
    if not KERAS.exists():
        sys.exit(f"{KERAS} does not exist: run make test-keras")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_ENABLE_ONEDNN_OPTS": "1",  # or TensorFlow counts no memory of processors without AVX512-VNNI
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    cases: list[Case] = []
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (f"{subject}, small" if quick else subject for subject in KERAS_SUBJECTS):
            out = Path(folder) / "out.json"
            command = [str(KERAS), "-m", "benchmarks.frameworks.in_keras", name, "5" if quick else "7", str(out)]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} in Keras failed: {done.stderr[-3000:]}")
            found = json.loads(out.read_text())
            cases += found["cases"]
            summary["versions"] = found["versions"]
            summary[name] = {c["way"]: _ratios(c, found["cases"][0]) for c in found["cases"][1:]}
            print(f"{name}, Keras: {len(found['cases'])} cases", file=sys.stderr)
    summary["over_budget"] = sum(c["own_peak_bytes"] > c["budget_bytes"] > 0 for c in cases)
    return cases, summary


def _ratios(case: Case, plain: Case) -> dict[str, float]:
    return {f"{key}_over_plain": case[key] / plain[key] for key in ("own_peak_bytes", "step_seconds")}


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
    flag = {"action": "store_true", "help": "compare ways to save memory in Keras instead"}
    main("frameworks", run, __doc__, options={"--keras": flag})
