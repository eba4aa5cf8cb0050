"""Work that ranks do together: it succeeds on all of them or fails on all, so that none waits for one that failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from memfit.errors import MemfitError, PlanMismatchError, RankError
from memfit.ranks.one_process import SingleProcess

T = TypeVar("T")


def each(ranks: SingleProcess, work: Callable[[], T]) -> list[T]:
    """Have each rank do some work; return the results of all, by rank, which pickle must be able to send.

    Raises:
        Exception: That of this rank, where it failed; else that of the first rank that did, or RankError.
    """
    if ranks.size == 1:
        return [work()]
    result, error = None, None
    try:
        result = work()
    except Exception as e:
        error = e
    found = ranks.gathered((result, None if error is None else _sendable(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            failure.add_note(f"memfit: the error is from rank {rank}")
            raise failure
    return [value for value, _ in found]


def agreed(ranks: SingleProcess, work: Callable[[], T]) -> T:
    """Have each rank do some work; return its own result, once all have succeeded.

    Raises:
        Exception: That of this rank, where it failed; else that of the first rank that did, or RankError.
    """
    own: list[T] = []
    each(ranks, lambda: own.append(work()))
    return own[0]


def once(ranks: SingleProcess, work: Callable[[], T]) -> T:
    """Have the first rank do some work; return its result on all, which pickle must be able to send.

    Raises:
        Exception: That of the first rank, or RankError.
    """
    return each(ranks, lambda: work() if ranks.rank == 0 else None)[0]  # type: ignore[return-value]


def check_same(ranks: SingleProcess, what: str, data: bytes) -> None:
    """Raise PlanMismatchError, on all ranks, unless all give the same data."""
    digests = ranks.gathered(hashlib.sha256(data).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PlanMismatchError(
            f"the ranks have different {what}: rank {others[0]}'s has the SHA-256 {digests[others[0]][:12]}..., and"
            f" rank 0's {digests[0][:12]}.... Save one to a file, and load the same file on every rank"
        )


def _sendable(error: Exception) -> MemfitError:
    return error if isinstance(error, MemfitError) else RankError(f"{type(error).__name__}: {error}")
