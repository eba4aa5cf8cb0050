from __future__ import annotations

import base64
import hashlib
import html as html_module
import json
import math
import random
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memfit.errors import MissingExtraError, OutputError
from memfit.ir.plan import Levers, Plan
from memfit.ir.record import RunRecord, Views
from memfit.ir.timeline import TIMELINE_CATEGORIES, Timeline
from memfit.report.axes import bucket_extremes, bucket_maxima, byte_unit, css_name, label, second_unit
from memfit.report.figures import curve_figure, frontier_figure, timeline_figure, total_bytes
from memfit.report.html import render, write

MIB, GIB = 1024**2, 1024**3
HOSTILE = "</script><script>alert(1)</script>"
Hostile = Callable[[str], tuple[Plan, Views, RunRecord, list[dict[str, Any]]]]
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "xlink:href"}


class Page(HTMLParser):
    """A page, as what a browser would read: tags, scripts, styles and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str, str]] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self._open = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._open == "style":
            self.styles.append(data)
        else:
            self.text.append(" ".join(data.split()))

    def said(self) -> str:
        return " ".join(part for part in self.text if part)

    def figures(self) -> dict[str, Any]:
        found = [text for kind, text in self.scripts if kind == "application/json"]
        assert len(found) == 1
        return dict(json.loads(found[0]))


@pytest.fixture
def page(plan: Plan, views: Views, run: RunRecord, metrics: list[dict[str, Any]]) -> Page:
    return Page(render(plan, views, run, metrics))


def spiky_timeline(points: int, peak_index: int) -> Timeline:
    """Return a long timeline of noise, with one point far above the rest."""
    noise = random.Random(0)
    live = {name: [noise.randrange(MIB, 9 * MIB) for _ in range(points)] for name in TIMELINE_CATEGORIES}
    live["temporaries"][peak_index] = GIB
    total = [sum(values) for values in zip(*live.values(), strict=True)]
    return Timeline(
        live_bytes=live,
        labels=[f"forward · m.{i} · aten.mm.default" for i in range(points)],
        modules=[f"m.{i}" for i in range(points)],
        phases=["forward" if i < points / 2 else "recompute" if i % 2 else "backward" for i in range(points)],
        seconds=[1e-4] * points,
        peak_bytes=total[peak_index],
        peak_index=peak_index,
        step_seconds=1e-4 * points,
    )


def drawn(timeline: Timeline, budget_bytes: int = GIB) -> dict[str, Any]:
    return timeline_figure(
        timeline, categories=TIMELINE_CATEGORIES, budget_bytes=budget_bytes, peak_bytes=timeline.peak_bytes
    )


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(trace) for trace in figure["data"] if trace["name"] == name)


# Nothing is loaded, nothing is run but our scripts


def test_the_page_loads_nothing(page: Page) -> None:
    loads = [(tag, key, value) for tag, attrs in page.tags for key, value in attrs.items() if key in LOADING]
    assert {tag for tag, _, _ in loads} == {"a"}
    assert all(value and value.startswith("#") for _, _, value in loads)
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    style = "".join(page.styles)
    assert style and "url(" not in style and "@import" not in style and "http" not in style


def test_the_policy_forbids_every_request_and_names_the_scripts(page: Page) -> None:
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert set(rules) == {"default-src", "base-uri", "form-action", "style-src", "img-src", "script-src"}
    assert rules["img-src"] == "data: blob:"
    runnable = [text for kind, text in page.scripts if not kind]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runnable]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert len(runnable) == 2


def test_links_within_the_page_lead_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "a"} <= set(ids)
    assert set(page.figures()) <= set(ids)


def test_text_from_records_is_harmless(hostile: Hostile) -> None:
    source = render(*hostile(HOSTILE))
    page = Page(source)
    assert len(page.scripts) == 3
    assert all("alert(1)" not in text for kind, text in page.scripts if not kind)
    assert page.said().count(HOSTILE) >= 15
    without_plotly = source.replace(max((text for _, text in page.scripts), key=len), "")
    assert "<script>alert" not in without_plotly and without_plotly.count("</script") == 3
    (embedded,) = [text for kind, text in page.scripts if kind]
    assert not {"<", ">", "&"} & set(embedded)
    written = json.dumps(page.figures())
    assert "alert(1)" in written and "<script" not in written and html_module.escape("<script>") in written


def test_a_colour_is_named_by_nothing_but_letters() -> None:
    assert css_name("optimizer state") == "--c-optimizer-state"
    assert css_name("x);background:url(//y)") == "--c-x-background-url-y-"


def test_text_is_shown_by_plotly_as_it_is() -> None:
    assert label('<a href="x">&amp;') == '&lt;a href="x"&gt;&amp;amp;'
    assert label("a\nb\x1b") == "a b\ufffd"
    assert len(label("x" * 500)) == 64


# The numbers


def test_the_headline(page: Page, plan: Plan, views: Views) -> None:
    said = page.said()
    assert "13.1 GiB → 4.9 GiB −63 %" in said
    assert "✓ Fits the budget of 6.0 GiB, 953.4 MiB free at the upper end of the prediction" in said
    assert "×1.25 predicted 161.0 ms → 201.5 ms ×1.27 measured 211.4 ms in training" in said
    assert "feasible: no plan that fits takes over 2.8 % less time" in said
    assert "memfit 0.1.0, torch 2.13.0" in said and all(note in said for note in plan.notes)


def test_a_plan_over_the_budget_is_not_said_to_fit(plan: Plan, views: Views) -> None:
    over = msgspec.structs.replace(plan.predicted, peak_upper_bytes=plan.budget_bytes + 512 * MIB)
    said = Page(render(msgspec.structs.replace(plan, predicted=over), views, None, [])).said()
    assert "✗ May not fit the budget of 6.0 GiB: the upper end of the prediction is 512.0 MiB over" in said


def test_bars_have_the_lengths_of_their_figures(page: Page, plan: Plan) -> None:
    widths = [re.fullmatch(r"width: ([\d.]+)%", attrs.get("style") or "") for tag, attrs in page.tags if tag == "i"]
    lefts = {attrs.get("style") for tag, attrs in page.tags if tag == "b"}
    found = [float(width[1]) for width in widths if width]
    measured = 13_300 * MIB, 5_080 * MIB
    figures = [plan.plain.peak_bytes, measured[0], plan.predicted.peak_bytes, measured[1]]
    assert found == pytest.approx([100 * figure / plan.plain.peak_bytes for figure in figures], abs=0.01)
    assert lefts == {f"left: {100 * 6 * GIB / plan.plain.peak_bytes:.2f}%"}


def test_predicted_against_measured(page: Page, plan: Plan) -> None:
    said = page.said()
    error = 100 * (plan.predicted.peak_bytes / (5_080 * MIB) - 1)
    assert f"Prediction error +0.79 % −{-error:.1f} %" in said
    assert "Peak, training run 5.0 GiB" in said
    assert "Step, measured 165.0 ms 210.0 ms ×1.27" in said
    assert "4 4.5 4.500001 +1.0e-06" in said


def test_evaluations_with_different_values(page: Page) -> None:
    assert "Step accuracy loss 100 — 2.41 300 0.534 1.71" in page.said()


def test_events_and_waiting_are_told(page: Page, plan: Plan, views: Views, run: RunRecord) -> None:
    said = page.said()
    assert "200 damaged checkpoint checkpoint-250 was cut short; training goes on from checkpoint-200" in said
    assert "waited for data 31 % of the time: have batches made while steps run" in said
    for share, part in ((0.05, "waited for data 5.0 % of the time."), (None, "")):
        said = Page(render(plan, views, msgspec.structs.replace(run, data_share=share), [])).said()
        assert part in said and "have batches made" not in said and ("waited" in said) == (share is not None)


def test_allocation_retries_are_a_warning(plan: Plan, views: Views, run: RunRecord) -> None:
    for retries, text in ((None, ""), (0, ""), (1, "no room 1 time and"), (1200, "no room 1,200 times and")):
        said = Page(render(plan, views, msgspec.structs.replace(run, allocation_retries=retries), [])).said()
        assert text in said and ("emptied its cache" in said) == bool(retries)


def test_module_rows_carry_the_numbers_they_are_sorted_by(page: Page, views: Views) -> None:
    values = [int(attrs["data-value"] or 0) for tag, attrs in page.tags if (attrs.get("class") or "") == "number saved"]
    assert values == [row.planned_saved_bytes for row in views.modules]


def test_every_table_has_a_caption_and_scopes(page: Page) -> None:
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") == 8
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    plots = [attrs for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert [plot["id"] for plot in plots] == ["before", "after", "frontier", "loss", "seconds"]
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)


def test_a_run_of_another_workload_is_named(plan: Plan, views: Views, run: RunRecord) -> None:
    other = msgspec.structs.replace(run, fingerprint="0123", status="failed", error="CUDA error", steps=7)
    said = Page(render(plan, views, other, [])).said()
    assert "The run was of another workload than the plan: its fingerprint is 0123" in said
    assert "The run failed at step 7: CUDA error" in said


def test_a_plan_alone_has_no_empty_sections(plan: Plan, views: Views) -> None:
    bare = msgspec.structs.replace(views, comparison=None, modules=[])
    page = Page(render(msgspec.structs.replace(plan, frontier=[], notes=[]), bare, None, []))
    assert set(page.figures()) == {"before", "after", "frontier"}
    said = page.said()
    assert "Predicted and measured" not in said and "Training" not in said and "Notes" not in said
    assert "The plan has no frontier" in said
    assert "None" not in said and "measured" not in said


def test_a_step_without_operators_can_be_shown(plan: Plan, views: Views) -> None:
    empty = Timeline(
        live_bytes={name: [] for name in TIMELINE_CATEGORIES},
        labels=[],
        modules=[],
        phases=[],
        seconds=[],
        peak_bytes=0,
        peak_index=0,
        step_seconds=0.0,
    )
    page = Page(render(plan, msgspec.structs.replace(views, plain=empty, planned=empty), None, []))
    assert [trace["name"] for trace in page.figures()["before"]["data"]] == ["total"]


# The charts


def test_the_stack_adds_up_to_the_bytes_alive(views: Views) -> None:
    figure = drawn(views.plain)
    stacked = [trace["y"] for trace in figure["data"] if trace.get("stackgroup")]
    assert len(stacked) == len(TIMELINE_CATEGORIES)
    sums = [sum(values) * GIB for values in zip(*stacked, strict=True)]
    assert sums == pytest.approx(total_bytes(views.plain), rel=1e-3)
    assert trace(figure, "total")["y"] == pytest.approx([b / GIB for b in total_bytes(views.plain)], abs=1e-4)
    assert "GiB" in figure["layout"]["yaxis"]["title"]["text"]


@pytest.mark.parametrize("peak_index", [0, 1, 16_666, 49_999])
def test_a_long_timeline_keeps_its_peak(peak_index: int) -> None:
    timeline = spiky_timeline(50_000, peak_index)
    figure = drawn(timeline)
    total, peak = trace(figure, "total"), trace(figure, "peak")
    assert len(total["x"]) <= 1500
    at = total["x"].index(peak_index)
    assert total["y"][at] == pytest.approx(timeline.peak_bytes / GIB, abs=1e-4) == max(total["y"])
    assert (peak["x"], peak["y"]) == ([peak_index], [timeline.peak_bytes / GIB])
    assert f"m.{peak_index}<br>aten.mm.default" in total["text"][at] and "1.0 GiB  temporaries" in total["text"][at]
    assert len(figure["layout"]["shapes"]) < 400


@pytest.mark.parametrize(("count", "limit"), [(0, 10), (1, 10), (10, 10), (11, 10), (999, 10), (12_345, 1500)])
def test_every_bucket_keeps_its_maximum(count: int, limit: int) -> None:
    noise = random.Random(count)
    values = [noise.random() for _ in range(count)]
    indices = bucket_maxima(values, limit)
    size = max(1, math.ceil(count / limit))
    assert len(indices) <= limit and indices == sorted(set(indices))
    assert [values[i] for i in indices] == [max(values[i : i + size]) for i in range(0, count, size)]
    kept = bucket_extremes(values, limit)
    assert len(kept) <= limit
    assert not values or {values.index(min(values)), values.index(max(values))} <= set(kept)


def test_of_equal_peaks_the_first_is_kept() -> None:
    assert bucket_maxima([1, 2, 2, 1], 1) == [1]


def test_the_budget_line(views: Views) -> None:
    figure = drawn(views.planned, 6 * GIB)
    (line,) = [shape for shape in figure["layout"]["shapes"] if shape["name"] == "budget"]
    assert (line["y0"], line["y1"], line["x0"], line["x1"], line["xref"]) == (6.0, 6.0, 0, 1, "paper")
    assert figure["layout"]["yaxis"]["range"][1] > 6.0
    assert any(note["text"] == "budget 6.0 GiB" for note in figure["layout"]["annotations"])


def test_a_budget_far_above_is_named_and_does_not_flatten_the_chart(views: Views) -> None:
    figure = drawn(views.planned, 80 * GIB)
    assert not [shape for shape in figure["layout"]["shapes"] if shape["name"] == "budget"]
    assert figure["layout"]["yaxis"]["range"][1] < 2 * views.planned.peak_bytes / GIB
    assert any(note["text"] == "budget 80.0 GiB ↑ far above" for note in figure["layout"]["annotations"])


def test_the_peak_is_written_clear_of_a_budget_just_above_it(views: Views) -> None:
    for room_bytes, at_bytes in ((GIB // 8, views.planned.peak_bytes + GIB // 8), (4 * GIB, views.planned.peak_bytes)):
        figure = drawn(views.planned, views.planned.peak_bytes + room_bytes)
        (written,) = [note for note in figure["layout"]["annotations"] if "peak" in note["text"]]
        assert written["y"] == at_bytes / GIB
        assert trace(figure, "peak")["y"] == [views.planned.peak_bytes / GIB]


def test_both_timelines_share_the_height_scale(page: Page) -> None:
    before, after = (page.figures()[name]["layout"] for name in ("before", "after"))
    assert before["yaxis"] == after["yaxis"]


def test_passes_and_recomputation_are_marked(views: Views) -> None:
    layout = drawn(views.planned)["layout"]
    bars = [(s["x0"], s["x1"]) for s in layout["shapes"] if s["name"] == "recompute"]
    covered = {i for start, end in bars for i in range(start, end)}
    assert covered == {i for i, phase in enumerate(views.planned.phases) if phase == "recompute"}
    assert len([s for s in layout["shapes"] if s["name"] == "pass"]) == 4
    words = [note["text"] for note in layout["annotations"]]
    assert words[:4] == ["forward", "backward", "forward", "backward"]


def test_the_frontier_chart(plan: Plan) -> None:
    figure = frontier_figure(plan)
    assert [trace["name"] for trace in figure["data"]] == [
        "",
        "allowed",
        'needs numerics="reduced"',
        "plain step",
        "this plan",
    ]
    ours, denied = trace(figure, "this plan"), trace(figure, 'needs numerics="reduced"')
    assert (ours["x"], ours["y"]) == (pytest.approx([4.9], abs=1e-6), pytest.approx([202.0]))
    assert denied["x"] == pytest.approx([7.2, 5.4, 3.6], abs=1e-6)
    assert denied["y"] == pytest.approx([94.0, 103.0, 121.0])
    assert len(trace(figure, "allowed")["x"]) == 5
    symbols = [trace["marker"]["symbol"] for trace in figure["data"][1:]]
    assert len(set(symbols)) == 4 and denied["marker"]["symbol"].endswith("-open")
    line = next(shape for shape in figure["layout"]["shapes"] if shape["name"] == "budget")
    assert (line["x0"], line["x1"], line["y0"], line["y1"]) == (6.0, 6.0, 0, 1)
    assert "blocks.0…7" in ours["hovertext"][0] and "×1.25 of plain" in ours["hovertext"][0]
    assert "step time (ms)" in figure["layout"]["yaxis"]["title"]["text"]


def test_the_line_of_the_frontier_holds_only_points_that_none_beats(plan: Plan) -> None:
    worse = msgspec.structs.replace(plan.frontier[2], peak_bytes=12 * GIB, step_seconds=0.3)
    line = frontier_figure(msgspec.structs.replace(plan, frontier=[*plan.frontier, worse]))["data"][0]
    assert line["x"] == pytest.approx([4.1, 4.9, 6.9, 8.1, 10.7, 13.1], abs=1e-6)


def test_an_edited_plan_is_drawn_where_it_was_predicted(plan: Plan) -> None:
    edited = msgspec.structs.replace(plan, levers=Levers(microbatch_size=1))
    assert trace(frontier_figure(edited), "this plan")["x"] == [plan.predicted.peak_bytes / GIB]


def test_curves_have_gaps_where_there_is_no_number() -> None:
    values = [1.0, None, math.nan, math.inf, 0.5]
    line = curve_figure([1, 2, 3, 4, 5], values, "loss", None)["data"][0]
    assert line["x"] == [1, 2, 3, 4, 5] and line["y"] == [1.0, None, None, None, 0.5]
    times = curve_figure([1, 2], [0.25, 0.5], "step time", second_unit)
    assert times["data"][0]["y"] == [250.0, 500.0] and times["layout"]["yaxis"]["title"]["text"] == "step time (ms)"


def test_long_curves_keep_their_spikes() -> None:
    values = [1.0] * 40_000
    values[12_345], values[23_456] = 9.0, -9.0
    line = curve_figure(list(range(40_000)), values, "loss", None)["data"][0]
    assert len(line["x"]) <= 1500
    assert line["y"][line["x"].index(12_345)] == 9.0 and line["y"][line["x"].index(23_456)] == -9.0


def test_metrics_without_numbers_draw_no_curve(plan: Plan, views: Views, run: RunRecord) -> None:
    page = Page(render(plan, views, run, [{"step": 1, "loss": None}, {"step": 2, "loss": math.nan, "skipped": True}]))
    assert "seconds" not in page.figures()
    assert page.figures()["loss"]["data"][0]["y"] == [None, None]
    assert "1 of the steps had no update" in page.said()


def test_lines_of_evaluations_break_no_curve(plan: Plan, views: Views, metrics: list[dict[str, Any]]) -> None:
    mixed = [*metrics[:10], {"step": 10, "evaluation": {"loss": 1.0}}, *metrics[10:]]
    curves = [Page(render(plan, views, None, lines)).figures() for lines in (mixed, metrics)]
    assert curves[0]["loss"] == curves[1]["loss"] and curves[0]["seconds"] == curves[1]["seconds"]


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, "B"), (1023, "B"), (2**20, "MiB"), (2**30 - 1, "MiB"), (2**30, "GiB"), (2**43, "TiB")]
)
def test_axes_are_in_binary_units(largest: int, unit: str) -> None:
    assert byte_unit(largest)[0] == unit


def test_axes_of_seconds() -> None:
    assert [second_unit(t)[0] for t in (0.0, 5e-4, 0.5, 2.0, 500.0)] == ["µs", "µs", "ms", "s", "min"]


# The file


def test_the_file_is_written_whole(tmp_path: Path, plan: Plan, views: Views) -> None:
    path = write(tmp_path / "new" / "report.html", plan, views, None, [])
    source = path.read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>") and source.rstrip().endswith("</html>")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_place_that_can_not_be_written(tmp_path: Path, plan: Plan, views: Views) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't write"):
        write(tmp_path / "file" / "report.html", plan, views, None, [])


@pytest.mark.parametrize("module", ["jinja2", "plotly.offline"])
def test_a_missing_extra_is_named(module: str, plan: Plan, views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[report\]'") as caught:
        render(plan, views, None, [])
    assert (caught.value.extra, caught.value.missing) == ("report", module.partition(".")[0])
