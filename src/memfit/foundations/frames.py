"""The user's own frames of a traceback, and memfit's where the fault is its own."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

_MOST = 8
_HOME = f"{Path(__file__).parents[1]}{os.sep}"
_BETWEEN = tuple(
    os.path.join(*parts)
    for parts in [
        ("_torch",),
        ("capture",),
        ("hardware", "attention.py"),
        ("hardware", "fake_cuda.py"),
        ("ir",),
        ("workload", "signatures.py"),
    ]
)
"""Rooms and modules of memfit whose code runs between a step and PyTorch."""
_STANDING_IN = (os.path.join("capture", "value_reads.py"),)
"""Those that stand in for functions of PyTorch, and raise what these do."""


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are not memfit's, PyTorch's or Python's, the innermost last.

    They are those of the first error in the chain of causes: errors that memfit raises from a user's error have no
    further frames of the user's code.
    """
    for link in reversed(list(_chain(error))):
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
    first = list(_chain(error))[-1]
    _, packages, python = _known_folders()
    for frame in reversed(traceback.extract_tb(first.__traceback__)):
        path = frame.filename
        if path.startswith("<") or (path.startswith(python) and not path.startswith((*packages, _HOME))):
            continue
        within = path.removeprefix(_HOME)
        is_ours = within != path and within.startswith(_BETWEEN) and within not in _STANDING_IN
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
    lines = [f"  {_short(f.filename)}:{f.lineno} in {f.name}\n    {f.line}" for f in frames]
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


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


@cache
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
    if filename.startswith(ours):
        return False
    return filename.startswith(packages) or not filename.startswith(python)  # packages lie within Python's own folder


def _short(filename: str) -> str:
    path = Path(filename)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename
