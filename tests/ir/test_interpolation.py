"""A step of another size, from two that were captured, is the one that would have been captured."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memfit.ir import Trace, between, simulate
from tests.covering import each
from tests.models import COSTS, captured, convnet, recurrent, transformer, twice, unet

BUILDERS: dict[str, Any] = {"transformer": transformer, "convnet": convnet, "unet": unet, "twice": twice}


def texts(trace: Trace) -> list[str]:
    return [trace.signatures[op.signature] for op in trace.ops]


@pytest.mark.parametrize(("name", "microbatches"), each(BUILDERS, [1, 2]))
def test_a_size_between_two_is_the_captured_one(name: str, microbatches: int) -> None:
    low, middle, high = (
        captured(BUILDERS[name](batch=size * microbatches), microbatch_size=size) for size in (2, 5, 8)
    )
    found = between(low, high, 5)
    assert found is not None
    assert texts(found) == texts(middle)
    assert found.storages == middle.storages
    assert [found.works[op.signature] for op in found.ops] == [middle.works[op.signature] for op in middle.ops]
    assert simulate(found, COSTS).peak_bytes == simulate(middle, COSTS).peak_bytes
    assert (found.batch_size, found.microbatch_size) == (middle.batch_size, middle.microbatch_size)


@pytest.mark.ci
def test_two_microbatches_stand_for_more() -> None:
    two, five = (captured(transformer(batch=2 * count), microbatch_size=2) for count in (2, 5))
    found = two.of_samples(10)
    assert (found.scale_microbatches, found.batch_size) == (five.scale_microbatches, five.batch_size)
    assert simulate(found, COSTS).step_seconds == simulate(five, COSTS).step_seconds


def test_programs_that_differ_have_nothing_between_them() -> None:
    low, high = captured(transformer(batch=2)), captured(transformer(batch=8))
    other = captured(convnet(batch=8))
    assert low.is_program_of(high) and not low.is_program_of(other)
    assert between(low, other, 4) is None
    assert between(low, replace(high, ops=high.ops[:-1]), 4) is None


def test_buffers_that_a_library_sizes_are_not_made_up() -> None:
    assert between(captured(recurrent(batch=2)), captured(recurrent(batch=8)), 5) is None


def test_what_would_not_be_whole_is_not_made_up() -> None:
    low, high = captured(transformer(batch=2)), captured(transformer(batch=8))
    grown = [replace(s, nbytes=s.nbytes + 1) if s.birth >= 0 else s for s in high.storages]
    assert between(low, replace(high, storages=grown), 5) is None
