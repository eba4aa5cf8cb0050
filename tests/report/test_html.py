from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace

from memfit import report
from memfit.foundations import format_bytes
from memfit.ir import TIMELINE_CATEGORIES, Evaluation, Event, Levers, ModuleRow, Plan, RunRecord, Timeline, Views
from memfit.report import GRID, Axis, Report, byte_axis, plan_page
from tests.report.conftest import GIB, MIB, run_before

charts = report.charts
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

    def hover(self) -> dict[str, Any]:
        found = [text for kind, text in self.scripts if kind == "application/json"]
        assert len(found) == 1
        return dict(json.loads(found[0]))


def read(plan: Plan, views: Views, run: RunRecord | None = None, metrics: Sequence[dict[str, Any]] = ()) -> Page:
    return Page(plan_page(Report(plan, views, run, metrics)))


@pytest.fixture
def page(plan: Plan, views: Views, run: RunRecord, metrics: list[dict[str, Any]]) -> Page:
    return read(plan, views, run, metrics)


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


def drawn(timeline: Timeline, budget_bytes: int = GIB) -> report.charts.Chart:
    return charts.timeline_chart(
        timeline, categories=TIMELINE_CATEGORIES, budget_bytes=budget_bytes, peak_bytes=timeline.peak_bytes
    )


def value(axis: Axis, at: float) -> float:
    """Return what an axis shows at a place."""
    return axis.low + (axis.high - axis.low) * at / GRID


def level(shape: report.charts.Shape, x: float) -> float:
    """Return the height of a staircase at a place."""
    return [y for at, y in shape.points if at <= x + 1e-6][-1]


def series(chart: report.charts.Chart, name: str) -> list[report.charts.Mark]:
    return [mark for mark in chart.marks if mark.series == name]


def note(chart: report.charts.Chart, kind: str) -> report.charts.Note:
    (found,) = [note for note in chart.notes if note.kind == kind]
    return found


def running(changes: list[int]) -> list[int]:
    return list(itertools.accumulate(changes))


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
    assert set(rules) == {"default-src", "base-uri", "form-action", "style-src", "script-src"}
    runnable = [text for kind, text in page.scripts if not kind]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runnable]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert len(runnable) == 1


def test_links_within_the_page_lead_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "a"} <= set(ids)
    assert set(page.hover()) <= set(ids)


def test_text_from_records_is_harmless(hostile: Hostile) -> None:
    source = plan_page(Report(*hostile(HOSTILE)))
    page = Page(source)
    assert len(page.scripts) == 2
    assert all("alert(1)" not in text for kind, text in page.scripts if not kind)
    assert page.said().count(HOSTILE) >= 15
    assert "<script>alert" not in source and source.count("</script") == 2
    (embedded,) = [text for kind, text in page.scripts if kind]
    assert not {"<", ">", "&"} & set(embedded) and "alert(1)" in embedded


def test_colours_and_labels_are_harmless() -> None:
    assert charts.css_name("optimizer state") == "--c-optimizer-state"
    assert charts.css_name("x);background:url(//y)") == "--c-x-background-url-y-"
    assert charts.label("a\nb\x1b") == "a b\ufffd" and len(charts.label("x" * 500)) == 64


# The numbers


def test_the_headline(page: Page, plan: Plan) -> None:
    said = page.said()
    error = 100 * (plan.predicted.peak_bytes / (5_080 * MIB) - 1)
    for part in (
        "13.1 GiB → 4.9 GiB −63 %",
        "✓ Fits: measured 5 of 6 GiB, 27 % slower, equal to rounding.",
        "×1.25 predicted 161.0 ms → 201.5 ms ×1.27 measured 211.4 ms in training",
        "at most 2.9 % slower than the best possible plan",
        "memfit 0.1.0, torch 2.13.0",
        *plan.notes,
        f"Prediction error +0.79 % −{-error:.1f} %",
        "Peak, training run 5.0 GiB",
        "Step, measured 165.0 ms 210.0 ms ×1.27",
        "4 4.5 4.500001 +1.0e-06",
        "Step accuracy loss 100 — 2.41 300 0.534 1.71",
        "200 damaged checkpoint checkpoint-250 was cut short; training continues from checkpoint-200",
        "waited for data 31 % of the time. Make batches while steps run",
    ):
        assert part in said, part
    assert "memfit ran these plans" not in said


def test_bars_have_the_lengths_of_their_figures(page: Page, plan: Plan) -> None:
    widths = [re.fullmatch(r"width: ([\d.]+)%", attrs.get("style") or "") for tag, attrs in page.tags if tag == "i"]
    lefts = {attrs["style"] for tag, attrs in page.tags if tag == "b" and "style" in attrs}
    found = [float(width[1]) for width in widths if width]
    measured = 13_300 * MIB, 5_080 * MIB
    figures = [plan.plain.peak_bytes, measured[0], plan.predicted.peak_bytes, measured[1]]
    assert found == pytest.approx([100 * figure / plan.plain.peak_bytes for figure in figures], abs=0.01)
    assert lefts == {f"left: {100 * 6 * GIB / plan.plain.peak_bytes:.2f}%"}


@pytest.mark.parametrize(
    ("changes", "parts", "others"),
    [
        ({"data_share": 0.05}, ["waited for data 5.0 % of the time."], ["Make batches"]),
        ({"data_share": None}, [], ["waited", "Make batches"]),
        ({"allocation_retries": None}, [], ["emptied its cache"]),
        ({"allocation_retries": 0}, [], ["emptied its cache"]),
        ({"allocation_retries": 1}, ["no room 1 time and emptied its cache"], []),
        ({"allocation_retries": 1200}, ["no room 1,200 times and emptied its cache"], []),
        (
            {"fingerprint": "0123", "status": "failed", "error": "CUDA error", "steps": 7},
            [
                "The run used another workload than the plan: its fingerprint is 0123",
                "The run failed at step 7: CUDA error",
            ],
            [],
        ),
    ],
)
def test_what_a_run_calls_for_is_said(
    changes: dict[str, Any], parts: list[str], others: list[str], plan: Plan, views: Views, run: RunRecord
) -> None:
    said = read(plan, views, replace(run, **changes)).said()
    assert [part for part in parts if part not in said] == [] == [part for part in others if part in said]


def test_plans_that_were_run_have_a_table(plan: Plan, views: Views) -> None:
    page = read(run_before(plan), views)
    for part in ("memfit ran these plans", "190.0 ms 210.0 ms", "250.0 ms 200.0 ms"):
        assert part in page.said()
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption")


def test_a_plan_over_the_budget_is_not_said_to_fit(plan: Plan, views: Views) -> None:
    over = replace(plan, predicted=replace(plan.predicted, peak_upper_bytes=plan.budget_bytes + 512 * MIB))
    wanted = "✗ May not fit: needs up to 6.5 of 6 GiB, 25 % slower, equal to rounding."
    assert wanted in read(over, replace(views, comparison=None)).said()


def test_many_modules_events_and_evaluations_are_cut_and_it_is_said(plan: Plan, views: Views, run: RunRecord) -> None:
    modules = [ModuleRow(f"m.{i}", "Linear", i, 10_000 - i, 0, 1e-3, "") for i in range(3000)]
    events = [Event(i, "damaged checkpoint", f"event {i}.") for i in range(1, 5001)]
    evaluations = [Evaluation(i, {"loss": i + 0.5}) for i in range(1, 5001)]
    long = replace(run, events=events, evaluations=evaluations)
    said = read(plan, replace(views, modules=modules), long).said()
    assert "3,000 modules: the 1,000 largest are shown" in said
    assert "m.0 Linear" in said and "m.999 Linear" in said and "m.1000 Linear" not in said
    assert "5,000 events: the first and the last 200 are shown" in said
    assert "event 200." in said and "event 201." not in said and "event 4801." in said and "event 5000." in said
    assert "5,000 evaluations: the first and the last 200" in said and "200.5" in said and "2500.5" not in said


def test_a_long_run_of_a_large_step_stays_below_a_megabyte(plan: Plan, views: Views, run: RunRecord) -> None:
    noise = random.Random(1)
    lines = [{"step": i, "loss": noise.random(), "seconds": noise.random(), "skipped": False} for i in range(1, 50_001)]
    evaluations = [Evaluation(i, {"loss": noise.random(), "accuracy": noise.random()}) for i in range(0, 50_000, 10)]
    modules = [ModuleRow(f"model.layers.{i}.mlp.gate", "Linear", 2**30, 2**30 - i, 1, 1e-3, "") for i in range(5000)]
    worst = replace(views, plain=spiky_timeline(50_000, 25_000), planned=spiky_timeline(50_000, 7), modules=modules)
    source = plan_page(Report(plan, worst, replace(run, evaluations=evaluations, steps=50_000), lines))
    assert len(source.encode()) < 1_000_000


def test_every_table_has_a_caption_and_scopes(page: Page) -> None:
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") == 8
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    plots = [attrs for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert [plot["id"] for plot in plots] == ["before", "after", "frontier", "loss", "seconds"]
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    boxes = [attrs for _, attrs in page.tags if attrs.get("class") == "box"]  # both timelines share the height scale
    assert boxes[0]["data-y"] == boxes[1]["data-y"] and boxes[0]["data-x"] != boxes[1]["data-x"]


def test_a_plan_alone_has_no_empty_sections(plan: Plan, views: Views) -> None:
    page = read(replace(plan, frontier=[], notes=[]), replace(views, comparison=None, modules=[]))
    assert set(page.hover()) == {"before", "after", "frontier"}
    said = page.said()
    assert not [part for part in ("Predicted and measured", "Training", "Notes", "None", "measured") if part in said]
    assert "The plan has no frontier" in said


def test_a_step_without_operators_can_be_shown(plan: Plan, views: Views) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("labels", "modules", "phases", "seconds"), [])
    live: dict[str, list[int]] = {name: [] for name in TIMELINE_CATEGORIES}
    empty = Timeline(live_bytes=live, peak_bytes=0, peak_index=0, step_seconds=0.0, **nothing)
    page = read(plan, replace(views, plain=empty, planned=empty))
    assert page.hover()["before"]["x"] == []
    assert not any(attrs.get("class") == "area" for tag, attrs in page.tags if tag == "path")


# The charts


def test_the_stack_adds_up_to_the_bytes_alive(views: Views) -> None:
    chart = drawn(views.plain)
    total = charts.total_bytes(views.plain)
    assert [shape.name for shape in chart.shapes] == [*reversed(TIMELINE_CATEGORIES)]
    for i in range(len(total)):
        heights = [value(chart.y, level(shape, chart.x.at(i))) for shape in chart.shapes]
        assert heights == sorted(heights, reverse=True)
        assert heights[0] == pytest.approx(total[i], rel=1e-3)
        assert heights[-1] == pytest.approx(views.plain.live_bytes[TIMELINE_CATEGORIES[0]][i], rel=1e-3)
    assert chart.y.title == "bytes alive (GiB)"


def test_a_pointer_is_told_what_is_alive_and_what_runs(views: Views) -> None:
    hover = drawn(views.plain).hover
    assert hover is not None and running(hover["x"]) == list(range(len(views.plain.labels)))
    for name, changes in hover["held"]:
        told = [count * hover["size"] for count in running(changes)]
        assert told == pytest.approx(views.plain.live_bytes[name], abs=hover["size"])
    for label_, words in zip(views.plain.labels, hover["said"], strict=True):
        assert " · ".join(hover["words"][word] for word in words) == label_


@pytest.mark.parametrize("peak_index", [0, 1, 16_666, 49_999])
def test_a_long_timeline_keeps_its_peak(peak_index: int) -> None:
    timeline = spiky_timeline(50_000, peak_index)
    chart = drawn(timeline)
    (peak,) = chart.marks
    assert (value(chart.x, peak.x), value(chart.y, peak.y)) == pytest.approx((peak_index, timeline.peak_bytes))
    top = chart.shapes[0]
    assert level(top, chart.x.at(peak_index)) == pytest.approx(peak.y) == max(y for _, y in top.points)
    hover = chart.hover
    assert hover is not None and len(hover["x"]) <= 1500
    at = running(hover["x"]).index(peak_index)
    assert [hover["words"][word] for word in hover["said"][at]][1:] == [f"m.{peak_index}", "aten.mm.default"]
    assert len(chart.rules) + len(chart.spans) < 400
    assert len(charts.chart_html(chart, "before", "")) + len(json.dumps(hover)) < 350_000


@pytest.mark.parametrize(("count", "limit"), [(0, 10), (1, 10), (10, 10), (11, 10), (999, 10), (12_345, 1500)])
def test_every_bucket_keeps_its_maximum(count: int, limit: int) -> None:
    noise = random.Random(count)
    values = [noise.random() for _ in range(count)]
    indices = charts.bucket_maxima(values, limit)
    size = max(1, math.ceil(count / limit))
    assert len(indices) <= limit and indices == sorted(set(indices))
    assert [values[i] for i in indices] == [max(values[i : i + size]) for i in range(0, count, size)]
    kept = charts.bucket_extremes(values, limit)
    assert len(kept) <= limit and charts.bucket_maxima([1, 2, 2, 1], 1) == [1]  # of equals the first
    assert not values or {values.index(min(values)), values.index(max(values))} <= set(kept)


def test_the_budget_line(views: Views) -> None:
    chart = drawn(views.planned, 6 * GIB)
    (line,) = [rule for rule in chart.rules if rule.kind == "budget"]
    assert value(chart.y, line.at) == pytest.approx(6 * GIB) and not line.upright
    assert note(chart, "budget").text == "budget 6.0 GiB"
    assert f'class="rule budget" d="M0 {GRID - line.at:.0f}h{GRID}"' in charts.chart_html(chart, "after", "")
    far = drawn(views.planned, 80 * GIB)  # is named and does not flatten the chart
    assert not [rule for rule in far.rules if rule.kind == "budget"]
    assert far.y.high < 2 * views.planned.peak_bytes
    assert note(far, "budget").text == "budget 80.0 GiB ↑ far above"


@pytest.mark.parametrize(
    ("room_bytes", "peak_above", "budget_above"),
    [(GIB // 8, False, True), (4 * GIB, True, True), (-GIB // 8, True, False), (-2 * GIB, True, True)],
)
def test_peak_and_budget_are_written_clear_of_one_another(
    views: Views, room_bytes: int, peak_above: bool, budget_above: bool
) -> None:
    chart = drawn(views.planned, views.planned.peak_bytes + room_bytes)
    assert (note(chart, "peak").above, note(chart, "budget").above) == (peak_above, budget_above)
    assert note(chart, "peak").text == f"peak {format_bytes(views.planned.peak_bytes)}"


def test_the_frontier(plan: Plan) -> None:
    chart = charts.frontier_chart(plan)
    names = [mark.series for mark in chart.marks]
    assert list(dict.fromkeys(names)) == ["allowed", 'needs numerics="reduced"', "plain step", "this plan"]
    (ours,), denied = series(chart, "this plan"), series(chart, 'needs numerics="reduced"')
    assert (value(chart.x, ours.x), value(chart.y, ours.y)) == pytest.approx((4.9 * GIB, 0.202), rel=1e-6)
    assert [value(chart.x, mark.x) / GIB for mark in denied] == pytest.approx([7.2, 5.4, 3.6])
    assert [value(chart.y, mark.y) for mark in denied] == pytest.approx([0.094, 0.103, 0.121])
    assert len(series(chart, "allowed")) == 5
    assert len({mark.symbol for mark in chart.marks}) == 4 and all(mark.hollow for mark in denied)
    (line,) = chart.rules
    assert value(chart.x, line.at) == pytest.approx(6 * GIB) and line.upright
    assert "blocks 0 to 7 recomputed" in ours.tip and "25 % slower than plain" in ours.tip
    assert chart.y.title == "step time (ms)"


def test_the_line_of_the_frontier_holds_only_points_that_none_beats(plan: Plan) -> None:
    worse = replace(plan.frontier[2], peak_bytes=12 * GIB, step_seconds=0.3)
    chart = charts.frontier_chart(replace(plan, frontier=[*plan.frontier, worse]))
    corners = dict.fromkeys(round(value(chart.x, x) / GIB, 3) for x, _ in chart.shapes[0].points)
    assert list(corners) == [4.1, 4.9, 6.9, 8.1, 10.7, 13.1]


def test_an_edited_plan_is_drawn_where_it_was_predicted(plan: Plan) -> None:
    chart = charts.frontier_chart(replace(plan, levers=Levers(microbatch_size=1)))
    (ours,) = series(chart, "this plan")
    assert value(chart.x, ours.x) == pytest.approx(plan.predicted.peak_bytes)


def test_curves_have_gaps_where_there_is_no_number() -> None:
    values = [1.0, None, math.nan, math.inf, 0.5]
    chart = charts.curve_chart([1, 2, 3, 4, 5], values, "loss")
    assert chart.hover is not None and chart.hover["y"] == [1.0, None, None, None, 0.5]
    assert [y == y for _, y in chart.shapes[0].points] == [True, False, False, False, True]
    (path,) = re.findall(r'class="line".*? d="([^"]*)"', charts.chart_html(chart, "loss", ""))
    assert path.count("M") == 2
    times = charts.curve_chart([1, 2], [0.25, 0.5], "step time", charts.second_axis)
    assert times.hover is not None and times.hover["y"] == [250.0, 500.0] and times.y.title == "step time (ms)"


def test_long_curves_keep_their_spikes() -> None:
    values = [1.0] * 40_000
    values[12_345], values[23_456] = 9.0, -9.0
    hover = charts.curve_chart(list(range(40_000)), values, "loss").hover
    assert hover is not None and len(hover["x"]) <= 1500
    steps = running(hover["x"])
    assert hover["y"][steps.index(12_345)] == 9.0 and hover["y"][steps.index(23_456)] == -9.0


def test_a_curve_of_one_step_is_a_point() -> None:
    chart = charts.curve_chart([7], [2.5], "loss")
    assert len(chart.marks) == 1 and value(chart.y, chart.marks[0].y) == pytest.approx(2.5)


def test_text_on_a_chart_is_harmless() -> None:
    axis, note = Axis(0, 1, HOSTILE), charts.Note(1, 1, HOSTILE)
    mark = charts.Mark(1, 1, "circle", "red", tip=HOSTILE, text=HOSTILE, series=HOSTILE)
    line = charts.Shape([(0, 0)], "red", name=HOSTILE)
    chart = charts.Chart(axis, axis, [line], marks=[mark], notes=[note], headings=[(1, HOSTILE)])
    page = Page(charts.chart_html(chart, "x", HOSTILE))
    assert not page.scripts and page.said().count(HOSTILE) == 5


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (0.0, 13.1), (-3.0, 1e6), (0.2, 0.21), (1e-7, 3e-7), (5.0, 6000.0)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    axis = Axis(low, high, "")
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 6
    assert all(-1e-6 <= at <= GRID + 1e-6 for at, _ in ticks)
    assert [float(said.replace(",", "")) for _, said in ticks] == pytest.approx([value(axis, at) for at, _ in ticks])


def test_stairs_keep_their_corners() -> None:
    assert charts.steps_to([(0, 5), (1, 5), (2, 7)], 9) == [(0, 5), (2, 5), (2, 7), (9, 7)]
    assert charts.steps_to([], 9) == []


def test_metrics_without_numbers_draw_no_curve(plan: Plan, views: Views, run: RunRecord) -> None:
    page = read(plan, views, run, [{"step": 1, "loss": None}, {"step": 2, "loss": math.nan, "skipped": True}])
    assert "seconds" not in page.hover()
    assert page.hover()["loss"]["y"] == [None, None]
    assert "1 of the steps had no update" in page.said()


def test_lines_of_evaluations_break_no_curve(plan: Plan, views: Views, metrics: list[dict[str, Any]]) -> None:
    mixed = [*metrics[:10], {"step": 10, "evaluation": {"loss": 1.0}}, *metrics[10:]]
    curves = [read(plan, views, None, lines).hover() for lines in (mixed, metrics)]
    assert curves[0]["loss"] == curves[1]["loss"] and curves[0]["seconds"] == curves[1]["seconds"]


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, "B"), (1023, "B"), (2**20, "MiB"), (2**30 - 1, "MiB"), (2**30, "GiB"), (2**43, "TiB")]
)
def test_axes_are_in_binary_units(largest: int, unit: str) -> None:
    assert byte_axis(largest, "peak").title == f"peak ({unit})"


def test_axes_of_seconds() -> None:
    axes = [charts.second_axis(t, "step") for t in (0.0, 5e-4, 0.5, 2.0, 500.0)]
    assert [axis.title for axis in axes] == [f"step ({unit})" for unit in ("µs", "µs", "ms", "s", "min")]
