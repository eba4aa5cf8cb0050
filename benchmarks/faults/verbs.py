"""Verbs that are interrupted at random moments, and that run beside other threads: `python -m benchmarks.faults.verbs`.

Each verb has a process of its own, in which a signal comes at a random moment of each call, and its handler raises:
Ctrl-C's KeyboardInterrupt, an alarm's exception, or SystemExit. That very exception must come out of the verb, the
process and the workload must be as before, and the verb must then find what it finds undisturbed. A process that ends
by a signal has failed. Beside threads, a verb finds what it finds alone, and a training with dropout loses nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.common import Case, main
from benchmarks.faults.process_state import changed, digest, process_state, workload_state
from benchmarks.faults.processes import finish, start
from benchmarks.steps.rows import Rows
from memfit.errors import UsageError
from memfit.ir import Plan
from memfit.workload import Workload

INTERRUPTS, QUICK_INTERRUPTS = 200, 5
SEEDS, QUICK_SEEDS = 10, 1
MAX_SECONDS = 3600.0
STEPS = 3
_WAITING = ("estimate_for_a_gpu", "fleet")  # for another process: their signals come by the world's clock
_STARTING = threading.Lock()  # no process starts while a stream is written to
_MISSED = 3  # times as many calls as are to be interrupted: some end before


class Rung(Exception):
    """What an alarm's handler raises."""


ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, Rung, SystemExit)


class Net(nn.Module):
    """Blocks with dropout, a normalisation and a product: some kernels of captures are memfit's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.cumprod(-1) + x.amax()


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def workload(samples: int = 64) -> Workload:
    """Return the workload that verbs run on."""
    torch.manual_seed(0)
    model = Net()
    return Workload(model, torch.randn(samples, 4, 16), mean_square, torch.optim.AdamW(model.parameters()))


def made_plan(given: Workload) -> Plan:
    """Return a plan that recomputes."""
    return memfit.plan(given, budget="0.8x", numerics="exact", points=2, measure=False, time_limit_seconds=1.0)


class Subject:
    """A workload and its plan, and the verbs on them. Each returns what must be the same in each undisturbed call."""

    def __init__(self, folder: Path) -> None:
        self.workload, self.folder = workload(), folder
        self.plan = made_plan(self.workload)
        self._start = copy.deepcopy((self.workload.model.state_dict(), self.workload.optimizer.state_dict()))

    def estimate(self) -> Any:
        return memfit.estimate(self.workload).peak_bytes

    def estimate_for_a_gpu(self) -> Any:
        return memfit.estimate(self.workload, device="t4").peak_bytes

    def search(self) -> Any:
        found = made_plan(self.workload)
        return found.levers, found.predicted.peak_bytes

    def search_and_measure(self) -> Any:
        memfit.plan(self.workload, budget="0.8x", points=2, measure=True, time_limit_seconds=1.0)
        return None  # which is faster is measured, and may differ

    def verify(self) -> Any:
        return memfit.verify(self.plan, self.workload, steps=0).holds

    def compare(self) -> Any:
        found = memfit.verify(self.plan, self.workload, steps=2).comparison
        assert found is not None
        return found.plain_losses, found.planned_losses

    def apply(self) -> Any:
        with memfit.apply(self.plan, self.workload) as step:
            return [step(self.workload.batch).loss for _ in range(STEPS)]

    def train(self) -> Any:
        memfit.train(self.plan, self.workload, out=self.folder / "run", steps=STEPS, overwrite=True)

    def fit(self) -> Any:
        model, optimizer = self.workload.model, self.workload.optimizer
        with memfit.fit(model, optimizer, budget="0.9x", tell=lambda text: None, time_limit_seconds=1.0):
            for _ in range(STEPS):
                optimizer.zero_grad()
                mean_square(model, self.workload.batch).backward()
                optimizer.step()

    def fleet(self) -> Any:
        return [row.device for row in memfit.fleet(self.workload, steps=10, devices=["t4"]).rows]

    def trained(self) -> str:
        """Return what the model and the optimizer hold, and set both back to what they were."""
        model, optimizer = self.workload.model, self.workload.optimizer
        state = optimizer.state_dict()["state"]
        found = digest([*model.parameters(), *(state[i][name] for i in sorted(state) for name in sorted(state[i]))])
        weights, of_optimizer = copy.deepcopy(self._start)
        model.load_state_dict(weights)
        optimizer.load_state_dict(of_optimizer)
        optimizer.zero_grad()
        return found


VERBS = (
    "estimate",
    "estimate_for_a_gpu",
    "search",
    "search_and_measure",
    "verify",
    "compare",
    "apply",
    "train",
    "fit",
    "fleet",
)
TRAINING = ("apply", "train", "fit")
"""Verbs that change the weights: by whole steps, but for a loop that is the user's own."""


def interrupted(verb: str, count: int, out: Path) -> None:
    """Interrupt a verb that many times in this process, and write what was found after each to a file, a line each."""
    drawn, struck = random.Random(verb), 0
    handlers: list[type[BaseException]] = [ERRORS[0]]

    def handler(number: int, frame: FrameType | None) -> None:
        handlers.append(ERRORS[len(handlers) % len(ERRORS)])
        raise handlers[-1](len(handlers))

    timer, number = signal.ITIMER_PROF, signal.SIGPROF  # by what the process computes: other programs delay it
    if verb in _WAITING:
        timer, number = signal.ITIMER_REAL, signal.SIGALRM
    clock = time.perf_counter if verb in _WAITING else time.process_time
    signal.signal(number, handler)
    with tempfile.TemporaryDirectory() as folder, open(out, "a", buffering=1) as log:
        subject = Subject(Path(folder))
        call: Callable[[], Any] = getattr(subject, verb)
        seconds, whole = _undisturbed(subject, verb, clock)
        expected = None
        for trial in range(_MISSED * count):
            torch.manual_seed(1)
            before = process_state(), workload_state(subject.workload)
            known, error, took = len(handlers), None, clock()
            try:
                try:
                    signal.setitimer(timer, drawn.uniform(0.0, 1.1) * seconds + 1e-4)
                    call()
                finally:
                    signal.setitimer(timer, 0)
            except BaseException as e:
                error = e
            took = clock() - took
            gc.collect()
            wrong = wrong_error(error, handlers[known:])
            after = process_state()
            if verb in TRAINING:
                if verb != "fit" and (found := subject.trained()) not in whole:
                    wrong.append(f"a step is half done ({found[:8]})")
                subject.trained()
                del before[0]["generator of PyTorch"]
            wrong += changed(before[0], after) + changed(before[1], workload_state(subject.workload))
            if error is None and not wrong:
                continue
            struck += 1
            if struck % 20 == 0 or struck == count:
                torch.manual_seed(1)
                found = call()
                subject.trained()
                expected = found if expected is None else expected
                wrong += [] if found == expected else [f"then {found}, not {expected}"]
            log.write(json.dumps({"verb": verb, "trial": trial, "wrong": wrong, "seconds": took}) + "\n")
            if struck == count:
                return
    raise RuntimeError(f"{verb} was interrupted {struck} times only")


def _undisturbed(subject: Subject, verb: str, clock: Callable[[], float]) -> tuple[float, set[str]]:
    """Return the median seconds of calls of a verb, and what a training holds after each number of whole steps."""
    times = []
    for _ in range(3):
        torch.manual_seed(1)
        begun = clock()
        getattr(subject, verb)()
        times.append(clock() - begun)
        subject.trained()
    if verb not in ("apply", "train"):
        return statistics.median(times), set()
    found = set()
    for steps in range(STEPS + 1):
        torch.manual_seed(1)
        with memfit.apply(subject.plan, subject.workload) as step:
            for _ in range(steps):
                step(subject.workload.batch)
        found.add(subject.trained())
    return statistics.median(times), found


def wrong_error(error: BaseException | None, raised: Sequence[type[BaseException]]) -> list[str]:
    """Return what is wrong with what came out of a verb, given what handlers raised."""
    if not raised:
        return [] if error is None else [f"{type(error).__name__} came of itself: {error}"]
    if error is None:
        return [f"{raised[-1].__name__} vanished"]
    return [] if type(error) is raised[-1] else [f"{type(error).__name__} ({error}) came for {raised[-1].__name__}"]


# Threads


def beside_threads(verb: str, seed: int, out: Path) -> None:
    """Run a verb in two threads at once, then beside a training with dropout; write what was found to a file."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, open(out, "a") as log:
        subjects = Subject(Path(first)), Subject(Path(second))
        calls: list[Callable[[], Any]] = [getattr(subject, verb) for subject in subjects]
        call = calls[0]
        call()
        alone = call()
        losses = training(seed)
        before = process_state(), [workload_state(subject.workload) for subject in subjects]
        wrong = [f"in a thread {found}, alone {alone}" for found in together(calls) if found != alone]
        done = threading.Event()
        beside: list[list[float]] = []
        trainer = threading.Thread(target=lambda: beside.append(training(seed, done)), daemon=True)
        trainer.start()
        found = call()
        done.set()
        trainer.join()
        wrong += [] if found == alone else [f"beside a training {found}, alone {alone}"]
        count = len(losses)
        wrong += [] if beside[0][:count] == losses else ["a training beside it has other losses"]
        torch.manual_seed(1)
        after = process_state()
        for name in ("generator of PyTorch",):  # which the training drew from
            before[0].pop(name)
        wrong += changed(before[0], after)
        for was, subject in zip(before[1], subjects, strict=True):
            wrong += changed(was, workload_state(subject.workload))
        log.write(json.dumps({"verb": verb, "trial": seed, "wrong": wrong}) + "\n")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run in threads at once; an exception is the result of one that raises it."""
    found: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as e:
            found[index] = e

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def training(seed: int, over: threading.Event | None = None) -> list[float]:
    """Return the losses of a training with dropout, of 200 steps and until an event."""
    torch.manual_seed(seed)
    model, batch = Net(), torch.randn(8, 4, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[float] = []
    while len(losses) < 200 or not (over is None or over.is_set()):
        optimizer.zero_grad()
        loss = mean_square(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# All


def run(
    quick: bool,
    verbs: Sequence[str] | None = None,
    interrupts: int | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    rows: Path | None = None,
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each verb and kind of disturbance, and how many there were and left the process unharmed.

    Args:
        quick: A few disturbances of each verb.
        verbs: Their names; None for all.
        interrupts: Of each verb.
        seeds: Of threads beside each verb.
        jobs: Verbs at a time.
        rows: A file with those that were disturbed before; None for none.

    Raises:
        UsageError: There is no verb of a name.
    """
    if unknown := {*(verbs or ())} - {*VERBS}:
        raise UsageError(f"--verbs: {sorted(unknown)} are none; there are {[*VERBS]}")
    count = interrupts if interrupts is not None else QUICK_INTERRUPTS if quick else INTERRUPTS
    n_seeds = seeds if seeds is not None else QUICK_SEEDS if quick else SEEDS
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        memfit.estimate(workload())  # children find everything imported
    before = Rows(rows)

    def disturbed(place: Path, verb: str) -> list[Case]:
        found = before.of(verb)
        if found is None:
            found = _cases(place / verb, verb, count, n_seeds)
            before.add(verb, found)
        return found

    with tempfile.TemporaryDirectory(prefix="memfit-verbs-") as folder, ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(functools.partial(disturbed, Path(folder)), verbs or VERBS))
    cases = [case for each in found for case in each]
    print(table(cases))
    return cases, summarised(cases)


def _cases(place: Path, verb: str, count: int, n_seeds: int) -> list[Case]:
    """Return a row of a verb's interrupts, and one for each seed of threads beside it."""
    found = [_case("interrupt", verb, count, place, functools.partial(interrupted, verb, count))] if count else []
    for seed in range(0 if verb in TRAINING else n_seeds):
        found.append(_case("threads", verb, 1, place, functools.partial(beside_threads, verb, seed)))
    return found


def _case(kind: str, verb: str, count: int, place: Path, work: Callable[[Path], None]) -> Case:
    """Return what some work in a process of its own found."""
    out, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
    out.write_text("")
    with _STARTING:
        pid = start(lambda: work(out), log)
    status = finish(pid, MAX_SECONDS)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    wrong = [text for each in rows for text in each["wrong"]]
    if status:
        wrong.append(f"the process ended with status {status}: {log.read_text()[-500:]}")
    unharmed = sum(not each["wrong"] for each in rows)
    with _STARTING:
        print(f"{kind}: {verb}: {unharmed} of {count} unharmed", *wrong[:5], sep="\n  ", file=sys.stderr, flush=True)
    return {"kind": kind, "verb": verb, "injected": count, "unharmed": unharmed, "status": status, "wrong": wrong}


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how many disturbances of each kind there were, and how many left the process unharmed."""
    return {
        f"{kind}_{what}": sum(case[what] for case in cases if case["kind"] == kind)
        for kind in ("interrupt", "threads")
        for what in ("injected", "unharmed")
    }


def table(cases: Sequence[Case]) -> str:
    """Return a line for each verb, in Markdown."""
    lines = ["| verb | interrupts | unharmed | beside threads | unharmed |", "| --- | --- | --- | --- | --- |"]
    for verb in dict.fromkeys(case["verb"] for case in cases):
        counts = summarised([case for case in cases if case["verb"] == verb]).values()
        lines.append(f"| {NAMES[verb]} | {' | '.join(str(count or '–') for count in counts)} |")
    return "\n".join(lines)


NAMES = {
    "estimate": "`estimate`",
    "estimate_for_a_gpu": "`estimate` for a GPU that is not here",
    "search": "`plan`",
    "search_and_measure": "`plan` with `measure=True`",
    "look_up": "another budget, with a capture",
    "verify": "`verify`, without a comparison",
    "compare": "the comparison of `verify`",
    "apply": "`apply` and its steps",
    "train": "`train`",
    "fit": "`fit`, around a loop",
    "fleet": "`fleet`",
}

OPTIONS: dict[str, dict[str, Any]] = {
    "--verbs": {"nargs": "+", "metavar": "NAME", "help": f"of {' '.join(VERBS)}"},
    "--interrupts": {"type": int, "help": f"of each verb; {INTERRUPTS} by default, {QUICK_INTERRUPTS} if quick"},
    "--jobs": {"type": int, "default": 1, "help": "verbs at a time; 1 by default"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
    "--seeds": {"type": int, "help": f"of threads beside each verb; {SEEDS} by default, {QUICK_SEEDS} if quick"},
}

if __name__ == "__main__":
    main("faults.verbs", run, __doc__, options=OPTIONS)
