"""Ctrl-C and SIGTERM, deferred until a step is complete."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from memfit.interrupts import Held, held_back

PREEMPTED = 75
"""Exit status after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later", on which a scheduler requeues."""

_log = logging.getLogger("memfit")


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Held]:
    """Defer what signals' handlers raise until `Held.check`, or until the context is left.

    Where SIGTERM has no handler, it raises SystemExit. Ctrl-C after another signal stops at once.
    """
    with held_back(ends_steps=False) as held:
        is_main = threading.current_thread() is threading.main_thread()
        ours = [signal.SIGTERM] if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else []
        before = held.on_first, held.stops_at_once
        held.on_first, held.stops_at_once = _announce, _is_impatient
        try:
            for number in ours:
                held.hold(number, _preempted)
            yield held
        finally:
            held.let_go(ours)
            held.on_first, held.stops_at_once = before
        held.check()


def _preempted(number: int, frame: FrameType | None) -> None:
    raise SystemExit(PREEMPTED)


def _announce(number: signal.Signals) -> None:
    _log.warning("%s: stopping after this step, with a checkpoint; Ctrl-C to stop at once", number.name)


def _is_impatient(number: signal.Signals, waited_seconds: float) -> bool:
    return number == signal.SIGINT  # schedulers may send SIGTERM more than once
