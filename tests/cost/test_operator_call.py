"""Bytes that move, where arguments cover others, and buffers inside CUDA operators, computed by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.cost import KERNELS_BYTES, OperatorCall, kernels_bytes, roofline
from memfit.ir import Op, Trace, Work
from tests.gpus import AMPERE
from tests.ir.test_throughputs import call, tensor
from tests.models import plain_trace


def traffic(name: str, args: list[object], read: int, write: int) -> int:
    text = json.dumps({"op": name, "args": args})
    return OperatorCall(name, text, Work(0, read, write, "float32", True), AMPERE).traffic_bytes


TABLE = tensor(50000, 64, dtype="float32")
INDICES = tensor(8, 16, dtype="int64")
ROWS = 8 * 16 * 64 * 4


SCORES, TARGETS = tensor(1024, 50000, dtype="float32"), tensor(1024, dtype="int64")


@pytest.mark.parametrize(
    ("name", "args", "read", "write", "moved"),
    [
        ("embedding.default", [TABLE, INDICES], 50000 * 256 + 1024, ROWS, 2 * ROWS + 1024),  # the rows it looks up
        (  # filled, and then added to
            "embedding_dense_backward.default",
            [tensor(8, 16, 64, dtype="float32"), INDICES, 50000],
            ROWS + 1024,
            50000 * 256,
            ROWS + 1024 + 2 * ROWS + 50000 * 256,
        ),
        ("zero_.default", [tensor(100)], 200, 200, 200),  # what is overwritten is not read
        ("copy_.default", [tensor(100), tensor(100)], 400, 200, 400),
        ("add_.Tensor", [tensor(100), tensor(100)], 400, 200, 600),
        ("native_batch_norm.default", [tensor(100)], 200, 200, 600),  # statistics take a second pass
        ("nll_loss_forward.default", [SCORES, TARGETS], 1024 * 200008, 8, 1024 * (8 + 32) + 8),  # a score a target
        ("nll_loss_backward.default", [None, SCORES, TARGETS], 1024 * 200008, 204_800_000, 204_800_000 + 8192),
    ],
)
def test_bytes_that_move(name: str, args: list[object], read: int, write: int, moved: int) -> None:
    assert traffic(f"aten.{name}", args, read, write) == moved


@given(
    st.sampled_from(["aten.embedding.default", "aten.zero_.default", "aten.relu.default", "aten.index.Tensor"]),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(1, 10**9),
)
def test_more_bytes_never_move_less(name: str, read: int, write: int, more: int) -> None:
    assert traffic(name, [TABLE, INDICES], read + more, write) >= traffic(name, [TABLE, INDICES], read, write)
    assert traffic(name, [TABLE, INDICES], read, write + more) >= traffic(name, [TABLE, INDICES], read, write)


@pytest.mark.parametrize("name", ["aten.native_layer_norm_backward.default", "aten.index.Tensor"])
def test_calls_without_known_arguments_are_counted(name: str) -> None:
    found = OperatorCall(name, json.dumps({"op": name}), Work(0, 10, 10, "float32", True), AMPERE)
    assert found.traffic_bytes > 0


AMD = replace(AMPERE, vendor="amd", capability=None)


def hidden(name: str, args: list[Any], work: Work | None = None, device: Any = AMPERE) -> int:
    text = json.dumps({"op": name, "args": args})
    return OperatorCall(name, text, work or Work(0, 1, 1, "bfloat16", True), device).workspace_bytes


def attention(kind: str, q: Any, k: Any, device: Any = AMPERE, forward: bool = False) -> int:
    name = f"aten._scaled_dot_product_{kind}_attention{'' if forward else '_backward'}.default"
    text = call(name, [q, k, k] if forward else [q, q, k, k], True)
    return OperatorCall(name, text, Work(0, 1, 1, "bfloat16", True), device).workspace_bytes


HEADS_OF_80, GROUPED = tensor(4, 16, 2000, 80), (tensor(2, 32, 1024, 128), tensor(2, 8, 1024, 128))
ATTENTION = {
    # 2,000 tokens rounded up to 2,048, a head of 80 rounded up to 96.
    "flash accumulates in float32": ("flash", HEADS_OF_80, 4 * 2048 * 16 * 96 * 4 + 4 * 16 * 2048 * 4),
    "flash with wide heads": ("flash", tensor(1, 2, 128, 160), 128 * 2 * 192 * 4 + 2 * 128 * 4),
    "cuDNN": ("cudnn", tensor(4, 16, 2000, 64), 4 * 16 * 2000 * (64 + 1) * 4),
    # Heads of 64: blocks of 64 x 64; 32 blocks of queries; delta beside them.
    "tiles of the query's gradient": (
        "efficient", tensor(2, 8, 2048, 64), 2 * 8 * 2048 * 4 + 2 * 8 * 32 * (16 + 64 * 64 * 4)
    ),
    "wider tiles": ("efficient", tensor(2, 8, 2048, 128), 2 * 8 * 2048 * 4 + 2 * 8 * 16 * (16 + 128 * 128 * 4)),
    # All 4 blocks of keys, which are fewer than 200 / 4.
    "wide heads accumulate keys and values": (
        "efficient",
        tensor(1, 4, 256, 192),
        4 * 256 * 4 + 4 * (2 * 3) * (16 + 128 * 64 * 4) + 4 * 4 * 64 * (256 + 256) * 4,
    ),
    "float32 makes delta of operators": (
        "efficient", tensor(1, 1, 64, 32, dtype="float32"), 64 * 4 + max(16 + 64 * 64 * 4, 64 * 32 * 4 + 64 * 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_backward_passes_of_attention(name: str) -> None:
    kind, q, expected = ATTENTION[name]
    assert attention(kind, q, q) == expected


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_grouped_queries_expand_the_gradients_of_keys_and_values(kind: str) -> None:
    q, k = GROUPED
    assert attention(kind, q, k) - attention(kind, q, q) == 2 * (2 * 1024 * 32 * 128 * 2)


def test_rocm_keeps_one_float_for_each_row_and_a_cpu_nothing() -> None:
    assert attention("flash", HEADS_OF_80, HEADS_OF_80, AMD) == 4 * 16 * 2000 * 4
    assert attention("flash", HEADS_OF_80, HEADS_OF_80, replace(AMPERE, kind="cpu")) == 0


def test_efficient_forward_accumulates_only_wide_heads() -> None:
    narrow, wide = tensor(1, 4, 256, 128), tensor(1, 4, 256, 192)
    assert attention("efficient", narrow, narrow, forward=True) == 0
    assert attention("efficient", wide, wide, forward=True) == 4 * 256 * 192 * 4


def test_layer_norm_backward_sums_in_two_passes_only_when_rows_are_many_and_short() -> None:
    name = "aten.native_layer_norm_backward.default"

    def of(rows: int, columns: int) -> int:
        x, weight = tensor(rows, columns), tensor(columns, dtype="float32")
        return hidden(name, [x, x, {"l": [columns]}, tensor(rows), tensor(rows), weight, weight])

    assert of(1024, 256) == 0 and of(100_000, 4096) == 0
    assert of(100_000, 256) == 2 * 3125 * 256 * 4
    assert of(1_000_000, 256) == 2 * 4096 * 256 * 4
    rms = "aten._fused_rms_norm_backward.default"
    x, weight = tensor(100_000, 256), tensor(256, dtype="float32")
    assert hidden(rms, [x, x, {"l": [256]}, tensor(100_000), weight]) == 3125 * 256 * 4


def test_embedding_backward_sorts_many_indices() -> None:
    name = "aten.embedding_dense_backward.default"
    assert hidden(name, [tensor(3, 1024, 64), tensor(3, 1024, dtype="int64"), 50000, -1, False]) == 0
    n = 8192
    partials = n // 10 + n
    summed = n * 8 + (2 * n + partials) * 8 + partials * 64 * 4
    assert hidden(name, [tensor(8, 1024, 64), tensor(8, 1024, dtype="int64"), 50000, -1, False]) == 2 * n * 8 + summed
    few = hidden(name, [tensor(8, 1024, 1), tensor(8, 1024, dtype="int64"), 10, -1, False])
    assert few == 2 * n * 8 + 3 * n * 8  # the sort is the larger part


SCORES_OF_HEADS, IMAGES = tensor(4, 12, 1024, 1024, dtype="float32"), tensor(4, 32, 16, 16)
LAST = {"t": ["bfloat16", [4, 64, 8, 8], [4096, 1, 512, 64]]}
PUT = [tensor(100, 8), {"l": [tensor(5000, dtype="int64")]}, tensor(5000, 8)]
GATES = {"l": [tensor(256, 32), tensor(256, 64), tensor(256), tensor(256)]}
WORKSPACES: dict[str, tuple[str, list[Any], int]] = {
    # Liger-Kernel's attention written out: one more tensor of scores at the peak than the operators show.
    "softmax's product": ("_softmax_backward_data.default", [SCORES_OF_HEADS, SCORES_OF_HEADS, -1], 192 * 2**20),
    "none of log softmax": ("_log_softmax_backward_data.default", [SCORES_OF_HEADS, SCORES_OF_HEADS, -1], 0),
    "the sort of an accumulating write": ("index_put.default", [*PUT, True], 6 * 5000 * 8),
    "none of a write": ("index_put.default", [*PUT, False], 0),
    "coefficients of channels": ("native_group_norm.default", [IMAGES, None, None, 4, 32, 256, 8], 4 * 4 * 2 * 32),
    "gradients' coefficients": (
        "native_group_norm_backward.default",
        [IMAGES, IMAGES, None, None, None, 4, 32, 256, 8],
        4 * 4 * (3 * 32 + 2 * 8),
    ),
    "none of images by channel": ("native_batch_norm.default", [tensor(4, 64, 8, 8)], 0),
    "staging of channels-last": ("native_batch_norm.default", [LAST], 4 * 64 * 128 * 4),
    "staging of their gradients": ("native_batch_norm_backward.default", [LAST, LAST], 2 * 64 * 128 * 4),
    "partials of all, as many as of the largest": (
        "_foreach_norm.Scalar",
        [{"l": [tensor(1_000_000), tensor(10), tensor(65536)]}, 2],
        4 * 3 * 16,
    ),
    "the gates of every step": ("_cudnn_rnn.default", [tensor(10, 4, 32), GATES], 10 * 4 * 256 * 2),
    "nothing of a sum": ("add.Tensor", [HEADS_OF_80, HEADS_OF_80], 0),
}


@pytest.mark.parametrize("name", WORKSPACES)
def test_workspaces(name: str) -> None:
    operator, args, nbytes = WORKSPACES[name]
    assert hidden(f"aten.{operator}", args) == nbytes


def test_reductions_of_much_to_little_are_staged() -> None:
    x = tensor(1024, 1024)
    assert 0 < hidden("aten.sum.default", [x], Work(0, 2**21, 2, "bfloat16", True)) < 2**20
    assert hidden("aten.sum.dim_IntList", [x], Work(0, 2**21, 2**20, "bfloat16", True)) == 0


def convolution(dtype: str = "bfloat16", channels: int = 64, last: bool = False, device: Any = AMPERE) -> int:
    x = tensor(8, 64, 32, 32, dtype=dtype)
    if last:
        x["t"][2] = [65536, 1, 2048, 64]
    weight = tensor(64, channels, 3, 3, dtype=dtype)
    return hidden("aten.convolution.default", [x, weight], Work(10**9, 1, 1_000_000, dtype, True), device)


def test_convolutions_on_matrix_units_copy_what_is_not_channels_last() -> None:
    x, weight = 8 * 64 * 32 * 32, 64 * 64 * 9
    assert convolution() == 2 * (x + weight) + 1_000_000
    assert convolution(last=True) == 0 and convolution(channels=1) == 0
    assert convolution("float32", device=replace(AMPERE, matrix_flops={})) == 0


@pytest.mark.parametrize("kernel", [(3,), (5, 5), (1, 7), (3, 3, 3)])
def test_convolutions_of_several_pixels_take_three_copies_in_tf32(kernel: tuple[int, ...]) -> None:
    pixels = (16,) * len(kernel)
    sizes = [(8, 64, *pixels), (32, 64, *kernel), (8, 32, *pixels)]
    copies = sum(math.prod(size) for size in sizes) * 4

    def both(dtype: str, kernel: tuple[int, ...]) -> list[int]:
        x, weight, y = (tensor(*size, dtype=dtype) for size in (sizes[0], (32, 64, *kernel), sizes[2]))
        work = Work(10**9, 1, math.prod(sizes[2]) * (4 if dtype == "float32" else 2), dtype, True)
        names = ("aten.convolution.default", "aten.convolution_backward.default")
        return [hidden(name, args, work) for name, args in zip(names, ([x, weight], [y, x, weight]), strict=True)]

    assert both("float32", kernel) == [3 * copies] * 2
    assert both("bfloat16", kernel) == [copies // 2] * 2
    assert both("float32", (1,) * len(kernel)) == [0, 4 * 32 * 64]  # a product of matrices, which needs no copies


def test_the_time_of_copying_is_that_of_one_copy() -> None:
    x, weight = tensor(8, 64, 32, 32, dtype="float32"), tensor(64, 64, 3, 3, dtype="float32")
    work = Work(10**9, 1, 8 * 64 * 32 * 32 * 4, "float32", True)
    text = json.dumps({"op": "aten.convolution.default", "args": [x, weight]})
    found = OperatorCall("aten.convolution.default", text, work, AMPERE)
    assert 3 * found.layout_bytes == found.workspace_bytes
    assert replace(found, device=replace(AMPERE, kind="cpu")).layout_bytes == 0
    assert replace(found, name="aten.mm.default").layout_bytes == 0


def test_convolution_backward_copies_the_gradient_and_keeps_a_float32_sum() -> None:
    gradient, x, weight = tensor(8, 32, 32, 32), tensor(8, 64, 32, 32), tensor(32, 64, 3, 3)
    name = "aten.convolution_backward.default"
    assert hidden(name, [gradient, x, weight]) == 2 * (8 * 1024 * (32 + 64) + 32 * 64 * 9)
    x["t"][2] = [65536, 1, 2048, 64]
    assert hidden(name, [gradient, x, weight]) == 4 * 32 * 64 * 9


HIDING = """_efficient_attention_backward _efficient_attention_forward _flash_attention_backward _foreach_norm
_index_put_impl_ _native_batch_norm_legit _unsafe_index_put argsort cudnn_batch_norm cudnn_batch_norm_backward
cudnn_convolution embedding_dense_backward index_put_ linalg_vector_norm native_layer_norm_backward sort sum""".split()
NAMES = {*HIDING, *(f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn"))}


@pytest.mark.parametrize("name", sorted(NAMES | {operator.split(".")[0] for operator, *_ in WORKSPACES.values()}))
def test_calls_with_unknown_arguments_have_no_workspace(name: str) -> None:
    for args in ([], [None] * 20, [1, "text", {"l": []}, 2.5]):
        assert hidden(f"aten.{name}.default", args) == 0
    assert hidden(f"aten.{name}.default", [None, None, None, tensor(2)]) < 2**20  # nor one that is made up


@given(st.sampled_from(["flash", "cudnn", "efficient"]), *[st.integers(1, 64)] * 2, st.integers(1, 5000))
def test_more_tokens_never_take_less(kind: str, batch: int, heads: int, tokens: int) -> None:
    some, more = tensor(batch, heads, tokens, 64), tensor(batch, heads, tokens + 64, 64)
    assert attention(kind, more, more) >= attention(kind, some, some) > 0


def trace_of(*names: str, phases: tuple[Any, ...] = ("forward",)) -> Trace:
    ops = [Op(name, -1, phase, 0, 0, (), False) for name in names for phase in phases]
    return replace(plain_trace("transformer"), ops=ops)


@pytest.mark.parametrize(
    ("phases", "count"),
    [((), 0), (("forward", "optimizer"), 1), (("backward", "recompute"), 1), (("forward", "recompute"), 2)],
)
def test_each_thread_that_multiplies_has_a_cublas_workspace(phases: tuple[Any, ...], count: int) -> None:
    table = roofline([trace_of("aten.mm.default", phases=phases)], AMPERE)
    assert table.resident_workspace_bytes == count * AMPERE.cublas_workspace_bytes


@pytest.mark.parametrize("name", ["aten.convolution.default", "aten.cudnn_convolution.default"])
def test_only_steps_that_convolve_need_the_kernels_of_cudnn(name: str) -> None:
    assert kernels_bytes(trace_of("aten.mm.default", "aten.add.Tensor")) == KERNELS_BYTES
    assert kernels_bytes(trace_of("aten.mm.default", name)) == KERNELS_BYTES + 283 * 2**20
    assert kernels_bytes(trace_of(name.replace("convolution", "convolution_backward"))) > KERNELS_BYTES
