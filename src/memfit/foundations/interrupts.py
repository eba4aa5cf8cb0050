"""Signals, held back where an exception of their handlers would leave something half done.

[Where a handler may raise] Python runs a signal's handler between any two instructions of the main thread: before the
`try` that would undo what was just done, in a callback of a weak reference, whose exceptions are dropped, or in a
function that C++ calls and that may not fail, which aborts the process. So a handler runs when its signal comes, as
ever, and what it raises waits for a safe point: a place in memfit's own code that may fail anyway.

From there to the verb's caller travels `Unwinding`, which no `except Exception` on the way takes for an error of the
step. There the handler's own exception is raised, once, whatever became of the other.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

_PATIENCE_SECONDS = 1.0  # of a further signal: where the first finds no safe point for so long, as in an endless loop

# Without an enumeration's name for each, of which a step would look up sixty, for a tenth of a millisecond.
_NUMBERS = tuple(map(int, signal.valid_signals()))
_handler_of = inspect.unwrap(signal.getsignal)

Handler = Callable[[int, FrameType | None], Any]


class Unwinding(BaseException):
    """The way out of an interrupted verb, to where the exception of the signal's handler is raised."""


class HeldSignals:
    """The exceptions that signals' handlers raised, until they are raised to the caller.

    Attributes:
        on_first: Called with the first signal whose handler raised.
        stops_at_once: Tells whether a later one is not held back, by the seconds since the first.
        ends_steps: Whether a safe point within a step is one: where steps are of a copy, and not of a training.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[signal.Signals], None] = lambda number: None
        self.stops_at_once: Callable[[signal.Signals, float], bool] = lambda number, waited: waited > _PATIENCE_SECONDS
        self.ends_steps = False
        self.thread = threading.get_ident()
        self.raised: list[BaseException] = []
        self._since = 0.0
        self._replaced: dict[int, tuple[Any, Handler]] = {}

    def check(self) -> None:
        """Raise what handlers raised: the latest, with the one before as its cause."""
        raised, self.raised = self.raised, []
        if raised:
            error = raised[-1]
            raise error from error.__cause__ or next((e for e in reversed(raised[:-1]) if e is not error), None)

    def hold(self, number: int, handler: Handler) -> None:
        """Call a handler for a signal from now on, and hold back what it raises."""

        def called(number: int, frame: FrameType | None) -> None:
            if _held is not self:  # in a forked process, or where someone has kept this as the signal's handler
                handler(number, frame)
                return
            try:
                handler(number, frame)
            except BaseException as e:
                self._came(signal.Signals(number), e)

        self._replaced[number] = signal.getsignal(number), called
        signal.signal(number, called)

    def let_go(self, numbers: Iterable[int]) -> None:
        """Set the handlers of signals back, where nobody has set others meanwhile."""
        left = [number for number in numbers if number in self._replaced]
        while left:
            try:
                while left:  # a loop within, or a handler could raise between two rounds, outside of the `try`
                    self._let_go(left[-1])
                    left.pop()
            except BaseException as e:  # of a handler that was set back
                self.raised.append(e)

    def _let_go(self, number: int) -> None:
        before, ours = self._replaced.get(number, (None, None))
        if ours is not None and signal.getsignal(number) is ours:
            signal.signal(number, before)
        self._replaced.pop(number, None)

    def _came(self, number: signal.Signals, error: BaseException) -> None:
        self.raised.append(error)
        if len(self.raised) == 1:
            self._since = time.monotonic()
            self.on_first(number)
        elif self.stops_at_once(number, time.monotonic() - self._since):
            raise Unwinding


_held: HeldSignals | None = None  # of the main thread, the only one in which Python runs handlers
os.register_at_fork(after_in_child=lambda: globals().update(_held=None))


@contextlib.contextmanager
def held_back(*, ends_steps: bool | None = None) -> Iterator[HeldSignals]:
    """Hold back what signals' handlers raise, until a safe point, or until the outermost such context is left.

    Signals that the system handles are not touched. Off the main thread there is nothing to hold back.

    Args:
        ends_steps: Whether a verb may be left within a step, since steps are of copies here; None as around it.
    """
    global _held
    if threading.current_thread() is not threading.main_thread():
        yield HeldSignals()
        return
    if _held is not None:
        before = _held.ends_steps
        _held.ends_steps = before if ends_steps is None else ends_steps
        try:
            yield _held
        finally:
            if _held is not None:
                _held.ends_steps = before
        return
    held = HeldSignals()
    held.ends_steps = bool(ends_steps)
    handlers = {number: _handler_of(number) for number in _NUMBERS}
    _held = held
    try:
        for number, handler in handlers.items():
            if callable(handler):
                held.hold(number, handler)
        yield held
    except Unwinding:
        pass  # the handler's exception follows
    finally:
        try:
            held.let_go(handlers)
        finally:  # what a handler that was set back raises on the way from there
            _held = None
        held.check()


def undone(undo: Callable[[], None]) -> None:
    """Call a function that undoes something, and does nothing twice: again, where a signal came before it was held."""
    try:
        with held_back():
            undo()
    except BaseException:
        with held_back():
            undo()
        raise


def safe_point(*, in_step: bool = False) -> None:
    """Leave the verb where a handler has raised. Called where memfit's own code may fail, often enough.

    Args:
        in_step: Whether a step may be half done, which only steps of copies may be.
    """
    if _held is not None and _held.raised and _held.thread == threading.get_ident():
        if _held.ends_steps or not in_step:
            raise Unwinding
