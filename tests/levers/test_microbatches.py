"""Microbatches as the planner's lever: their sizes, and plans of batches that no small number divides."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.ir import Levers
from memfit.levers import microbatch_sizes
from memfit.workload import Workload
from tests.measuring import peaks
from tests.models import recurrent, transformer


@pytest.mark.parametrize(
    "sizes",
    [
        *([8, 4, 2, 1], [12, 6, 3, 1], [15, 5, 3, 1], [1], [4096, 2048, 1024, 512, 1]),
        *([7, 4, 2, 1], [13, 7, 4, 2, 1], [14, 7, 4, 2, 1]),  # halved unevenly
    ],
)
def test_sizes_divide_the_batch_where_some_size_about_half_does(sizes: list[int]) -> None:
    assert microbatch_sizes(sizes[0]) == sizes


@given(st.integers(1, 10_000))
def test_sizes_shrink_by_no_more_than_a_third_each_time(batch_size: int) -> None:
    sizes = microbatch_sizes(batch_size, most=100)
    assert (sizes[0], sizes[-1]) == (batch_size, 1)
    assert all(low < high <= 3 * low for high, low in itertools.pairwise(sizes))
    few = microbatch_sizes(batch_size)
    assert few[:-1] == sizes[: len(few) - 1] and few[-1] == 1 and len(few) <= 5


def seven(name: str) -> Workload:
    """A batch of seven samples, whose activations are most of its peak."""
    return transformer(batch=7, tokens=64) if name == "transformer" else recurrent(batch=7, tokens=64, features=32)


@pytest.mark.parametrize("size", [4, 3, 2])
@pytest.mark.parametrize("name", ["transformer", "recurrent"])
def test_the_peak_of_uneven_microbatches_is_predicted(name: str, size: int) -> None:
    predicted, measured = peaks(seven(name), Levers(microbatch_size=size))
    assert 0 <= measured - predicted <= 16  # a number that a division keeps for its gradient is a tensor of 8 bytes


@pytest.mark.ci
def test_a_plan_for_seven_samples_cuts_them_in_two_and_keeps_the_gradients() -> None:
    workload = seven("transformer")
    plain, half = (peaks(workload, Levers(microbatch_size=size))[0] for size in (7, 4))
    assert half < 0.8 * plain
    plan = memfit.plan(workload, budget=int(1.1 * half), numerics="reordered", precisions=["32-true"], points=1)
    assert plan.levers.microbatch_size == 4 and "the last of 3" in str(plan)
    assert memfit.verify(plan, workload, steps=0).holds
