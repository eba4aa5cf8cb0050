"""Operator calls as text, and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.workload import rebuild, signature

aten = torch.ops.aten
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw tensors of all dtypes, with permuted, expanded, sliced and empty shapes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and tensor.shape[0] > 1 and draw(st.booleans()):
        tensor = tensor[::2]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.complex_numbers(max_magnitude=1e6),
    st.text(max_size=5),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.contiguous_format, torch.channels_last, torch.strided]),
)
arguments = st.one_of(tensors(), scalars, st.lists(st.one_of(tensors(), scalars), max_size=3))


@given(st.lists(arguments, max_size=4), st.dictionaries(st.sampled_from("abc"), arguments, max_size=2))
@settings(max_examples=300, deadline=None)
def test_what_is_rebuilt_has_the_same_signature(args: list[Any], kwargs: dict[str, Any]) -> None:
    text = signature(aten.add.Tensor, tuple(args), kwargs)
    func, again, named = rebuild(text, "cpu")
    assert func is aten.add.Tensor
    assert signature(func, tuple(again), named) == text
    assert len(again) == len(args) and named.keys() == kwargs.keys()


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_a_rebuilt_tensor_has_dtype_shape_stride_and_safe_values(tensor: torch.Tensor) -> None:
    _, (again,), _ = rebuild(signature(aten.neg.default, (tensor,), {}), "cpu")
    assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    values = again.double()
    assert bool(((values > 0) & (values < 1) if tensor.dtype.is_floating_point else values == 0).all())


@given(tensors(), tensors())
@settings(max_examples=200, deadline=None)
def test_different_tensors_have_different_signatures(one: torch.Tensor, other: torch.Tensor) -> None:
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert (signature(aten.neg.default, (one,), {}) == signature(aten.neg.default, (other,), {})) is same


def test_floats_are_rounded_to_one_digit_so_that_equal_costs_share_a_text() -> None:
    def of(value: float) -> str:
        return signature(aten.mul.Scalar, (torch.zeros(2), value), {})

    assert of(0.9001) == of(0.9) != of(0.5)
    assert math.isnan(rebuild(of(math.nan), "cpu")[1][1])
    assert rebuild(of(-math.inf), "cpu")[1][1] == -math.inf


def test_a_rebuilt_call_runs() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    func, args, kwargs = rebuild(signature(aten.addmm.default, (torch.randn(5), x, w.t()), {"beta": 1}), "cpu")
    assert func(*args, **kwargs).shape == (3, 5)
    text = signature(aten.bernoulli_.float, (torch.zeros(2), 0.5), {"generator": torch.Generator()})
    func, args, kwargs = rebuild(text, "cpu")
    assert kwargs == {"generator": None} and func(*args, **kwargs).shape == (2,)


def test_what_cannot_be_described_leaves_the_operator_alone() -> None:
    text = signature(aten.neg.default, (object(),), {})
    assert json.loads(text) == {"op": "aten.neg.default"}
    with pytest.raises(LookupError, match="no arguments are known for aten.neg.default"):
        rebuild(text, "cpu")
    with pytest.raises(LookupError, match="aten.no_such_operator.default"):
        rebuild('{"op":"aten.no_such_operator.default","args":[]}', "cpu")


def test_a_call_without_gradients_runs_without_them_where_its_kernel_asks() -> None:
    layer, x = torch.nn.LSTM(3, 3), torch.ones(5, 1, 3)
    weights = [w.detach() for w in layer.parameters()]
    state = torch.zeros(1, 3)
    args = (x, *weights, state, state, False, [], 2, 3, 1, True, False, False, True)
    texts = []
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            texts.append(signature(aten.mkldnn_rnn_layer.default, args, {}))
    kept = []
    for text in texts:
        func, given, _ = rebuild(text, "cpu")
        kept.append(func(*given)[3])
    assert kept[0].numel() > 0 and (kept[1] is None or kept[1].numel() == 0)
