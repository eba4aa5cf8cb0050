"""The site builds without warnings and without network, and its pages can be read in one sitting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mkdocs_hooks
from tests.docs.conftest import Site
from tests.docs.pages import DOCS, PAGES, ROOT, name_of, prose_of, tables_of, words_in

MOST_WORDS = 1500
"""Of a page, code and tables among them, outside of the reference and of results."""
MOST_PROSE = 1900
"""Of any page's prose: about eight minutes of reading."""
MOST_ROWS = 24
"""Of a table that is not folded, outside of the reference."""


def test_it_builds_without_warnings(site: Site) -> None:
    assert site.status == 0, site.log
    assert "WARNING" not in site.log and "ERROR" not in site.log, site.log
    for page in DOCS.rglob("*.md"):
        assert (site.folder / page.relative_to(DOCS)).with_suffix(".html").exists(), page


def test_its_pages_load_nothing_from_elsewhere(site: Site) -> None:
    loads = (
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(https?:)?//|<link[^>]*href=[\"']?https?://(?![^>]*canonical)"
    )
    pages = list(site.folder.rglob("*.html"))
    assert pages
    assert [page.name for page in pages if re.search(loads, page.read_text())] == []
    assert re.search(loads, '<script src="https://example.org/a.js"></script>')
    styles = "".join(path.read_text() for path in site.folder.rglob("*.css"))
    assert not re.search(r"@import[^;]*//|url\(['\"]?https?://", styles)


def test_the_api_has_what_the_package_exports(site: Site) -> None:
    import memfit

    text = (site.folder / "reference" / "api.html").read_text()
    missing = [name for name in memfit.__all__ if f'id="memfit.{name}"' not in text and name != "__version__"]
    assert missing == []
    assert "Predict the peak and the time of a step as it is" in text


def test_pages_of_results_are_listed_where_there_are_some(tmp_path: Path) -> None:
    config = {"docs_dir": str(tmp_path), "nav": [{"Start": ["index.md"]}, {"Results": ["results/index.md"]}]}
    assert mkdocs_hooks.on_config(config)["nav"][1] == {"Results": ["results/index.md"]}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu.md").write_text("# Measured")
    for _ in range(2):  # a page that is listed already is not listed again
        listed = mkdocs_hooks.on_config(config)["nav"]
        assert listed == [{"Start": ["index.md"]}, {"Results": ["results/index.md", "results/gpu.md"]}]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_fits_one_reading(page: Path) -> None:
    assert len(prose_of(page).split()) <= MOST_PROSE
    if not {"reference", "results"} & set(page.parts):
        assert words_in(page) <= MOST_WORDS
    if "reference" not in page.parts:
        assert all(len(table) <= MOST_ROWS + 2 for table in tables_of(page))


def test_the_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
