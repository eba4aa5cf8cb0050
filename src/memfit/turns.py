"""Turns of threads: a process runs one verb at a time, and a verb in another thread waits.

Captures change what belongs to the whole process: methods of PyTorch's classes, kernels of its operators, the garbage
collector. What they change applies to the thread that has the turn and to the threads that it starts meanwhile; others,
a training in the background, run PyTorch as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from memfit.interrupts import safe_point

_P = ParamSpec("_P")
_R = TypeVar("_R")
_POLL_SECONDS = 0.1  # from one look for signals to the next, while another thread has the turn
_ATTRIBUTE = "memfit_turn"


class _Turn:
    """One thread's turn. The threads that it starts meanwhile hold it, too."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


_lock = threading.RLock()
_turn: _Turn | None = None


def _forget() -> None:
    """Begin anew in a forked process, where the thread that had the turn is not."""
    global _lock, _turn
    if _turn is not None and _turn.thread != threading.get_ident():
        _lock, _turn = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait for this thread's turn, and have it until the context is left."""
    global _turn
    lock = _lock
    while not lock.acquire(timeout=_POLL_SECONDS):
        safe_point()
    try:
        if _turn is not None:  # this thread's
            yield
            return
        now = _turn = _Turn()
        start = threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            if has_turn():
                setattr(thread, _ATTRIBUTE, now)
            start(thread)

        threading.Thread.start = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]
            _turn = None
    finally:
        lock.release()


def has_turn() -> bool:
    """Tell whether this thread has the turn, or was started by the one that has it; True where none has it."""
    now = _turn
    if now is None or now.thread == threading.get_ident():
        return True
    return getattr(threading.current_thread(), _ATTRIBUTE, None) is now


def here(ours: Callable[_P, _R], others: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that is one for the thread that has the turn, and another for all other threads."""

    @functools.wraps(ours)
    def chosen(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():  # it traces what is called, and knows no threads
            return others(*args, **kwargs)
        return (ours if has_turn() else others)(*args, **kwargs)

    return chosen
