"""Scripts that are run in a budget as they are: a process each, as their users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm


def started(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return warm.run(line, cwd=folder, env=environment)


def memfit(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return started(folder, "-m", "memfit", "run", *line)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; sys.exit(7)", 7, []),
        ("print('no training')", 0, ["nothing was planned"]),
        ("def f():\n    return {}['missing']\nf()", 1, ["Traceback", 'script.py", line 2, in f', "KeyError"]),
        ("import nowhere", 1, ["ModuleNotFoundError"]),
    ],
)
def test_a_script_ends_as_it_ends_itself(tmp_path: Path, code: str, status: int, words: list[str]) -> None:
    (tmp_path / "script.py").write_text(code)
    done = memfit(tmp_path, "--budget", "1GiB", "script.py")
    assert done.returncode == status
    assert all(word in done.stderr for word in words)
    assert "memfit/" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--budget", "1GiB", "nowhere.py"), "nowhere.py"),
        (("--budget", "plenty", "script.py"), "plenty"),
        (("script.py",), "--budget"),
        (("--budget", "1GiB", "--numerics", "reduced", "script.py"), "numerics='reduced'"),
    ],
)
def test_bad_input_is_named_before_the_script_begins(tmp_path: Path, line: tuple[str, ...], words: str) -> None:
    (tmp_path / "script.py").write_text("print('began')")
    done = memfit(tmp_path, *line)
    assert done.returncode == 2 and words in done.stderr.replace("\n", "")
    assert "began" not in done.stdout and "Traceback" not in done.stderr
