"""What waits is captured where it may be enough faster than what is known, the largest compiled step first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir import CompilerLever, Levers
from memfit.planner.captured_steps import DeferredCandidates

SIZES = (8, 4, 2, 1)
LAST, FIRST = "inductor-channels-last", "inductor"


def as_is(size: int) -> Levers:
    return Levers(microbatch_size=size)


def compiled(size: int, compiler: CompilerLever = FIRST) -> Levers:
    return Levers(microbatch_size=size, compiler=compiler)


class World:
    """Steps whose seconds and peaks are known, with nothing to recompute; it counts what is captured.

    A step that has no seconds can't be captured; where its peak is not given it is 8 bytes a sample.
    """

    def __init__(self, seconds: dict[Levers, float], peaks: dict[Levers, int] | None = None) -> None:
        self.seconds, self.peaks = seconds, peaks or {}
        self.asked: list[Levers] = []

    def captured(self, wanted: Sequence[Levers]) -> list[Levers]:
        self.asked += [levers for levers in wanted if levers not in self.asked]
        return [levers for levers in wanted if levers in self.seconds]

    def predicted(self, levers: Levers) -> Any:
        return SimpleNamespace(step_seconds=self.seconds[levers], peak_bytes=self.peak(levers))

    def combination(self, levers: Levers) -> Any:
        def bound(peak_bytes: int) -> float | None:
            return self.seconds[levers] if self.peak(levers) <= peak_bytes else None

        return SimpleNamespace(solver=SimpleNamespace(bound=bound))

    def peak(self, levers: Levers) -> int:
        return self.peaks.get(levers, 8 * levers.microbatch_size)

    def compiled_sizes(self) -> list[int]:
        return [levers.microbatch_size for levers in self.asked if levers.compiler != "none"]


def deferred(world: World, *compilers: CompilerLever) -> DeferredCandidates:
    """Return the smaller compiled steps, which wait for the whole one that is captured."""
    wholes = [compiled(8, c) for c in compilers]
    waiting = {replace(whole, microbatch_size=size): whole for whole in wholes for size in SIZES[1:]}
    return DeferredCandidates(world, waiting, [as_is(8), *wholes])


def searched(world: World, waits: DeferredCandidates, best_seconds: float, budget_bytes: int = 64) -> float:
    """Return the least seconds that fit once nothing more is captured."""
    while found := waits.next(best_seconds, budget_bytes):
        best_seconds = min([best_seconds, *(world.seconds[x] for x in found if world.peak(x) <= budget_bytes)])
    return best_seconds


factors = st.floats(0.96, 1.1)  # of a compiled step's time to that expected by the next larger one


@given(
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
    st.floats(0.5, 1.5),
    st.lists(factors, min_size=3, max_size=3),
    st.sampled_from([8, 16, 32, 64]),
)
def test_what_is_not_captured_is_not_faster(
    seconds: list[float], ratio: float, halvings: list[float], budget_bytes: int
) -> None:
    """Where compiled steps are to those as they are as the next larger ones are, or at best so much faster."""
    known = {as_is(size): taken for size, taken in zip(SIZES, seconds, strict=True)}
    for size, factor in zip(SIZES, [1.0, *halvings], strict=True):
        ratio *= factor
        known[compiled(size)] = ratio * known[as_is(size)]
    world = World(known)
    fitting = [x for x in known if world.peak(x) <= budget_bytes]
    first = [x for x in fitting if x.compiler == "none" or x.microbatch_size == 8]
    found = searched(world, deferred(world, FIRST), min(known[x] for x in first), budget_bytes)
    assert found <= min(known[x] for x in fitting) * (1 + 1e-9)


def alike(ratio: float, compiler: CompilerLever = FIRST) -> dict[Levers, float]:
    """Return steps as they are, of which small microbatches take longer, and compiled ones that are so to them."""
    known = {as_is(size): seconds for size, seconds in zip(SIZES, (1.0, 1.0, 1.2, 1.5), strict=True)}
    return known | {compiled(size, compiler): ratio * known[as_is(size)] for size in SIZES}


@pytest.mark.parametrize(
    ("ratio", "best_seconds", "sizes"),
    [(1.1, 1.0, []), (0.9, 1.0, [4]), (0.9, 0.82, []), (0.9, math.inf, [4, 2, 1])],
    ids=["compiled is slower", "the next one tells of the others", "something else is faster", "nothing fits"],
)
def test_what_is_captured(ratio: float, best_seconds: float, sizes: list[int]) -> None:
    world = World(alike(ratio))
    waits = deferred(world, FIRST)
    searched(world, waits, best_seconds)
    assert world.compiled_sizes() == sizes
    assert waits.compiled_sizes == [size for size in SIZES[1:] if size not in sizes]


def test_a_step_as_it_is_that_does_not_fit_tells_that_the_compiled_one_does_not() -> None:
    """By as much less as the larger compiled step holds."""
    larger = {compiled(8): 48}  # of 64: the step of 4, of 32 bytes as it is, is expected to hold 24
    for budget_bytes, sizes in ((24, [4]), (23, [2])):
        world = World(alike(0.9), larger)
        waits = deferred(world, FIRST)
        waits.next(1.5, budget_bytes)
        assert world.compiled_sizes() == sizes


def test_of_two_compilers_the_one_whose_larger_step_was_faster_goes_on() -> None:
    world = World(alike(0.9) | alike(0.85, LAST))
    searched(world, deferred(world, FIRST, LAST), 1.0)
    assert {levers.compiler for levers in world.asked} - {"none"} == {LAST}


def test_a_size_that_can_not_be_captured_is_left_out_and_the_next_is_tried() -> None:
    known = alike(0.9)
    del known[compiled(4)]
    world = World(known)
    waits = deferred(world, FIRST)
    assert waits.next(1.0, 64) == [compiled(2)]
    assert world.compiled_sizes() == [4, 2] and waits.compiled_sizes == [1]


def test_compiled_steps_wait_on_where_none_was_captured_whole() -> None:
    world = World(alike(0.5))
    waits = DeferredCandidates(world, {compiled(size): compiled(8) for size in SIZES[1:]}, [as_is(8)])
    assert waits.next(1.0, 64) == [] == waits.compiled_sizes  # nothing is said of them
    assert waits.next(math.inf, 64) == [compiled(size) for size in SIZES[1:]]


@pytest.mark.parametrize(("best_seconds", "are_captured"), [(2.0, False), (3.0, True)])
def test_microbatches_of_a_slow_precision_wait_for_a_plan_that_is_as_slow(
    best_seconds: float, are_captured: bool
) -> None:
    cut = [Levers(precision="bf16-mixed", microbatch_size=size) for size in SIZES]
    world = World(dict.fromkeys(cut, 2.5))
    waits = DeferredCandidates(world, dict.fromkeys(cut[1:], cut[0]), [as_is(8), cut[0]])
    assert waits.next(best_seconds, 64) == (cut[1:] if are_captured else [])
    assert waits.compiled_sizes == []
