"""Ctrl-C and SIGTERM, deferred until a step is complete."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

PREEMPTED = 75
"""Exit status after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later", on which a scheduler requeues."""

_log = logging.getLogger("memfit")


class Interrupt:
    """The signal received so far, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def check(self) -> None:
        """Raise KeyboardInterrupt, or SystemExit after SIGTERM, if a signal was received."""
        came, self.signal = self.signal, None
        if came is signal.SIGTERM:
            raise SystemExit(PREEMPTED)
        if came is not None:
            raise KeyboardInterrupt

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal. Ctrl-C after another one stops at once; schedulers may send SIGTERM more than once."""
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = signal.Signals(number)
        _log.warning("%s: stopping after this step, with a checkpoint; Ctrl-C to stop at once", self.signal.name)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Defer Ctrl-C and SIGTERM until `Interrupt.check`, or until the context is left.

    Only in the main thread, and only where they have no other handler.
    """
    interrupt = Interrupt()
    ours: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    handled = [s for s, default in ours.items() if is_main and signal.getsignal(s) is default]
    for number in handled:
        signal.signal(number, interrupt.note)
    try:
        yield interrupt
    finally:
        for number in handled:
            signal.signal(number, ours[number])
    interrupt.check()
