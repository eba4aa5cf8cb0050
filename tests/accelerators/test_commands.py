"""The command line's verbs that no other test runs on an accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from memfit import ir
from memfit.cli import main
from memfit.hardware import measurement, read
from memfit.ir import Plan, RunRecord, Views
from memfit.structure import separable_convolutions
from tests.accelerators.steps import convnet, language_model


@pytest.mark.slow
def test_the_demo_trains_there_and_reports(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small model: what `memfit demo --device` runs."""
    monkeypatch.setattr("memfit.recipes.byte_lm", lambda: language_model(n_layer=1))
    line = ["demo", "--out", str(tmp_path / "demo"), "--steps", "6", "--budget", "0.75x", "--device", kind]
    monkeypatch.setattr(sys, "argv", ["memfit", *line])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "Peak, measured" in shown and (tmp_path / "demo" / "report.html").exists()
    plan = ir.codec.read(tmp_path / "demo" / "plan.json", Plan)
    record = ir.codec.read(tmp_path / "demo" / "run.json", RunRecord)
    comparison = ir.codec.read(tmp_path / "demo" / "views.json", Views).comparison
    assert plan.device == f"{kind}:0" and record.measured_peak_bytes is not None and comparison is not None
    assert record.measured_peak_bytes <= plan.budget_bytes < comparison.plain_peak_bytes * 1.3
    assert record.first_loss is not None and record.last_loss is not None and record.last_loss < record.first_loss


def test_a_probe_keeps_the_accelerator_that_is_here(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few runs for each figure, which else takes 0.3 s each."""
    file = tmp_path / "machine.toml"
    monkeypatch.setattr(measurement, "_SECONDS", 0.01)
    monkeypatch.setattr(sys, "argv", ["memfit", "tools", "probe-devices", "--output", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    (found,) = (device for device in read(file).values() if device.kind == kind)
    assert found.bandwidth_bytes_per_second > 1e8 and found.vector_flops["float32"] > 1e6
    assert found.link_bytes_per_second > 1e6 and found.launch_seconds > 1e-8


def test_a_lighter_structure_is_measured_there(kind: str, place: torch.device) -> None:
    found = separable_convolutions(convnet(), device=kind, measure=True)
    for price in (found.before, found.after):
        assert price.measured_peak_bytes == pytest.approx(price.peak_bytes, rel=0.02)
    assert all(p.device.type == "cpu" for p in found.workload.model.parameters())
