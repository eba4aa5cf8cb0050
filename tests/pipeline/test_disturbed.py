"""Verbs that are interrupted at random moments, and beside threads; `benchmarks.faults.verbs` does so more often."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from benchmarks.faults.process_state import changed, process_state, workload_state
from benchmarks.faults.verbs import Rung, beside_threads, interrupted, together, workload, wrong_error
from memfit.errors import CaptureError
from memfit.workload import Workload


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGPROF)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    "verb",
    ["estimate", *(pytest.param(v, marks=pytest.mark.ci) for v in "verify apply search compare train fit".split())],
)
def test_an_interrupted_verb_raises_what_its_handler_did_and_leaves_all_as_it_was(verb: str, tmp_path: Path) -> None:
    interrupted(verb, 3, tmp_path / "found")
    rows = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [row["wrong"] for row in rows] == [[]] * 3


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
@pytest.mark.parametrize("verb", ["estimate", pytest.param("search", marks=pytest.mark.ci)])
@pytest.mark.ci
def test_beside_threads_a_verb_and_a_training_are_as_alone(verb: str, seed: int, tmp_path: Path) -> None:
    beside_threads(verb, seed, tmp_path / "found")
    assert json.loads((tmp_path / "found").read_text())["wrong"] == []


def rings(number: int, frame: FrameType | None) -> None:
    raise Rung


def in_a_hook(model: nn.Module) -> Callable[[], None]:
    return model.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGPROF)).remove


def in_a_gradient_hook(model: nn.Module) -> Callable[[], None]:
    def hooked(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: signal.raise_signal(signal.SIGPROF))

    return model.register_forward_hook(hooked).remove


def in_an_update(model: nn.Module) -> Callable[[], None]:
    return register_optimizer_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGPROF)).remove


@pytest.mark.parametrize("place", [in_a_hook, in_a_gradient_hook, in_an_update])
def test_a_signal_within_code_that_pytorch_calls_ends_the_verb(
    place: Callable[[nn.Module], Callable[[], None]],
) -> None:
    """C++ calls it, some of it where an exception would end the process."""
    made = workload()
    memfit.estimate(made)  # imports what it needs
    signal.signal(signal.SIGPROF, rings)
    before = process_state(), workload_state(made)
    remove = place(made.model)
    try:
        with pytest.raises(Rung):
            memfit.estimate(made)
    finally:
        remove()
    assert changed(before[0], process_state()) + changed(before[1], workload_state(made)) == []


def test_a_step_that_is_under_way_is_run_to_its_end() -> None:
    """Ctrl-C in a loop around `apply`: the weights are those after a whole step."""
    made, signals = workload(), 0

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if signals:
            signal.raise_signal(signal.SIGPROF)
        return made.loss_fn(model, batch)  # type: ignore[return-value]

    signal.signal(signal.SIGPROF, rings)
    theirs = Workload(made.model, made.batch, loss, made.optimizer)
    plan = memfit.plan(theirs, budget="2x", numerics="exact", points=1, measure=False)
    start = workload_state(made)["values"]
    with memfit.apply(plan, theirs) as step:
        signals = 1
        with pytest.raises(Rung):
            step(made.batch)
        assert step.steps == 1 and workload_state(made)["values"] != start
        assert all(p.grad is None for p in made.model.parameters())


class Signalling:
    """A folder that is asked for its name when the plan's levers are on."""

    def __fspath__(self) -> str:
        signal.raise_signal(signal.SIGPROF)
        return "snapshots"


def test_a_plan_that_was_applied_as_the_signal_came_is_taken_back() -> None:
    made = workload()
    plan = memfit.plan(made, budget="0.8x", numerics="exact", points=1, measure=False)
    before = workload_state(made)
    signal.signal(signal.SIGPROF, rings)
    with pytest.raises(Rung):
        memfit.apply(plan, made, snapshots=Signalling())  # type: ignore[arg-type]
    assert changed(before, workload_state(made)) == []


def test_interrupts_end_a_long_search_soon() -> None:
    """Ctrl-C, at any moment of planning: within a second of undisturbed time."""
    made, drawn = workload(), random.Random(0)
    signal.signal(signal.SIGPROF, signal.default_int_handler)
    took = []
    for _ in range(3):
        wait = drawn.uniform(0.02, 0.3)
        signal.setitimer(signal.ITIMER_PROF, wait)
        began = time.process_time()
        with pytest.raises(KeyboardInterrupt):
            while True:
                memfit.plan(made, budget="0.6x", points=3, measure=False)
        took.append(time.process_time() - began - wait)
    assert min(took) < 1.0


def test_what_a_disturbance_does_is_seen() -> None:
    """The comparisons of this file can fail."""
    made = workload()
    before = process_state(), workload_state(made)
    names = ("gradients", "classes", "generator of PyTorch", "logging", "signals", "threads")
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    numpy, log = torch.Tensor.__dict__.get("numpy"), __import__("logging").getLogger("torch._subclasses.fake_tensor")
    level, state = log.level, torch.get_rng_state()
    torch.set_grad_enabled(False)
    torch.Tensor.numpy = lambda self: None  # type: ignore[assignment, method-assign]
    torch.rand(1)
    log.setLevel(1)
    signal.signal(signal.SIGPROF, rings)
    thread.start()
    try:
        found = changed(before[0], process_state())
        assert {text.split(":")[0] for text in found} == set(names)
    finally:
        torch.set_grad_enabled(True)
        del torch.Tensor.numpy
        assert torch.Tensor.__dict__.get("numpy") is numpy
        torch.set_rng_state(state)
        log.setLevel(level)
        over.set()
        thread.join()
    with torch.no_grad():
        next(made.model.parameters()).add_(1)
    made.model.eval()
    assert {text.split(":")[0] for text in changed(before[1], workload_state(made))} == {"values", "modules"}
    assert wrong_error(None, [Rung]) == ["Rung vanished"] and wrong_error(Rung(), [Rung]) == []
    assert wrong_error(IndexError("list index"), [Rung]) and wrong_error(CaptureError(""), [])
    assert together([lambda: 1, lambda: 1 / 0])[0] == 1


def test_a_thread_that_a_step_starts_reads_as_the_step_does(tmp_path: Path) -> None:
    """Readings by `tolist()` in a thread of the loss function's are recorded, and replayed."""

    def read(h: torch.Tensor, found: list[Any]) -> None:
        found.append(len([value for value in h.detach().abs().amax(1).tolist() if value > 0]))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        h, found = model(batch), []  # type: ignore[var-annotated]
        thread = threading.Thread(target=read, args=(h, found))
        thread.start()
        thread.join()
        return h[: found[0]].square().mean()  # type: ignore[no-any-return]

    model = nn.Linear(4, 4)
    made = Workload(model, torch.randn(8, 4), loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not [note for note in memfit.estimate(made).notes if "guess" in note]
