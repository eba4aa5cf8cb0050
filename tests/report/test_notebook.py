"""Records in notebooks, and their progress."""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.ir import (
    Device,
    Devices,
    GradientDifference,
    Ladder,
    Plan,
    Rung,
    RunRecord,
    ValueStatistics,
    Verification,
    Views,
    range_report,
)
from memfit.report import Bars, Report, ReportFile, html_of, plan_page, show_records, stages, text_of, with_bars
from tests.report.conftest import MIB, VERIFIED

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"
VOID = {"path", "circle", "br", "img", "input", "meta"}


@pytest.fixture(scope="module", autouse=True)
def _shown() -> None:
    show_records()


class Strict(HTMLParser):
    """Reads HTML, and fails where a tag is not closed in its turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def verification(name: str = "blocks.0.weight") -> Verification:
    return msgspec.structs.replace(
        VERIFIED,
        failures=[f"the gradient of {name} differs"],
        bitwise=False,
        gradients=[GradientDifference(parameter=name, relative=0.1, equal=False)],
        measured_peak_bytes=101 * MIB,
        plain_measured_peak_bytes=200 * MIB,
        budget_bytes=128 * MIB,
        notes=[f"about {name}"],
    )


def a_ladder(name: str = "lean") -> Ladder:
    measured = {"peak_bytes": 90 * MIB, "step_seconds": 0.2, "largest_batch": 4, "samples_per_second": 10.0}
    rungs = [
        Rung(name="plain", outcome="kept", **{**measured, "peak_bytes": 200 * MIB}),  # type: ignore[arg-type]
        Rung(name=name, outcome="kept", why=name, **measured),  # type: ignore[arg-type]
        Rung(name="offload", outcome="not available", why=name),
    ]
    return Ladder(
        memfit_version="0",
        torch_version="0",
        workload=name,
        fingerprint="f",
        device="cpu",
        threads=1,
        batch_size=8,
        budget_bytes=200 * MIB,
        is_budget_given=False,
        allowed="exact",
        rungs=rungs,
    )


def a_device(name: str = "card") -> Device:
    return Device(
        name=name, kind="cuda", vendor="nvidia", description=name, memory_bytes=24 * MIB, usable_bytes=23 * MIB, cores=8
    )


@pytest.fixture
def records(plan: Plan, views: Views, run: RunRecord) -> dict[str, Any]:
    ranges = {"head": ValueStatistics(largest=1e6, sums={0: 1.0})}
    return {
        "plan": plan,
        "prediction": plan.predicted,
        "frontier": plan.frontier,
        "verification": verification(),
        "comparison": views.comparison,
        "run": run,
        "ladder": a_ladder(),
        "device": a_device(),
        "devices": Devices([a_device()]),
        "ranges": range_report(ranges, ranges),
    }


def test_every_record_is_a_short_line_a_table_and_html(records: dict[str, Any]) -> None:
    for name, record in records.items():
        shown = Strict(record._repr_html_())
        assert "table" in shown.tags and "script" not in shown.tags, name
        assert name in ("frontier", "devices") or (len(repr(record)) < 200 and "\n" not in repr(record)), name
        assert len(str(record).splitlines()) > 3, name
        for word in re.findall(r"\w{4,}", str(record)):
            assert word in shown.text, (name, word)
        assert len(record._repr_html_()) < 60_000, name


def test_pictures_stand_beside_the_tables(records: dict[str, Any], plan: Plan) -> None:
    for name in ("plan", "frontier", "ladder"):
        assert 'class="plot" role="img"' in records[name]._repr_html_()
    marks = records["plan"]._repr_html_().count('<span class="mark ')
    assert marks == len(plan.frontier) + 1
    assert records["plan"]._repr_html_().count('class="row"') == 2
    assert records["verification"]._repr_html_().count('class="row"') == 3
    stack = re.findall(r'<i style="width:([\d.]+)%', records["prediction"]._repr_html_())
    assert sum(map(float, stack)) == pytest.approx(100, abs=0.1)


def test_lines_say_what_counts(records: dict[str, Any]) -> None:
    assert repr(records["plan"]) == (
        "<Plan for 'recipes.byte_lm:byte_lm' on rtx-3090: 4.9 GiB of 13.1 GiB, 25 % slower than plain, budget"
        " 6.0 GiB, reordered>"
    )
    assert repr(records["verification"]) == (
        "<Verification failed, 1 failure: exact, 101.0 MiB measured of a budget of 128.0 MiB>"
    )
    assert "finished after 300 steps, loss 5.545 → 1.62" in repr(records["run"])


def test_names_of_users_run_nothing(hostile: Callable[[str], Any]) -> None:
    plan, views, run, _ = hostile(HOSTILE)
    record = range_report({HOSTILE: ValueStatistics(largest=1e6)}, {})
    shown = [
        *(plan, plan.frontier, plan.predicted, views.comparison, run, verification(HOSTILE), a_ladder(HOSTILE)),
        *(a_device(HOSTILE), Devices([a_device(HOSTILE)]), record),
        msgspec.structs.replace(plan.predicted, by_category={HOSTILE: 5}, notes=[HOSTILE]),
    ]
    for one in shown:
        tags = Strict(one._repr_html_()).tags
        assert "script" not in tags and "img" not in tags


def test_the_style_touches_nothing_else(plan: Plan) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", plan._repr_html_() or "", re.S)
    rules = re.findall(r"([^{}]+)\{", style)
    assert len(rules) > 40 and all(part.strip().startswith(".memfit") for rule in rules for part in rule.split(","))
    assert "url(" not in style and "@import" not in style


def test_a_report_is_shown_whole_and_is_a_path(tmp_path: Path, plan: Plan, views: Views) -> None:
    (tmp_path / "report.html").write_text(plan_page(Report(plan, views)))
    found = ReportFile(tmp_path / "report.html")
    assert found == tmp_path / "report.html" and isinstance(found, Path) and found.read_text()
    shown = found._repr_html_()
    assert shown is not None and '<iframe srcdoc="&lt;!DOCTYPE html&gt;' in shown and 'sandbox="allow-scripts"' in shown
    Strict(shown)
    assert ReportFile(tmp_path / "none.html")._repr_html_() is None
    assert getattr(found.parent, "_repr_html_", lambda: None)() is None


def test_tables_become_html_cell_by_cell() -> None:
    table = Table(title="a & b", caption="c", show_footer=True)
    table.add_column("x", footer="sum")
    table.add_column("n", justify="right", style="bold")
    table.add_row(Text.assemble(("<i>", "green"), " plain"), "[red]1[/]", style="bright_black")
    shown = html_of(Group(table, Text("below", "dim"), ""))
    assert "<caption>a &amp; b</caption>" in shown and "<p>c</p>" in shown
    assert '<tr class="dim"><td><span class="green">&lt;i&gt;</span> plain</td>' in shown
    assert '<td class="right strong">[red]1[/]</td>' in shown and "<tfoot><tr><td>sum</td>" in shown
    assert shown.endswith('<p><span class="dim">below</span></p>')
    with pytest.raises(TypeError, match="Padding"):
        html_of(Padding("x"))
    assert text_of(Text("a"), "", Text("b")) == "a\n\nb"


def test_a_workload_is_a_line() -> None:
    import torch

    import memfit

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    batch = {"x": torch.ones(5, 3)}
    found = memfit.Workload(model=model, batch=batch, loss_fn=lambda m, b: m(b["x"]).sum(), optimizer=optimizer)
    assert repr(found) == "<Workload 'workload': Linear with 8 parameters, batch of (5, 3), SGD>"


def test_ranges_of_the_model_itself_have_a_name() -> None:
    report = range_report({"": ValueStatistics()}, {})
    assert "(the model and the loss)" in str(report) and report.advice() in " ".join(str(report).split())


class Handle:
    """Stands for the place of an output in a cell, and keeps what was shown there."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, output: Any, raw: bool) -> None:
        assert raw
        self.shown.append(output)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """Make it look as if this ran in a notebook; the places that outputs were shown in."""
    places: list[Handle] = []

    def display(output: Any, raw: bool, display_id: bool) -> Handle:
        assert display_id
        places.append(Handle())
        places[-1].update(output, raw)
        return places[-1]

    interactive, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    interactive.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", interactive)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return places


@with_bars(stages)
def work(count: int, *, progress: Any = lambda *told: None, fails: bool = False) -> int:
    """Tell how far it is."""
    for i in range(count + 1):
        progress("<work>", i, count)
    if fails:
        raise ValueError("no")
    return count


def test_a_script_and_a_terminal_of_ipython_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = types.ModuleType("IPython")
    terminal.get_ipython = lambda: types.SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    monkeypatch.setitem(sys.modules, "IPython.display", None)  # what shows something fails
    assert work(3) == 3


def test_a_cell_shows_bars_and_then_how_long_it_took(notebook: list[Handle]) -> None:
    assert work(100) == 100
    (place,) = notebook
    assert len(place.shown) <= 4
    first, *_, last = place.shown
    assert '<progress value="0" max="100">' in first["text/html"] and "&lt;work&gt;" in first["text/html"]
    assert first["text/plain"] == "<work> 0/100"
    assert "progress" not in last["text/html"] and last["text/plain"].startswith("memfit.work: ")


def test_whoever_asks_to_be_told_is_told_alone(notebook: list[Handle]) -> None:
    told: list[Any] = []
    work(2, progress=lambda *what: told.append(what))
    assert notebook == [] and told == [("<work>", i, 2) for i in range(3)]


def test_calls_from_within_memfit_show_nothing(notebook: list[Handle]) -> None:
    inside = {"__name__": "memfit.somewhere", "work": work}
    exec("work(2)", inside)
    assert notebook == []
    exec("work(2)", {"__name__": "memfit_of_mine", "work": work})
    assert len(notebook) == 1


def test_after_an_error_the_bars_say_how_far_it_was(notebook: list[Handle]) -> None:
    with pytest.raises(ValueError, match="no"):
        work(5, fails=True)
    assert 'value="5" max="5"' in notebook[0].shown[-1]["text/html"]


def test_time_left_is_said_where_the_end_is_known(monkeypatch: pytest.MonkeyPatch, notebook: list[Handle]) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Bars("x") as bars:
        bars("train", 0, 10)
        now[0] = 8.0
        bars("train", 2, 10, "loss 1.5")
        assert "2 of 10 · 32.00 s left · loss 1.5" in notebook[0].shown[-1]["text/html"]
        now[0] = 9.0
        bars("epochs", 3, None)
        page = notebook[0].shown[-1]["text/html"]
        assert "<progress></progress></td><td>3</td>" in page
    assert notebook[0].shown[-1]["text/plain"] == "x: 9.00 s"


def test_what_tells_nothing_shows_nothing(notebook: list[Handle]) -> None:
    with Bars("x"):
        pass
    assert notebook == []
