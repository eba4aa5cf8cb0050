"""Kernels as text: what they are made of, what they cost, and their operators one by one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.ir import CostTable, OpCost, Work, call_flops, is_kernel, kernel_text, unfused
from tests.ir.test_throughput import TRACE

ADD, MUL, MM = (f'{{"op":"aten.{name}","args":[]}}' for name in ("add.Tensor", "mul.Tensor", "mm.default"))
COSTS = CostTable(
    device="cpu",
    torch_version="",
    threads=1,
    ops={ADD: OpCost(1.0, 10, True), MUL: OpCost(2.0, 20, True), MM: OpCost(5.0, 50, True)},
    dispatch_seconds=0.5,
    checkpoint_seconds=0.0,
    selective_op_seconds=0.0,
    peak_error=0.0,
)


@pytest.mark.parametrize(
    ("members", "reused", "expected"),
    [
        ((ADD, MUL), 0, OpCost(2.0, 0, True)),
        ((ADD, MUL), 7, OpCost(2.0, -7, True)),
        ((MM,), 0, OpCost(5.0, 50, True)),
        ((MM, ADD), 0, OpCost(5.0, 0, True)),
        ((ADD, "unknown"), 0, OpCost(1.0, 0, False)),
        ((), 0, OpCost(0.0, 0, True)),
    ],
)
def test_a_kernel_is_as_slow_as_the_slowest_of_its_operators(
    members: tuple[str, ...], reused: int, expected: OpCost
) -> None:
    text = kernel_text(members, reused)
    assert is_kernel(text) and not is_kernel(ADD)
    assert COSTS.of(text) == expected
    assert COSTS.seconds_of(text) == expected.seconds and COSTS.seconds_of(ADD) == 1.5


def test_the_operators_of_kernels_are_there_for_their_costs() -> None:
    trace = TRACE
    assert unfused(trace) is trace
    work = Work(1, 2, 3, "float32", True)
    text = kernel_text((ADD, MUL))
    fused = replace(
        trace,
        signatures=[*trace.signatures, ADD, MUL, text],
        works=[*trace.works, work, work, work],
        ops=[replace(trace.ops[0], signature=len(trace.signatures) + 2), *trace.ops[1:]],
    )
    alone = unfused(fused)
    assert alone.signatures == [*trace.signatures, ADD, MUL]
    assert [op.name for op in alone.ops] == ["aten.add.Tensor", "aten.mul.Tensor", *(op.name for op in trace.ops[1:])]
    assert [alone.signatures[op.signature] for op in alone.ops[:2]] == [ADD, MUL]


def test_the_operations_of_a_kernel_are_counted() -> None:
    work = Work(12, 0, 0, "float32", True)
    assert call_flops("aten.mm.default", kernel_text((MM,)), work).model == 12
