"""The pages of the docs, and what is in them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: "" where none is said.
        file: The file that its title names; "" for none.
    """

    language: str
    file: str
    code: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return a page's blocks of code, in order."""
    found = [Block(*match.groups(default="")) for match in _FENCE.finditer(page.read_text())]
    return [block for block in found if language in (None, block.language)]


def name_of(page: Path) -> str:
    """Return how tests call a page."""
    return str(page.relative_to(ROOT))


def words_of(page: Path) -> str:
    """Return a page's text with every gap as one space."""
    return " ".join(page.read_text().split())


def prose_of(page: Path) -> str:
    """Return what is read of a page: no code, no tables, nothing folded, no comments."""
    text = _FENCE.sub("", page.read_text())
    text = re.sub(r"<details.*?</details>|<!--.*?-->", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def tables_of(page: Path) -> Iterator[list[str]]:
    """Yield the lines of each table that is not folded."""
    text = re.sub(r"<details.*?</details>", "", _FENCE.sub("", page.read_text()), flags=re.DOTALL)
    for match in re.finditer(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        yield match[0].splitlines()


def run_python(program: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints.

    Raises:
        AssertionError: It fails.
    """
    return _run(warm.command("-c", program), folder, environment)


def run_shell(script: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what a script prints; it ends with the first command that fails.

    Raises:
        AssertionError: It fails.
    """
    python = shlex.join(warm.command())
    commands = f'memfit() {{ {python} -m memfit "$@"; }}\npython() {{ {python} "$@"; }}'
    return _run(["bash", "-euo", "pipefail", "-c", f"{commands}\n{script}"], folder, environment)


def _run(command: list[str], folder: Path, environment: Mapping[str, str] | None) -> str:
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
