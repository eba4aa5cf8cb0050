"""Each block of the README, the Quickstart and the guide to Trainers runs by itself, with the wheel and `all`.

The name of this file comes after that of `test_wheel.py`, which begins without the extra.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, README, Block, blocks, is_run, write_files
from tests.wheel.conftest import install, own


@pytest.fixture(scope="session")
def everything(environment: Path, distributions: Path) -> Path:
    """The Python of the environment, with all that pages need."""
    (wheel,) = distributions.glob("*.whl")
    install(environment, f"{wheel}[all]")
    return environment


def first_blocks() -> Iterator[object]:
    """Yield the blocks of the pages that one reads first, each once."""
    seen = set[str]()
    for page in (README, DOCS / "quickstart.md", DOCS / "guides" / "trainers.md"):
        for block in filter(is_run, blocks(page)):
            if block.code not in seen:
                seen.add(block.code)
                yield pytest.param(page, block, id=f"{page.stem}: {block.code.splitlines()[0][:60]}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "block"), list(first_blocks()))
def test_a_block_runs_by_itself(page: Path, block: Block, everything: Path, tmp_path: Path) -> None:
    write_files(page, block, tmp_path)
    line = [everything, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    command = [*line, block.code]
    done = subprocess.run(command, cwd=tmp_path, env=own(everything), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
