"""`--log`: a function of the user's takes each step's record, of `memfit train` and of `memfit run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import LEAN, Shell, run_script

TRACKER = """
import json

print("imported")


def log(record):
    with open("records.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n")


def full(record):
    raise OSError("no room in the tracker")


def workload():
    from tests.workloads import lean

    return lean()
"""
SCRIPT = """
import torch
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tracker.py").write_text(TRACKER)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(folder: Path, name: str = "records.jsonl") -> list[object]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("workload", "log"), [(LEAN, "tracker.py:log"), (LEAN, "tracker:log"), ("tracker.py:workload", "tracker.py:log")]
)
def test_training_gives_the_lines_of_its_metrics(
    memfit: Shell,
    plan_file: Path,
    folder: Path,
    workload: str,
    log: str,
) -> None:
    line = ("train", workload, "--plan", str(plan_file), "--out", "run", "--steps", "2", "--log", log)
    status, output, _ = memfit(*line)
    assert status == 0 and output.count("imported") == 1
    assert records(folder) == records(folder, "run/metrics.jsonl")


def test_an_error_of_the_function_is_the_users_own_and_the_run_goes_on_later(
    memfit: Shell,
    plan_file: Path,
    folder: Path,
) -> None:
    line = ("train", LEAN, "--plan", str(plan_file), "--out", "run", "--steps", "2", "--log")
    status, _, errors = memfit(*line, "tracker.py:full")
    assert status == 1 and "no room in the tracker" in errors and "tracker.py:13 in full" in errors
    assert memfit(*line, "tracker.py:log", "--resume")[0] == 0
    assert {record["step"] for record in records(folder)} == {2}  # type: ignore[index]


def test_a_script_gives_a_record_for_each_step(folder: Path) -> None:
    done = run_script(folder, "--budget", "1GiB", "--log", "tracker.py:log", "script.py")
    assert done.returncode == 0, done.stderr
    found = records(folder)
    assert [sorted(record) for record in found] == [["peak_bytes", "predicted_peak_bytes", "seconds", "step"]] * 3  # type: ignore[call-overload]
    done = run_script(folder, "--budget", "1GiB", "--log", "tracker.py:full", "script.py")
    assert done.returncode == 1 and "OSError: no room in the tracker" in done.stderr
