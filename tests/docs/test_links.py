"""No link is dead: in the pages, between them, and in what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of

ROOT_TEXTS = ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
TEXTS = (*PAGES, *(ROOT / name for name in ROOT_TEXTS), *sorted((ROOT / "examples").rglob("*.md")))
SOURCES = [
    path
    for folder in ("src", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".toml", ".cpp", ".j2", ".c"}
]
HERE = (
    "https://github.com/memfit/memfit/blob/main/",
    "https://raw.githubusercontent.com/memfit/memfit/main/",
)
"""Where the repository's files are, for pages that are shown elsewhere too, as the README is."""
FOLDERS = ("benchmarks", "examples", "tests", "src", "docs")


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page, relative or into the repository, that lead to no file or to no heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        place, target_here = page.parent, target
        for address in HERE:
            if target.startswith(address):
                place, target_here = ROOT, target.removeprefix(address)
        if re.match(r"https?://|mailto:", target_here):
            continue
        path, _, anchor = target_here.partition("#")
        file = (place / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            yield target


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as both the site and hosts of repositories make them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def named_files(text: str) -> Iterator[str]:
    """Yield the pages of the docs that a text names, and in code spans the repository's files."""
    yield from re.findall(r"docs/[\w./-]+\.md", text)
    for span in re.findall(r"`([^`\s]+)`", text):
        if span.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not re.search(r"[*<>{}]|NAME|MACHINE", span):
            yield span.partition("::")[0].partition(":")[0]


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_no_link_is_dead(page: Path) -> None:
    text = page.read_text()
    assert list(dead_links(page, text)) == []
    assert [name for name in named_files(text) if not (ROOT / name).exists()] == []


def test_no_page_that_the_code_names_is_missing() -> None:
    missing = {
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if path != Path(__file__)
        for name in re.findall(r"docs/[\w./-]+\.md", path.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


def test_the_readme_can_be_shown_elsewhere() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert targets and all(target.startswith(HERE) for target in targets)
    assert len([target for target in targets if target.startswith(f"{HERE[0]}docs/")]) == 3


def test_dead_links_are_found() -> None:
    page = ROOT / "README.md"
    assert list(dead_links(page, f"[a](docs/none.md) [b](README.md#none) [c](#memfit) [d]({HERE[0]}none.md)")) == [
        "docs/none.md",
        "README.md#none",
        f"{HERE[0]}none.md",
    ]
    assert list(named_files("see docs/none.md and `src/memfit/none.py`")) == ["docs/none.md", "src/memfit/none.py"]
