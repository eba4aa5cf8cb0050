"""Standard output as one JSON document: what else is printed, by the user's code too, goes to standard error."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_OUT, _ERR = 1, 2


class _Kept:
    """Standard output, kept while standard error takes its place.

    Attributes:
        stream: Python's.
        descriptor: A copy of the file descriptor.
    """

    def __init__(self) -> None:
        self.stream: TextIO = sys.stdout
        _flush()
        self.descriptor = os.dup(_OUT)
        self.replace()

    def replace(self) -> None:
        """Let standard error take the place: for Python, and for what writes to the file descriptor, such as C."""
        sys.stdout = sys.stderr
        os.dup2(_ERR, _OUT)

    def put_back(self) -> None:
        """Let standard output have its place again."""
        _flush()
        os.dup2(self.descriptor, _OUT)
        sys.stdout = self.stream


_kept: _Kept | None = None


def when_asked(is_asked: bool) -> bool:
    """Let all but what is printed in `for_json` go to standard error until `give_back`, if --json is given."""
    global _kept
    if is_asked and _kept is None:
        _kept = _Kept()
    return is_asked


def takes_json() -> bool:
    """Tell whether standard output is for one JSON document."""
    return _kept is not None


def give_back(*, is_end: bool = True) -> None:
    """Put standard output back.

    Args:
        is_end: Whether the command is over: what is printed when Python exits then goes to standard error too.
    """
    global _kept
    if _kept is None:
        return
    _kept.put_back()
    os.close(_kept.descriptor)
    _kept = None
    if is_end:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # functions run from the last to the first: before those of the user's code


@contextlib.contextmanager
def for_json() -> Iterator[None]:
    """Print to standard output itself while the context is entered."""
    if _kept is None:
        yield
        return
    _kept.put_back()
    try:
        yield
    finally:
        _flush()
        _kept.replace()


def _at_exit() -> None:
    with contextlib.suppress(OSError, ValueError):
        _flush()
        os.dup2(_ERR, _OUT)
        sys.stdout = sys.stderr


def _flush() -> None:
    """Write what Python and C have not written yet."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
