"""The pages in Chinese say the same as those in English: code, outputs and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.chinese import BLOCK, differences, with_blocks
from tests.docs.conftest import Site
from tests.docs.pages import CHINESE, DOCS, ROOT, name_of

MADE = DOCS / "zh" / "results" / "claims.md"
"""Made with its page in English, and tested with it."""
PAIRS = [pytest.param(page, original, id=name_of(page)) for page, original in CHINESE.items() if page != MADE]


def figures_in(text: str) -> set[str]:
    """Return the figures of a text, but for those of links and comments."""
    text = re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", text, flags=re.DOTALL)
    return set(re.findall(r"\d+(?:[.,]\d+)*(?:e-?\d+)?", text))


def other_figures(chinese: str, english: str) -> set[str]:
    """Return the figures of one text's prose and tables that the other has nowhere."""
    texts = [(chinese, english), (english, chinese)]
    return {figure for one, other in texts for figure in figures_in(BLOCK.sub("", one)) - figures_in(other)}


@pytest.mark.parametrize(("page", "original"), PAIRS)
def test_a_page_has_the_code_and_the_figures_of_its_english_one(page: Path, original: Path) -> None:
    chinese, english = page.read_text(), original.read_text()
    assert list(differences(chinese, english)) == [], f"{name_of(page)}: run python -m tests.docs.chinese"
    assert other_figures(chinese, english) == set()


def test_what_differs_is_found_and_copied() -> None:
    page, original = ROOT / "README.zh-CN.md", ROOT / "README.md"
    chinese, english = page.read_text(), original.read_text()
    changed = english.replace("manual_seed(0)", "manual_seed(1)", 1).replace(
        "The script needs 133.2", "The script needs 134.2"
    )
    assert [found.partition("\n")[0] for found in differences(chinese, changed)] == ["block 4 is not"]
    assert list(differences(with_blocks(chinese, changed), changed)) == []
    assert other_figures(chinese, changed) == {"134.2"}
    assert next(differences(chinese + "\n```\n```\n", english)) == "7 blocks, not 6"


def test_the_readmes_lead_to_one_another() -> None:
    for page, other in ((ROOT / "README.md", "README.zh-CN.md"), (ROOT / "README.zh-CN.md", "README.md")):
        assert f"](https://github.com/memfit/memfit/blob/main/{other})" in page.read_text()


def test_links_to_english_pages_are_marked() -> None:
    for page in CHINESE:
        for target, after in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)\s*(.?\s*.{0,2})", page.read_text()):
            path = (page.parent / target.partition("#")[0]).resolve()
            if path.is_relative_to(DOCS) and not path.is_relative_to(DOCS / "zh") and page != MADE:
                assert re.match(r"（英文|，\s*英文", after), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("name", ["quickstart", "guides/script", "concepts/levers"])
def test_the_site_is_in_two_languages_that_lead_to_one_another(site: Site, name: str) -> None:
    english, chinese = (site.folder / folder / f"{name}.html" for folder in ("", "zh"))
    for page, language, other in ((english, "en", chinese), (chinese, "zh", english)):
        text = page.read_text()
        assert f'<html lang="{language}"' in text
        leads = re.findall(r'<a href="([^"]+)" hreflang="(\w+)" class="md-select__link"', text)
        assert {where: (page.parent / link).resolve() for link, where in leads} == {
            language: page,
            {"en": "zh", "zh": "en"}[language]: other,
        }


def test_a_page_in_one_language_leads_to_the_home_of_the_other(site: Site) -> None:
    leads = re.findall(r'<a href="([^"]+)" hreflang="zh"', (site.folder / "guides" / "keras.html").read_text())
    assert leads == ["../zh/index.html"]


def test_lines_of_chinese_are_joined(site: Site) -> None:
    pages = [path.read_text() for path in (site.folder / "zh").rglob("*.html")]
    paragraphs = [words for page in pages for words in re.findall(r"<(?:p|li)>([^<]*)<", page)]
    assert len(paragraphs) > 100
    assert [words for words in paragraphs if re.search(r"[\u4e00-\u9fff，。：；]\n[\u4e00-\u9fff]", words)] == []
