"""Where ranks meet before each step: all of them run it, on batches of one size, or all stop for the same reason."""

from __future__ import annotations

from memfit.errors import MemoryLimitError, RankError
from memfit.ranks.one_process import SingleProcess
from memfit.training.interrupt import PREEMPTED

_FINE, _LIMIT, _FAILED, _INTERRUPTED, _TERMINATED = range(5)
_AT_THE_END = -1


def meet(ranks: SingleProcess, error: BaseException | None, samples: int | None) -> BaseException | None:
    """Return why this rank must stop before a step; None where it goes on.

    Args:
        error: Why it stops by itself; None where it would go on.
        samples: Samples of the batch to run; None at the end of the data.
    """
    if ranks.size == 1:
        return error
    code = _code(error)
    count = _AT_THE_END if samples is None else samples
    counts = [count, -count] if code == _FINE else [-float("inf")] * 2
    worst, who, most, least = ranks.most([code, ranks.rank + 1 if code else 0, *counts])
    if error is not None:
        return error
    if worst != _FINE:
        return _like_others(int(worst), int(who) - 1)
    if most != -least:
        return RankError(
            f"Workload.batches gave {_told(-least)} on one rank and {_told(most)} on another: every rank takes the same"
            " global batches, of which memfit gives it its part. Seed what shuffles them"
        )
    return None


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
    text = f"rank {rank} stopped before the step: see what it says"
    if code == _LIMIT:
        return MemoryLimitError(text, limit_bytes=0, held_bytes=0, requested_bytes=0, by_category={}, where="")
    return RankError(text)


def _told(count: float) -> str:
    return "no more batches" if count == _AT_THE_END else f"a batch of {count:.0f} samples"
