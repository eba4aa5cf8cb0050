"""`memfit` in this process, and as a process of its own in somebody's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import main
from tests import warm

LEAN = "tests.workloads:lean"
BUDGET = "2.2MiB"
"""Less than it takes as it is: 2.7 MiB."""


class Shell:
    """Runs `memfit` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["memfit", *arguments])
        self.capfd.readouterr()
        before = sys.stdout
        try:
            main()
            status: Any = 0
        except SystemExit as e:
            status = e.code or 0
        assert sys.stdout is before
        output, errors = self.capfd.readouterr()
        return int(status), output, errors

    def refused(self, *arguments: str) -> str:
        """Return what a command that is used wrongly says."""
        status, _, errors = self(*arguments)
        assert status == 2 and "Traceback" not in errors, errors
        return errors

    def document(self, *arguments: str) -> Any:
        """Return the JSON that a command prints, which succeeds."""
        return json.loads(self.text(*arguments, "--json"))

    def text(self, *arguments: str) -> str:
        """Return what a command prints, which succeeds."""
        status, output, errors = self(*arguments)
        assert status == 0, errors
        return output


@pytest.fixture
def memfit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capfd)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import memfit
    from tests.workloads import lean

    return memfit.plan(lean(), budget=BUDGET, points=2).save(tmp_path_factory.mktemp("plans") / "plan.json")


def started(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return warm.run(line, cwd=folder, env=environment)


def run_script(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return started(folder, "-m", "memfit", "run", *line)


def process(*line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a process of its own, in the root of the repository."""
    own = {k: v for k, v in os.environ.items() if k != "TORCH_CPP_LOG_LEVEL"}
    own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(line, env={**own, **environment}, capture_output=True, text=True, check=False)
