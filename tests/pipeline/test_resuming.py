"""A run that goes on in another precision ends as one whose step was closed and made anew in that precision."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit.errors import CheckpointError
from memfit.ir.plan import Plan, Precision
from memfit.ir.run_record import RunRecord
from memfit.levers.stack import applied
from memfit.training.runs import checkpoint
from memfit.training.runs.log import RunOptions
from memfit.training.trainer import Trainer
from memfit.workload import Workload, fingerprint
from tests.models import BUILDERS

MASTERS, ROUNDING = "master-weights", "stochastic-rounding"
PAIRS: list[tuple[Precision, Precision, Any, str]] = [
    ("32-true", "16-mixed", None, "a new loss scaler starts at 65536"),
    ("16-mixed", "32-true", None, "the loss scaler's state is dropped"),
    ("16-mixed", "bf16-mixed", None, "the loss scaler's state is dropped"),
    ("32-true", "bf16-true", MASTERS, "unchanged"),
    ("bf16-true", "32-true", MASTERS, "unchanged"),
    ("bf16-true", "16-mixed", MASTERS, "a new loss scaler starts at 65536"),
    ("32-true", "bf16-true", ROUNDING, "weights are rounded to bf16"),
    ("bf16-true", "32-true", ROUNDING, "weights are widened from bf16"),
]


def built(updates: Any) -> Workload:
    return dataclasses.replace(BUILDERS["transformer"](), bf16_updates=updates)


@functools.cache
def plan_for(updates: Any) -> Plan:
    workload = BUILDERS["transformer"]()
    plan = memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1)
    return replace(plan, fingerprint=fingerprint(built(updates)))


def train(precision: Precision, updates: Any, out: Path, **options: Any) -> tuple[Workload, RunRecord]:
    workload, plan = built(updates), plan_for(updates)
    plan = replace(plan, levers=replace(plan.levers, precision=precision, microbatch_size=2))
    torch.manual_seed(1)
    with applied(plan.levers, workload) as step:
        record = Trainer(step, plan, RunOptions(out=out, **options)).fit()
    return workload, record


def switched(was: Precision, is_now: Precision, updates: Any) -> Workload:
    """Two steps in one precision and two in the other, without a checkpoint in between."""
    workload, levers = built(updates), plan_for(updates).levers
    torch.manual_seed(1)
    for precision in (was, is_now):
        with applied(replace(levers, precision=precision, microbatch_size=2), workload) as step:
            for _ in range(2):
                step(workload.batch)
    return workload


@pytest.mark.parametrize(("was", "is_now", "updates", "done"), PAIRS)
def test_a_run_goes_on_in_another_precision(
    was: Precision, is_now: Precision, updates: Any, done: str, tmp_path: Path
) -> None:
    train(was, updates, tmp_path, steps=2)
    moved, record = train(is_now, updates, tmp_path, steps=4, resume=True)
    expected = switched(was, is_now, updates)
    for one, other in zip(moved.model.parameters(), expected.model.parameters(), strict=True):
        assert one.dtype is torch.float32 and torch.equal(one, other)
    states = (list(w.optimizer.state.values()) for w in (moved, expected))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*states, strict=True) for key in a)
    (event,) = record.events
    assert event.kind == "another precision" and done in event.text
    assert f"precision={was!r}; training continues with {is_now!r}" in event.text


def test_in_the_same_precision_a_checkpoint_without_the_scaler_s_state_is_refused(tmp_path: Path) -> None:
    """As after `16-mixed` written by something that forgot it: nothing is said to have changed, so nothing may."""
    train("32-true", None, tmp_path, steps=1)
    folder = tmp_path / "checkpoint-1"
    workload, plan = built(None), plan_for(None)
    levers = replace(plan.levers, precision="16-mixed", microbatch_size=2)
    with applied(levers, workload) as step:
        same: list[Precision | None] = [None, "32-true"]
        for precision in same:
            with pytest.raises(CheckpointError, match="loss scaler"):
                checkpoint.read(folder, step, precision)
        assert json.loads((folder / "training.json").read_text())["scaler"] is None
        assert checkpoint.read(folder, step, "16-mixed").step_count == 1
