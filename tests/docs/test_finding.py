"""Someone who has never seen memfit finds what to type: six tasks, in the words that people type into a search.

The site's own index is asked, and ranked as Material for MkDocs ranks it in a browser. A task is found if its page is
among the first three, and one of the first three blocks of code on that page does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import mkdocs_hooks
from tests.docs.conftest import Site
from tests.docs.pages import DOCS, blocks

FIRST = 3
LEADING = 3
Section = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What somebody wants.

    Attributes:
        page: Where it is said.
        command: A pattern of what does it.
        phrasings: What people type.
    """

    page: str
    command: str
    phrasings: tuple[str, ...]


TASKS = {
    "fits my card?": Task(
        "guides/cards",
        r"memfit estimate \S+ --device \S+",
        (
            "does it fit my GPU",
            "will my model fit on my card",
            "does my training fit in 24 GB",
            "how much GPU memory do I need",
            "fit on rtx 3090",
            "estimate memory without a GPU",
        ),
    ),
    "make it fit": Task(
        "guides/out-of-memory",
        r"memfit run --budget \S+ train\.py",
        (
            "CUDA out of memory",
            "torch.OutOfMemoryError",
            "fix out of memory error",
            "OOM during training",
            "make my training fit",
            "reduce memory of training",
        ),
    ),
    "fit my script": Task(
        "guides/script",
        r"memfit run --budget \S+ train\.py",
        ("fit my script", "training script unchanged", "memfit run", "run my own training script"),
    ),
    "compare two cards": Task(
        "guides/cards",
        r"for card in (\S+) (\S+); do memfit estimate \S+ --device \$card",
        ("compare two cards", "compare GPUs", "a100 or rtx 3090", "which GPU should I rent", "which card is faster"),
    ),
    "resume after a crash": Task(
        "guides/resume",
        r"memfit train .* --resume",
        (
            "resume after a crash",
            "resume training",
            "continue from checkpoint",
            "training was killed",
            "restart an interrupted run",
            "save checkpoints during training",
        ),
    ),
    "put it in my Trainer": Task(
        "guides/trainers",
        r"trainer\.add_callback\(MemfitCallback\(trainer, budget=",
        (
            "huggingface trainer",
            "transformers Trainer callback",
            "use with Lightning",
            "accelerate integration",
            "put it in my trainer",
            "pytorch lightning",
        ),
    ),
    "make it fit, in Chinese": Task(
        "zh/guides/out-of-memory",
        r"memfit run --budget \S+ train\.py",
        ("显存不足", "解决显存不足", "报错 out of memory 怎么办", "训练时 OOM", "让训练放得下", "爆显存"),
    ),
    "fit my script, in Chinese": Task(
        "zh/guides/script",
        r"memfit run --budget \S+ train\.py",
        ("训练脚本", "我的脚本放得下吗", "退出码", "脚本 一行不改"),
    ),
    "Jittor, in Chinese": Task(
        "zh/guides/jittor",
        r"mj\.plan\(mine, budget=",
        ("计图", "计图 梯度检查点", "Jittor 显存", "set_memory_limit 计图"),
    ),
}


class Search:
    """The site's search: lunr over titles and texts, sections ranked as Material does, then grouped by page."""

    def __init__(self, sections: Sequence[Section], separator: str) -> None:
        from lunr import lunr

        self._separator = re.compile(separator)
        documents = []
        for section in sections:
            words = {key: self._split(section[key]) for key in ("title", "text")}
            documents.append(({"location": section["location"], **words}, {"boost": section.get("boost", 1)}))
        fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
        self._index = lunr(ref="location", fields=fields, documents=documents)

    def _split(self, text: str) -> str:
        return " ".join(word for word in self._separator.split(text) if word)

    def pages(self, query: str) -> list[str]:
        """Return pages, best first, without their endings."""
        words = self._split(mkdocs_hooks.with_words_apart(query)).split()
        best: dict[str, float] = {}
        for found in self._index.search(" ".join(words)):
            found_terms = len(found["match_data"].metadata) / len(words)
            boost = ("#" not in found["ref"]) + min(1.0, found_terms)
            page = found["ref"].partition("#")[0].removesuffix(".html")
            best[page] = max(best.get(page, 0.0), found["score"] * (1 + boost**2))
        return sorted(best, key=lambda page: -best[page])


@pytest.fixture(scope="module")
def built(site: Site) -> tuple[list[Section], str]:
    """The sections of the site, and what separates words in them."""
    pytest.importorskip("lunr", reason="the search needs the extra dev: pip install '.[dev]'")
    index = json.loads((site.folder / "search" / "search_index.json").read_text())
    sections = [{**section, "text": re.sub(r"<[^>]*>", " ", section["text"])} for section in index["docs"]]
    return sections, index["config"]["separator"]


@pytest.fixture(scope="module")
def search(built: tuple[list[Section], str]) -> Search:
    return Search(*built)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_found(name: str, search: Search) -> None:
    task = TASKS[name]
    missed = {
        words: search.pages(words)[:FIRST] for words in task.phrasings if task.page not in search.pages(words)[:FIRST]
    }
    assert missed == {}


@pytest.mark.parametrize("name", TASKS)
def test_the_home_page_leads_to_a_task(name: str) -> None:
    page = DOCS / f"{TASKS[name].page}.md"
    home = DOCS / "zh" if (DOCS / "zh") in page.parents else DOCS
    assert f"]({page.relative_to(home)})" in (home / "index.md").read_text()


@pytest.mark.parametrize("name", TASKS)
def test_the_leading_code_on_its_page_does_it(name: str) -> None:
    task = TASKS[name]
    first = [block for block in blocks(DOCS / f"{task.page}.md") if block.language in ("sh", "python")]
    assert any(re.search(task.command, block.code) for block in first[:LEADING])


def test_a_task_is_not_found_where_its_page_says_something_else(built: tuple[list[Section], str]) -> None:
    sections, separator = built
    renamed = [
        {**section, "title": "Notes", "text": "This page says something else."}
        if section["location"].startswith("guides/resume")
        else section
        for section in sections
    ]
    found = Search(renamed, separator)
    task = TASKS["resume after a crash"]
    assert all(task.page not in found.pages(words)[:FIRST] for words in task.phrasings)
