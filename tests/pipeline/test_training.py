"""Runs through the library: side by side, trained, reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memfit
from memfit.errors import OutputError, UsageError
from memfit.ir import codec
from memfit.ir.plan import Plan
from memfit.ir.record import RunRecord, Views
from memfit.pipeline.training import views
from tests.workloads import tiny


@pytest.fixture(scope="module")
def plan() -> Plan:
    plain = memfit.estimate(tiny()).peak_bytes
    return memfit.plan(tiny(), budget=int(0.7 * plain), numerics="exact", precisions=["32-true"], points=1)


def test_exact_plan_trains_as_the_plain_step_does(plan: Plan) -> None:
    found = memfit.compare(plan, tiny(), steps=4)
    assert found.plain_losses == found.planned_losses
    assert len(set(found.plain_losses)) == 4
    assert found.planned_peak_bytes <= plan.budget_bytes < found.plain_peak_bytes
    assert found.plain_step_seconds > 0 < found.planned_step_seconds


def test_comparing_leaves_the_workload_alone(plan: Plan) -> None:
    workload = tiny()
    before = [p.clone() for p in workload.model.parameters()]
    random_state = torch.get_rng_state()
    first = next(iter(workload.batches or ()))
    memfit.compare(plan, workload, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    again = next(iter(tiny().batches or ()))
    assert torch.equal(first["tokens"], again["tokens"])


def test_views_hold_both_timelines_and_the_modules(plan: Plan) -> None:
    found = views(plan, tiny())
    assert found.plain.peak_bytes == plan.plain.peak_bytes
    assert found.planned.peak_bytes == plan.predicted.peak_bytes
    rows = {row.fqn: row for row in found.modules}
    recomputed = [fqn for fqn, row in rows.items() if row.action]
    assert recomputed == sorted((fqn for r in plan.levers.regions for fqn in r.modules), key=list(rows).index)
    whole = rows["(model)"]
    assert whole.planned_saved_bytes < whole.saved_bytes
    assert whole.parameter_bytes == sum(p.nbytes for p in tiny().model.parameters())
    assert codec.decode(codec.encode(found), Views, source="memory") == found


def test_run_holds_what_its_report_needs(plan: Plan, tmp_path: Path) -> None:
    seen = []
    record = memfit.train(
        plan, tiny(), out=tmp_path / "run", steps=3, compare_steps=2, on_step=lambda p: seen.append(p.step)
    )
    assert seen == [1, 2, 3]
    assert record.status == "finished"
    assert record.measured_peak_bytes is not None
    assert record.measured_peak_bytes <= plan.budget_bytes
    assert codec.read(tmp_path / "run" / "run.json", RunRecord) == record
    page = memfit.write_report(tmp_path / "run")
    assert "tiny" in page.read_text() or "byte_lm" in page.read_text()
    with pytest.raises(OutputError, match="overwrite"):
        memfit.train(plan, tiny(), out=tmp_path / "run", steps=3)
    memfit.train(plan, tiny(), out=tmp_path / "run", steps=2, overwrite=True)
    assert not page.exists()


def test_planned_training_ends_where_plain_training_ends(plan: Plan, tmp_path: Path) -> None:
    planned, plain = tiny(), tiny()
    torch.manual_seed(1)
    memfit.train(plan, planned, out=tmp_path / "planned", steps=3)
    wide = memfit.plan(tiny(), budget="4GiB", numerics="exact", points=1)
    assert wide.levers.regions == ()
    torch.manual_seed(1)
    memfit.train(wide, plain, out=tmp_path / "plain", steps=3)
    for one, other in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run.json"):
        memfit.write_report(tmp_path)
