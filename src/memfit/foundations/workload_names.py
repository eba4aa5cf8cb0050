"""The user's functions by name, `file.py:function` or `package.module:function`: of workloads, and of logs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from memfit.errors import WorkloadError

NAME = "write file.py:function or package.module:function; the function"
HOW = f"{NAME} has no arguments and returns a memfit.Workload"


def parts_of(name: str, noun: str = "workload", how: str = HOW) -> tuple[str, str]:
    """Return the file or module that a name has, and the function; nothing is imported.

    Args:
        name: The name.
        noun: What the function is for, as errors say it.
        how: How it is named, as errors say it.

    Raises:
        WorkloadError: The name has another form, or there is no such file or module.
    """
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise WorkloadError(f"the {noun} {name!r} can't be found: {how}")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise WorkloadError(f"the {noun}'s file {place!r} does not exist: {how}")
    elif not has_module(place.partition(".")[0]):
        raise WorkloadError(no_module(place, how))
    return place, function


def has_module(name: str) -> bool:
    """Tell whether there is a module of this name, without a dot, in the current folder or installed."""
    look_in(Path.cwd())
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that has no spec, such as __main__
        return name in sys.modules


def no_module(name: str, how: str = HOW) -> str:
    """Return the message for a module that is not there."""
    return f"there is no module {name!r} in {Path.cwd()}, and none is installed: {how}"


def look_in(folder: Path) -> None:
    """Have imports look in a folder first, for good: what is loaded from it may import its neighbours later."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
