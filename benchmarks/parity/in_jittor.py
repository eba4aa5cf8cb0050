"""Does a training in Jittor end the same under each lever of `memfit.jittor`, and what is the freed memory good for?

A residual network learns handwritten digits in Jittor's own environment, which `make test-jittor` makes: plainly and
under each lever, once for each seed. Each condition has a process of its own, with one thread. Verdicts are those of
the study in PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from benchmarks.common import Case, main
from benchmarks.frameworks.__main__ import JITTOR, ROOT
from benchmarks.markdown import head, made_by, row
from benchmarks.parity.equivalence import compare
from benchmarks.parity.figures import verdict_text
from benchmarks.steps.rows import Rows
from memfit.foundations import format_bytes

SEEDS, USE_SEEDS, STEPS, USE_SECONDS = 5, 3, 60, 5.0
MARGIN = 0.015
"""As digits_resnet's in the study in PyTorch: 5 of the 360 held-out images."""

CONDITIONS = {
    "plain": "plain, fp32",
    "exact": "plan that recomputes",
    "lean": "normalisations recomputed (`structure.lean_regions`)",
    "microbatches": "4 microbatches",
    "16-mixed": "16-mixed, dynamic loss scaling",
    "plain, strict": "plain, kernels without fast mathematics",
    "exact, strict": "plan that recomputes, kernels without fast mathematics",
}
"""The strict ones are held against one another."""

PLAIN_USE = {"channels": 16, "blocks": 6, "batch_size": 128}
USES: dict[str, dict[str, int]] = {
    "batch of 256 in place of 128": {**PLAIN_USE, "batch_size": 256},
    "24 channels in place of 16": {**PLAIN_USE, "channels": 24},
}


def run(quick: bool, rows: Path | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each run, verdict and use, and the figures.

    Args:
        rows: A file with rows that were measured before, which grows by each condition; None for none.
    """
    if not JITTOR.exists():
        sys.exit(f"{JITTOR} does not exist: run make test-jittor")
    torch.set_num_threads(1)
    before, cases = Rows(rows), list[Case]()
    seeds, steps = (2, 6) if quick else (SEEDS, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        digits = load_digits()
        np.savez(Path(folder) / "digits.npz", x=digits.images, y=digits.target)
        for condition in CONDITIONS:
            name, _, strict = condition.partition(", ")
            asked = {"condition": name, "seeds": seeds, "steps": steps, **({"strict": True} if strict else {})}
            cases += [{"kind": "run", **one, "condition": condition} for one in _asked(asked, Path(folder), before)]
        for title, larger in {} if quick else USES.items():
            asked = {"plain": PLAIN_USE, "larger": larger, "seeds": USE_SEEDS, "seconds": USE_SECONDS}
            cases += [{"kind": "use", "use": title, **judged(one)} for one in _asked(asked, Path(folder), before)]
    cases += verdicts(cases)
    return cases, summary_of(cases)


def _asked(asked: Case, folder: Path, before: Rows) -> list[Case]:
    """Return the rows of a process in Jittor's environment."""
    key = json.dumps(asked)
    found = before.of(key)
    if found is None:
        out, home = folder / "out.json", str(ROOT / "build" / "jittor-home")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOME": home,
            "JITTOR_HOME": home,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        given = json.dumps({**asked, "digits": str(folder / "digits.npz")})
        command = [str(JITTOR), "-m", "benchmarks.parity.jittor_runs", given, str(out)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{key} failed: {done.stderr[-3000:]}")
        found = list[Case](json.loads(out.read_text()))
        before.add(key, found)
        print(f"{key}: {[one.get('metric', one.get('levers')) for one in found]}", file=sys.stderr, flush=True)
    return found


def judged(found: Case) -> Case:
    """Return a use with the means of its runs; it `pays` where the planned ones are at least as good."""
    if "infeasible" in found:
        return {**found, "pays": False}
    means = {w: statistics.fmean(r["metric"] for r in found["runs"] if r["way"] == w) for w in ("plain", "planned")}
    return {**found, "means": means, "pays": means["planned"] >= means["plain"]}


def verdicts(cases: Sequence[Case]) -> list[Case]:
    """Return for each condition whether it ends as the plain one does."""
    runs = [case for case in cases if case["kind"] == "run"]
    found = []
    for condition in dict.fromkeys(case["condition"] for case in runs if not case["condition"].startswith("plain")):
        plain = {case["seed"]: case for case in runs if case["condition"] == _plain_of(condition)}
        pairs = [(plain[case["seed"]], case) for case in runs if case["condition"] == condition]
        said = compare([case["metric"] - before["metric"] for before, case in pairs], MARGIN)
        found.append(
            {
                "kind": "verdict",
                "condition": condition,
                "margin": MARGIN,
                **dataclasses.asdict(said),
                "seeds": len(pairs),
                "bitwise": sum(case["weights"] == before["weights"] for before, case in pairs),
            }
        )
    return found


def _plain_of(condition: str) -> str:
    return "plain, strict" if condition.endswith("strict") else "plain"


def summary_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures."""
    said = [case for case in cases if case["kind"] == "verdict"]
    count = Counter(case["verdict"] for case in said)
    return {
        "jittor": next(case["jittor"] for case in cases if case["kind"] == "run"),
        "seeds": len({case["seed"] for case in cases if case["kind"] == "run"}),
        "bitwise": {case["condition"]: case["bitwise"] for case in said},
        **{verdict: count[verdict] for verdict in ("equivalent", "refuted", "undecided")},
        "uses": sum(case["kind"] == "use" for case in cases),
        "uses_that_pay": sum(case["kind"] == "use" and case["pays"] for case in cases),
    }


def verdicts_table(result: dict[str, Any]) -> str:
    """Return for each condition the accuracy, the peak, the time and the verdict."""
    said = {case["condition"]: case for case in result["cases"] if case["kind"] == "verdict"}
    lines = head(("", "held-out accuracy", "difference to plain", "verdict", "skipped", "peak", "CPU time"))
    first = _runs(result, "plain")
    for condition, title in CONDITIONS.items():
        runs, plain = _runs(result, condition), _runs(result, _plain_of(condition))
        values = [case["metric"] for case in runs]
        accuracy = f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
        seconds = statistics.median(case["cpu_seconds"] for case in runs)
        if condition not in said:
            cells = ("", "", "", format_bytes(runs[0]["peak_bytes"]), f"{seconds:.1f} s")
        else:
            one, skips = said[condition], [case["skips"] for case in runs]
            ratio = seconds / statistics.median(case["cpu_seconds"] for case in plain)
            difference = f"{one['mean']:+.3f} ± {one['half_width']:.3f}"
            lost = " to ".join(map(str, sorted({min(skips), max(skips)})))
            skipped = f"{lost} of {runs[0]['steps']}" if condition == "16-mixed" else ""
            peak = f"×{runs[0]['peak_bytes'] / plain[0]['peak_bytes']:.2f}"
            cells = (difference, verdict_text(one), skipped, peak, f"×{ratio:.2f}")
        levers = f": {', '.join(runs[0]['levers'])}" if runs[0]["levers"] else ""
        lines.append(row((title + levers, accuracy, *cells)))
    return "\n".join([*lines, "", f"{first[0]['steps']} steps, {len(first)} seeds. {_source(result)}"])


def uses_table(result: dict[str, Any]) -> str:
    """Return what was trained in the bytes of the plain step, and how it did."""
    headings = ("larger", "budget", "larger, plain", "plan", "steps, plain and larger", "plain", "larger", "pays")
    lines, uses = head(headings), [case for case in result["cases"] if case["kind"] == "use"]
    for case in uses:
        sizes = [format_bytes(case[key]) for key in ("budget_bytes", "unplanned_bytes")]
        if "infeasible" in case:
            lines.append(row((case["use"], *sizes, "no plan fits", "", "", "", "no")))
            continue
        ways = {way: [r for r in case["runs"] if r["way"] == way] for way in ("plain", "planned")}
        steps = ", ".join(f"{statistics.median(r['steps'] for r in runs):.0f}" for runs in ways.values())
        found = [f"{case['means'][w]:.3f} ± {statistics.stdev(r['metric'] for r in ways[w]):.3f}" for w in ways]
        lines.append(
            row((case["use"], *sizes, ", ".join(case["levers"]), steps, *found, "yes" if case["pays"] else "no"))
        )
    seeds = max(r["seed"] for case in uses for r in case.get("runs", [{"seed": 0}])) + 1
    said = f"{uses[0]['seconds']:g} CPU seconds of steps a run, {seeds} seeds. {_source(result)}"
    return "\n".join([*lines, "", said])


def _runs(result: dict[str, Any], condition: str) -> list[Case]:
    return [case for case in result["cases"] if case["kind"] == "run" and case["condition"] == condition]


def _source(result: dict[str, Any]) -> str:
    return f"Jittor {result['summary']['jittor']}. {made_by(result)}."


if __name__ == "__main__":
    main(
        "parity.in_jittor",
        run,
        __doc__,
        {
            "--rows": {
                "type": Path,
                "metavar": "FILE",
                "help": "go on with a run that was cut short: its rows are there",
            }
        },
    )
