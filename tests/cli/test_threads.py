"""Threads of the command line's process sleep while they wait where other programs compute, and nowhere else."""

from __future__ import annotations

import sys

import psutil
import pytest
from typer.testing import CliRunner

from memfit.cli import commands
from memfit.cli.app import app
from memfit.hardware import is_busy as is_machine_busy


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process on a busy machine, before PyTorch is imported."""
    for name in (commands.WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(commands, "is_busy", lambda: True)
    return monkeypatch


def waits_passively() -> bool:
    return commands.os.environ.get(commands.WAIT_POLICY) == "PASSIVE"


def test_threads_sleep_on_a_busy_machine_and_at_rest_nothing_is_set(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(commands, "is_busy", lambda: False)
    commands.settle_threads()
    assert not waits_passively()
    environment.setattr(commands, "is_busy", lambda: True)
    commands.settle_threads()
    assert waits_passively()


@pytest.mark.parametrize("name", [commands.WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_has_set_stays(name: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(name, "active")
    commands.settle_threads()
    assert not waits_passively()


def test_once_pytorch_is_there_it_is_too_late(environment: pytest.MonkeyPatch) -> None:
    environment.setitem(sys.modules, "torch", sys)
    environment.setattr(commands, "is_busy", lambda: pytest.fail("not even asked"))
    commands.settle_threads()
    assert not waits_passively()


COMMANDS = {
    "plan": ["missing.py:none", "--budget", "1GiB"],
    "train": ["missing.py:none", "--plan", "missing.json", "--out", "missing", "--steps", "1"],
    "verify": ["missing.py:none", "--plan", "missing.json"],
    "run": ["--budget", "1GiB", "missing.py"],
    "devices": [],
    "report": ["missing"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_steps_settle_how_threads_wait(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(commands, "settle_threads", lambda: asked.append(True))
    CliRunner().invoke(app, [command, *COMMANDS[command]])
    assert asked == [True] * (command not in ("devices", "report"))


def test_a_machine_is_busy_where_others_use_more_than_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for percent, is_busy in ((50.0, False), (51.0, True)):
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percent=percent: percent)
        assert is_machine_busy() is is_busy
