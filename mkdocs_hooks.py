"""What the site's build is told beside `mkdocs.yml`: in the search, what to do comes before how it works."""

from __future__ import annotations

from typing import Any

BOOSTS = {"guides": 4.0, "internals": 0.5, "reference": 0.5, "results": 0.5}
"""For each folder, how much its pages count in the search; all others count 1."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set a page's rank, as the front matter `search.boost` would, which hosts of repositories show as a table."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1.0)}
    return markdown
