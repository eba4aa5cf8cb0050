"""The ladder: rungs measured one on top of the other, and what is said of those that can't be had."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memfit import ir, levers, tools
from memfit.errors import BudgetError, UsageError, WorkloadError
from memfit.hardware import find_device
from memfit.ir import Ladder, Levers, Rung
from memfit.levers import NotOffered
from memfit.report import ladder_page
from memfit.tools._ladder import PAYS, LadderClimb, pays
from memfit.workload import Workload
from tests.measuring import step_peak_bytes
from tests.models import convnet


def deep(batch: int = 64) -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, {"x": torch.randn(batch, 128)}, lambda m, b: m(b["x"]).square().mean(), optimizer, "deep")


@functools.cache
def climbed(batch: int = 512) -> Ladder:
    return tools.ladder(deep(batch), numerics="reordered", min_run_seconds=0.02)


def named(ladder: Ladder) -> dict[str, Rung]:
    return {rung.name: rung for rung in ladder.rungs}


def test_every_rung_is_measured_or_says_why_not() -> None:
    ladder = climbed()
    assert [rung.name for rung in ladder.rungs][:3] == ["plain", "precision", "chunked loss"]
    for rung in ladder.rungs:
        assert rung.is_measured == (rung.outcome != "not available")
        assert rung.why
    found = named(ladder)
    assert found["precision"].why == "of class reduced: numerics='reduced' allows it"
    assert "logits" in found["chunked loss"].why
    assert "GPU" in found["offload"].why
    assert "numerics='changed'" in found["structure"].why
    assert ladder.top.outcome == "kept"


def test_rungs_stand_on_those_that_were_kept_and_peaks_are_those_of_the_steps() -> None:
    workload, before = deep(512), climbed().rungs[0]
    for rung in climbed().rungs:
        if rung.levers is None:
            continue
        assert rung.peak_bytes == step_peak_bytes(workload, rung.levers)
        assert rung.predicted_peak_bytes == pytest.approx(rung.peak_bytes, rel=0.02)
        if rung is before:
            continue
        assert rung.peak_ratio == pytest.approx(rung.peak_bytes / before.peak_bytes)
        assert rung.step_seconds == pytest.approx(before.step_seconds * rung.step_ratio)
        if before.levers.lean:
            assert rung.levers.lean == before.levers.lean
        assert (rung.outcome == "kept") == pays(rung, before, None)
        before = rung if rung.outcome == "kept" else before


def test_the_largest_batch_fits_and_one_tenth_more_does_not() -> None:
    ladder = climbed()
    lean = named(ladder)["lean norms and activations"]
    assert lean.largest_batch > 512
    most, more = lean.largest_batch, int(1.1 * lean.largest_batch)
    assert step_peak_bytes(deep(most), Levers(microbatch_size=most, lean=("*",))) <= 1.01 * ladder.budget_bytes
    assert step_peak_bytes(deep(more), Levers(microbatch_size=more, lean=("*",))) > ladder.budget_bytes


def test_a_budget_is_climbed_down_to() -> None:
    plain = named(climbed())["plain"].peak_bytes
    ladder = tools.ladder(deep(512), budget=int(0.7 * plain), numerics="exact", min_run_seconds=0.02)
    assert ladder.is_budget_given
    found = named(ladder)
    assert found["lean norms and activations"].outcome == "kept"
    assert found["precision"].why.startswith("of class reduced")
    assert "reordered" in found["microbatches"].why
    assert ladder.top.peak_bytes <= 0.7 * plain


def test_batch_norm_leaves_microbatches_out() -> None:
    climb = LadderClimb(convnet(), find_device("cpu"), None, "reordered", 0.02)
    with pytest.raises(NotOffered, match="BatchNorm"):
        dict(levers.registry.lever_rungs())["microbatches"](climb, climb.plain)


RATIOS = st.floats(0.3, 3.0)


def rung(**figures: Any) -> Rung:
    return Rung(name="", outcome="kept", **figures)


@given(RATIOS, RATIOS, st.floats(0.0, 3.0))
def test_what_pays(peak: float, step: float, speed: float) -> None:
    """Without a budget peak times time decides; with one fitting comes first, and then throughput."""
    found = rung(peak_bytes=int(1000 * peak), peak_ratio=peak, step_ratio=step, samples_per_second=speed)
    before = rung(peak_bytes=1000, samples_per_second=1.0)
    assert pays(found, before, None) == (peak * step <= 1 - PAYS)
    assert pays(found, rung(peak_bytes=1000, samples_per_second=0.0), 900) == (peak <= 1 - PAYS)
    assert pays(found, before, 1100) == (speed >= 1 + PAYS)


def test_a_ladder_prints_writes_and_reads_back() -> None:
    ladder = climbed()
    assert ir.codec.decode(ir.codec.encode(ladder), Ladder, source="a test") == ladder
    page = ladder_page(ladder)
    for found in ladder.rungs:
        assert found.name in str(ladder)
        assert found.name in page
    assert page.count('<span class="mark ') == sum(found.is_measured for found in ladder.rungs)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("options", [{"budget": "many"}, {"numerics": "free"}, {"min_run_seconds": 0}])
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError if "budget" in options else UsageError, match=next(iter(options))):
        tools.ladder(deep(), **options)


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"), pytest.raises(WorkloadError, match="has no data"):
        tools.ladder(deep())
