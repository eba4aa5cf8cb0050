"""A selection of the faults, in processes that really die; and what the comparison says of runs that went wrong."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import trials
from benchmarks.faults.injections import FAULTS, Fault, Reach
from benchmarks.faults.trials import Outcome, judged
from memfit.errors import UsageError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from benchmarks.faults.__main__ import run
from memfit.training import trainer

cases, summary = run(True, subjects=["byte_lm"], faults=sys.argv[1:], trials=1)
trainer.set_rng_state = lambda state: None  # forget the random states when resuming
_, forgetful = run(True, subjects=["byte_lm"], faults=["torn checkpoint"], trials=1)
print(json.dumps([cases, summary, forgetful]))
"""


@pytest.mark.slow
@pytest.mark.ci  # trainers that are killed have tests of their own in `make test`
def test_each_fault_is_survived_and_a_forgetful_trainer_is_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *FAULTS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    cases, summary, forgetful = json.loads(done.stdout.splitlines()[-1])
    assert [case["fault"] for case in cases] == list(FAULTS)
    assert summary["injected"] == summary["survived"] == len(FAULTS), done.stderr
    assert summary["updates_lost"] == summary["updates_doubled"] == 0
    statuses = {
        "NaN in a gradient": 5,
        "full disk": 2,
        "SIGKILL": -9,
        "torn checkpoint": -9,
        "failing data worker": 1,
        "SIGTERM": 75,
    }
    assert {case["fault"]: case["statuses"][0] for case in cases if case["fault"] != "out of memory"} == statuses
    assert forgetful["injected"] == 1 and forgetful["survived"] == 0


UNDISTURBED = Outcome(
    files={"model.safetensors": "a", "training.json": "b"},
    steps=[(1, False, 3.0), (2, True, 2.5), (2, False, 2.0)],
    updates=2,
)


@pytest.mark.parametrize(
    ("change", "wrong", "lost", "doubled"),
    [
        ({"files": {"model.safetensors": "c", "training.json": "b"}}, ["model.safetensors differs"], 0, 0),
        ({"files": {"model.safetensors": "a"}}, ["training.json differs"], 0, 0),
        ({"steps": [(1, False, 3.0)]}, ["the log differs", "1 updates lost"], 1, 0),
        ({"steps": [*UNDISTURBED.steps, (2, False, 2.0)]}, ["the log differs", "1 updates doubled"], 0, 1),
        ({"steps": [(1, False, 3.0), (2, True, 2.5), (2, False, 2.0001)]}, ["the log differs"], 0, 0),
        ({"updates": 1}, ["1 updates lost"], 1, 0),
        ({"updates": 4}, ["2 updates doubled"], 0, 2),
        ({}, [], 0, 0),
    ],
)
def test_what_went_wrong_is_seen(
    change: dict[str, Any], wrong: list[str], lost: int, doubled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = judge(dataclasses.replace(UNDISTURBED, **change), tmp_path, monkeypatch)
    assert (case["wrong"], case["updates_lost"], case["updates_doubled"]) == (wrong, lost, doubled)
    assert case["survived"] == (not wrong)


def test_another_exit_status_a_silent_repair_and_leftovers_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = judge(UNDISTURBED, tmp_path, monkeypatch, statuses=(1, 0))
    assert case["wrong"] == ["ended with status 1, not one of (-9,)"]
    torn = {"kind": FAULTS["torn checkpoint"], "statuses": (-9, 0)}
    assert judge(UNDISTURBED, tmp_path, monkeypatch, **torn)["wrong"] == ["nothing is said of a damaged checkpoint"]
    assert judge(UNDISTURBED, tmp_path, monkeypatch, **torn, events=("damaged checkpoint",))["survived"]
    (tmp_path / ".run.json.x.tmp").write_text("")
    assert judge(UNDISTURBED, tmp_path, monkeypatch)["wrong"] == ["left .run.json.x.tmp behind"]


def test_a_run_that_never_ended_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: Any = SimpleNamespace(outcome=UNDISTURBED, subject=SimpleNamespace(n_steps=2))
    fault = FAULTS["SIGKILL"](random.Random(0), REACH, tmp_path / "none")
    case = judged(prepared, fault, tmp_path / "none", [-9, 1])
    assert not case["survived"] and "did not come to its end" in case["wrong"][0] and case["updates_lost"] == 2


def test_names_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="earthquake"):
        faults.run(True, faults=["earthquake"])


REACH = Reach(steps=4, operators=10, seconds=1.0, training_seconds=1.0, folder_bytes=1000)


def judge(
    found: Outcome,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: type[Fault] = FAULTS["SIGKILL"],
    statuses: tuple[int, ...] = (-9, 0),
    events: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Judge a run that ended with what is given."""
    record = SimpleNamespace(events=[SimpleNamespace(kind=event) for event in events])
    monkeypatch.setattr(trials, "outcome_of", lambda *_: found)
    monkeypatch.setattr("memfit.ir.codec.read", lambda *_: record)
    prepared: Any = SimpleNamespace(outcome=UNDISTURBED, subject=SimpleNamespace(n_steps=2))
    return judged(prepared, kind(random.Random(0), REACH, out), out, list(statuses))
