"""The site in a browser: its search finds the tasks, from a server and from a folder.

It asks nothing of elsewhere, and a telephone can show it.
"""

from __future__ import annotations

import functools
import http.server
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import Site
from tests.docs.test_finding import FIRST, TASKS
from tests.report import test_browser

pytestmark = [pytest.mark.browser, pytest.mark.ci, pytest.mark.timeout(300)]
browser = test_browser.browser
RESULT = ".md-search-result__list > li"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing of it."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """Where the site is served."""
    handler = functools.partial(Quiet, directory=str(site.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci if i else ()) for i, n in enumerate(TASKS)])
def test_the_search_finds_a_task(name: str, browser: Any, address: str) -> None:
    for words in TASKS[name].phrasings[:2]:
        assert TASKS[name].page in searched(browser, address, words)[:FIRST], words


@pytest.mark.parametrize("name", TASKS)
def test_the_search_works_from_a_folder(name: str, browser: Any, site: Site) -> None:
    words = TASKS[name].phrasings[0]
    assert TASKS[name].page in searched(browser, f"{site.folder.as_uri()}/", words)[:FIRST]


def searched(browser: Any, address: str, words: str) -> list[str]:
    """Return the pages that the search finds, best first, without their endings."""
    page = browser.new_page()
    page.goto(f"{address}index.html?q={urllib.parse.quote(words)}")
    page.focus("input.md-search__input")
    page.wait_for_selector(RESULT, state="attached")
    links = page.eval_on_selector_all(f"{RESULT} a", "links => links.map(link => link.href)")
    page.close()
    found = (link.removeprefix(address).partition("?")[0].partition("#")[0] for link in links)
    return list(dict.fromkeys(page.removesuffix(".html") for page in found))


def test_pages_ask_nothing_of_elsewhere_and_fit_a_telephone(browser: Any, address: str) -> None:
    page, asked = browser.new_page(viewport={"width": 400, "height": 800}), []
    page.on("request", lambda request: asked.append(request.url))
    names = ("index", "quickstart", "concepts/peak", "guides/cards", "reference/api", "results/frontier", "zh/index")
    for name in names:
        page.goto(f"{address}{Path(name)}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
    assert asked and [url for url in asked if not url.startswith((address, "data:"))] == []
    page.close()
