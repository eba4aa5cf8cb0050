"""Operations of calls against hand counts and PyTorch's counter, and the rates that apply to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.flop_counter import flop_registry

from memfit.ir import ATTENTION, CONVOLUTIONS, MATRIX, Device, Work, call_flops, peak_flops
from memfit.ir.throughputs import _CAUSAL, Flops
from tests.gpus import AMPERE

NO_WORK = Work(0, 0, 0, "bfloat16", True)


def call(name: str, first: list[Any], causal: bool) -> str:
    position = _CAUSAL[name.split(".")[1]]
    args = [*first, *[None] * (position - len(first)), causal]
    return json.dumps({"op": name, "args": args})


def tensor(*shape: int, dtype: str = "bfloat16") -> dict[str, Any]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return {"t": [dtype, list(shape), strides]}


def flops(name: str, causal: bool, tokens: int = 4096) -> Flops:
    first = [tensor(2, 8, tokens, 64)] * (4 if "backward" in name else 3)
    text = call(name, first, causal)
    return call_flops(name, text, NO_WORK)


@pytest.mark.parametrize("name", _CAUSAL)
def test_the_place_of_is_causal_is_the_schemas(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert schema.arguments[_CAUSAL[name]].name in ("is_causal", "custom_mask_type")


SDPA = [n for n in _CAUSAL if n.startswith("_scaled")]


@pytest.mark.parametrize("name", SDPA)
def test_causal_attention_does_half_the_work_and_counts_as_a_whole(name: str) -> None:
    full, causal = flops(f"aten.{name}.default", False), flops(f"aten.{name}.default", True)
    forward = 2 * 2 * 2 * 8 * 4096 * 4096 * 64
    backward = "backward" in name
    assert full == Flops(2 * forward if backward else forward, int(2.5 * forward) if backward else forward)
    assert causal.model == full.model
    assert causal.hardware == full.hardware * 33 // 64  # 32 x 33 / 2 of 32 x 32 blocks of 128
    assert flops(f"aten.{name}.default", True, tokens=64).hardware == flops(f"aten.{name}.default", False, 64).hardware


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
def test_inner_attention_operators_hold_tokens_before_heads(name: str) -> None:
    first = [tensor(2, 4096, 8, 64)] * 3
    found = call_flops(f"aten.{name}.default", call(f"aten.{name}.default", first, False), NO_WORK)
    assert found.model == 2 * 2 * 2 * 8 * 4096 * 4096 * 64


def test_is_causal_may_be_left_out_or_named() -> None:
    name = "aten._scaled_dot_product_flash_attention.default"
    plain = json.dumps({"op": name, "args": [tensor(1, 1, 1024, 8)] * 3})
    named = json.dumps({"op": name, "args": [tensor(1, 1, 1024, 8)] * 3, "kwargs": {"is_causal": True}})
    assert call_flops(name, plain, NO_WORK).hardware * 9 == call_flops(name, named, NO_WORK).hardware * 16


def test_without_a_mask_the_kernels_do_what_pytorchs_counter_says() -> None:
    shape = torch.zeros(2, 8, 512, 64)
    for name, given in ((SDPA[0], [shape] * 3), (SDPA[1], [shape] * 4)):
        counted = flop_registry[getattr(torch.ops.aten, name)](*given, out_val=shape)
        assert flops(f"aten.{name}.default", False, tokens=512).hardware == counted


def test_other_operators_keep_their_count() -> None:
    work = Work(123, 0, 0, "float32", True)
    assert call_flops("aten.mm.default", '{"op":"aten.mm.default","args":[]}', work) == Flops(123, 123)


def test_attention_without_arguments_keeps_its_count() -> None:
    name = "aten._scaled_dot_product_flash_attention.default"
    assert call_flops(name, json.dumps({"op": name}), Work(7, 0, 0, "bfloat16", True)) == Flops(7, 7)


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
        assert call_flops(name, text, NO_WORK) == Flops(expected, expected)
        backward = name.replace(".default", "_backward.default")
        assert call_flops(backward, text, NO_WORK) == Flops(2 * expected, 2 * expected)


VOLTA = Device(
    name="volta",
    kind="cuda",
    vendor="nvidia",
    description="",
    memory_bytes=1,
    usable_bytes=1,
    cores=80,
    matrix_flops={"float16": 125e12},
    vector_flops={"float32": 15e12, "float64": 7e12},
    capability=(7, 0),
)
CDNA = Device(
    name="cdna",
    kind="cuda",
    vendor="amd",
    description="",
    memory_bytes=1,
    usable_bytes=1,
    cores=304,
    matrix_flops={"float32": 163e12, "bfloat16": 1307e12, "tf32": 653e12},
    vector_flops={"float32": 163e12},
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
