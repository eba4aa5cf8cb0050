"""The claims page: its words follow from its figures, and its workloads are what the page says."""

from __future__ import annotations

import copy
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import claims_workloads as workloads
from benchmarks.charts import Axis, Line, Panel, chart
from benchmarks.claims_figures import UnsupportedVerdict, every, growth, pick
from benchmarks.claims_page import CHINESE, files, page
from benchmarks.claims_predicted import activation_bytes, capture_step, fits, kept_convolutions
from benchmarks.pages import stale
from benchmarks.tables import results
from memfit.hardware import find_device
from memfit.ir import Prediction, simulate
from memfit.planner import costs_of


@pytest.fixture
def result() -> dict[str, Any]:
    return copy.deepcopy(results("claims"))


def test_the_page_is_that_of_the_result_file(result: dict[str, Any]) -> None:
    assert stale(files(result)) == []
    assert "Figures for GPUs are **predicted**" in page(result)


def test_the_chinese_page_has_the_figures_of_the_english_one_and_no_english_words(result: dict[str, Any]) -> None:
    english, chinese = page(result), page(result, CHINESE)
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (english, chinese)]
    cells = [re.findall(r"[\d.,]+ [KMGT]iB|×[\d.]+|[\d.]+ m?s\b", "\n".join(lines)) for lines in tables]
    assert cells[0] == cells[1] and len(cells[0]) > 200
    english_words = {
        "plain",
        "checkpointed",
        "time",
        "peak",
        "layers",
        "blocks",
        "each",
        "saved",
        "this",
        "of",
        "to",
        "yes",
    }
    assert not english_words & set(re.findall(r"[a-z]+", re.sub(r"`[^`]*`", "", "\n".join(tables[1]))))


def test_other_figures_make_another_page(result: dict[str, Any]) -> None:
    pick(result["cases"], claim="depth", setting="blocks", depth=36, group=6)["activation_bytes"] *= 1.3
    pick(result["cases"], claim="billion", setting="math")["peak_bytes"] *= 1.3
    assert stale(files(result)) == ["claims.md", "claims.md", "depth.svg"]


@pytest.mark.parametrize(
    ("wanted", "key", "value"),
    [
        ({"claim": "mixed precision", "precision": "bf16-mixed", "batch_size": 32}, "peak_bytes", 2.8 * 2**30),
        ({"claim": "checkpointing", "setting": "every layer"}, "step_seconds", 9.0),
        ({"claim": "depth", "setting": "layers", "group": "solver"}, "status", "feasible"),
        ({"claim": "spacing", "setting": "layers", "group": 5}, "activation_bytes", 1),
        ({"claim": "attention", "setting": "flash", "length": 32768}, "activation_bytes", 2**40),
        ({"claim": "mri", "net": "DynUNet 32", "precision": "bf16-mixed"}, "fits", "yes"),
        ({"claim": "billion", "setting": "zero1"}, "state_bytes", 1),
        ({"claim": "billion", "setting": "fp32"}, "step_seconds", 1.0),
        ({"claim": "depth", "setting": "blocks", "group": 0, "depth": 256}, "activation_bytes", 2**40),
        ({"claim": "depth", "setting": "blocks", "group": 2, "depth": 4}, "step_seconds", 9.0),
        ({"claim": "passes", "setting": "layers", "passes": 3}, "activation_bytes", 1),
        ({"claim": "image nets", "setting": "EfficientNet-B0"}, "peak_bytes", 2**30),
        ({"claim": "undifferentiable"}, "bitwise", False),
    ],
)
def test_a_verdict_that_no_longer_follows_is_not_written(
    result: dict[str, Any], wanted: dict[str, Any], key: str, value: Any
) -> None:
    changed = every(result["cases"], **wanted)
    assert changed
    for case in changed:
        case[key] = value
    with pytest.raises(UnsupportedVerdict, match="figures no longer say"):
        page(result)


def test_growth_is_the_exponent() -> None:
    cases = [{"n": n, "activation_bytes": 7 * n**1.5} for n in (2, 9, 31)]
    assert growth(cases, "n") == pytest.approx(1.5)


def test_a_chain_computes_the_same_however_it_is_grouped() -> None:
    chains = []
    for sizes in ([], [2, 4, 12], [5]):
        torch.manual_seed(0)
        chains.append(workloads.layers(12, sizes, rows=3, width=8).model)
    x = torch.randn(3, 8)
    assert all(torch.equal(chains[0](x), chain(x)) for chain in chains[1:])
    counts = {size: len(workloads.groups_of(chains[1], size)) for size in (1, 2, 3, 4, 12)}
    assert counts == {1: 12, 2: 6, 3: 0, 4: 3, 12: 1}
    assert len(workloads.groups_of(chains[2], 5)) == 2  # and one of the two that are left


def test_lean_norms_keep_convolutions_and_save_memory() -> None:
    made = workloads.unet((16, 16, 16), (4, 8))
    stages = workloads.outermost(made.model, ("ResidualUnit", "Convolution"))
    assert not any(a != b and a.startswith(f"{b}.") for a in stages for b in stages)
    cpu = find_device("cpu")
    plain = capture_step(made, cpu, "32-true")
    regions = kept_convolutions(plain, stages)
    kept = [name for region in regions for name in region.keep]
    ran = [op for op in plain.ops if op.name == "aten.convolution.default"]
    assert len(kept) == len(ran) and all(name.startswith("aten.convolution.default#") for name in kept)
    costs = costs_of([plain], cpu)
    lean = simulate(plain, costs, regions)
    assert activation_bytes(lean) < activation_bytes(simulate(plain, costs))


@pytest.mark.parametrize(("reserved", "upper", "said"), [(8, 9, "yes"), (10, 11, "perhaps"), (11, 12, "no")])
def test_a_step_fits_by_the_upper_end_of_what_it_reserves(reserved: int, upper: int, said: str) -> None:
    prediction = Prediction(
        peak_bytes=7,
        peak_reserved_bytes=reserved,
        peak_upper_bytes=upper,
        step_seconds=1.0,
        by_category={},
        where="",
        device_bytes=10,
    )
    assert fits(prediction) == said


def test_a_chart_is_xml_with_its_points_on_logarithmic_axes() -> None:
    axis = Axis("<n>", (1, 10, 100), str)
    text = chart("A & B", "", [Panel("p", [Line("l", [(1, 100), (10, 1)], "#000")])], axis, axis)
    root = ElementTree.fromstring(text)
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x2 - x1 == pytest.approx(140) and y2 - y1 == pytest.approx(250)  # half of the width, all of the height
    assert "<n>" in [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
