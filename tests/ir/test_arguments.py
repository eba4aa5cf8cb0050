"""Signatures read without torch say what was written with it."""

from __future__ import annotations

import torch

from memfit.ir import ITEM_BYTES, Tensor, arguments
from memfit.workload import signature

aten = torch.ops.aten


def test_tensors_lists_and_names_come_back() -> None:
    x, w = torch.zeros(2, 3, 4), torch.zeros(5, dtype=torch.bfloat16)
    text = signature(aten.sum.dim_IntList, (x, [0, -1], True), {"dtype": torch.float64, "other": [w, None]})
    given = arguments(text)
    assert given.values == [Tensor("float32", (2, 3, 4), (12, 4, 1)), [0, -1], True]
    assert given.named == {"dtype": "float64", "other": [Tensor("bfloat16", (5,), (1,)), None]}
    assert given.tensors == [given.values[0], given.named["other"][0]]
    assert [t.nbytes for t in given.tensors] == [96, 10]
    assert given.get(2, "keepdim") is True and given.get(3, "dtype") == "float64" and given.get(7, "no", 5) == 5


def test_a_name_alone_has_no_arguments() -> None:
    assert arguments('{"op":"mine.operator.default"}').tensors == []


def test_item_sizes_are_torchs() -> None:
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        assert ITEM_BYTES.get(name, 1) == getattr(torch, name).itemsize
    for name in ("complex64", "complex128", "float8_e4m3fn", "uint16"):
        assert ITEM_BYTES.get(name, 1) == getattr(torch, name).itemsize


def test_channels_last_is_seen() -> None:
    x = torch.zeros(2, 3, 4, 4)
    for tensor, expected in ((x, False), (x.to(memory_format=torch.channels_last), True), (x[:, :1], False)):
        assert arguments(signature(aten.relu.default, (tensor,), {})).tensors[0].channels_last is expected
