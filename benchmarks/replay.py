"""Digests of what memfit makes of many steps: whether a change to its code changed anything that it computes.

`python -m benchmarks.replay --json before.json` on one commit, and `python -m benchmarks.replay --against before.json`
on another one of the same machine: a line for each step whose digests differ, and status 1 if there is one. They are of
the trace of the plain step, its costs, its prediction, an exact plan and one in reordered numerics, of plans for cards,
for ranks and for compiled steps, of what the command line prints as JSON, of the report, and of a run's checkpoints.
No clock is in them: operators cost what `tests.fixed_costs` says. Each step is taken in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import memfit
from benchmarks.common import Case, result_of, write_result
from benchmarks.fuzzing.modules import workload_of
from benchmarks.fuzzing.programs import Program, drawn
from benchmarks.steps.zoo import STEPS
from benchmarks.zoo import ZOO
from memfit import Workload, ir
from memfit.cli import main as memfit_main
from memfit.errors import InfeasibleError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers, costs_of
from memfit.workload import samples_of
from tests.fixed_costs import fixed_costs

Make = Callable[[], Workload]
Digests = dict[str, str]

ROOT = Path(__file__).parents[1]
PROGRAMS = 50
CARDS = {"transformer": "a100-40gb", "vit_probe": "t4", "lstm": "rtx-4090"}
RANKS = {"transformer": 4, "recommender": 2}
COMPILED = ("autoencoder",)
PLANNED = ("gpt2", "vit_probe", "vgg", "lstm", "recommender", "autoencoder", "transformer")
"""Steps of the first zoo that are planned, both ways: the others take long, and are only captured."""
EACH = 4
"""Of the second zoo and of the programs each fourth is planned."""
_EXACT, _REORDERED = "0.6x", "0.45x"
_SECONDS = 20.0  # for solving: what is not solved to the end by then differs from run to run
_TIMEOUT_SECONDS = 300
_VARIABLES = os.environ | {"PYTHONHASHSEED": "0"}
_CLOCKED = re.compile(
    r'"(solve_seconds|device_bytes|usable_bytes|seconds|free_bytes|code_seconds)": [^,\n}]+|of [0-9.]+ GiB'
)
"""What differs from run to run, or from machine to machine."""


def digest(record: Any) -> str:
    """Return the digest of a record, or of a text, without what no two runs or checkouts have in common."""
    text = (record if isinstance(record, str) else ir.codec.encode(record).decode()).replace(str(ROOT), "")
    return hashlib.sha256(_CLOCKED.sub("", text).encode()).hexdigest()[:16]


def attempted(found: Digests, name: str, make: Callable[[], Any]) -> Any:
    """Note the digest of what a function returns, or of the error that it raises; return it, or None."""
    try:
        made = make()
    except Exception as e:  # a refusal is to stay one
        found[name] = digest(f"{type(e).__name__}: {e}")
        return None
    found[name] = digest(made)
    return made


def of_step(make: Make, *, exact: bool = True, reordered: bool = False) -> Digests:
    """Return the digests of a step on the CPU."""
    found: Digests = {}
    workload, device = make(), find_device("cpu")
    plain = Levers(microbatch_size=samples_of(workload))
    trace = attempted(found, "trace", lambda: capture_levers(workload, plain, device))
    if trace is None:
        return found

    def costs() -> Any:
        table = costs_of([trace], device)
        return msgspec.structs.replace(table, ops={text: table.of(text) for text in sorted(set(trace.signatures))})

    attempted(found, "costs", costs)
    attempted(found, "estimate", lambda: memfit.estimate(workload))
    if exact:
        attempted(found, "exact", lambda: planned(workload, _EXACT, numerics="exact"))
    if reordered:
        attempted(found, "reordered", lambda: planned(workload, _REORDERED, numerics="reordered", points=3))
    return found


def planned(workload: Workload, budget: int | str, **options: Any) -> Any:
    """Return a plan that no measurement chose; where none fits, that for the budget which is named."""
    options = {"points": 1, "precisions": ["32-true"], "measure": False, "time_limit_seconds": _SECONDS, **options}
    try:
        return memfit.plan(workload, budget=budget, **options)
    except InfeasibleError as e:
        return memfit.plan(workload, budget=e.lowest_peak_bytes, **options)


def of_card(make: Make, card: str) -> Digests:
    """Return the digests of a step on a card that is not here."""
    found: Digests = {}
    workload = make()
    attempted(found, "estimate", lambda: memfit.estimate(workload, device=card))
    attempted(found, "plan", lambda: planned(workload, _EXACT, device=card, host_budget="1GiB"))
    return found


def of_ranks(make: Make, world_size: int) -> Digests:
    """Return the digests of a step that ranks share."""
    found: Digests = {}
    attempted(found, "plan", lambda: planned(make(), _EXACT, world_size=world_size))
    return found


def of_compiled(make: Make) -> Digests:
    """Return the digests of compiled steps."""
    found: Digests = {}
    attempted(found, "plan", lambda: planned(make(), _EXACT, compile=True))
    return found


def of_command_line() -> Digests:
    """Return the digests of what verbs print and write for a workload in a file, and of a run's checkpoints."""
    found: Digests = {}
    mine = f"{ROOT / 'examples' / 'mine.py'}:workload"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        attempted(found, "estimate", lambda: printed("estimate", mine, "--json"))
        attempted(
            found,
            "plan",
            lambda: printed("plan", mine, "--budget", _EXACT, "--json", "-o", "plan.json", "--no-measure"),
        )
        attempted(found, "train", lambda: printed("train", mine, "--plan", "plan.json", "--steps", "3", "--out", "run"))
        for path in (Path("run/metrics.jsonl"), Path("run/run.json")):  # the axis of a chart of times is as they are
            path.write_text(re.sub(r'("\w*(?:seconds|per_second)": ?)[\d.e-]+', r"\g<1>1.0", path.read_text()))
        attempted(found, "report", lambda: re.sub(r"\d+", "0", written("run/report.html", "report", "run")))
        for path in sorted(Path("run").rglob("*.safetensors")):
            found[f"checkpoint {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def printed(*line: str) -> str:
    """Return what a command prints to standard output."""
    out, before = io.StringIO(), sys.argv
    sys.argv = ["memfit", *line]
    try:
        with contextlib.redirect_stdout(out):
            memfit_main()
    except SystemExit as e:
        if e.code:
            raise RuntimeError(f"memfit {' '.join(line)} ended with status {e.code}: {out.getvalue()}") from e
    finally:
        sys.argv = before
    return out.getvalue()


def written(path: str, *line: str) -> str:
    """Return what a command writes to a file."""
    printed(*line)
    return Path(path).read_text()


def of_program(program: Program, *, exact: bool) -> Digests:
    """Return the digests of a random program; none of one that PyTorch refuses."""
    try:
        workload_of(program)
    except Exception:
        return {}
    return of_step(partial(workload_of, program), exact=exact)


def cases() -> dict[str, Callable[[], Digests]]:
    """Return what is digested, by name; each is called in a process of its own."""
    found: dict[str, Callable[[], Digests]] = {"command line": of_command_line}
    found |= {f"card: {name}": partial(of_card, ZOO[name], card) for name, card in CARDS.items()}
    found |= {f"ranks: {name}": partial(of_ranks, ZOO[name], world_size) for name, world_size in RANKS.items()}
    found |= {f"compiled: {name}": partial(of_compiled, ZOO[name]) for name in COMPILED}
    for name, make in ZOO.items():
        found[f"zoo: {name}"] = partial(of_step, make, exact=name in PLANNED, reordered=name in PLANNED)
    for index, (name, make) in enumerate(STEPS.items()):
        found[f"step: {name}"] = partial(of_step, make, exact=index % EACH == 0)
    for index in range(PROGRAMS):
        program = drawn(random.Random(f"0:{index}"))
        found[f"program: {index}"] = partial(of_program, program, exact=index % EACH == 0)
    return found


def digested(wanted: dict[str, Callable[[], Digests]], jobs: int) -> list[Case]:
    """Return a row of digests for each case, in their order; each is made by a fork of this process."""
    context, waiting, found = multiprocessing.get_context("fork"), list(wanted), dict[str, Digests]()
    running: dict[Connection, tuple[str, Any, float]] = {}  # with when each began
    seconds: dict[str, float] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(theirs, wanted[waiting[0]]))
            process.start()
            theirs.close()
            running[ours] = waiting.pop(0), process, time.monotonic()
        wait(list(running), timeout=1.0)
        over = time.monotonic() - _TIMEOUT_SECONDS
        for pipe in [pipe for pipe, (_, _, began) in running.items() if pipe.poll() or began < over]:
            name, process, began = running.pop(pipe)
            seconds[name] = time.monotonic() - began
            try:
                found[name] = pipe.recv() if pipe.poll() else {"failed": "no end within the time limit"}
            except EOFError:
                found[name] = {"failed": "the process ended"}
            process.kill()
            process.join()
            said = found[name].get("failed", f"{seconds[name]:.1f} s")
            print(f"{len(found)}/{len(wanted)} {name}: {said}", file=sys.stderr, flush=True)
    return [{"case": name, "seconds": seconds[name], "digests": found[name]} for name in wanted]


def _send(pipe: Connection, make: Callable[[], Digests]) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as cache, open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
        os.environ["MEMFIT_CACHE_DIR"] = cache
        try:
            with fixed_costs():
                pipe.send(make())
        except Exception:
            pipe.send({"failed": traceback.format_exc(limit=-3)})
    os._exit(0)


def differences(before: list[Case], after: list[Case]) -> list[str]:
    """Return a line for each digest of `after` that `before` has otherwise."""
    known = {row["case"]: row["digests"] for row in before}
    lines = []
    for row in after:
        was, now = known.get(row["case"], {}), row["digests"]
        changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        lines += [f"{row['case']}: {', '.join(changed)}"] if changed else []
    return lines


def main() -> None:
    """Make digests, and write them or compare them with those of another commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the digests to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare them with those of a file")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose names a regular expression finds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # some models go through sets of strings
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.replay", *sys.argv[1:]], _VARIABLES)
    torch.set_num_threads(1)
    wanted = {name: make for name, make in cases().items() if re.search(arguments.only or "", name)}
    rows = digested(wanted, arguments.jobs)
    if arguments.json is not None:
        summary = {"cases": len(rows), "digests": sum(len(row["digests"]) for row in rows)}
        write_result(arguments.json, result_of("python -m benchmarks.replay", rows, summary))
    if arguments.against is not None:
        before = json.loads(arguments.against.read_text())["cases"]
        lines = differences(before, rows)
        print("\n".join([*lines, f"{len(rows)} cases, {len(lines)} with other digests"]))
        raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
