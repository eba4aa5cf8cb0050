"""Progress on a terminal and elsewhere, with the time left."""

from __future__ import annotations

import sys
import time

import pytest

from memfit.cli import stages
from tests.cli.conftest import process


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


class Lines:
    """What is written to a standard error that is no terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.text = capsys, ""

    def __call__(self) -> list[str]:
        self.text += self.capsys.readouterr().err
        return self.text.splitlines()


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


def test_a_stage_has_a_line_when_it_begins_every_ten_seconds_and_when_it_ends(clock: Clock, lines: Lines) -> None:
    with stages() as report:
        for done in range(0, 481):
            report("train", done, 480, f"loss {done}")
            clock.now += 0.0625 * (done < 480)  # no rounding
    assert lines() == [
        "train: 0/480, loss 0",
        "train: 160/480, 0:10 so far, 0:20 left, loss 160",
        "train: 320/480, 0:20 so far, 0:10 left, loss 320",
        "train: 480/480, done in 0:30, loss 480",
    ]


@pytest.mark.parametrize(
    ("first", "done", "total", "said"),
    [
        (0, 2, 6, "2/6, 0:12 so far, 0:24 left"),
        (40, 60, 100, "60/100, 0:12 so far, 0:24 left"),
        (3, 3, 6, "3/6, 0:12 so far"),
        (0, 3, None, "3/?, 0:12 so far"),
    ],
)
def test_the_time_left_is_that_of_what_was_done_here(
    first: int, done: int, total: int | None, said: str, clock: Clock, lines: Lines
) -> None:
    with stages() as report:
        report("train", first, total)
        clock.now += 12
        report("train", done, total)
    assert lines()[1] == f"train: {said}"


def test_stages_that_take_no_time_end_without_a_word(clock: Clock, lines: Lines) -> None:
    with stages() as report:
        report("load", 0, 1)
        report("load", 1, 1)
        report("capture", 0, 3)
        clock.now += 75
        report("capture", 3, 3)
        report("solve", 0, None)
    assert lines() == ["load", "capture: 0/3", "capture: 3/3, done in 1:15", "solve: 0/?"]


def test_a_stage_that_is_not_done_does_not_say_so(clock: Clock, lines: Lines) -> None:
    with pytest.raises(ValueError), stages() as report:
        report("capture", 0, 3)
        clock.now += 75
        raise ValueError
    assert lines() == ["capture: 0/3"]


def test_a_stage_that_reports_nothing_is_told_of_and_a_time_left_that_is_over_is_not(
    clock: Clock, lines: Lines
) -> None:
    with stages() as report:
        report("solve", 0, 2)
        clock.now += 12
        report("solve", 1, 2)
        for said in ("0:12 so far, 0:12 left", "0:42 so far"):
            while not lines()[-1].endswith(said):  # the thread that tells of it looks once a second
                time.sleep(0.01)
            clock.now += 30
    assert lines()[:3] == ["solve: 0/2", "solve: 1/2, 0:12 so far, 0:12 left", "solve: 1/2, 0:42 so far"]


TERMINAL = {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "120"}
PROGRAM = """
import time
from memfit.cli import stages
with stages() as report:
    report("train", 40, 100)
    time.sleep(0.05)
    report("train", 41, 100, "loss 3.0")
    time.sleep(0.5)  # of about three seconds, drawn ten times a second
    report("train", 100, 100, "loss 2.0")
"""


def test_on_a_terminal_each_stage_has_a_bar_with_the_time_left() -> None:
    shown = process(sys.executable, "-c", PROGRAM, **TERMINAL).stderr
    assert "left" in shown
    last = shown.rpartition("train")[2]
    assert "100/100" in last and "loss 2.0" in last and "left" not in last
