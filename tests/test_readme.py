"""The README's examples run as they are written, from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_readme_examples_run(tmp_path: Path) -> None:
    (python,), (shell,) = blocks("python"), blocks("sh")
    library, _, use = python.partition("mine = workload()")
    (tmp_path / "mine.py").write_text(library)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = f"{library}\nmine = workload(){use}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "160.0 MiB" in done.stdout
    assert "checkpointing" in done.stdout
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The plan is what it says." in done.stdout
    assert (tmp_path / "runs/mine/report.html").stat().st_size > 1_000_000


def test_readme_figures_are_those_of_the_result_files() -> None:
    from benchmarks.tables import with_tables

    assert with_tables(README) == README
    assert with_tables(README.replace("| byte_lm |", "| other_lm |")) == README
