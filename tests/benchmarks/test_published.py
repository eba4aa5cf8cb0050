"""The published rows and their page: what can be held without predicting them again."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from benchmarks.published import building, case, detection, figures, page
from benchmarks.published.rows import Row, every_row, sources
from benchmarks.tables import results
from memfit.cost import KERNELS_BYTES, roofline
from memfit.hardware import known_devices
from memfit.planner import predict
from tests.gpus import AMPERE
from tests.models import plain_trace


def test_rows_have_ids_of_their_own_a_card_of_the_catalogue_and_a_figure() -> None:
    rows = [row for source in sources().values() for row in source.rows]
    assert len(rows) == len(every_row()) >= 60
    for row in rows:
        assert row.device in known_devices()
        told = [row.allocated, row.after, row.reserved, row.process, row.step, row.fits]
        assert any(value is not None for value in told), row.id


@pytest.mark.parametrize("module", ["operators", "book", "lit", "language", "hub", "detection"])
def test_functions_take_the_options_of_their_rows(module: str) -> None:
    for row in every_row().values():
        where, _, name = row.build.partition(":")
        if where == module:
            make = getattr(importlib.import_module(f"benchmarks.published.{module}"), name)
            inspect.signature(make).bind(**{**row.options, **row.timed})


def test_the_page_is_that_of_the_result_file() -> None:
    assert page.PAGE.read_text() == page.page(results("published"))


def test_the_summary_is_that_of_the_cases() -> None:
    result = results("published")
    assert figures.summarised(result["cases"], sources()) == result["summary"]


def a_case(**errors: float) -> dict[str, Any]:
    return {"id": "a/1", "source": "s", "device": "d", "published": errors, "errors": errors, "within": {}}


def test_ratios_compare_neighbours_of_one_group() -> None:
    cases = [a_case(step=0.5), a_case(step=0.5), a_case(step=0.2)]
    assert figures.ratio_errors(cases) == pytest.approx([0, 0.2])
    other = [a_case(step=0.5), {**a_case(step=0.5), "id": "b/1"}]
    assert figures.ratio_errors(other) == []


FOUND = {
    "allocated_bytes": 900,
    "after_bytes": 100,
    "reserved_bytes": 1000,
    "upper_bytes": 1100,
    "context_bytes": 200,
    "context_upper_bytes": 200 + KERNELS_BYTES + 50,  # of a step that convolves
    "step_seconds": 1.0,
    "fits": True,
}


def a_row(**given: Any) -> Row:
    return Row(id="a", grade="A", build="", device="a10", **given)


def test_the_whole_process_is_what_is_reserved_and_what_the_sources_meter_shows_beside_it() -> None:
    predicted = {
        "lazily": a_row(process=1200),
        "with the driver's own": a_row(process=1240, driver=40),
        "as measured before": a_row(process=1300, idle=300),
        "all kernels": a_row(process=1350, idle=300, loads_all=True),
    }
    for row in predicted.values():
        case = figures.compared("s", row, FOUND)
        assert case["errors"] == {"process": 0} and case["within"] == {"process": True}


def test_the_interval_of_a_whole_process_has_room_for_kernels_unless_they_were_measured() -> None:
    def within(**given: Any) -> bool:
        inside: bool = figures.compared("s", a_row(**given), FOUND)["within"]["process"]
        return inside

    most = 1100 + FOUND["context_upper_bytes"]
    assert within(process=most) and not within(process=most + 1)
    assert within(process=1000) and not within(process=999)  # 10 % less is reserved, and half of the context is held
    assert within(process=most + 40, driver=40) and not within(process=1039, driver=40)
    assert within(process=1400, idle=300) and not within(process=1401, idle=300)


def test_intervals_of_what_is_allocated_are_around_the_prediction() -> None:
    for measured, inside in ((810, True), (990, True), (809, False), (991, False)):
        assert figures.compared("s", a_row(allocated=measured), FOUND)["within"]["allocated"] is inside


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 2, 7, 8)])
def test_tokens_are_packed_by_a_copy_only_where_the_sequence_comes_first(shape: tuple[int, ...]) -> None:
    batch, heads, length, width = shape
    rows = torch.randn(batch, length, heads, width).transpose(1, 2)
    first = torch.randn(length, batch, heads, width).permute(1, 2, 0, 3)
    for x in (rows, first):
        packed = building._packed(x)
        assert torch.equal(packed, x)
        assert packed.stride() == (length * heads * width, width, heads * width, 1)
    assert building._packed(rows).data_ptr() == rows.data_ptr()
    assert batch == 1 or building._packed(first).data_ptr() != first.data_ptr()


def test_the_old_flash_attention_is_for_halves_without_a_mask() -> None:
    q = torch.randn(1, 2, 4, 8)
    current = torch.nn.functional.scaled_dot_product_attention
    with building.flash_of_packed_tokens():
        patched = torch.nn.functional.scaled_dot_product_attention
        assert patched is not current
        assert torch.equal(patched(q, q, q), current(q, q, q))
        mask = torch.ones(4, 4, dtype=torch.bool)
        assert torch.equal(patched(q.half(), q.half(), q.half(), mask), current(q.half(), q.half(), q.half(), mask))
    assert torch.nn.functional.scaled_dot_product_attention is current


@pytest.mark.parametrize(("classes", "parameters"), [(4, 20_883_441), (80, 21_190_557)])
def test_yolov5m_has_the_parameters_that_autobatch_prints(classes: int, parameters: int) -> None:
    with torch.device("meta"):
        model = detection.YOLOv5m(classes, runs=True)
        found = model(torch.empty(2, 3, 64, 96, dtype=torch.float16))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert [tuple(x.shape) for x in found] == [(2, 3, 64 // n, 96 // n, classes + 5) for n in (8, 16, 32)]


def test_convolutions_that_autocast_keeps_give_no_gradient_to_their_weights() -> None:
    layer = detection.HalvedConv(2, 3, 1, 1, 0, bias=True, runs=True)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in layer.parameters())
    assert not list(detection.HalvedConv(2, 3, 1, 1, 0, bias=True, runs=False).buffers())


def test_outputs_are_kept_within_the_block_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    with building.outputs_kept([layer]) as kept:
        first = layer(torch.ones(1, 2))
    layer(torch.zeros(1, 2))
    assert [x.data_ptr() for x in kept] == [first.data_ptr()]
    assert not kept[0].requires_grad


def scored(source: str, *scores: float) -> dict[str, Any]:
    return {"id": source, "source": source, "scores": dict(zip(figures.MEMORY, scores, strict=False))}


def test_a_source_is_held_against_the_intervals_that_the_others_need() -> None:
    others = [scored(name, 0.1, 0.2, 0.3, 0.4) for name in "abcdefgh"]
    found = figures.left_out_intervals([*others, scored("wide", 0.2, 2.0)])
    assert found["wide"] == (pytest.approx(0.4), [True, False])
    width, inside = found["a"]
    assert 0.4 <= width <= 2.0 and all(inside)


@pytest.mark.parametrize(("measured", "score"), [(900, 0.0), (945, 0.5), (855, 0.5), (990, 1.0), (1080, 2.0)])
def test_scores_are_shares_of_the_way_to_the_intervals_end(measured: int, score: float) -> None:
    case = figures.compared("s", a_row(allocated=measured), FOUND)
    assert case["scores"]["allocated"] == pytest.approx(score) and case["within"]["allocated"] is (score <= 1)


def test_kernels_that_are_all_loaded_leave_less_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = plain_trace("transformer")
    found, _ = predict(trace, roofline([trace], AMPERE), AMPERE)
    assert found.peak_reserved_bytes is not None and found.retries == 0
    monkeypatch.setattr(case, "built", lambda row, options: None)
    monkeypatch.setattr(case, "samples_of", lambda workload: 1)
    monkeypatch.setattr(case, "capture_plain", lambda workload, levers, device: trace)

    def retries(usable_bytes: int, **given: Any) -> int | None:
        monkeypatch.setattr(case, "find_device", lambda name: replace(AMPERE, usable_bytes=usable_bytes))
        return case.retries(a_row(fits=True, **given), found)

    enough = found.peak_reserved_bytes + KERNELS_BYTES
    assert retries(enough, loads_all=True) == 0
    assert retries(enough - 1, loads_all=True) != 0
    assert retries(enough - 1) == 0
