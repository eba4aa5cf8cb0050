"""Output of the command line: tables and JSON on standard output, progress and errors on standard error.

With `--json` standard output is one document: all other output, the user's code's too, goes to standard error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from memfit.errors import MemfitError
from memfit.foundations import frames_text
from memfit.ranks import launched_rank

out = Console()
err = Console(stderr=True)
is_quiet = False
"""Whether results and errors alone are printed."""
LINE_SECONDS = 10.0
"""Seconds between two lines about a stage, without a terminal for bars."""
_NOTICED_SECONDS = 2.0  # shorter stages have no line at their end


def print_json(value: Any) -> None:
    """Print a record, or plain values, as one JSON document."""
    plain = msgspec.to_builtins(value)
    with for_json():
        print(json.dumps(plain, indent=2, allow_nan=False, default=str))


def tell(text: str, *, to: Console | None = None) -> None:
    """Print a text as it is."""
    (to or out).print(text, highlight=False, markup=False, soft_wrap=True)


def show(found: Any, as_json: bool, *tables: Any, verdict: str = "") -> None:
    """Print a command's result: as the document, as its verdict where `is_quiet`, or as tables."""
    if as_json:
        print_json(found)
    elif verdict and is_quiet:
        tell(verdict)
    else:
        out.print(*tables)


def tell_written(path: Path | str | None, as_json: bool, name: str = "") -> None:
    """Print the file that a command wrote, if it did, unless `is_quiet`; a name makes it the document."""
    if as_json and name:
        print_json({name: str(path)})
    if path is not None and not (as_json or is_quiet):
        tell(f"Written to {path}")


def note(text: str) -> None:
    """Print a text on standard error that asks for nothing, unless `is_quiet`."""
    if not is_quiet:
        tell(text, to=err)


def print_error(error: Exception, as_json: bool, is_whole: bool) -> None:
    """Print an error with the user's frames, or with its whole traceback; on request also as JSON."""
    message = str(error) if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
    if is_whole:
        traceback.print_exception(error)
    err.print(f"[bold red]error:[/] {_escaped(message)}", highlight=False, soft_wrap=True)
    frames = frames_text(error)
    if frames and not is_whole:
        err.print(_escaped(frames), highlight=False, soft_wrap=True, style="dim")
    if as_json:
        numbers = {k: v for k, v in vars(error).items() if not k.startswith("_")}
        print_json({"error": {"type": type(error).__name__, "message": message, **numbers, "frames": frames}})


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


class StageReport(Protocol):
    """A function that reports the progress of a stage."""

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None: ...


@contextlib.contextmanager
def stages(prefix: str = "") -> Iterator[StageReport]:
    """Show the progress of stages and their time left: as bars on a terminal, elsewhere as a few lines.

    In lines, each has the prefix. Of several ranks the first shows it, and none where `is_quiet`.
    """
    if launched_rank() or is_quiet:
        yield lambda *_: None
        return
    with _bars() if err.is_terminal else _lines(prefix) as report:
        yield report


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Show a stage whose progress is not known."""
    with stages() as progress:
        progress(name, 0, 1)
        yield
        progress(name, 1, 1)


def seconds_left(seconds: float, first: int, done: int, total: int | None) -> float | None:
    """Return the time left of a stage, at its speed so far; None if unknown.

    `first` items were done at its first report, `seconds` ago.
    """
    if total is None or done <= first:
        return None
    return seconds / (done - first) * (total - done)


def _clock(seconds: float) -> str:
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _left_text(seconds: float | None, since: float) -> str:
    """Return the text of a stage's time left, as estimated `since` seconds ago; "" where it has passed."""
    return "" if seconds is None or seconds - since < 0.5 else f"{_clock(seconds - since)} left"


# On a terminal


class _TimeLeft(ProgressColumn):
    """A column with the time left of a stage."""

    def render(self, task: Task) -> Text:
        total = None if task.total is None else int(task.total)
        began, at, first = (task.fields[name] for name in ("began", "reported", "first"))
        left = None if task.finished else seconds_left(at - began, first, int(task.completed), total)
        return Text(_left_text(left, task.get_time() - at))


@contextlib.contextmanager
def _bars() -> Iterator[StageReport]:
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeft(),
        TextColumn("{task.fields[note]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=err) as progress:

        def report(stage: str, done: int, total: int | None, note: str = "") -> None:
            now = progress.get_time()
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, note=note, first=done, began=now, reported=now)
            progress.update(tasks[stage], completed=done, total=total, note=note, reported=now)

        yield report


# Elsewhere


class _Line:
    """A stage reported in lines: at its start, every `LINE_SECONDS`, and at its end, unless it was short."""

    def __init__(self, stage: str, prefix: str, done: int, total: int | None, note: str) -> None:
        self.stage, self.prefix, self.first = stage, prefix, done
        self.started = self.printed = self.reported = time.monotonic()
        self.done, self.total, self.note = done, total, note
        self._print()

    def tell(self) -> None:
        """Print the progress, if the last line is `LINE_SECONDS` old."""
        now = time.monotonic()
        if self._is_over() or now - self.printed < LINE_SECONDS:
            return
        left = seconds_left(self.reported - self.started, self.first, self.done, self.total)
        self._print(f"{_clock(now - self.started)} so far", _left_text(left, now - self.reported))

    def end(self) -> None:
        """Print the end, unless the stage was short."""
        if self._is_over() and self.reported - self.started >= _NOTICED_SECONDS:
            self._print(f"done in {_clock(self.reported - self.started)}")

    def _is_over(self) -> bool:
        return self.total is not None and self.done >= self.total

    def _print(self, *texts: str) -> None:
        self.printed = time.monotonic()
        count = "" if self.total == 1 else f"{self.done}/{'?' if self.total is None else self.total}"
        text = ", ".join(part for part in (count, *texts, self.note) if part)
        tell(f"{self.prefix}{self.stage}{': ' if text else ''}{text}", to=err)


@contextlib.contextmanager
def _lines(prefix: str) -> Iterator[StageReport]:
    lines: dict[str, _Line] = {}
    last: list[_Line] = []
    over, guard = threading.Event(), threading.Lock()

    def report(stage: str, done: int, total: int | None, note: str = "") -> None:
        with guard:
            if last and last[0].stage != stage:
                last.pop().end()
            if stage not in lines:
                lines[stage] = _Line(stage, prefix, done, total, note)
            else:
                line = lines[stage]
                line.reported, line.done, line.total, line.note = time.monotonic(), done, total, note
                line.tell()
            last[:] = [lines[stage]]

    def tell() -> None:  # prints lines for stages that report nothing for long
        while not over.wait(LINE_SECONDS / 10):
            with guard:
                for line in last:
                    line.tell()

    thread = threading.Thread(target=tell, name="memfit-progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        over.set()
        thread.join()
        for line in last:
            line.end()


# One document

_OUT, _ERR = 1, 2


class _SavedOutput:
    """Standard output, saved while it is redirected to standard error."""

    def __init__(self) -> None:
        self.stream: TextIO = sys.stdout
        _flush()
        self.descriptor = os.dup(_OUT)
        self.replace()

    def replace(self) -> None:
        """Redirect to standard error, for Python and for writers to the file descriptor, such as C code."""
        sys.stdout = sys.stderr
        os.dup2(_ERR, _OUT)

    def put_back(self) -> None:
        """Restore standard output."""
        _flush()
        os.dup2(self.descriptor, _OUT)
        sys.stdout = self.stream


_saved: _SavedOutput | None = None


def when_asked(is_asked: bool) -> bool:
    """If --json is given, redirect all output outside of `for_json` to standard error until `give_back`."""
    global _saved
    if is_asked and _saved is None:
        _saved = _SavedOutput()
    return is_asked


def takes_json() -> bool:
    """Tell whether standard output is for one JSON document."""
    return _saved is not None


def give_back(*, is_end: bool = True) -> None:
    """Restore standard output.

    Args:
        is_end: Whether the command is over: output while Python exits then goes to standard error too.
    """
    global _saved
    if _saved is None:
        return
    _saved.put_back()
    os.close(_saved.descriptor)
    _saved = None
    if is_end:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # runs before the functions that the user's code registered earlier


@contextlib.contextmanager
def for_json() -> Iterator[None]:
    """Restore standard output while the context is entered."""
    if _saved is None:
        yield
        return
    _saved.put_back()
    try:
        yield
    finally:
        _flush()
        _saved.replace()


def _at_exit() -> None:
    with contextlib.suppress(OSError, ValueError):
        _flush()
        os.dup2(_ERR, _OUT)
        sys.stdout = sys.stderr


def _flush() -> None:
    """Flush the buffers of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
