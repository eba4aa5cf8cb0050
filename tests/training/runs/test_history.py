"""A record holds the command that started the run, for a report to say how it goes on."""

from __future__ import annotations

import sys

import pytest

from memfit.training.runs.log import History
from tests.models import twice


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/memfit", "train", "a.py:w", "--plan", "p.json"], ["train", "a.py:w", "--plan", "p.json"]),
        (["/lib/memfit/__main__.py", "train", "a.py:w"], ["train", "a.py:w"]),
        (["C:/Scripts/memfit.exe", "train", "a.py:w"], ["train", "a.py:w"]),
        (["/usr/bin/memfit", "demo", "--out", "x"], []),
        (["train.py", "train", "--token", "secret"], []),
        (["/other/__main__.py", "train"], []),
        ([], []),
    ],
)
def test_only_the_command_of_a_training_is_kept(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], command: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert History(twice()).record("running", 0).command == command
