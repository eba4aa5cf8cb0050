"""The page in a browser: drawn, quiet, usable on a narrow screen."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from memfit.ir.plan import Plan
from memfit.ir.record import RunRecord, Views
from memfit.report.html import write

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CHARTS = ("before", "after", "frontier", "loss", "seconds")


@dataclass
class Opened:
    """A page in the browser, what it asked for, and what it complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("MEMFIT_CHROMIUM") or shutil.which("chromium")
    if path is None:
        message = "no chromium: install it, or name it in MEMFIT_CHROMIUM"
        if os.environ.get("MEMFIT_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def file(tmp_path: Path, plan: Plan, views: Views, run: RunRecord, metrics: list[dict[str, Any]]) -> Path:
    return write(tmp_path / "report.html", plan, views, run, metrics)


def opened(browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> Opened:
    """Open a file, with every request but for the file itself blocked."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    result = Opened(context.new_page())

    def route(route: Any) -> None:
        result.requests.append(route.request.url)
        if route.request.url == file.as_uri():
            route.continue_()
        else:
            route.abort()

    context.route("**/*", route)
    result.page.on("console", lambda message: result.complaints.append(f"{message.type}: {message.text}"))
    result.page.on("pageerror", lambda error: result.complaints.append(str(error)))
    result.page.goto(file.as_uri())
    drawn = "document.querySelectorAll('.js-plotly-plot .xaxislayer-above').length"
    result.page.wait_for_function(f"() => document.querySelectorAll('.plot').length === {drawn}")
    return result


def assert_quiet(result: Opened, file: Path) -> None:
    assert result.requests == [file.as_uri()]
    assert result.complaints == []


def test_the_charts_are_drawn_without_a_request_or_a_complaint(browser: Any, file: Path) -> None:
    result = opened(browser, file)
    page = result.page
    traces = {name: page.locator(f"#{name}.js-plotly-plot .scatterlayer .trace").count() for name in CHARTS}
    assert traces == {"before": 10, "after": 10, "frontier": 5, "loss": 1, "seconds": 1}
    assert page.locator("#before .fills path.js-fill").count() == 8
    page.locator("#before").hover()
    page.wait_for_selector("#before .hoverlayer .hovertext")
    assert "aten." in page.locator("#before .hoverlayer .hovertext").first.text_content()
    assert_quiet(result, file)
    page.context.close()


@pytest.mark.parametrize("name", ["before", "after"])
def test_the_budget_is_drawn_at_its_bytes(browser: Any, file: Path, plan: Plan, name: str) -> None:
    page = opened(browser, file).page
    index = page.evaluate("n => document.getElementById(n).layout.shapes.findIndex(s => s.name === 'budget')", name)
    line = page.locator(f"#{name} .shapelayer path[data-index='{index}']")
    assert line.count() == 1 and line.bounding_box()["width"] > 300
    found = re.fullmatch(r"M[\d.]+,([\d.]+)L[\d.]+,([\d.]+)", line.get_attribute("d"))
    wanted = page.evaluate(
        "([n, gib]) => { const a = document.getElementById(n)._fullLayout.yaxis; return a._offset + a.l2p(gib); }",
        [name, plan.budget_bytes / 1024**3],
    )
    assert found is not None and [float(y) for y in found.groups()] == pytest.approx([wanted, wanted], abs=1)
    page.context.close()


def test_a_click_on_a_header_sorts(browser: Any, file: Path, views: Views) -> None:
    result = opened(browser, file)
    page = result.page
    table = page.locator("table.sortable")

    def names() -> list[str]:
        return list(table.locator("tbody th").all_inner_texts())

    by_saved = sorted(views.modules, key=lambda row: row.saved_bytes)
    button = table.get_by_role("button", name="Saved before")
    button.click()
    assert names()[:3] == ["(the model)", "blocks.0", "blocks.1"]
    assert table.locator("th[aria-sort=descending]").count() == 1
    button.click()
    assert names()[0] == by_saved[0].fqn == "head" and names()[-1] == "(the model)"
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("Saved before")
    table.get_by_role("button", name="Module").click()
    assert names().index("blocks.2") < names().index("blocks.10") and len(names()) == len(views.modules)
    assert table.locator("th[aria-sort]").count() == 1
    assert_quiet(result, file)
    page.context.close()


@pytest.mark.parametrize("width", [320, 380, 768, 1280])
def test_no_width_scrolls_the_page_sideways(browser: Any, file: Path, width: int) -> None:
    result = opened(browser, file, width)
    widths = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert result.page.evaluate(widths) == [width, width]
    boxes = [result.page.locator(f"#{name} .main-svg").first.bounding_box() for name in CHARTS]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert_quiet(result, file)
    result.page.context.close()


def test_colours_follow_the_scheme(browser: Any, file: Path) -> None:
    result = opened(browser, file)
    page = result.page
    fill = "() => getComputedStyle(document.querySelector('#before .fills path.js-fill')).fill"
    ink = "() => document.getElementById('before').layout.font.color"
    light = page.evaluate(fill), page.evaluate(ink)
    assert light == ("rgb(0, 114, 178)", "#17212b")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({ink})() === '#e8edf2'")
    assert page.evaluate(fill) == "rgb(47, 134, 193)"
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(15, 20, 25)"
    assert_quiet(result, file)
    page.context.close()


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path, hostile: Any) -> None:
    image, link = "<img src=x onerror=window.ran=1>", "<a href='javascript:window.ran=1'>z</a>"
    text = f"</script><script>window.ran=1</script>{image}{link}"
    file = write(tmp_path / "report.html", *hostile(text))
    result = opened(browser, file)
    result.page.locator("#before").hover()
    result.page.wait_for_selector("#before .hoverlayer .hovertext")
    assert result.page.evaluate("window.ran") is None
    assert result.page.locator(".hoverlayer a, .infolayer a, main img").count() == 0
    assert result.page.locator("h1").inner_text() == text
    assert_quiet(result, file)
    result.page.context.close()
