"""The page in a browser: drawn, quiet, usable on a narrow screen."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from memfit import ir
from memfit.foundations import format_bytes
from memfit.ir import Plan, RunRecord, Views
from memfit.report import Report, ladder_page, plan_page
from tests.covering import some
from tests.report.test_notebook import a_ladder

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Opened = Callable[..., Any]
CHARTS = ("before", "after", "frontier", "loss", "seconds")


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
    return ir.codec.write_atomic(tmp_path / "report.html", plan_page(Report(plan, views, run, metrics)).encode())


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Open a file; in the end, nothing but files may have been asked for, and no page may have complained."""
    contexts, wanted, requests, complaints = [], [], [], []

    def route(route: Any) -> None:
        requests.append(route.request.url)
        route.continue_() if route.request.url in wanted else route.abort()

    def open_(file: Path, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **options)
        contexts.append(context)
        wanted.append(file.as_uri())
        context.route("**/*", route)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert (requests, complaints) == (wanted, [])


def told(page: Any) -> str:
    """Return what the pointer is told; "" where nothing is."""
    return str(page.locator(".tip").inner_text()) if page.locator(".tip").is_visible() else ""


def at(page: Any, name: str, x: float, y: float = 0.5) -> tuple[float, float]:
    """Return a point of a chart in the window, from parts of its width and height."""
    page.locator(f"#{name}").scroll_into_view_if_needed()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = page.locator(f"#{name} .shapes").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def shown(page: Any, name: str) -> list[float]:
    """Return the part of a chart that is shown: left, top, width and height."""
    return [float(part) for part in page.locator(f"#{name} .shapes").get_attribute("viewBox").split()]


def test_the_charts_are_drawn_without_a_request_or_a_complaint(opened: Opened, file: Path) -> None:
    page = opened(file)
    drawn = {name: [page.locator(f"#{name} {part}").count() for part in (".area", ".line", ".mark")] for name in CHARTS}
    wanted = {"before": [8, 0, 1], "after": [8, 0, 1], "frontier": [0, 1, 10], "loss": [0, 1, 0], "seconds": [0, 1, 0]}
    assert drawn == wanted
    assert page.locator("#before .area").first.bounding_box()["height"] > 200


def test_a_pointer_is_told_what_runs_and_what_is_held(opened: Opened, file: Path, views: Views) -> None:
    page = opened(file)
    timeline = views.plain
    for index in (0, timeline.peak_index, len(timeline.labels) - 1):
        page.mouse.move(*at(page, "before", (index + 0.5) / len(timeline.labels)))
        lines = told(page).splitlines()
        total = sum(values[index] for values in timeline.live_bytes.values())
        assert lines[0] == format_bytes(total)
        parts = timeline.labels[index].split(" · ")
        assert lines[1 : 1 + len(parts)] == parts
        assert "optimizer state" in told(page)
    page.mouse.move(5, 5)
    assert told(page) == ""
    page.mouse.move(*at(page, "loss", 0.5))
    assert re.fullmatch(r"[\d.]+\s+step 15[01]", told(page))
    at(page, "frontier", 0.5)
    star = page.locator("#frontier .mark.star").bounding_box()
    page.mouse.move(star["x"] + 3, star["y"] + 3)
    assert "25 % slower than plain" in told(page) and "blocks 0 to 7" in told(page)


def test_a_chart_zooms_and_shows_the_whole_again(opened: Opened, file: Path, metrics: list[dict[str, Any]]) -> None:
    page = opened(file)
    whole = shown(page, "loss")
    page.mouse.move(*at(page, "loss", 0.5))
    page.mouse.down()
    page.mouse.move(*at(page, "loss", 1.0, 0.52))
    page.mouse.up()
    left, top, width, height = shown(page, "loss")
    assert (left, width) == pytest.approx((5000, 5000), abs=60)
    seen = [line["loss"] for line in metrics[150:]]
    part = (max(seen) - min(seen)) / (1.12 * (max(m["loss"] for m in metrics) - min(m["loss"] for m in metrics)))
    assert height == pytest.approx(1.12 * 10_000 * part, rel=0.1)
    ticks = [int(text.replace(",", "")) for text in page.locator("#loss .tx").all_inner_texts()]
    assert 3 <= len(ticks) <= 7 and min(ticks) >= 150 and max(ticks) == 300
    page.mouse.move(*at(page, "loss", 0.5))
    assert re.search(r"step 22[456]", told(page))
    page.get_by_role("button", name="Show the whole: Loss").click()
    assert shown(page, "loss") == whole
    page.get_by_role("button", name="Zoom in: Loss").click()
    assert shown(page, "loss")[2] == pytest.approx(5000)
    page.get_by_role("button", name="Zoom out: Loss").click()
    assert shown(page, "loss") == whole
    page.mouse.move(*at(page, "frontier", 0.2, 0.1))
    page.mouse.down()
    page.mouse.move(*at(page, "frontier", 0.6, 0.6))
    page.mouse.up()
    assert shown(page, "frontier") == pytest.approx([2000, 1000, 4000, 5000], abs=60)
    page.mouse.dblclick(*at(page, "frontier", 0.5))
    assert shown(page, "frontier") == [0, 0, 10_000, 10_000]


@pytest.mark.parametrize("name", some(["before", "after"], ["after"]))
def test_the_budget_is_drawn_at_its_bytes(opened: Opened, file: Path, plan: Plan, name: str) -> None:
    page = opened(file)
    line, box = (page.locator(f"#{name} {part}").bounding_box() for part in (".rule.budget", ".box"))
    low, high = (float(part) for part in page.locator(f"#{name} .box").get_attribute("data-y").split())
    wanted = box["y"] + box["height"] * (1 - (plan.budget_bytes / 1024**3 - low) / (high - low))
    assert line["width"] > 300 and line["y"] == pytest.approx(wanted, abs=2)


def test_a_click_on_a_header_sorts(opened: Opened, file: Path, views: Views) -> None:
    page = opened(file)
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


@pytest.mark.parametrize("width", some([320, 400, 768, 1280], [320]))
def test_no_width_scrolls_the_page_sideways(opened: Opened, file: Path, width: int) -> None:
    page = opened(file, width)
    widths = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert page.evaluate(widths) == [width, width]
    for part in [*(f"#{name} .box" for name in CHARTS), "pre.command >> nth=0"]:
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && e.innerText?.trim())"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


@pytest.mark.parametrize("width", some([320, 400, 1280], [320]))
def test_a_ladder_is_read_on_any_width(opened: Opened, tmp_path: Path, width: int) -> None:
    ladder = a_ladder("recompute all of the normalisations, and every one of the activations")
    file = ir.codec.write_atomic(tmp_path / "ladder.html", ladder_page(ladder).encode())
    page = opened(file, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".mark").count() == 2 and page.locator("ol.next li").count() == 1
    mark = page.locator(".mark").last
    mark.scroll_into_view_if_needed()
    page.mouse.move(*at(page, "ladder", 0.45, 0.15))
    box = mark.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert "every one of the activations: kept" in told(page) and "90.0 MiB, 200.0 ms" in told(page)


def test_a_finger_is_told_too_and_the_tip_stays_on_a_narrow_page(opened: Opened, file: Path) -> None:
    page = opened(file, 400, 800, has_touch=True, is_mobile=True)
    for x in (0.02, 0.98):
        page.touchscreen.tap(*at(page, "after", x))
        tip = page.locator(".tip").bounding_box()
        assert "GiB" in told(page) and tip["x"] >= 0 and tip["x"] + tip["width"] <= 400


def test_the_pictures_and_the_tables_need_no_script(opened: Opened, file: Path) -> None:
    page = opened(file, 400, 800, java_script_enabled=False)
    assert page.locator("#before .area").first.bounding_box()["height"] > 100
    assert page.locator("#before .tx").count() >= 3 and page.locator(".zoom").count() == 0


def test_colours_follow_the_scheme(opened: Opened, file: Path) -> None:
    page = opened(file)
    fill = "() => getComputedStyle(document.querySelector('#before .area[data-name=parameters]')).fill"
    assert page.evaluate(fill) == "rgb(0, 114, 178)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(fill) == "rgb(47, 134, 193)"
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(15, 20, 25)"


@pytest.mark.ci
def test_hostile_names_run_nothing(opened: Opened, tmp_path: Path, hostile: Any) -> None:
    image, link = "<img src=x onerror=window.ran=1>", "<a href='javascript:window.ran=1'>z</a>"
    text = f"</script><script>window.ran=1</script>{image}{link}"
    file = ir.codec.write_atomic(tmp_path / "report.html", plan_page(Report(*hostile(text))).encode())
    page = opened(file)
    page.mouse.move(*at(page, "before", 0.5))
    assert "<script>" in told(page) or "<img" in told(page)
    assert page.evaluate("window.ran") is None
    assert page.locator(".plot a, .tip a, main img").count() == 0
    assert page.locator("h1").inner_text() == text
