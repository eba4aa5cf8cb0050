"""Ranks that are killed, and ranks that run out of memory: whether training ends bitwise as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors.torch import load_file

import memfit
from benchmarks.common import Case
from benchmarks.distributed.models import MODELS
from benchmarks.distributed.peaks import UNITS
from benchmarks.distributed.ranks import on_ranks
from benchmarks.distributed.training import workload
from benchmarks.faults.injections import CountingOperators
from memfit import ir
from memfit.ir import Levers, Mode, Plan, Region
from memfit.training import Recovery

ENGINES: tuple[tuple[Mode, int], ...] = (("ddp", 2), ("zero2", 2), ("zero3", 2), ("zero3", 4))
"""Modes and ranks, among which the interruptions are shared."""
KILLS, QUICK_KILLS = 40, 2
PLACES, QUICK_PLACES = 40, 6
STEPS_A_KILL = 20
LONGEST_SECONDS = 120.0
"""Without a step, after which a run is said to hang."""
_STEPS = 4


def kills(quick: bool) -> Iterator[Case]:
    """Yield a row for each engine: a run whose ranks are killed at random times, against one that is left alone."""
    engines = ENGINES[2:3] if quick else ENGINES
    count = (QUICK_KILLS if quick else KILLS) // len(engines)
    for mode, ranks in engines:
        plan = memfit.plan(workload(), budget="90%", world_size=ranks, sharding=mode, precisions=["32-true"], points=1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plan.save(folder / "plan.json")
            steps = STEPS_A_KILL * (count + 1)
            expected, _ = _trained(folder / "undisturbed", ranks, steps, 0)
            killed, sent = _trained(folder / "killed", ranks, steps, count)
        row = {
            "part": "kills",
            "engine": mode,
            "ranks": ranks,
            "steps": steps,
            "kills": sent,
            "hangs": int(killed is None),
            "survived": sent if killed is not None and killed == expected else 0,
        }
        print(f"{mode:<6}{ranks} ranks: {row['survived']} of {sent} kills survived", file=sys.stderr, flush=True)
        yield row


def _trained(out: Path, ranks: int, steps: int, count: int) -> tuple[Any, int]:
    """Train under torchrun while ranks are killed; return what is left (None where it hangs), and how many were."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    line += ["--max-restarts", str(count), "-m", "memfit", "train", "benchmarks.distributed.training:workload"]
    line += ["--plan", str(out.parent / "plan.json"), "--out", str(out), "--steps", str(steps), "--resume"]
    line += ["--checkpoint-every", "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    chance, sent = random.Random(f"{out.parent.name}{ranks}"), 0
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)
        moved, seen = time.monotonic(), 0
        while process.poll() is None:
            time.sleep(0.02)
            lines = _lines(out)
            if lines != seen:
                moved, seen = time.monotonic(), lines
            if sent < count and lines >= STEPS_A_KILL * (sent + 1):
                time.sleep(chance.uniform(0, 0.3))
                victims = psutil.Process(process.pid).children()
                if len(victims) == ranks:
                    os.kill(chance.choice(victims).pid, signal.SIGKILL)
                    sent += 1
            if time.monotonic() - moved > LONGEST_SECONDS:
                process.kill()
                return None, sent
    if process.returncode:
        text = (out.parent / f"{out.name}.log").read_text()
        if not count:
            raise RuntimeError(f"a run that nobody disturbed failed:\n{text[-4000:]}")
        print(text[-4000:], file=sys.stderr)
        return "failed", sent
    return _left(out, steps), sent


def _lines(out: Path) -> int:
    log = out / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _left(out: Path, steps: int) -> Any:
    """Return what identifies the last checkpoint's tensors and states, and the log's steps and losses."""
    sums = {}
    for path in sorted((out / f"checkpoint-{steps}").iterdir()):
        if path.suffix == ".safetensors":
            for name, tensor in sorted(load_file(path).items()):
                sums[f"{path.name}/{name}"] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        elif path.name != "checkpoint.json":  # sums of headers, in which safetensors has metadata in any order
            sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return sums, [(line["step"], line.get("loss"), line.get("grad_norm")) for line in log if "loss" in line]


def out_of_memory(quick: bool) -> Iterator[Case]:
    """Yield a row for each engine: trainings in each of which an operator of one rank fails at a place."""
    engines = ENGINES[2:3] if quick else ENGINES
    count = (QUICK_PLACES if quick else PLACES) // len(engines)
    for mode, ranks in engines:
        plan = _ladder(mode, ranks)
        survived = places = 0
        is_hanging = False
        try:
            for was_same in on_ranks(ranks, _failing, ir.codec.encode(plan), count, longest_seconds=LONGEST_SECONDS):
                places, survived = places + 1, survived + was_same
        except TimeoutError:
            is_hanging = True
        row = {
            "part": "out of memory",
            "engine": mode,
            "ranks": ranks,
            "places": count,
            "survived": survived,
            "hangs": int(is_hanging),
        }
        print(f"{mode:<6}{ranks} ranks: {survived} of {count} places survived", file=sys.stderr, flush=True)
        yield row


def _ladder(mode: Mode, ranks: int) -> Plan:
    """Return a plan with one below it that recomputes all units: the same numbers, bitwise."""
    plan = memfit.plan(
        MODELS["transformer"](), budget="90%", world_size=ranks, sharding=mode, precisions=["32-true"], points=1
    )
    base = replace(plan.levers, regions=())
    lower = replace(base, regions=tuple(Region((unit,)) for unit in UNITS))
    nearest = plan.frontier[0]
    frontier = [replace(nearest, levers=base), replace(nearest, levers=lower, peak_bytes=nearest.peak_bytes // 2)]
    return replace(plan, levers=base, frontier=frontier)


def _failing(data: bytes, count: int) -> Iterator[bool]:
    """Yield for each place whether all ranks took the lower plan and ended with its weights."""
    plan = ir.codec.decode(data, Plan, source="the benchmark")
    lower = plan.frontier[1].levers
    expected, _, _ = _steps_of(plan, lower)
    undisturbed, _, reached = _steps_of(plan, plan.levers)
    assert undisturbed == expected
    own = torch.tensor(reached)
    dist.broadcast(own, 1)
    chance = random.Random(0)
    for index in range(count):
        step = index % _STEPS
        place = chance.randint(1, int(own[step]))
        found, levers, _ = _steps_of(plan, plan.levers, (step, place))
        yield _all((found, levers) == (expected, lower))


def _steps_of(
    plan: Plan, levers: Levers, failing: tuple[int, int] | None = None
) -> tuple[list[str], Levers, list[int]]:
    """Return the weights after some steps, the levers then, and the operators that each step ran until its update."""
    workload, reached = MODELS["transformer"](), []
    with memfit.apply(replace(plan, levers=levers), workload, recover=True) as step:
        workload.optimizer.register_step_pre_hook(lambda *_: reached.append(counting.count))
        for index in range(_STEPS):
            is_failing = failing is not None and failing[0] == index and dist.get_rank() == 1
            with CountingOperators(failing[1] if failing is not None and is_failing else None) as counting:
                step(workload.batch)
        assert isinstance(step.recovery, Recovery)
        last = step.recovery.plan.levers
    return [_sum(p) for p in workload.model.parameters()], last, reached


def _sum(parameter: Any) -> str:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()


def _all(is_true: bool) -> bool:
    found = torch.tensor(int(is_true))
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    killed = [row for row in rows if row["part"] == "kills"]
    failed = [row for row in rows if row["part"] == "out of memory"]
    return {
        "kills": sum(row["kills"] for row in killed),
        "kills_survived": sum(row["survived"] for row in killed),
        "out_of_memory": sum(row["places"] for row in failed),
        "out_of_memory_survived": sum(row["survived"] for row in failed),
        "hangs": sum(row["hangs"] for row in killed + failed),
    }
