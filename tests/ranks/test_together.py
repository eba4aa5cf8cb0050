"""Work of ranks succeeds on all of them or fails on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memfit.errors import OutOfMemoryError, PlanMismatchError, RankError
from memfit.ranks.group import Group
from memfit.ranks.processes import SingleProcess, check_same, each, once
from tests.processes import on_ranks


def working(rank: int) -> Iterator[Any]:
    ranks = Group("cpu")
    yield each(ranks, lambda: rank * 10), once(ranks, lambda: f"by {rank}")
    yield ranks.most([rank, -rank]), ranks.all(rank < 2), ranks.all(rank == 0), ranks.first(rank + 5)

    def fails() -> None:
        if rank == 1:
            raise OutOfMemoryError("full", step=3)

    with pytest.raises(OutOfMemoryError) as e:
        each(ranks, fails)
    yield str(e.value), e.value.step, getattr(e.value, "__notes__", [])

    def fails_otherwise() -> None:
        if rank == 0:
            raise KeyError("name")

    with pytest.raises((KeyError, RankError)) as other:
        once(ranks, fails_otherwise)
    yield type(other.value).__name__, str(other.value)
    check_same(ranks, "plans", b"same")
    with pytest.raises(PlanMismatchError, match="rank 1's has the SHA-256") as different:
        check_same(ranks, "plans", bytes(rank))
    yield str(different.value)


def test_ranks_that_work_together_hear_of_errors() -> None:
    first, second = on_ranks(2, working)
    assert first[0] == second[0] == ([0, 10], "by 0")
    assert first[1] == second[1] == ([1.0, 0.0], True, False, 5)
    assert first[2] == ("full", 3, ["memfit: the error is from rank 1"]) and second[2] == ("full", 3, [])
    assert first[3] == ("KeyError", "'name'") and second[3] == ("RankError", "KeyError: 'name'")
    assert first[4] == second[4]


def test_one_process_works_by_itself() -> None:
    alone = SingleProcess()
    assert each(alone, lambda: 1) == [1] and once(alone, lambda: 2) == 2
    check_same(alone, "plans", b"any")
    assert alone.outside(lambda: 3) == 3 and alone.gathered(4) == [4]
