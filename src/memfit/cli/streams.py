"""Standard output as one JSON document: all other output, the user's code's too, goes to standard error."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO

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
