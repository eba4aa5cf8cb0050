"""The user's own frames of a traceback, and memfit's where the fault is its own.

Errors that leave memfit show the user's, without memfit's between and below them (`public`).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from memfit.errors import MemfitError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_MOST = 8
_HOME = f"{Path(__file__).parents[1]}{os.sep}"
_BETWEEN = ("_torch", "capture", "hardware/fake_cuda.py", "ir", "workload/signatures.py")
"""Rooms and modules of memfit whose code runs between a step and PyTorch."""
_STANDING_IN = ("capture/value_reads.py",)
"""Those that stand in for functions of PyTorch, and raise what these do."""


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are not memfit's, PyTorch's or Python's, the innermost last.

    They are those of the first error in the chain of causes: errors that memfit raises from a user's error have no
    further frames of the user's code.
    """
    for link in reversed(list(chain(error))):
        frames = [f for f in traceback.extract_tb(link.__traceback__) if is_users(f.filename)]
        if frames:
            return frames
    return []


def users_place(error: BaseException) -> str:
    """Return the user's innermost frame of an error, as " at FILE:LINE: CODE"; "" without one."""
    frames = users_frames(error)
    return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def memfits_place(error: BaseException) -> str:
    """Return memfit's own line that raised an error, as "FILE:LINE"; "" where other code did.

    It is the innermost frame outside of Python's library, of the first error in the chain of causes. Only code that
    stands between a step and PyTorch counts: what calls the step's functions fails where they take other arguments.
    """
    first = list(chain(error))[-1]
    _, packages, python = _known_folders()
    for frame in reversed(traceback.extract_tb(first.__traceback__)):
        path = frame.filename
        if path.startswith("<") or (path.startswith(python) and not path.startswith((*packages, _HOME))):
            continue
        within = path.removeprefix(_HOME)
        posix = within.replace(os.sep, "/")
        is_ours = within != path and posix.startswith(_BETWEEN) and posix not in _STANDING_IN
        return f"memfit/{within}:{frame.lineno}" if is_ours else ""
    return ""


def frames_text(error: BaseException) -> str:
    """Return the user's frames of an error as text, each with file and line of code; "" without any.

    If there are many, the middle ones are left out. An error from another process has them as `frames`.
    """
    carried = getattr(error, "frames", None)
    if carried is not None:
        return str(carried)
    frames = users_frames(error)
    lines = []
    for frame in frames:
        path = Path(frame.filename)
        place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else frame.filename
        lines.append(f"  {place}:{frame.lineno} in {frame.name}\n    {frame.line}")
    if len(lines) > _MOST:
        left_out = len(lines) - _MOST
        lines[_MOST // 2 : -_MOST // 2] = [f"  ... {left_out} more"]
    return "\n".join(lines)


def on_unused(value: Any, message: str) -> weakref.finalize[..., Any]:
    """Warn at the user's innermost line if a value is dropped; the finalizer that is returned is detached once used."""
    return weakref.finalize(value, warnings.warn_explicit, message, RuntimeWarning, *_users_line())


def warn_users(message: str, category: type[Warning]) -> None:
    """Warn at the user's innermost line."""
    warnings.warn_explicit(message, category, *_users_line())


def _users_line() -> tuple[str, int]:
    """Return the file and the line of the user's innermost frame that runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return ("<unknown>", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


@functools.cache
def _known_folders() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the folders of memfit with its foundations, of installed packages, and of Python."""
    paths = sysconfig.get_paths()
    specs = [importlib.util.find_spec(name) for name in ("torch", "typer", "click")]
    homes = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    packages = [Path(paths[name]) for name in ("purelib", "platlib")]
    python = [Path(paths[name]) for name in ("stdlib", "platstdlib")]
    kinds = ([Path(__file__).parents[1], *homes], packages, python)
    ours, others, pythons = (tuple(f"{folder}{os.sep}" for folder in folders) for folders in kinds)
    return ours, others, pythons


def is_memfits(filename: str) -> bool:
    """Tell whether a file is memfit's."""
    return filename.startswith(_HOME)


def is_users(filename: str) -> bool:
    """Tell whether a file is the user's: neither memfit's, nor PyTorch's, nor Python's own."""
    if filename.startswith("<"):  # Python's import machinery, and code that has no file
        return False
    ours, packages, python = _known_folders()
    is_python = filename.startswith(python) and not filename.startswith(packages)  # which lie within Python's folder
    return not filename.startswith(ours) and not is_python


def public(
    function: Callable[_P, _R], check: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
) -> Callable[_P, _R]:
    """Make a function one that users call: its errors end at the line that called it.

    `check` is called with the arguments first, and raises what is wrong with them.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if check is not None:
                check(args, kwargs)
            return function(*args, **kwargs)
        except Exception as e:
            if not is_called_by_memfit() and os.environ.get("MEMFIT_TRACEBACK") != "full":
                trim(e)
            raise  # by itself, which adds no frame

    return call


def constructor(kind: type[_T]) -> type[_T]:
    """Make a class one that users create: errors of its constructor end at the line that called it."""
    setattr(kind, "__init__", public(kind.__init__))  # noqa: B010 (an assignment is an error for mypy)
    return kind


def is_called_by_memfit() -> bool:
    """Tell whether memfit's own code called the function that asks."""
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:  # `call`, above
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "memfit"


def trim(error: BaseException) -> None:
    """Take memfit's frames, and causes that have no others, out of an error that was caught at memfit's door.

    An error that is no `MemfitError` and has no frame of the user's is memfit's own fault: it stays whole.
    """
    door = error.__traceback__
    rest = _users(door.tb_next if door is not None else None, isinstance(error, MemfitError))
    if not isinstance(error, MemfitError) and (rest is None or memfits_place(error)):
        return
    error.__traceback__ = rest
    link, seen = error, {id(error)}
    while (cause := _next(link)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        if any(is_memfits(entry.tb_frame.f_code.co_filename) for entry in _entries(cause.__traceback__)):
            rest = _users(cause.__traceback__, isinstance(cause, MemfitError))
            if rest is None:  # Python shows the one before it above `link`, or none
                before = _next(cause)
                if before is None or link.__cause__ is not None:
                    link.__cause__ = before
                else:
                    link.__context__ = before
                continue
            cause.__traceback__ = rest
        link = cause


def _next(error: BaseException) -> BaseException | None:
    """Return the error that Python shows above another one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _entries(entry: TracebackType | None) -> list[TracebackType]:
    found = []
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _users(outermost: TracebackType | None, raised_by_memfit: bool) -> TracebackType | None:
    """Return a traceback from the user's first frame on, without memfit's; None where it has no frame of the user's.

    Where memfit raised the error, the user's frames are all; else those of what the user's code called are kept too.
    """
    entries = _entries(outermost)
    names = [entry.tb_frame.f_code.co_filename for entry in entries]
    first = next((index for index, name in enumerate(names) if is_users(name)), len(entries))
    kept = None
    for entry, name in reversed(list(zip(entries[first:], names[first:], strict=True))):
        if is_users(name) or not (raised_by_memfit or is_memfits(name)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
