"""Operator calls as text, and back, with values of arguments that operators take, and that cost what a step's would."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.workload import rebuild, signature

aten = torch.ops.aten
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


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


def rebuilt(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Return a tensor as it is rebuilt for an operator that does not ask for its values."""
    _, (found,), _ = rebuild(signature(aten.neg.default, (tensor,), {}), device)
    assert isinstance(found, torch.Tensor)
    return found


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_a_rebuilt_tensor_has_dtype_shape_stride_and_safe_values(tensor: torch.Tensor) -> None:
    again = rebuilt(tensor)
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


def again(func: Any, *args: Any) -> tuple[Any, list[Any]]:
    """Return what a call gives with rebuilt arguments, and these."""
    func, rebuilt, named = rebuild(signature(func, args, {}), "cpu")
    return func(*rebuilt, **named), rebuilt


def whole(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def described(found: Any) -> list[Any]:
    return [(value.shape, value.dtype) for value in tree_leaves(found)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_differ_and_are_between_0_and_1_in_every_format(dtype: torch.dtype) -> None:
    values = rebuilt(torch.empty(3000, 500, dtype=dtype)).double()
    assert values.min() > 0 and values.max() < 1
    assert 0.45 < values.mean() < 0.55 and values.std() > 0.2
    assert not torch.equal(values[0], values[1])
    assert len({tuple(row) for row in values[:, :32].tolist()}) == 3000  # past where they repeat too


@given(st.lists(st.integers(0, 4), max_size=3))
def test_numbers_are_the_same_each_time_and_take_none_of_a_generators(shape: list[int]) -> None:
    before = torch.get_rng_state()
    one, other = (rebuilt(torch.empty(shape)) for _ in range(2))
    assert one.shape == torch.Size(shape) and torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_device_nothing_is_drawn() -> None:
    assert rebuilt(torch.empty(10**9, 10**6, device="meta"), "meta").device.type == "meta"
    text = signature(aten.gather.default, (torch.zeros(4, 4), 1, whole(4, 4)), {})
    func, args, _ = rebuild(text, "meta")
    assert func(*args).shape == (4, 4)


X = torch.zeros(64, 300)
INDEXED: dict[str, tuple[Any, tuple[Any, ...], Callable[[list[Any]], torch.Tensor], int]] = {
    "gather": (aten.gather.default, (X, 1, whole(64, 200)), lambda args: args[2], 300),
    "gather, from the end": (aten.gather.default, (X, -2, whole(50, 300)), lambda args: args[2], 64),
    "gather, expanded": (aten.gather.default, (X, 0, whole(64, 1).expand(64, 300)), lambda args: args[2], 64),
    "scatter_add": (aten.scatter_add.default, (X, 1, whole(64, 200), X), lambda args: args[2], 300),
    "index_select": (aten.index_select.default, (X, 1, whole(500)), lambda args: args[2], 300),
    "index_add": (aten.index_add.default, (X, 1, whole(500), torch.zeros(64, 500)), lambda args: args[2], 300),
    "index": (aten.index.Tensor, (X, [None, whole(500)]), lambda args: args[1][1], 300),
    "index_put": (aten.index_put.default, (X, [whole(500)], torch.zeros(500, 300)), lambda args: args[1][0], 64),
    "embedding": (aten.embedding.default, (X, whole(5, 100)), lambda args: args[1], 64),
    "embedding of int32": (aten.embedding.default, (X, whole(5, 100).int()), lambda args: args[1], 64),
    "embedding's gradient": (
        aten.embedding_dense_backward.default, (torch.zeros(5, 100, 300), whole(5, 100), 64, -1, False),
        lambda args: args[1], 64,
    ),
    "a pool's gradient": (
        aten.max_pool2d_with_indices_backward.default,
        (torch.zeros(2, 8, 10, 10), torch.zeros(2, 8, 20, 20), [2, 2], [2, 2], [0, 0], [1, 1], False,
         whole(2, 8, 10, 10)),
        lambda args: args[7], 400,
    ),
    "a pool's gradient in three dimensions": (
        aten.max_pool3d_with_indices_backward.default,
        (torch.zeros(2, 8, 5, 5, 5), torch.zeros(2, 8, 10, 10, 10), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False,
         whole(2, 8, 5, 5, 5)),
        lambda args: args[7], 1000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_spread_over_all_that_they_may_name(name: str) -> None:
    func, args, indices_of, count = INDEXED[name]
    _, rebuilt = again(func, *args)  # out of range, it would fail
    indices = indices_of(rebuilt)
    assert 0 <= int(indices.min()) < 0.1 * count and 0.9 * count < int(indices.max()) < count
    assert len(indices.unique()) > min(20, count / 2)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.unsqueeze.default, (X, 2)),  # a dimension that is not there yet
        (aten.unsqueeze.default, (X, -3)),
        (aten.max_pool2d_with_indices.default, (torch.zeros(1, 2, 8, 8), [2, 2])),
        (aten.sum.dim_IntList, (X, [0, 1])),
        (aten.select.int, (X, 0, 63)),
        (aten.index_fill.int_Scalar, (X, 0, whole(3), 1.0)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_arguments_that_only_look_like_what_is_indexed_do_no_harm(func: Any, args: tuple[Any, ...]) -> None:
    found, rebuilt = again(func, *args)
    assert described(found) == described(func(*args))
    assert [value for value in rebuilt if not isinstance(value, torch.Tensor)] == [
        value for value in args if not isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_that_are_packed_have_a_length(batch_first: bool) -> None:
    batch, steps = 5, 7
    padded = torch.zeros(*((batch, steps) if batch_first else (steps, batch)), 2)
    (packed, sizes), _ = again(aten._pack_padded_sequence.default, padded, whole(batch), batch_first)
    assert packed.shape == (batch * steps, 2) and sizes.tolist() == [batch] * steps


def test_a_mask_among_indices_stands_for_its_dimensions() -> None:
    args = (torch.zeros(2, 3, 500), [torch.ones(2, 3, dtype=torch.bool), whole(4)])
    assert rebuild(signature(aten.index.Tensor, args, {}), "cpu")[1][1][1].max() > 3  # of the last dimension


def test_where_nothing_is_indexed_nothing_is_spread() -> None:
    for args in ((X, 1, whole(64, 0)), (torch.zeros(0, 300), 1, whole(0, 5)), (torch.zeros(()), 0, whole())):
        assert again(aten.gather.default, *args)[0].shape == args[2].shape


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.bernoulli.default, (X,)),
        (aten.multinomial.default, (X, 5)),
        (aten.binary_cross_entropy.default, (X, X)),
        (aten.linalg_cholesky_ex.default, (torch.zeros(3, 8, 8),)),
        (aten.logit.default, (X,)),
        (aten.native_batch_norm.default, (torch.zeros(2, 3, 4), None, None, *[torch.zeros(3)] * 2, False, 0.1, 1e-5)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_operators_that_ask_for_some_values_get_them(func: Any, args: tuple[Any, ...]) -> None:
    found, _ = again(func, *args)
    first = found[0] if isinstance(found, tuple) else found
    assert not first.dtype.is_floating_point or bool(first.isfinite().all())


ENDS = torch.tensor([1, 2, 3, 1024], dtype=torch.int32)


@pytest.mark.parametrize("gradient", [False, True])
def test_groups_of_a_grouped_product_are_equally_large(gradient: bool) -> None:
    a, b = torch.randn(1024, 64), torch.randn(1024, 96) if gradient else torch.randn(4, 64, 96)
    found, args = again(aten._grouped_mm.default, a.t() if gradient else a, b, ENDS)
    assert args[2].tolist() == [256, 512, 768, 1024] and args[2].dtype == torch.int32
    assert found.shape == ((4, 64, 96) if gradient else (1024, 96))


def test_groups_of_a_product_of_another_library_are_equally_large_too() -> None:
    pytest.importorskip("transformers.integrations.moe")
    operator = torch.ops.transformers.grouped_mm_fallback.default
    text = signature(operator, (torch.randn(1024, 64), torch.randn(4, 64, 96), ENDS), {})
    assert rebuild(text, "cpu")[1][2].tolist() == [256, 512, 768, 1024]


def test_a_ctc_loss_can_be_run_again_with_labels_for_every_sequence() -> None:
    scores, counts = torch.randn(20, 3, 5).log_softmax(-1), torch.tensor([4, 2, 5])
    for labels in (torch.ones(11, dtype=torch.long), torch.ones(3, 6, dtype=torch.long)):
        lengths = torch.tensor([20, 18, 20])
        (likelihood, alpha), _ = again(aten._ctc_loss.Tensor, scores, labels, lengths, counts)
        assert likelihood.shape == (3,) and alpha.shape[:2] == (3, 20)
        given = (likelihood, scores, labels, lengths, counts, likelihood, alpha, 0)
        assert again(aten._ctc_loss_backward.Tensor, *given)[0].shape == scores.shape
    narrow = (torch.ones(6), torch.zeros(20, 6, 12), whole(6, 8), whole(6), whole(6), torch.ones(6))
    _, args = again(aten._ctc_loss_backward.Tensor, *narrow, torch.zeros(6, 20, 11), 0)
    assert args[4].tolist() == [5] * 6 and args[3].tolist() == [20] * 6  # no more labels than its scores have room for


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("written", "mask", "at", "chosen"), [((6, 3), (6,), 0, 4), ((6, 3), (6, 3), 0, 18), ((2, 6, 3), (6,), 1, 5)]
)
def test_a_mask_to_write_through_selects_as_many_places_as_there_are_values(
    written: tuple[int, ...], mask: tuple[int, ...], at: int, chosen: int, accumulate: bool
) -> None:
    values = torch.zeros(*written[:at], chosen, *written[at + len(mask) :])
    indices = [*[None] * at, torch.zeros(mask, dtype=torch.bool)]
    found, args = again(aten.index_put_.default, torch.zeros(written), indices, values, accumulate)
    assert found.shape == written and int(args[1][at].sum()) == chosen


@pytest.mark.parametrize("shape", [(6, 3), (6,)])
def test_values_are_added_through_a_mask_that_stands_beside_the_indices(shape: tuple[int, ...]) -> None:
    """As the gradient of an embedding with padding is, where Inductor compiles it."""
    places, width = torch.zeros(1, 8, dtype=torch.long), shape[1:]
    mask = torch.ones(1, 8, *(1 for _ in width), dtype=torch.bool)
    args = (torch.zeros(shape), mask, [places], torch.ones(1, 8, *width))
    assert again(aten._unsafe_masked_index_put_accumulate.default, *args)[0].shape == shape


def test_a_mask_that_one_value_is_written_through_stays_empty() -> None:
    mask = torch.zeros(6, dtype=torch.bool)
    _, args = again(aten.index_put_.default, torch.zeros(6), [mask], torch.ones(()))
    assert not args[1][0].any()


class Signed(TorchDispatchMode):
    """Notes the signatures of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.texts: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.texts.add(signature(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _definite() -> torch.Tensor:
    torch.manual_seed(0)
    half = torch.randn(3, 6, 6)
    return (half @ half.mT + 6 * torch.eye(6)).requires_grad_()


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.linalg.solve(_definite(), torch.ones(3, 6, 2)),
        lambda: torch.linalg.inv(_definite()),
        lambda: torch.linalg.cholesky(_definite()),
        lambda: torch.linalg.lu_factor(_definite())[0],
        lambda: torch.polar(_definite().abs(), _definite()).abs(),
        lambda: torch.segment_reduce(_definite().flatten(0, 1), "sum", lengths=torch.tensor([5, 6, 7])),
        lambda: torch.segment_reduce(_definite().flatten(0, 1), "max", offsets=torch.tensor([0, 5, 11, 18])),
    ],
)
def test_calls_of_both_passes_run_on_rebuilt_arguments(function: Callable[[], torch.Tensor]) -> None:
    with Signed() as signed:
        function().sum().backward()
    for text in signed.texts:
        func, args, kwargs = rebuild(text, "cpu")
        with torch.no_grad():
            func(*args, **kwargs)
