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
        (("--budget", "1GiB", "--numerics", "reduced", "script.py"), "--numerics"),
    ],
)
def test_bad_input_is_named_before_the_script_begins(tmp_path: Path, line: tuple[str, ...], words: str) -> None:
    (tmp_path / "script.py").write_text("print('began')")
    done = memfit(tmp_path, *line)
    assert done.returncode == 2 and words in done.stderr.replace("\n", "")
    assert "began" not in done.stdout and "Traceback" not in done.stderr


SWALLOWING = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    try:
        nn.functional.cross_entropy(model(torch.randn(256, 64)), torch.randint(0, 10, (256,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("done", step)
    except {caught}:
        print("skipped", step)
print("the end")
{last}
"""


@pytest.mark.parametrize(("caught", "last", "ends"), [("Exception", "", False), ("BaseException", "sys.exit(0)", True)])
def test_no_plan_fits_decides_the_status_whatever_the_script_catches(
    tmp_path: Path, caught: str, last: str, ends: bool
) -> None:
    (tmp_path / "script.py").write_text(SWALLOWING.format(caught=caught, last=last))
    done = memfit(tmp_path, "--budget", "300KiB", "script.py")
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("no plan fits") == 1 and "script.py" in done.stderr or ends
    assert done.stdout.count("done") == 1 and ("the end" in done.stdout) == ends
