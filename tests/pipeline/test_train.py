"""Runs through the library: side by side, trained, reported."""

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
from memfit import ir
from memfit.errors import CheckpointError, NonFiniteError, OutputError, UsageError
from memfit.ir import Levers, Plan, Precision, Region, RunRecord, Views
from memfit.levers import applied
from memfit.pipeline import views_of
from memfit.recipes import byte_lm
from memfit.training import METRICS, RunOptions, Trainer, read_lines
from memfit.training.runs import checkpoint
from memfit.workload import Workload, fingerprint
from tests.models import BUILDERS
from tests.pipeline.plans import exact, have_same_weights


def tiny() -> Workload:
    """A GPT of one layer, with dropout."""
    return byte_lm(n_layer=1, d_model=64, n_head=4, context=64, batch_size=4, max_bytes=200_000)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return exact(tiny(), int(0.8 * memfit.estimate(tiny()).peak_bytes))


@pytest.fixture(scope="module")
def wide() -> Plan:
    return exact(tiny(), "4GiB")


def test_exact_plan_trains_as_the_plain_step_does_and_the_workload_is_left_alone(plan: Plan) -> None:
    workload = tiny()
    random_state = torch.get_rng_state()
    first = next(iter(workload.batches or ()))
    found = memfit.verify(plan, workload, steps=4).comparison
    assert found is not None and found.plain_losses == found.planned_losses
    assert len(set(found.plain_losses)) == 4
    assert found.planned_peak_bytes <= plan.budget_bytes < found.plain_peak_bytes
    assert found.plain_step_seconds > 0 < found.planned_step_seconds
    assert have_same_weights(workload, tiny())
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.equal(first["tokens"], next(iter(tiny().batches or ()))["tokens"])


def test_views_hold_both_timelines_and_the_modules(plan: Plan) -> None:
    found = views_of(plan, tiny())
    assert found.plain.peak_bytes == plan.plain.peak_bytes
    assert found.planned.peak_bytes == plan.predicted.peak_bytes
    rows = {row.fqn: row for row in found.modules}
    recomputed = [fqn for fqn, row in rows.items() if row.action]
    assert recomputed == sorted((fqn for r in plan.levers.regions for fqn in r.modules), key=list(rows).index)
    whole = rows["(model)"]
    assert whole.planned_saved_bytes < whole.saved_bytes
    assert whole.parameter_bytes == sum(p.nbytes for p in tiny().model.parameters())
    assert ir.codec.decode(ir.codec.encode(found), Views, source="memory") == found


def test_run_holds_what_its_report_needs(plan: Plan, tmp_path: Path) -> None:
    seen = []
    record = memfit.train(
        plan, tiny(), out=tmp_path / "run", steps=3, compare_steps=2, on_step=lambda p: seen.append(p.step)
    )
    assert seen == [1, 2, 3]
    assert record.status == "finished"
    assert record.measured_peak_bytes is not None
    assert record.measured_peak_bytes <= plan.budget_bytes
    assert ir.codec.read(tmp_path / "run" / "run.json", RunRecord) == record
    page = memfit.write_report(tmp_path / "run")
    assert "tiny" in page.read_text() or "byte_lm" in page.read_text()
    with pytest.raises(OutputError, match="overwrite"):
        memfit.train(plan, tiny(), out=tmp_path / "run", steps=3)
    memfit.train(plan, tiny(), out=tmp_path / "run", steps=2, overwrite=True)
    assert not page.exists()


def test_planned_training_ends_where_plain_training_ends(plan: Plan, wide: Plan, tmp_path: Path) -> None:
    planned, plain = tiny(), tiny()
    torch.manual_seed(1)
    memfit.train(plan, planned, out=tmp_path / "planned", steps=3)
    assert wide.levers.regions == ()
    torch.manual_seed(1)
    memfit.train(wide, plain, out=tmp_path / "plain", steps=3)
    assert have_same_weights(planned, plain)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_lines(out / METRICS) if "loss" in line]


def test_a_run_goes_on_bitwise_under_the_plan_of_a_smaller_machine(plan: Plan, wide: Plan, tmp_path: Path) -> None:
    """Both plans are exact, so the run ends as if it had never been moved."""
    whole, moved = tiny(), tiny()
    torch.manual_seed(1)
    memfit.train(wide, whole, out=tmp_path / "whole", steps=4)
    torch.manual_seed(1)
    memfit.train(wide, tiny(), out=tmp_path / "moved", steps=2)
    record = memfit.train(plan, moved, out=tmp_path / "moved", steps=4, resume=True)
    assert have_same_weights(whole, moved)
    assert losses(tmp_path / "moved") == losses(tmp_path / "whole")
    (event,) = record.events
    assert event.kind == "another plan"
    count = len(plan.levers.regions)
    assert event.text.endswith(f"continues with {count} region{'s' * (count > 1)}")
    assert ir.codec.read(tmp_path / "moved" / "plan.json", Plan) == plan
    assert ir.codec.read(tmp_path / "moved" / "views.json", Views).planned.peak_bytes == plan.predicted.peak_bytes


@pytest.mark.ci
def test_a_run_goes_on_over_the_same_batches_with_smaller_microbatches(tmp_path: Path) -> None:
    """The same global batches in the same order; the sums are of other pieces, so equal to rounding."""

    def undropped() -> Workload:
        return byte_lm(n_layer=1, d_model=32, n_head=4, context=32, batch_size=4, max_bytes=100_000, dropout=0.0)

    whole, moved = undropped(), undropped()
    plain = memfit.plan(undropped(), budget="4GiB", precisions=["32-true"], points=1)
    halved = replace(plain, levers=replace(plain.levers, microbatch_size=1))
    memfit.train(plain, whole, out=tmp_path / "whole", steps=4)
    memfit.train(plain, undropped(), out=tmp_path / "moved", steps=2)
    memfit.train(halved, moved, out=tmp_path / "moved", steps=4, resume=True)
    whole_losses, moved_losses = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert moved_losses[:2] == whole_losses[:2] and moved_losses == pytest.approx(whole_losses, rel=1e-5)
    for one, other in zip(whole.model.parameters(), moved.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
    assert moved.batches.state_dict() == whole.batches.state_dict()  # type: ignore[union-attr]


def test_what_is_not_finite_is_named_where_modules_are_recomputed_too() -> None:
    """Looking at the numbers of a module changes nothing that autograd saves in it."""
    workload = tiny()
    levers = Levers(microbatch_size=2, regions=(Region(("blocks.0.attention",)), Region(("blocks.0.mlp",))))
    with applied(levers, workload) as step:
        with torch.no_grad():
            workload.model.blocks[0].mlp.fc.bias[0] = torch.inf  # type: ignore[index,union-attr]
        with pytest.raises(NonFiniteError, match="first the output of 'blocks.0.mlp.fc'"):
            step(workload.batch)


def test_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run.json"):
        memfit.write_report(tmp_path)


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
    return replace(exact(BUILDERS["transformer"](), "90%"), fingerprint=fingerprint(built(updates)))


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
