"""The pages of the docs, and what is in them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
CHINESE = {
    ROOT / "README.zh-CN.md": README,
    **{page: DOCS / page.relative_to(DOCS / "zh") for page in sorted((DOCS / "zh").rglob("*.md"))},
}
"""The pages in Chinese, with the page in English that each one says the same as."""
PAGES = (README, ROOT / "README.zh-CN.md", *sorted(DOCS.rglob("*.md")))
ALONE = (README, DOCS / "index.md", DOCS / "quickstart.md", *sorted((DOCS / "guides").glob("*.md")))
"""Pages whose blocks stand by themselves: each runs in a folder with nothing but the files that it names and its page
shows. Those of any other page are read, and run, from its top."""
OUTPUT = "output"
"""The title of a block that shows the output of the one before it."""
_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: "" where none is said.
        file: The file that its title names; "" for none.
        output: The output that its page shows; "" for none.
    """

    language: str
    file: str
    code: str
    output: str = ""

    def names(self, file: str) -> bool:
        """Return whether the code names a file, or imports it."""
        stem = re.escape(file.removesuffix(".py"))
        imports = rf"^(?:from|import) {stem}\b" if file.endswith(".py") else r"(?!)"
        return re.search(rf"(?<![\w./-]){re.escape(file)}\b|{imports}", self.code, flags=re.MULTILINE) is not None


def is_run(block: Block) -> bool:
    """Tell whether a block is code that runs."""
    return block.language in ("python", "sh")


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return a page's blocks of code, in order."""
    found = list[Block]()
    for match in _FENCE.finditer(page.read_text()):
        _, its_language, title, code = match.groups(default="")
        code = textwrap.dedent(code)
        if title == OUTPUT:
            found[-1] = replace(found[-1], output=code)
        else:
            found.append(Block(its_language, title, code))
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


def words_in(page: Path) -> int:
    """Return how many words a page has, code and tables among them."""
    return len(page.read_text().split())


def run_alone(page: Path, block: Block, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what a block prints in a folder that has the files that it names: its page's, and the examples.

    Raises:
        AssertionError: It fails.
    """
    for shown in blocks(page):
        if shown.file and block.names(shown.file):
            (folder / shown.file).write_text(shown.code)
    if "examples/" in block.code:
        (folder / "examples").symlink_to(ROOT / "examples")
    run = run_python if block.language == "python" else run_shell
    return run(block.code, folder, environment)


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
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
