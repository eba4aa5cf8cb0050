"""Speeds of a step that was counted by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.ir import CostTable, Matmul, Op, OpCost, Phase, Trace, Work, throughput
from tests.gpus import AMPERE
from tests.models import COSTS, plain_trace

ATTENTION = (
    '{"op":"x","args":[{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]},{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]},'
    '{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]}]}'
)
FULL = 2 * 2 * 128 * 128 * 8


def op(name: str, phase: Phase, signature: int, microbatch: int = 0) -> Op:
    return Op(name, -1, phase, microbatch, signature, (), False)


def made(ops: list[Op], scale: int = 1) -> Trace:
    return Trace(
        workload="w",
        fingerprint="",
        torch_version="",
        device="cuda",
        precision="bf16-mixed",
        batch_size=8,
        microbatch_size=8 // scale,
        microbatches=min(2, scale),
        scale_microbatches=scale,
        modules=[],
        calls=[],
        ops=ops,
        storages=[],
        saves=[],
        signatures=['{"op":"mm"}', ATTENTION, '{"op":"add"}'],
        works=[Work(1000, 10, 10, "bfloat16", True), Work(0, 1, 1, "bfloat16", True), Work(0, 1, 1, "float32", True)],
    )


MM, FLASH, ADD = "aten.mm.default", "aten._scaled_dot_product_flash_attention.default", "aten.add_.Tensor"
TRACE = made(
    [
        op(MM, "forward", 0),
        op(FLASH, "forward", 1),
        op(MM, "recompute", 0),
        op(MM, "backward", 0),
        op(ADD, "optimizer", 2),
    ]
)
TABLE = CostTable(
    device="ampere",
    torch_version="",
    threads=0,
    ops={s: OpCost(t, 0, False) for s, t in zip(TRACE.signatures, (2e-3, 1e-3, 3e-3), strict=True)},
    dispatch_seconds=0.0,
    checkpoint_seconds=0.0,
    selective_op_seconds=0.0,
    peak_error=0.05,
    step_error=0.3,
)


def test_a_step_counted_by_hand() -> None:
    found = throughput(TRACE, TABLE, AMPERE, tokens_per_sample=16)
    assert found.step_seconds == pytest.approx(10e-3)
    assert found.samples_per_second == pytest.approx(800)
    assert found.tokens_per_second == pytest.approx(12800)
    assert list(found.seconds_by_class) == ["matrix products", "optimizer", "attention"]
    assert found.seconds_by_class["matrix products"] == pytest.approx(0.6 * 10e-3)
    assert found.model_flops == 2000 + FULL and found.hardware_flops == 3000 + FULL
    assert (found.peak_dtype, found.peak_flops) == ("bfloat16", 300e12)
    assert found.model_utilisation == pytest.approx(found.model_flops / 10e-3 / 300e12)
    assert found.hardware_utilisation == pytest.approx(found.hardware_flops / 10e-3 / 300e12)
    assert found.step_error == 0.3 and not found.measured


def test_later_microbatches_count() -> None:
    step = made([op(MM, "forward", 0), op(MM, "forward", 0, 1), op(MM, "backward", 0, 1)], scale=4)
    found = throughput(step, TABLE, AMPERE)
    assert found.model_flops == 1000 + 3 * 2000
    assert found.step_seconds == pytest.approx(7 * 2e-3) and found.tokens_per_second is None


def test_a_last_microbatch_of_fewer_samples_counts_as_a_part() -> None:
    step = made([op(MM, "forward", 0), op(MM, "forward", 0, 1), op(MM, "backward", 0, 1)], scale=4)
    found = throughput(replace(step, batch_size=7), TABLE, AMPERE)
    assert found.model_flops == 1000 + 2.5 * 2000
    assert found.step_seconds == pytest.approx(6 * 2e-3)


def test_a_given_time_replaces_the_sum() -> None:
    assert throughput(TRACE, TABLE, AMPERE, step_seconds=1.0).samples_per_second == 8


def test_a_device_of_unknown_rates_has_no_utilisation() -> None:
    unknown = replace(AMPERE, matrix_flops={}, vector_flops={})
    found = throughput(TRACE, TABLE, unknown)
    assert found.model_utilisation is None and found.hardware_utilisation is None and found.peak_flops == 0


def test_a_real_step_computes_three_times_its_forward_pass() -> None:
    """Each product has two in the backward pass, but for those whose input needs no gradient."""
    trace = plain_trace("transformer")
    found = throughput(trace, COSTS, AMPERE)
    forward = sum(trace.works[o.signature].flops for o in trace.ops if o.phase == "forward")
    assert found.model_flops == found.hardware_flops == pytest.approx(3 * forward, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "matmul", "rate"), [("aten.mm.default", "highest", "float32"), ("aten.mm.default", "high", "tf32")]
)
def test_equal_rates_of_fp32_and_tf32_are_not_taken_for_one_another(kind: str, matmul: Matmul, rate: str) -> None:
    """As on an RTX 3090, whose matrix units are no faster in TF32."""
    equal = replace(AMPERE, matrix_flops={"tf32": 35.6e12}, vector_flops={"float32": 35.6e12})
    trace = plain_trace("transformer")
    assert any(op.name == kind for op in trace.ops)
    found = throughput(trace, COSTS, equal, matmul=matmul)
    assert (found.peak_dtype, found.peak_flops) == (rate, 35.6e12)
    assert throughput(trace, COSTS, AMPERE, matmul="highest").peak_dtype == "float32"
