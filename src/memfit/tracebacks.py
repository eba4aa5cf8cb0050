"""Tracebacks of errors that leave memfit: the user's own frames, without memfit's between and below them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from memfit.errors import MemfitError
from memfit.frames import is_memfits, is_users, memfits_place

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
VARIABLE = "MEMFIT_TRACEBACK"
"""The environment variable by which "full" leaves tracebacks whole."""


def public(
    function: Callable[_P, _R], check: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
) -> Callable[_P, _R]:
    """Make a function one that users call: its errors end at the line that called it.

    Args:
        function: The function.
        check: Called with the arguments first, and raises what is wrong with them.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if check is not None:
                check(args, kwargs)
            return function(*args, **kwargs)
        except Exception as e:
            if not is_called_by_memfit() and os.environ.get(VARIABLE) != "full":
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
    traceback = error.__traceback__
    rest = _users(traceback.tb_next if traceback is not None else None, isinstance(error, MemfitError))
    if not isinstance(error, MemfitError) and (rest is None or memfits_place(error)):
        return
    error.__traceback__ = rest
    link, seen = error, {id(error)}
    while (cause := _next(link)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        if any(is_memfits(entry.tb_frame.f_code.co_filename) for entry in _entries(cause.__traceback__)):
            rest = _users(cause.__traceback__, isinstance(cause, MemfitError))
            if rest is None:
                _link(link, _next(cause))
                continue
            cause.__traceback__ = rest
        link = cause


def _next(error: BaseException) -> BaseException | None:
    """Return the error that Python shows above another one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _link(error: BaseException, cause: BaseException | None) -> None:
    """Have Python show another error above an error, or none."""
    if cause is None or error.__cause__ is not None:
        error.__cause__ = cause
    else:
        error.__context__ = cause


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _users(traceback: TracebackType | None, raised_by_memfit: bool) -> TracebackType | None:
    """Return a traceback from the user's first frame on, without memfit's; None where it has no frame of the user's.

    Where memfit raised the error, the user's frames are all; else those of what the user's code called are kept too.
    """
    entries = _entries(traceback)
    names = [entry.tb_frame.f_code.co_filename for entry in entries]
    first = next((index for index, name in enumerate(names) if is_users(name)), len(entries))
    kept = None
    for entry, name in reversed(list(zip(entries[first:], names[first:], strict=True))):
        if is_users(name) or not (raised_by_memfit or is_memfits(name)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
