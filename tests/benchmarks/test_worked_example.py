"""The docs' example: what it measures is what it predicts, and its pictures are drawn to scale."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.charts import PANEL_HEIGHT, PANEL_WIDTH, Stack, stacks
from benchmarks.worked_example import run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.ci
@pytest.mark.slow
def test_the_example_is_predicted_to_the_byte_and_fits() -> None:
    (plain, planned), summary = run(quick=True)
    assert plain["peak_bytes"] > summary["budget_bytes"] >= planned["peak_upper_bytes"]
    for case in (plain, planned):
        assert case["measured_peak_bytes"] == case["peak_bytes"]
        totals = [sum(values) for values in zip(*case["live_bytes"].values(), strict=True)]
        assert totals[case["peak_index"]] == max(totals) == case["peak_bytes"]
        # Of some 600 operators, each rounded to 1 ns.
        assert sum(case["seconds"]) == pytest.approx(case["step_seconds"], abs=1e-6)
    assert summary["holds"] and summary["bitwise"] and summary["regions"]


def test_stacks_are_on_top_of_one_another_and_to_scale() -> None:
    panel = Stack("<p>", {"low": [1.0, 1.0, 2.0], "high": [3.0, 0.0, 1.0]}, [1.0, 2.0, 4.0], [(2.0, "half")])
    root = ElementTree.fromstring(stacks("A & B", "", [panel], (0, 4), (2.0, "limit"), "time"))
    areas = [
        [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
        for polygon in root.iter(f"{SVG}polygon")
    ]
    low, high = ([y for _, y in area] for area in areas)
    ground = max(low)
    assert ground - min(low) == pytest.approx(PANEL_HEIGHT / 2) and ground - min(high) == pytest.approx(PANEL_HEIGHT)
    across = [x for x, _ in areas[0]]
    assert max(across) - min(across) == pytest.approx(PANEL_WIDTH)
    assert "<p>" in [text.text for text in root.iter(f"{SVG}text")]
