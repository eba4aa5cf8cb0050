"""One disturbed training: run, resumed until it is done, and held against the undisturbed one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import memfit
from benchmarks.common import Case
from benchmarks.faults.injections import FAULTS, CountingOperators, Fault, Reach
from benchmarks.faults.processes import finish, start
from benchmarks.faults.subjects import Subject
from memfit import ir
from memfit.ir import Plan, RunRecord, Views
from memfit.pipeline import trained, views_of
from memfit.training import METRICS, RUN, VIEWS, RunOptions, read_lines
from memfit.training.runs import checkpoint

MAX_RESTARTS = 4
PLAN_FILE, REACH_FILE, RESULT_FILE = "plan.json", "reach.json", "result.json"


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
        files: SHA-256 of what is in each file of the last checkpoint but the plan: weights, optimizer state,
            scheduler, loss scaler, random states and data position.
        steps: Each line of the log: step, whether the update was skipped, loss.
        updates: How many updates the optimizer's own state counts.
    """

    files: dict[str, str]
    steps: list[tuple[int, bool, float]]
    updates: int


@dataclass(frozen=True)
class Prepared:
    """A subject with its plan, and what it ends with when nothing disturbs it."""

    subject: Subject
    plan: Plan
    views: Views
    reach: Reach
    outcome: Outcome


def prepare(subject: Subject, folder: Path) -> Prepared:
    """Plan and train a subject undisturbed, in children. This process imports and loads only what they all need.

    Raises:
        RuntimeError: That failed.
    """
    folder.mkdir(parents=True)
    subject.make()
    importlib.import_module("torch._dynamo")  # which checkpointing imports when it first runs
    gc.collect()
    gc.freeze()  # children then collect only what is theirs
    _in_child(lambda: _plan(subject, folder), folder / "plan.log")
    plan, views = ir.codec.read(folder / PLAN_FILE, Plan), ir.codec.read(folder / VIEWS, Views)
    _in_child(lambda: _measure(subject, plan, views, folder), folder / "reference.log")
    reach = Reach(**json.loads((folder / REACH_FILE).read_bytes()))
    return Prepared(subject, plan, views, reach, outcome_of(folder / "run", subject.n_steps))


def _in_child(work: Callable[[], None], log: Path) -> None:
    status = finish(start(work, log))
    if status:
        raise RuntimeError(f"ended with status {status}:\n{log.read_text()[-4000:]}")


def _plan(subject: Subject, folder: Path) -> None:
    plan = subject.plan()
    (folder / PLAN_FILE).write_bytes(ir.codec.encode(plan))
    (folder / VIEWS).write_bytes(ir.codec.encode(views_of(plan, subject.make())))


def _measure(subject: Subject, plan: Plan, views: Views, folder: Path) -> None:
    started, first = time.perf_counter(), 0.0

    def on_step(step: int) -> None:
        nonlocal first
        first = first or time.perf_counter()

    out = folder / "run"
    with CountingOperators() as operators:
        train(subject, plan, views, out, folder / "journal", on_step=on_step)
    now = time.perf_counter()
    folder_bytes = sum(path.stat().st_size for path in out.rglob("*"))
    reach = Reach(subject.n_steps, operators.count, now - started, now - first, folder_bytes)
    (folder / REACH_FILE).write_text(json.dumps(dataclasses.asdict(reach)))


def train(
    subject: Subject,
    plan: Plan,
    views: Views,
    out: Path,
    journal: Path,
    *,
    fault: Fault | None = None,
    resume: bool = False,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train a subject as `memfit.train` does, with views for the report that were captured once for all runs.

    Every update that is done is noted in a file beside the run, which nothing takes back.
    """
    seed = 1 if resume else 0  # a resumed run has no random state but that of its checkpoint
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)

    def after_step(progress: Any) -> None:
        with journal.open("a") as file:
            file.write(f"{progress.step}\n")
        on_step(progress.step)
        if fault is not None and not progress.skipped:
            fault.at_step(progress.step)

    workload = subject.make()
    with contextlib.nullcontext() if fault is None else fault.around():
        options = RunOptions(
            out=out,
            steps=subject.n_steps,
            checkpoint_every=subject.checkpoint_every,
            prefetch_batches=subject.prefetch_batches,
            resume=resume,
            overwrite=not resume,
            on_step=after_step,
        )
        trained(plan, workload if fault is None else fault.changed(workload), options, draw=lambda *_: views)


def outcome_of(out: Path, n_steps: int) -> Outcome:
    """Return what a run ended with.

    Raises:
        OSError: It did not come to its end.
    """
    last = out / f"checkpoint-{n_steps}"
    files = {name: _digest(last / name) for name in checkpoint.FILES if name != "plan.json"}
    lines = [line for line in read_lines(out / METRICS) if "loss" in line]
    counts = [int(t) for key, t in load_file(last / "optimizer.safetensors").items() if key.endswith(".step")]
    assert min(counts) == max(counts)  # each parameter has a gradient in each update
    return Outcome(files, [(line["step"], line["skipped"], line["loss"]) for line in lines], counts[0])


def _digest(file: Path) -> str:
    """Return a hash of what a file of a checkpoint says; safetensors writes its names in any order."""
    found = hashlib.sha256()
    if file.suffix != ".safetensors":
        found.update(file.read_bytes())
        return found.hexdigest()
    with safe_open(file, framework="pt") as opened:
        found.update(json.dumps(sorted((opened.metadata() or {}).items())).encode())
    tensors = load_file(file)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trial(prepared: Prepared, fault: str, seed: int, folder: Path) -> Case | None:
    """Disturb a training once; None where it was over before that.

    It is watched over by a process of its own, so that what that mounts is gone with it.
    """
    folder.mkdir(parents=True)
    _in_child(lambda: _watch(prepared, fault, seed, folder), folder / "watch.log")
    found: Case | None = json.loads((folder / RESULT_FILE).read_bytes())
    return found


def _watch(prepared: Prepared, name: str, seed: int, folder: Path) -> None:
    started = time.perf_counter()
    place = folder / "disk"
    place.mkdir()
    out, journal, log = place / "run", folder / "journal", folder / "run.log"
    fault = FAULTS[name](random.Random(f"{prepared.subject.name} {name} {seed}"), prepared.reach, out)
    fault.before()
    subject, plan, views = prepared.subject, prepared.plan, prepared.views
    statuses = [fault.ended(start(lambda: train(subject, plan, views, out, journal, fault=fault), log))]
    happened = 0 in fault.statuses or not _is_finished(out)
    if happened:
        fault.after()
    while statuses[-1] != 0 and len(statuses) <= MAX_RESTARTS:
        resume = checkpoint.latest(out) is not None
        statuses.append(finish(start(lambda r=resume: train(subject, plan, views, out, journal, resume=r), log)))  # type: ignore[misc]
    case = judged(prepared, fault, out, statuses) if happened else None
    if case is not None:
        executed = len(journal.read_text().splitlines()) if journal.exists() else 0
        repeated = executed - len(prepared.outcome.steps)
        seconds = time.perf_counter() - started
        case = {"subject": subject.name, "fault": name, "seed": seed, **case, "repeated": repeated, "seconds": seconds}
    (folder / RESULT_FILE).write_text(json.dumps(case))


def _is_finished(out: Path) -> bool:
    with contextlib.suppress(memfit.UsageError):
        return ir.codec.read(out / RUN, RunRecord, error=memfit.UsageError).status == "finished"
    return False


def judged(prepared: Prepared, fault: Fault, out: Path, statuses: list[int]) -> Case:
    """Return how a run that was disturbed stands to the one that was not."""
    wanted, n_steps = prepared.outcome, prepared.subject.n_steps
    wrong = []
    if statuses[0] not in fault.statuses:
        wrong.append(f"ended with status {statuses[0]}, not one of {fault.statuses}")
    try:
        found = outcome_of(out, n_steps)
        events = [event.kind for event in ir.codec.read(out / RUN, RunRecord).events]
    except (OSError, memfit.MemfitError) as e:
        wrong.append(f"did not come to its end: {e}")
        found, events = Outcome({}, [], 0), []
    wrong += [f"{name} differs" for name in wanted.files if found.files.get(name) != wanted.files[name]]
    if found.steps != wanted.steps:
        wrong.append("the log differs")
    if fault.event is not None and fault.event not in events:
        wrong.append(f"nothing is said of a {fault.event}")
    leftovers = [path.name for path in out.rglob("*.tmp")] if out.exists() else []
    wrong += [f"left {name} behind" for name in leftovers]
    logged = Counter(step for step, skipped, _ in found.steps if not skipped)
    lost = max(0, n_steps - found.updates, sum(step not in logged for step in range(1, n_steps + 1)))
    doubled = max(0, found.updates - n_steps, sum(logged.values()) - len(logged))
    wrong += [f"{count} updates {how}" for count, how in ((lost, "lost"), (doubled, "doubled")) if count]
    return {
        "statuses": statuses,
        "survived": not wrong,
        "updates_lost": lost,
        "updates_doubled": doubled,
        "wrong": wrong,
    }
