"""Progress on a terminal and elsewhere, with the time left."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from memfit.cli import output
from memfit.cli.output import seconds_left, stages


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(output, "time", found)
    return found


@pytest.mark.parametrize(
    ("seconds", "first", "done", "total", "left"),
    [
        (10.0, 0, 2, 6, 20.0),
        (10.0, 40, 60, 100, 20.0),
        (10.0, 0, 6, 6, 0.0),
        (10.0, 3, 3, 6, None),
        (9, 0, 3, None, None),
    ],
)
def test_the_time_left_is_that_of_what_was_done_here(
    seconds: float, first: int, done: int, total: int | None, left: float | None
) -> None:
    assert seconds_left(seconds, first, done, total) == left


class TestElsewhere:
    """On a stream that is no terminal."""

    @pytest.fixture(autouse=True)
    def no_terminal(self, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
        self.written = io.StringIO()
        monkeypatch.setattr(output, "err", Console(file=self.written, width=80))
        return self.written

    @property
    def lines(self) -> list[str]:
        return self.written.getvalue().splitlines()

    def test_a_stage_has_a_line_when_it_begins_every_ten_seconds_and_when_it_ends(self, clock: Clock) -> None:
        with stages() as report:
            for done in range(0, 481):
                report("train", done, 480, f"loss {done}")
                clock.now += 0.0625 * (done < 480)  # no rounding
        assert self.lines == [
            "train: 0/480, loss 0",
            "train: 160/480, 0:10 so far, 0:20 left, loss 160",
            "train: 320/480, 0:20 so far, 0:10 left, loss 320",
            "train: 480/480, done in 0:30, loss 480",
        ]

    def test_stages_that_take_no_time_end_without_a_word(self, clock: Clock) -> None:
        with stages() as report:
            report("load", 0, 1)
            report("load", 1, 1)
            report("capture", 0, 3)
            clock.now += 75
            report("capture", 3, 3)
            report("solve", 0, None)
        assert self.lines == ["load", "capture: 0/3", "capture: 3/3, done in 1:15", "solve: 0/?"]

    def test_a_stage_that_is_not_done_does_not_say_so(self, clock: Clock) -> None:
        with pytest.raises(ValueError), stages() as report:
            report("capture", 0, 3)
            clock.now += 75
            raise ValueError
        assert self.lines == ["capture: 0/3"]

    def test_a_stage_that_reports_nothing_is_told_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
        with stages() as report:
            report("load", 0, 1)
            while len(self.lines) < 3:
                time.sleep(0.01)
        assert self.lines[1] == "load: 0:00 so far"

    def test_a_time_left_that_is_over_is_not_said(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output, "LINE_SECONDS", 10.0)
        with stages() as report:
            report("solve", 0, 2)
            clock.now += 12
            report("solve", 1, 2)
            clock.now += 30
            while len(self.lines) < 3:  # the thread that tells of it looks once a second
                time.sleep(0.01)
        assert self.lines[1:] == ["solve: 1/2, 0:12 so far, 0:12 left", "solve: 1/2, 0:42 so far"]


def test_on_a_terminal_each_stage_has_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(output, "err", Console(file=written, force_terminal=True, width=120))
    with stages() as report:
        report("train", 40, 100)
        time.sleep(0.05)
        report("train", 41, 100, "loss 3.0")
        while "left" not in written.getvalue():  # about three seconds, drawn ten times a second
            time.sleep(0.01)
        report("train", 100, 100, "loss 2.0")
    last = written.getvalue().rpartition("train")[2]
    assert "100/100" in last and "loss 2.0" in last and "left" not in last
