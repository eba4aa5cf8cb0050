"""Threads of the command line's process sleep while they wait where other programs compute, and nowhere else."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from tests.cli.conftest import Shell

WAIT_POLICY = "OMP_WAIT_POLICY"
OTHERS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
COMMANDS = {  # each refused before it imports PyTorch
    "plan": ["missing.py:none", "--budget", "1GiB"],
    "train": ["missing.py:none", "--plan", "missing.json", "--out", "missing", "--steps", "1"],
    "verify": ["missing.py:none", "--plan", "missing.json"],
    "run": ["--budget", "1GiB", "missing.py"],
    "devices": ["no-such-card"],
    "report": ["missing", "--output", "/proc/no/place"],
}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process before PyTorch is imported, on a machine of which others use more than half."""
    for name in (WAIT_POLICY, *OTHERS):
        monkeypatch.setenv(name, "")  # is put back, whatever is set here
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 51.0)
    return monkeypatch


def waits_passively(memfit: Shell, command: str = "plan") -> bool:
    memfit.refused(command, *COMMANDS[command])
    return os.environ.get(WAIT_POLICY) == "PASSIVE"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_steps_settle_how_threads_wait(
    command: str, memfit: Shell, process: pytest.MonkeyPatch
) -> None:
    assert waits_passively(memfit, command) == (command not in ("devices", "report"))


def test_on_a_machine_at_rest_nothing_is_set(memfit: Shell, process: pytest.MonkeyPatch) -> None:
    process.setattr(psutil, "cpu_percent", lambda interval: 50.0)
    assert not waits_passively(memfit)


@pytest.mark.parametrize("name", [WAIT_POLICY, *OTHERS])
def test_what_the_user_has_set_stays(name: str, memfit: Shell, process: pytest.MonkeyPatch) -> None:
    process.setenv(name, "active")
    assert not waits_passively(memfit)


def test_once_pytorch_is_there_it_is_too_late(memfit: Shell, process: pytest.MonkeyPatch) -> None:
    process.setitem(sys.modules, "torch", sys)
    process.setattr(psutil, "cpu_percent", lambda interval: pytest.fail("not even asked"))
    assert not waits_passively(memfit)
