"""Modes of a step that is run elsewhere than in its loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memfit._torch import TorchDispatchMode
from memfit.workload import ExecutionContext, outside_autocast


class _Casts(TorchDispatchMode):
    """Counts casts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "_to_copy" in str(func)
        return func(*args, **(kwargs or {}))


def casts_of_two_passes(context: ExecutionContext) -> list[int]:
    """Return the number of casts in each of two passes through a linear layer, each in a context of its own."""
    linear, x, counts = torch.nn.Linear(8, 8), torch.randn(4, 8), []
    for _ in range(2):
        with _Casts() as casts, context.entered():
            linear(x)
        counts.append(casts.count)
    return counts


MIXED = ExecutionContext((("cpu", torch.bfloat16, True),), grad=True)


@pytest.fixture(params=[0, 1, 3], ids="within {}".format)
def depth(request: pytest.FixtureRequest) -> Iterator[int]:
    """Enter autocast as many times as a loop may have when it calls its module."""
    for _ in range(request.param):
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    try:
        yield request.param
    finally:
        for _ in range(request.param):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", False)


def test_each_pass_casts_weights_for_itself_within_a_loops_autocast_too(depth: int) -> None:
    within = casts_of_two_passes(MIXED)
    with outside_autocast():
        assert not torch.is_autocast_enabled("cpu")
        counts = casts_of_two_passes(MIXED)
        with ExecutionContext((), grad=False).entered():
            assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert counts == [3, 3]
    assert within == ([3, 3] if depth == 0 else [3, 1])  # what the loop's own context keeps


def test_a_loops_autocast_is_as_it_was_afterwards(depth: int) -> None:
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    with pytest.raises(RuntimeError, match="mine"), outside_autocast():
        raise RuntimeError("mine")
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    assert before == after == (depth > 0, *before[1:])
    assert torch.autocast_increment_nesting() == depth + 1
    assert torch.autocast_decrement_nesting() == depth
