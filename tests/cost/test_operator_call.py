"""Bytes that move, where arguments cover others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost.operator_call import OperatorCall, traffic_bytes
from memfit.ir.trace import Work
from tests.gpus import AMPERE
from tests.ir.test_flops import tensor


def traffic(name: str, args: list[object], read: int, write: int) -> int:
    text = json.dumps({"op": name, "args": args})
    return traffic_bytes(OperatorCall(name, text, Work(0, read, write, "float32", True), AMPERE))


TABLE = tensor(50000, 64, dtype="float32")
INDICES = tensor(8, 16, dtype="int64")
ROWS = 8 * 16 * 64 * 4


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    assert traffic("aten.embedding.default", [TABLE, INDICES], 50000 * 256 + 1024, ROWS) == 2 * ROWS + 1024


def test_its_gradient_is_filled_and_then_added_to() -> None:
    args = [tensor(8, 16, 64, dtype="float32"), INDICES, 50000]
    assert traffic("aten.embedding_dense_backward.default", args, ROWS + 1024, 50000 * 256) == (
        ROWS + 1024 + 2 * ROWS + 50000 * 256
    )


def test_what_is_overwritten_is_not_read() -> None:
    assert traffic("aten.zero_.default", [tensor(100)], 200, 200) == 200
    assert traffic("aten.copy_.default", [tensor(100), tensor(100)], 400, 200) == 400
    assert traffic("aten.add_.Tensor", [tensor(100), tensor(100)], 400, 200) == 600


def test_statistics_take_a_second_pass() -> None:
    assert traffic("aten.native_batch_norm.default", [tensor(100)], 200, 200) == 600


def test_the_loss_reads_one_score_for_each_target() -> None:
    scores, targets = tensor(1024, 50000, dtype="float32"), tensor(1024, dtype="int64")
    assert traffic("aten.nll_loss_forward.default", [scores, targets], 1024 * 200008, 8) == 1024 * (8 + 32) + 8
    whole = 1024 * 200000
    assert traffic("aten.nll_loss_backward.default", [None, scores, targets], 1024 * 200008, whole) == whole + 8192


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
    assert traffic_bytes(found) > 0
