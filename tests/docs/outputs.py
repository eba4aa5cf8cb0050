"""The outputs that pages show: `python -m tests.docs.outputs [PAGE ...]` runs their blocks, and writes what is printed.

An output is a block with the title "output" below the block that prints it. A line "…" stands for lines that are left
out: as many as before stay above and below it. Lines of progress are left out, which a terminal overwrites.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.docs.chinese import copy_blocks
from tests.docs.pages import ALONE, ROOT, blocks, name_of, run_alone

LEFT_OUT = "…"
ENVIRONMENT = {"COLUMNS": "100"}
_PROGRESS = re.compile(
    r"^memfit: (?:capture|solve|frontier|prove)\b|^[a-z]+( [a-z]+)*(: (\d.*|done in .*))?$|^\[W\d{4} |^USDT:"
)


def lines_of(printed: str) -> list[str]:
    """Return the lines that stay on a terminal, without gaps at their ends."""
    lines = [line.rstrip() for line in printed.splitlines()]
    kept = [line for line in lines if not _PROGRESS.match(line)]
    return "\n".join(kept).strip("\n").splitlines()


def shortened(lines: list[str], shown: str) -> list[str]:
    """Return lines, with as many left out as are in what is shown."""
    before, gap, after = (part.strip("\n").splitlines() for part in shown.partition(f"{LEFT_OUT}\n"))
    if not gap:
        return lines
    return [*lines[: len(before)], LEFT_OUT, *lines[len(lines) - len(after) :]]


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines shown that begin as none of those printed does; figures and what follows may differ."""
    begins = {_beginning(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line != LEFT_OUT and _beginning(line) not in begins]


def _beginning(line: str) -> str:
    words = re.sub(r"[\d.,:×−-]+|[─█▏▎▍▌▋▊▉]+", " # ", line).split()
    return " ".join(words[:2])


def _written(page: Path, printed: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the outputs that a page shows, old and new; those of a block that other pages have too are printed once."""
    for block in blocks(page):
        if block.output:
            if block.code not in printed:
                print(f"{name_of(page)}: {block.code.splitlines()[0]}", file=sys.stderr)
                with tempfile.TemporaryDirectory() as folder:
                    printed[block.code] = run_alone(page, block, Path(folder), ENVIRONMENT)
            yield block.output, "\n".join(shortened(lines_of(printed[block.code]), block.output)) + "\n"


def main() -> None:
    """Write the outputs of the pages that are named, or of all."""
    printed: dict[str, str] = {}
    for page in [ROOT / name for name in sys.argv[1:]] or ALONE:
        text = page.read_text()
        for old, new in _written(page, printed):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        page.write_text(text)
    copy_blocks()


if __name__ == "__main__":
    main()
