"""What the site's build is told beside `mkdocs.yml`.

In the search, what to do comes before how it works; and pages that exist only once something was measured are listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BOOSTS = {"guides": 4.0, "internals": 0.5, "reference": 0.5, "results": 0.5}
"""For each folder, how much its pages count in the search; all others count 1."""

MEASURED = {"Results": ["results/gpu.md"]}
"""For each part of the navigation, the pages that results make, where there are such results."""


def on_config(config: Any, **_: Any) -> Any:
    """List the pages that exist by results."""
    for section in config["nav"]:
        for title, pages in section.items():
            known = [page for page in MEASURED.get(title, ()) if Path(config["docs_dir"], page).exists()]
            pages += [page for page in known if page not in pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set a page's rank, as the front matter `search.boost` would, which hosts of repositories show as a table."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1.0)}
    return markdown
