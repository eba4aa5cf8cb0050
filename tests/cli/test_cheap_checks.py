"""Errors that need no model: told before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LINES = [
    ("run nowhere.py", "there is no script 'nowhere.py'"),
    ("run --budget 1GiB -m nowhere.train", "there is no module 'nowhere.train'"),
    ("run --bugdet 1GiB script.py", "memfit run has no option --bugdet"),
    ("run --budget 24 script.py", "--budget 24 is 24 bytes: type --budget 24GiB"),
    ("run --budget plenty script.py", "--budget plenty can't be read"),
    ("run --budget 1GiB --numerics reduced script.py", "'reduced' is not one of"),
    ("run --budget 1GiB --host-budget 90% script.py", "--host-budget 90% can't be read"),
    ("run --budget 1GiB -o script.py/plan.json script.py", "script.py is a file"),
    ("run --budget 1GiB -o script.py script.py", "--output script.py already exists"),
    ("run --budget 1GiB --plan plan.json script.py", "give --budget or --plan, not both"),
    ("run --plan plan.json --numerics exact script.py", "leave it out with --plan"),
    ("run --plan nowhere.json script.py", "can't read nowhere.json"),
    ("run --plan script.py script.py", "script.py"),
    ("plan script.py:make", "Type memfit plan --budget"),
    ("plan --device a100-80gb script.py:make", "Type memfit plan --budget 90% --device a100-80gb script.py:make"),
    ("plan nowhere.py:make --budget 1GiB", "the workload's file 'nowhere.py' does not exist"),
    ("plan nowhere:make --budget 1GiB", "there is no module 'nowhere'"),
    ("plan script.py:make --budget 0.5", "--budget 0.5 is 0.5 bytes"),
    ("plan script.py:make --budget 1GiB --device rtx-9000", "--device rtx-9000 is not in the catalogue"),
    ("plan script.py:make --budget 1GiB --numerics loose", "'loose' is not one of"),
    ("plan script.py:make --budget 1GiB -o script.py", "--output script.py already exists"),
    ("estimate script.py", "the workload 'script.py' can't be found"),
    ("estimate script.py:make --device rtx-9000", "--device rtx-9000 is not in the catalogue"),
    ("estimate script.py:make --chrome-trace script.py/t.json", "script.py is a file"),
    ("train script.py:make --out runs --steps 2", "Type memfit train --budget"),
    ("train script.py:make --out script.py --steps 2 --budget 1GiB", "script.py is a file"),
    ("train script.py:make --out runs --steps 2 --budget 1GiB --limit 24", "--limit 24 is 24 bytes"),
    ("train script.py:make --out runs --steps 2 --plan nowhere.json", "can't read nowhere.json"),
    ("verify script.py:make --plan nowhere.json", "can't read nowhere.json"),
    ("tools ladder script.py:make --budget 8", "--budget 8 is 8 bytes"),
    ("fleet script.py:make --steps 8 --budget 8", "--budget 8 is 8 bytes"),
    *((f"fleet script.py:make --steps 8 --ranks {text}", "--ranks") for text in "0-4 4-1 a 1- 1,,2 1-9999999".split()),
    ("demo --budget 8", "--budget 8 is 8 bytes"),
    ("demo --out script.py", "script.py is a file"),
]

PROGRAM = """
import sys
from memfit.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["memfit", *line.split()]
    print("==", line, flush=True)
    try:
        main()
        status = 0
    except SystemExit as e:
        status = e.code
    print("->", status, "torch" in sys.modules, flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each line of `LINES` prints, in one process."""
    folder: Path = tmp_path_factory.mktemp("mine")
    (folder / "script.py").write_text("raise RuntimeError('began')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "200"}
    lines = "\n".join(line for line, _ in LINES)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=environment,
        input=lines,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    assert [path.name for path in folder.iterdir()] == ["script.py"]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in done.stdout.split("== ")[1:]}


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_it_is_told_without_pytorch(answers: dict[str, str], line: str, words: str) -> None:
    answer = answers[line]
    assert words in answer and "began" not in answer and "Traceback" not in answer
    assert answer.splitlines()[-1] == "-> 2 False"
