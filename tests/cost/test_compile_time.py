"""How long code takes to make."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.cost.modelled_costs import code_seconds, kernels_of
from memfit.ir import kernels
from memfit.ir.trace import Trace
from tests.models import plain_trace


def with_kernels(count: int) -> Trace:
    trace = plain_trace("transformer")
    fused = [kernels.text((text,), number) for number, text in enumerate(trace.signatures[:count])]
    return replace(trace, signatures=[*trace.signatures, *fused])


def test_a_step_that_is_not_compiled_has_no_kernels() -> None:
    assert kernels_of(plain_trace("transformer")) == 0
    assert kernels_of(with_kernels(7)) == 7


def test_more_kernels_and_operators_take_longer_and_more_processes_less() -> None:
    few, many = with_kernels(2), with_kernels(12)
    assert code_seconds(few, 1) < code_seconds(many, 1) < code_seconds(replace(many, ops=many.ops * 2), 1)
    assert code_seconds(many, 1) - code_seconds(many, 2) > code_seconds(few, 1) - code_seconds(few, 2) > 0
