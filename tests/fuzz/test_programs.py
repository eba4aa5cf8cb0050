"""Random programs: what memfit predicts of them, and whether its plans keep budgets and numbers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.fuzzing import checking
from benchmarks.fuzzing.checking import Costs, checked, saved_number_bytes
from benchmarks.fuzzing.modules import workload_of
from benchmarks.fuzzing.programs import Block, Call, Loss, Operation, Program, drawn, from_text, text_of
from tests.models import captured

PHASES = (Phase.generate, Phase.shrink)
COSTS = Costs()
NOT_YET_RIGHT = {"prod", "cumprod"}
"""Backward formulas that look for zeros: `python -m benchmarks.fuzzing` counts these."""
PROGRAMS = st.randoms(use_true_random=False).map(drawn)


def program(*operations: Operation, within: str = "", block: Block | None = None, **others: object) -> Program:
    """Return a program of one block, called once."""
    blocks = (block or Block(operations),)
    return Program(seed=1, shape=(4, 8, 16), blocks=blocks, calls=(Call(0, within),), **others)  # type: ignore[arg-type]


SETTINGS = settings(
    deadline=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@settings(SETTINGS, max_examples=5)
@given(PROGRAMS)
def test_memfit_is_right_on_random_programs(program: Program) -> None:
    is_right(program)


@pytest.mark.ci
@settings(SETTINGS, max_examples=12)
@given(PROGRAMS)
def test_memfit_is_right_on_more_random_programs(program: Program) -> None:
    is_right(program)


def is_right(program: Program) -> None:
    """Check what memfit says of a program."""
    names = {operation.name for block in program.blocks for operation in block.operations}
    assume(not names & NOT_YET_RIGHT)
    found = checked(program, COSTS)
    assume(found is not None)
    assert found is not None and not found.wrong, text_of(program)


REFUSED_VIEW = (
    '[194,[4,16,8],[[[["diagonal",[2],2],["diagonal",[1],3],["copy_",[2,1],8],["Sequence",[3],9],["pad",[5],8]],false,'
    '"before backward","tuple",true]],[[0,"no_grad",2]],false,false,[3,"",true,true,false],"momentum",false,"dict"]'
)
SHAPES = {
    "an activation that its node saves, under checkpointing": program(Operation("tanh", (1,), 0), within="checkpoint"),
    "a view that is written to": program(Operation("on_view_", (1,), 3), Operation("exp", (1,), 0)),
    "positions and values": program(Operation("topk", (1,), 0), Operation("gather", (1,), 0)),
    "a metric within the loss": program(Operation("sigmoid", (1,), 0), loss=Loss(0, "kept")),
    "outputs that hooks keep": program(block=Block((Operation("softmax", (1,), 0),), hook="collects")),
    "a recurrent layer": program(Operation("Recurrent", (1,), 0), Operation("relu", (1,), 0)),
    "backward hooks": program(block=Block((Operation("Linear", (1,), 0),), hook="backward")),
    "a view that autograd refuses, given to a layer": from_text(REFUSED_VIEW),
    "a running mean that another takes the place of": program(Operation("exp", (1,), 0), Operation("Average", (1,), 1)),
    "a reentrant checkpoint": program(Operation("Sequence", (1,), 2), within="reentrant"),
    "autocast in the middle": program(Operation("Linear", (1,), 0), Operation("gelu", (1,), 0), within="autocast"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_memfit_is_right_on_programs_of_each_kind(name: str) -> None:
    found = checked(SHAPES[name], COSTS)
    assert found is not None and not found.wrong
    assert found.planned_measured_bytes is not None


@pytest.mark.parametrize("off_bytes", [-16, 4])
def test_a_prediction_that_is_a_number_off_is_noticed(monkeypatch: pytest.MonkeyPatch, off_bytes: int) -> None:
    predict = checking.predict

    def other(*arguments: Any) -> Any:
        predicted, timeline = predict(*arguments)
        return replace(predicted, peak_bytes=predicted.peak_bytes + off_bytes), timeline

    monkeypatch.setattr(checking, "predict", other)
    found = checked(SHAPES["positions and values"], COSTS)
    assert found is not None and any("plain peak" in said for said in found.wrong)


def test_other_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = checking._run

    def other(workload: object, running: object) -> object:
        with torch.no_grad():
            next(workload.model.parameters()).mul_(1.001)  # type: ignore[attr-defined]
        return run(workload, running)  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "_run", other)
    found = checked(SHAPES["positions and values"], COSTS)
    assert found is not None and any("differs from a plain loop" in said for said in found.wrong)


def test_a_program_is_its_text_and_its_workload_the_same_each_time() -> None:
    for seed in range(20):
        one = drawn(Random(seed))
        assert from_text(text_of(one)) == one
    first, second = (workload_of(SHAPES["a recurrent layer"]) for _ in range(2))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_numbers_that_autograd_saves_are_counted_and_others_are_not() -> None:
    saving = program(block=Block((Operation("relu", (1,), 0),), hook="replaces output"))
    plain = program(Operation("relu", (1,), 0))
    numbers = [saved_number_bytes(captured(workload_of(p))) for p in (plain, saving)]
    assert numbers[1] == numbers[0] + 8
