"""The pages in Chinese have the code of the pages in English: `python -m tests.docs.chinese` copies it again.

Each block of a page in Chinese, its comments and the output that it shows, is the block at the same place of the page
in English. What `benchmarks` makes whole has no such blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.pages import CHINESE, name_of

BLOCK = re.compile(r"^( *)```.*?^\1```$", flags=re.DOTALL | re.MULTILINE)


def differences(chinese: str, english: str) -> Iterator[str]:
    """Yield which blocks of a text are other than those of another."""
    ours, theirs = ([match[0] for match in BLOCK.finditer(text)] for text in (chinese, english))
    if len(ours) != len(theirs):
        yield f"{len(ours)} blocks, not {len(theirs)}"
    for number, (mine, original) in enumerate(zip(ours, theirs, strict=False), start=1):
        if mine != original:
            yield f"block {number} is not\n{original}"


def with_blocks(chinese: str, english: str) -> str:
    """Return a text with the blocks of another.

    Raises:
        StopIteration: The other has fewer.
    """
    blocks = BLOCK.finditer(english)
    return BLOCK.sub(lambda _: next(blocks)[0], chinese)


def copy_blocks() -> None:
    """Copy the blocks of the pages in English to those in Chinese.

    Raises:
        AssertionError: A page has more or fewer blocks.
    """
    for page, original in CHINESE.items():
        chinese, english = page.read_text(), original.read_text()
        counts = [len(BLOCK.findall(text)) for text in (chinese, english)]
        assert counts[0] == counts[1], f"{name_of(page)} has {counts[0]} blocks, {name_of(original)} has {counts[1]}"
        page.write_text(with_blocks(chinese, english))


if __name__ == "__main__":
    copy_blocks()
