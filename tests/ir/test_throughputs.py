"""Operations of calls against hand counts and PyTorch's counter, rates, and speeds of steps and kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import flop_registry

from memfit.ir import (
    ATTENTION,
    CONVOLUTIONS,
    MATRIX,
    Device,
    Matmul,
    Op,
    OpCost,
    Phase,
    Trace,
    Work,
    call_flops,
    is_kernel,
    kernel_text,
    peak_flops,
    throughput,
    unfused,
)
from tests.gpus import AMPERE
from tests.models import COSTS, plain_trace

NO_WORK = Work(0, 0, 0, "bfloat16", True)


SDPA = [
    f"_scaled_dot_product_{kind}{end}"
    for kind, suffix in (("flash_attention", ""), ("efficient_attention", ""), ("cudnn_attention", ""),
                         ("flash_attention", "_for_cpu"))
    for end in (suffix, f"{suffix}_backward")
]  # fmt: skip


def call(name: str, first: list[Any], causal: bool) -> str:
    """Return the signature of fused attention, with what says whether it is causal in its place of the schema."""
    schema = getattr(torch.ops.aten, name.split(".")[1]).default._schema
    position = next(i for i, a in enumerate(schema.arguments) if a.name in ("is_causal", "custom_mask_type"))
    return json.dumps({"op": name, "args": [*first, *[None] * (position - len(first)), causal]})


def tensor(*shape: int, dtype: str = "bfloat16") -> dict[str, Any]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return {"t": [dtype, list(shape), strides]}


def flops(name: str, text: str, work: Work = NO_WORK) -> tuple[int, int]:
    """Return the operations of the model and of the kernels."""
    found = call_flops(name, text, work)
    return found.model, found.hardware


def attention(name: str, causal: bool, tokens: int = 4096) -> tuple[int, int]:
    name = f"aten.{name}.default"
    return flops(name, call(name, [tensor(2, 8, tokens, 64)] * (4 if "backward" in name else 3), causal))


@pytest.mark.parametrize("name", SDPA)
def test_causal_attention_does_half_the_work_and_counts_as_a_whole(name: str) -> None:
    full, causal = attention(name, False), attention(name, True)
    forward = 2 * 2 * 2 * 8 * 4096 * 4096 * 64
    assert full == ((2 * forward, int(2.5 * forward)) if "backward" in name else (forward, forward))
    assert causal == (full[0], full[1] * 33 // 64)  # 32 x 33 / 2 of 32 x 32 blocks of 128
    assert attention(name, True, tokens=64) == attention(name, False, 64)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_inner_attention_operators_hold_tokens_before_heads(kind: str, way: str) -> None:
    name = f"aten._{kind}_attention_{way}.default"
    first = [tensor(2, 4096, 8, 64)] * (4 if "backward" in name else 3)
    full, causal = (flops(name, call(name, first, is_causal)) for is_causal in (False, True))
    assert full[0] == causal[0] == 2 * 2 * 2 * 8 * 4096 * 4096 * 64 * (2 if way == "backward" else 1)
    assert causal[1] == full[1] * 33 // 64


def test_is_causal_may_be_left_out_or_named() -> None:
    name = "aten._scaled_dot_product_flash_attention.default"
    plain = json.dumps({"op": name, "args": [tensor(1, 1, 1024, 8)] * 3})
    named = json.dumps({"op": name, "args": [tensor(1, 1, 1024, 8)] * 3, "kwargs": {"is_causal": True}})
    assert call_flops(name, plain, NO_WORK).hardware * 9 == call_flops(name, named, NO_WORK).hardware * 16


def test_without_a_mask_the_kernels_do_what_pytorchs_counter_says() -> None:
    shape = torch.zeros(2, 8, 512, 64)
    for name, given in ((SDPA[0], [shape] * 3), (SDPA[1], [shape] * 4)):
        counted = flop_registry[getattr(torch.ops.aten, name)](*given, out_val=shape)
        assert attention(name, False, tokens=512)[1] == counted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aten.mm.default", '{"op":"aten.mm.default","args":[]}'),
        ("aten.mm.default", kernel_text(('{"op":"aten.mm.default","args":[]}',))),
        (
            "aten._scaled_dot_product_flash_attention.default",
            '{"op":"aten._scaled_dot_product_flash_attention.default"}',
        ),
    ],
)
def test_other_operators_and_kernels_keep_their_count(name: str, text: str) -> None:
    assert flops(name, text, Work(123, 0, 0, "float32", True)) == (123, 123)


def test_recurrent_layers_multiply_every_token_with_every_weight() -> None:
    weights = [tensor(64, 8, dtype="float32"), tensor(64, 16, dtype="float32")]
    biases = [tensor(64, dtype="float32")] * 2
    state = [tensor(4, 16, dtype="float32")] * 2
    expected = 2 * (10 * 4) * (64 * 8 + 64 * 16)
    for name, args in (
        ("aten.mkldnn_rnn_layer.default", [tensor(10, 4, 8, dtype="float32"), *weights, *biases, *state]),
        ("aten._cudnn_rnn.default", [tensor(10, 4, 8, dtype="float32"), {"l": weights + biases}, 4, None, *state]),
    ):
        text = json.dumps({"op": name, "args": args})
        assert flops(name, text) == (expected, expected)
        backward = name.replace(".default", "_backward.default")
        assert flops(backward, text) == (2 * expected, 2 * expected)


VOLTA = replace(
    AMPERE,
    matrix_flops={"float16": 125e12},
    vector_flops={"float32": 15e12, "float64": 7e12},
    capability=(7, 0),
)
CDNA = replace(
    AMPERE,
    vendor="amd",
    matrix_flops={"float32": 163e12, "bfloat16": 1307e12, "tf32": 653e12},
    vector_flops={"float32": 163e12},
    capability=None,
)


@pytest.mark.parametrize(
    ("device", "dtype", "kind", "matmul", "expected"),
    [
        (AMPERE, "float32", MATRIX, "highest", 20e12),
        (AMPERE, "float32", MATRIX, "high", 150e12),
        (AMPERE, "float32", CONVOLUTIONS, "highest", 150e12),
        (AMPERE, "float32", ATTENTION, "high", 50e12),
        (AMPERE, "bfloat16", MATRIX, "highest", 300e12),
        (VOLTA, "float32", CONVOLUTIONS, "high", 15e12),
        (VOLTA, "float16", MATRIX, "highest", 125e12),
        (VOLTA, "bfloat16", MATRIX, "highest", 15e12),
        (VOLTA, "float64", MATRIX, "highest", 7e12),
        (CDNA, "float32", CONVOLUTIONS, "high", 163e12),
        (CDNA, "bfloat16", MATRIX, "highest", 1307e12),
    ],
)
def test_peak_rates_are_those_that_pytorchs_defaults_use(
    device: Device, dtype: str, kind: str, matmul: Any, expected: float
) -> None:
    assert peak_flops(device, dtype, kind, matmul) == expected


def convolution(groups: int, mask: tuple[bool, bool, bool] = (True, True, True)) -> int:
    """The operations of the backward pass of a 7 x 7 convolution with 96 channels, as torch's counter gives them."""
    x, weight = tensor(8, 96, 56, 56), tensor(96, 96 // groups, 7, 7)
    args = [x, x, weight, [96], [1, 1], [3, 3], [1, 1], False, [0, 0], groups, list(mask)]
    text = json.dumps({"op": "aten.convolution_backward.default", "args": args})
    return call_flops("aten.convolution_backward.default", text, replace(NO_WORK, flops=1)).hardware


def test_the_backward_pass_of_a_convolution_is_two_forward_products_whatever_its_groups() -> None:
    forward = 2 * 8 * 96 * 56 * 56 * 7 * 7
    assert convolution(96) == 2 * forward
    assert convolution(1) == 2 * forward * 96
    assert convolution(96, (False, True, True)) == forward


FUSED = (
    '{"op":"x","args":[{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]},{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]},'
    '{"t":["bfloat16",[1,1,128,8],[1,1,1,1]]}]}'
)
FULL = 2 * 2 * 128 * 128 * 8


def op(name: str, phase: Phase, signature: int, microbatch: int = 0) -> Op:
    return Op(name, -1, phase, microbatch, signature, (), False)


def made(ops: list[Op], scale: int = 1) -> Trace:
    return replace(
        plain_trace("transformer"),
        batch_size=8,
        microbatch_size=8 // scale,
        microbatches=min(2, scale),
        scale_microbatches=scale,
        ops=ops,
        signatures=['{"op":"mm"}', FUSED, '{"op":"add"}'],
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
TABLE = replace(
    COSTS,
    ops={s: OpCost(t, 0, False) for s, t in zip(TRACE.signatures, (2e-3, 1e-3, 3e-3), strict=True)},
    dispatch_seconds=0.0,
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
    # a last microbatch of fewer samples counts as a part
    found = throughput(replace(step, batch_size=7), TABLE, AMPERE)
    assert found.model_flops == 1000 + 2.5 * 2000
    assert found.step_seconds == pytest.approx(6 * 2e-3)


def test_a_given_time_replaces_the_sum_and_unknown_rates_have_no_utilisation() -> None:
    assert throughput(TRACE, TABLE, AMPERE, step_seconds=1.0).samples_per_second == 8
    found = throughput(TRACE, TABLE, replace(AMPERE, matrix_flops={}, vector_flops={}))
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


ADD_TEXT, MUL_TEXT, MM_TEXT = (
    f'{{"op":"aten.{name}","args":[]}}' for name in ("add.Tensor", "mul.Tensor", "mm.default")
)
KERNELS = replace(
    COSTS,
    ops={ADD_TEXT: OpCost(1.0, 10, True), MUL_TEXT: OpCost(2.0, 20, True), MM_TEXT: OpCost(5.0, 50, True)},
    dispatch_seconds=0.5,
)


@pytest.mark.parametrize(
    ("members", "reused", "expected"),
    [
        ((ADD_TEXT, MUL_TEXT), 0, OpCost(2.0, 0, True)),
        ((ADD_TEXT, MUL_TEXT), 7, OpCost(2.0, -7, True)),
        ((MM_TEXT,), 0, OpCost(5.0, 50, True)),
        ((MM_TEXT, ADD_TEXT), 0, OpCost(5.0, 0, True)),
        ((ADD_TEXT, "unknown"), 0, OpCost(1.0, 0, False)),
        ((), 0, OpCost(0.0, 0, True)),
    ],
)
def test_a_kernel_is_as_slow_as_the_slowest_of_its_operators(
    members: tuple[str, ...], reused: int, expected: OpCost
) -> None:
    text = kernel_text(members, reused)
    assert is_kernel(text) and not is_kernel(ADD_TEXT)
    assert KERNELS.of(text) == expected
    assert KERNELS.seconds_of(text) == expected.seconds and KERNELS.seconds_of(ADD_TEXT) == 1.5


def test_the_operators_of_kernels_are_there_for_their_costs() -> None:
    trace = TRACE
    assert unfused(trace) is trace
    work = Work(1, 2, 3, "float32", True)
    text = kernel_text((ADD_TEXT, MUL_TEXT))
    fused = replace(
        trace,
        signatures=[*trace.signatures, ADD_TEXT, MUL_TEXT, text],
        works=[*trace.works, work, work, work],
        ops=[replace(trace.ops[0], signature=len(trace.signatures) + 2), *trace.ops[1:]],
    )
    alone = unfused(fused)
    assert alone.signatures == [*trace.signatures, ADD_TEXT, MUL_TEXT]
    assert [op.name for op in alone.ops] == ["aten.add.Tensor", "aten.mul.Tensor", *(op.name for op in trace.ops[1:])]
    assert [alone.signatures[op.signature] for op in alone.ops[:2]] == [ADD_TEXT, MUL_TEXT]
