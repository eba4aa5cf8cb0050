"""After every verb the process is as before: one snapshot, in several settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Plan, Workload, tools
from memfit.capture import user_state
from tests.undisturbed import changes, process, state_of

TABLES: dict[int, torch.Tensor] = {}
ENDED: list[float] = []


@functools.lru_cache
def mask(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


class Masked(nn.Module):
    window: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Masked.window is None:
            Masked.window = torch.hann_window(16)  # on the CPU, wherever the step is planned for
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.arange(x.shape[1]).float()[:, None]
        hidden = self.drop(self.linear(self.norm(x) * Masked.window.to(x.device))).relu()
        return x + mask(x.shape[1]).to(x.device) @ hidden + TABLES[x.shape[1]].to(x.device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean(dim=(1, 2)).mean()
    ENDED.append(0.0)
    return loss


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss_of(model, batch)
    random.random(), np.random.rand(), torch.rand(1)
    raise KeyError("the user's own mistake")


def caches() -> dict[str, Any]:
    return {"caches": [sorted(TABLES), mask.cache_info().currsize, id(Masked.window), len(ENDED)]}


def lazily() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), Masked(), nn.Linear(16, 1))
    return Workload(model, torch.randn(8, 8, 16), loss_of, torch.optim.AdamW(model.parameters()), name="lazily")


def plain_step(workload: Workload) -> float:
    loss = loss_of(workload.model, workload.batch)
    loss.backward()
    workload.model.zero_grad()
    return float(loss.detach())


def forget() -> None:
    TABLES.clear()
    ENDED.clear()
    mask.cache_clear()
    Masked.window = None


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # Threads that other tests have left may run: what changes meanwhile may be theirs, and stays.
    monkeypatch.setattr(user_state, "_others", dict)
    forget()
    yield
    forget()


@functools.cache
def made_plan() -> Plan:
    found = memfit.plan(lazily(), budget="0.9x", measure=False, time_limit_seconds=2.0)
    forget()
    return found


def _fitted(plan: Plan, workload: Workload) -> None:
    with memfit.fit(workload.model, workload.optimizer, budget="1GiB", tell=lambda line: None):
        pass


VERBS: dict[str, Callable[[Plan, Workload], object]] = {
    "estimate": lambda plan, workload: memfit.estimate(workload),
    "estimate for ranks": lambda plan, workload: memfit.estimate(workload, world_size=2, sharding="zero2"),
    "plan": lambda plan, workload: memfit.plan(workload, budget="0.9x", measure=False, time_limit_seconds=2.0),
    "verify": lambda plan, workload: memfit.verify(plan, workload, steps=2),
    "probe_range": lambda plan, workload: tools.probe_range(workload),
    "apply, adaptive": lambda plan, workload: memfit.apply(plan, workload, adaptive=True).close(),
    "apply": lambda plan, workload: memfit.apply(plan, workload).close(),
    "fit": _fitted,
    "ladder": lambda plan, workload: tools.ladder(workload, min_run_seconds=0.01),
    "fleet": lambda plan, workload: memfit.fleet(workload, steps=10, devices=["rtx-4090"]),
}
_MAY_FAIL = ("estimate", "plan", "verify", "probe_range")
_RARELY = ("ladder", "fleet")


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("verb", [pytest.param(v, marks=pytest.mark.ci) if v in _RARELY else v for v in VERBS])
def test_each_verb_leaves_the_process_as_it_was(verb: str, is_filled: bool) -> None:
    plan, workload = made_plan(), lazily()
    if is_filled:
        plain_step(workload)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = state_of(workload) | caches()
    VERBS[verb](plan, workload)
    assert not changes(before, state_of(workload) | caches())
    assert plain_step(workload) > 0  # with data: no table is fake


@pytest.mark.parametrize("verb", _MAY_FAIL)
def test_a_verb_that_fails_leaves_the_process_as_it_was(verb: str) -> None:
    plan, workload = made_plan(), dataclasses.replace(lazily(), loss_fn=failing)
    before = state_of(workload) | caches()
    with pytest.raises((memfit.MemfitError, KeyError)):
        VERBS[verb](plan, workload)
    assert not changes(before, state_of(workload) | caches())


@pytest.mark.ci
def test_a_budget_that_nothing_fits_leaves_the_process_as_it_was() -> None:
    workload = lazily()
    before = state_of(workload) | caches()
    with pytest.raises(memfit.InfeasibleError):
        memfit.plan(workload, budget="10KiB", time_limit_seconds=1.0)
    assert not changes(before, state_of(workload) | caches())


def test_training_changes_what_it_trains_and_nothing_else(tmp_path: Path) -> None:
    workload = lazily()
    before = process()
    memfit.train(made_plan(), workload, steps=1, out=tmp_path / "run")
    memfit.write_report(tmp_path / "run")
    left = changes(before, process())
    assert set(left) <= {"random state", "folder"}, left


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Workload], object]] = {
    "random state": lambda patch, w: torch.rand(1),
    "other random states": lambda patch, w: np.random.rand(),
    "dtype and device": lambda patch, w: torch.set_default_dtype(torch.float64),
    "collector": lambda patch, w: gc.callbacks.append(print),
    "gradients on": lambda patch, w: torch.set_grad_enabled(False),
    "autocast": lambda patch, w: torch.set_autocast_enabled("cpu", True),
    "deterministic": lambda patch, w: torch.set_deterministic_debug_mode("warn"),
    "backends": lambda patch, w: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "arguments": lambda patch, w: patch.setattr(sys, "argv", ["other"]),
    "environment": lambda patch, w: patch.setenv("MEMFIT_OTHER", "1"),
    "signals": lambda patch, w: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "log levels": lambda patch, w: patch.setattr(logging.getLogger("memfit"), "level", 5),
    "filters": lambda patch, w: warnings.simplefilter("ignore"),
    "threads": lambda patch, w: threading.Thread(target=STOP.wait, daemon=True).start(),
    "tracing": lambda patch, w: threading.settrace(lambda *_: None),
    "hooks of Python": lambda patch, w: patch.setattr(sys, "excepthook", print),
    "PyTorch": lambda patch, w: patch.setattr(torch.Tensor, "numpy", print),
    "PyTorch's functions": lambda patch, w: patch.setattr(nn.functional, "linear", print),
    "folder": lambda patch, w: Path("left.txt").write_text(""),
    "training": lambda patch, w: w.model.eval(),
    "hooks": lambda patch, w: w.model.register_forward_hook(print),
    "gradients": lambda patch, w: loss_of(w.model, w.batch).backward(),
    "optimizer's hooks": lambda patch, w: w.optimizer.register_step_post_hook(print),
    "attributes": lambda patch, w: setattr(w.model, "other", 1),
    "caches": lambda patch, w: mask(3),
}
STOP = threading.Event()


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        signal.signal(signal.SIGUSR1, handler)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_deterministic_debug_mode("default")
        threading.settrace(None)  # type: ignore[arg-type]
        gc.callbacks[:] = [each for each in gc.callbacks if each is not print]
        STOP.set()


@pytest.mark.parametrize("name", CHANGES)
def test_the_snapshot_notices_each_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = lazily()
    STOP.clear()
    before = state_of(workload) | caches()
    assert not changes(before, state_of(workload) | caches())
    with _undone():
        CHANGES[name](monkeypatch, workload)
        after = state_of(workload) | caches()
    assert name in changes(before, after)
