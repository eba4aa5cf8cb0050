"""Progress in a notebook: shown there, silent elsewhere, and no louder than it has to be."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from memfit.report import Bars, stages, with_bars


class Handle:
    """Stands for the place of an output in a cell, and keeps what was shown there."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, output: Any, raw: bool) -> None:
        assert raw
        self.shown.append(output)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """Make it look as if this ran in a notebook; the places that outputs were shown in."""
    places: list[Handle] = []

    def display(output: Any, raw: bool, display_id: bool) -> Handle:
        assert display_id
        places.append(Handle())
        places[-1].update(output, raw)
        return places[-1]

    interactive, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    interactive.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", interactive)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return places


@with_bars(stages)
def work(count: int, *, progress: Any = lambda *told: None, fails: bool = False) -> int:
    """Tell how far it is."""
    for i in range(count + 1):
        progress("<work>", i, count)
    if fails:
        raise ValueError("no")
    return count


def test_a_script_and_a_terminal_of_ipython_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = types.ModuleType("IPython")
    terminal.get_ipython = lambda: types.SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    monkeypatch.setitem(sys.modules, "IPython.display", None)  # what shows something fails
    assert work(3) == 3


def test_a_cell_shows_bars_and_then_how_long_it_took(notebook: list[Handle]) -> None:
    assert work(100) == 100
    (place,) = notebook
    assert len(place.shown) <= 4
    first, *_, last = place.shown
    assert '<progress value="0" max="100">' in first["text/html"] and "&lt;work&gt;" in first["text/html"]
    assert first["text/plain"] == "<work> 0/100"
    assert "progress" not in last["text/html"] and last["text/plain"].startswith("memfit.work: ")


def test_whoever_asks_to_be_told_is_told_alone(notebook: list[Handle]) -> None:
    told: list[Any] = []
    work(2, progress=lambda *what: told.append(what))
    assert notebook == [] and told == [("<work>", i, 2) for i in range(3)]


def test_calls_from_within_memfit_show_nothing(notebook: list[Handle]) -> None:
    inside = {"__name__": "memfit.somewhere", "work": work}
    exec("work(2)", inside)
    assert notebook == []
    exec("work(2)", {"__name__": "memfit_of_mine", "work": work})
    assert len(notebook) == 1


def test_after_an_error_the_bars_say_how_far_it_was(notebook: list[Handle]) -> None:
    with pytest.raises(ValueError, match="no"):
        work(5, fails=True)
    assert 'value="5" max="5"' in notebook[0].shown[-1]["text/html"]


def test_time_left_is_said_where_the_end_is_known(monkeypatch: pytest.MonkeyPatch, notebook: list[Handle]) -> None:
    now = [0.0]
    monkeypatch.setattr("memfit.report.notebook.monotonic", lambda: now[0])
    with Bars("x") as bars:
        bars("train", 0, 10)
        now[0] = 8.0
        bars("train", 2, 10, "loss 1.5")
        assert "2 of 10 · 32.00 s left · loss 1.5" in notebook[0].shown[-1]["text/html"]
        now[0] = 9.0
        bars("epochs", 3, None)
        page = notebook[0].shown[-1]["text/html"]
        assert "<progress></progress></td><td>3</td>" in page
    assert notebook[0].shown[-1]["text/plain"] == "x: 9.00 s"


def test_what_tells_nothing_shows_nothing(notebook: list[Handle]) -> None:
    with Bars("x"):
        pass
    assert notebook == []
