"""The demonstration that `make demo` runs, with fewer steps of a smaller model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from memfit import ir
from memfit.cli import training
from memfit.ir import Plan, RunRecord, Views
from memfit.recipes import byte_lm


@pytest.mark.ci  # `make demo` itself; each of its parts has tests of its own
@pytest.mark.slow
def test_demo_trains_under_a_budget_that_the_plain_step_does_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.recipes, "byte_lm", functools.partial(byte_lm, n_layer=2, d_model=128, batch_size=4))
    training.run_demo(tmp_path / "demo", steps=4, budget="24MiB", device="cpu", overwrite=False)
    shown = capsys.readouterr().out
    for part in ("predicted without running it", "Frontier", "Budget", "Peak, measured", "report.html"):
        assert part in shown
    plan = ir.codec.read(tmp_path / "demo" / "plan.json", Plan)
    record = ir.codec.read(tmp_path / "demo" / "run.json", RunRecord)
    comparison = ir.codec.read(tmp_path / "demo" / "views.json", Views).comparison
    assert comparison is not None
    assert plan.plain.peak_bytes > plan.budget_bytes == 24 * 2**20
    assert comparison.plain_peak_bytes > plan.budget_bytes >= comparison.planned_peak_bytes
    assert record.measured_peak_bytes is not None
    assert record.measured_peak_bytes <= plan.budget_bytes
    assert record.last_loss is not None
    assert record.first_loss is not None
    assert record.last_loss < record.first_loss
