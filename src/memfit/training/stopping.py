"""Where a run stops: at signals, deferred until a step is complete, and where ranks meet before each step."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from memfit.errors import MemoryLimitError, RankError
from memfit.interrupts import HeldSignals, held_back
from memfit.ranks.processes import SingleProcess
from memfit.training.runs.checkpoint import Writing

PREEMPTED = 75
"""Exit status after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later", on which a scheduler requeues."""
_FINE, _LIMIT, _FAILED, _INTERRUPTED, _TERMINATED = range(5)
_AT_THE_END = -1
_WRITTEN, _GOING_ON, _CANNOT = range(3)  # the largest counts: all hear of a rank that could not, whoever still writes

_log = logging.getLogger("memfit")


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[HeldSignals]:
    """Defer what signals' handlers raise until `HeldSignals.check`, or until the context is left.

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


class Meeting(NamedTuple):
    """What ranks agreed on before a step.

    Attributes:
        stop: Why this rank must stop; None where it goes on.
        is_written: Whether no rank still writes its files of a checkpoint, or one of them could not.
    """

    stop: BaseException | None
    is_written: bool


def meet(ranks: SingleProcess, error: BaseException | None, samples: int | None, writing: Writing | None) -> Meeting:
    """Meet the other ranks before a step.

    Args:
        error: Why this rank stops by itself; None where it would go on.
        samples: Samples of the batch to run; None at the end of the data.
        writing: The checkpoint that is being written, of the same step on all ranks; None where there is none.
    """
    written = _written(writing)
    if ranks.size == 1:
        return Meeting(error, written != _GOING_ON)
    code = _code(error)
    count = _AT_THE_END if samples is None else samples
    counts = [count, -count] if code == _FINE else [-float("inf")] * 2
    worst, who, most, least, written = ranks.most([code, ranks.rank + 1 if code else 0, *counts, written])
    is_written = written != _GOING_ON
    if error is not None:
        return Meeting(error, is_written)
    if worst != _FINE:
        return Meeting(_like_others(int(worst), int(who) - 1), is_written)
    if most != -least:
        differ = RankError(
            f"Workload.batches gave {_told(-least)} on one rank and {_told(most)} on another: every rank must give the"
            " same global batches; memfit takes the rank's part. Shuffle with the same seed on every rank"
        )
        return Meeting(differ, is_written)
    return Meeting(None, is_written)


def _written(writing: Writing | None) -> float:
    """Return the state of this rank's files of a checkpoint, as a number for the others."""
    if writing is None:
        return _WRITTEN
    if writing.is_going_on:
        return _GOING_ON
    return _CANNOT if writing.has_failed else _WRITTEN


def _code(error: BaseException | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, SystemExit):
        return _TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return _LIMIT if isinstance(error, MemoryLimitError) else _FAILED


def _like_others(code: int, rank: int) -> BaseException:
    """Return the error of a rank that stops since another one does."""
    if code == _TERMINATED:
        return SystemExit(PREEMPTED)
    if code == _INTERRUPTED:
        return KeyboardInterrupt()
    text = f"rank {rank} stopped before the step: read that rank's output"
    if code == _LIMIT:
        return MemoryLimitError(text, limit_bytes=0, held_bytes=0, requested_bytes=0, by_category={}, where="")
    return RankError(text)


def _told(count: float) -> str:
    return "no more batches" if count == _AT_THE_END else f"a batch of {count:.0f} samples"
