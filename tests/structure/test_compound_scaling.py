from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.errors import InfeasibleError, WorkloadError
from memfit.structure import COMPOUND, SINGLE, Rule, scale
from memfit.structure.compound_scaling import ScalingSearch
from memfit.workload import Workload
from tests.structure.measuring import classifier, measured_peak_bytes


def family(width: float, depth: float, resolution: float) -> Workload:
    """Chains of convolutions on small images."""
    torch.manual_seed(0)
    sizes = [3] + [max(round(8 * width), 1)] * max(round(2 * depth), 1)
    layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 4))
    size = max(round(12 * resolution), 1)
    return classifier(model, torch.randn(4, 3, size, size), 4)


def test_the_default_rule_is_the_papers() -> None:
    width, depth, resolution = COMPOUND.at(1)
    assert (depth, width, resolution) == (1.2, 1.1, 1.15)
    assert depth * width**2 * resolution**2 == pytest.approx(2, rel=0.05)
    for rule in SINGLE:
        width, depth, resolution = rule.at(1)
        assert depth * width**2 * resolution**2 == pytest.approx(2)


class Imagined(ScalingSearch):
    """A search over members whose peaks grow in steps, as sizes that are rounded do."""

    def __init__(self, budget_bytes: int, growth: float, steps: float) -> None:
        super().__init__(family, budget_bytes, None, False, "exact", "cpu")
        self.growth, self.steps = growth, steps

    def peak(self, phi: float) -> float:
        return 1000 * self.growth ** (math.floor(phi * self.steps) / self.steps)

    def member(self, rule: Rule, phi: float) -> Any:
        peak = int(self.peak(phi))
        fits = peak <= self.budget_bytes
        made = memfit.structure.Member(rule.name, phi, 1.0, 1.0, 1.0, 1, 1, peak, 1.0, fits, 1.0 if fits else None)
        self.members.append(made)
        return made


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10**6),
    st.floats(1.1, 4),
    st.floats(0.3, 20),
    st.floats(0.02, 0.5),
    st.floats(-8, 1),
    st.floats(2, 8),
)
def test_bisection_finds_the_largest(
    budget: int, growth: float, steps: float, tolerance: float, low: float, high: float
) -> None:
    search = Imagined(budget, growth, steps)
    found = search.largest(COMPOUND, tolerance, (low, high))
    if found is None:
        assert int(search.peak(low)) > budget
        return
    assert found.fits and low <= found.phi <= high
    assert found.phi == high or int(search.peak(found.phi + tolerance)) > budget
    assert len(search.members) <= 8 + math.log2(16 / tolerance)


def test_the_member_chosen_fits_and_the_next_does_not() -> None:
    budget = 400_000
    found = scale(family, budget=budget, tolerance=0.25)
    assert found.chosen.fits and found.chosen.phi > 0
    assert measured_peak_bytes(found.workload) <= budget
    over = [m for m in found.members if not m.fits]
    assert min(m.phi for m in over) - found.chosen.phi <= 0.25
    assert memfit.estimate(found.workload).peak_bytes == found.chosen.peak_bytes
    assert "▶" in str(found) and "compound" in str(found)
    assert [m.peak_bytes for m in found.frontier] == sorted(m.peak_bytes for m in found.frontier)


@pytest.mark.ci
def test_rules_compete_by_the_proxy() -> None:
    budget = 400_000
    widest = scale(family, budget=budget, rules=SINGLE[:2], tolerance=1.0, proxy=lambda w: w.model[0].out_channels)
    deepest = scale(family, budget=budget, rules=SINGLE[:2], tolerance=1.0, proxy=lambda w: len(w.model))
    assert (widest.chosen.rule, deepest.chosen.rule) == ("width", "depth")
    assert all((m.proxy is None) != m.fits for m in widest.members)

    whole = len(family(1, 1, 1).model)
    closest = scale(family, budget=400_000, rules=SINGLE[:2], tolerance=1.0, proxy=lambda w: whole - len(w.model))
    assert any(m.proxy is not None and m.proxy < 0 for m in closest.members)
    assert (closest.chosen.rule, closest.chosen.proxy) == ("width", 0.0)


@pytest.mark.ci
def test_plans_make_room_for_larger_members() -> None:
    options: dict[str, Any] = {"budget": 300_000, "tolerance": 1.0, "phi_range": (-2.0, 3.0)}
    plain, planned = scale(family, **options), scale(family, planned=True, **options)
    assert planned.chosen.phi > plain.chosen.phi
    memfit.plan(planned.workload, budget=300_000, points=1)


def test_nothing_fits_is_said_with_the_smallest() -> None:
    with pytest.raises(InfeasibleError) as e:
        scale(family, budget=2000, phi_range=(-1.0, 1.0))
    assert e.value.budget_bytes == 2000 < e.value.lowest_peak_bytes and "phi_range" in str(e.value)
    with pytest.raises(WorkloadError, match="tolerance=0"):
        scale(family, budget=1000, tolerance=0)
    largest = scale(family, budget="1GiB", phi_range=(-1.0, 1.0))
    assert largest.chosen.phi == 1.0 and "raise phi_range" in largest.notes[0]


def test_the_frontier_is_drawn(tmp_path: Path) -> None:
    found = scale(family, budget="1GiB", phi_range=(-1.0, 0.5))
    page = found.plot(tmp_path / "frontier.html").read_text()
    assert "multiply-adds per sample" in page and "budget" in page
    shown = [member for member in found.members if member.peak_bytes <= 2.5 * found.budget_bytes]
    assert page.count('<span class="mark ') == len(shown) + 1 and "chosen" in page
