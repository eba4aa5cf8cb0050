"""What batches hold, whatever they are made of, and what is within another."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils._pytree import register_pytree_node

from memfit.errors import WorkloadError
from memfit.workload import (
    Extent,
    batch_size_of,
    map_tensors,
    packed_in,
    slice_batch,
    take,
    tensors_of,
    tokens_per_sample,
)
from tests.batch_cases import CONTAINERS, Data, Frozen, N, Slotted, graphs, images, normalised, targets, xy


class Fields(dict[str, Any]):
    """A mapping with an attribute too."""


class Ordered(OrderedDict[str, Any]):
    pass


class Registered:
    def __init__(self, x: Any) -> None:
        self.x, self.note = x, "note"


register_pytree_node(Registered, lambda r: ([r.x], r.note), lambda children, _: Registered(children[0]))


def fields() -> Fields:
    made = Fields(xy())
    made.more = torch.arange(N)  # type: ignore[attr-defined]
    return made


ONE, TWO = torch.arange(N), torch.arange(3 * N).view(N, 3)
KINDS = {
    **{name: build().batch for name, build in CONTAINERS.items()},
    "a tensor": ONE,
    "a tuple": (ONE, TWO),
    "a list": [ONE, TWO],
    "lists in dicts": {"a": [ONE, (TWO, {"b": ONE})], "name": "text", "weight": 0.5, "none": None},
    "an ordered dict": OrderedDict(x=ONE),
    "a dict's subclass": fields(),
    "an ordered dict's subclass": Ordered(xy()),
    "a registered class": [Registered(torch.ones(N, 2))],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_samples_in_containers_of_the_same_type(kind: str) -> None:
    batch = KINDS[kind]
    assert batch_size_of(batch) == N
    part = slice_batch(batch, 2, 5)
    assert type(part) is type(batch) and batch_size_of(part) == 3
    if kind == "lists in dicts":
        assert [part[name] for name in ("name", "weight", "none")] == ["text", 0.5, None]
    for whole, some in zip(tensors_of(batch), tensors_of(part), strict=True):
        rows = whole[2:5] if whole.dim() and len(whole) else whole
        assert torch.equal(some, rows) and some.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_whose_tensors_stay_is_the_same_object(kind: str) -> None:
    batch = KINDS[kind]
    moved = map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch)
    assert type(moved) is type(batch)
    assert [t.shape for t in tensors_of(moved)] == [t.shape for t in tensors_of(batch)]
    assert not any(t.dtype is torch.float32 for t in tensors_of(moved))
    if kind != "object":  # whose parts refer to it
        assert map_tensors(lambda t: t, batch) is batch


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_a_part_has_as_many_samples_as_fit(n: int, start: int, stop: int) -> None:
    assert slice_batch({"x": torch.arange(n)}, start, stop)["x"].tolist() == list(range(n))[start:stop]


@pytest.mark.parametrize("batch", [{}, "text", None, torch.tensor(3.0), {"x": torch.zeros(0, 4)}])
def test_batches_without_samples_are_refused(batch: Any) -> None:
    with pytest.raises(WorkloadError, match="has no samples"):
        batch_size_of(batch)


def test_lists_with_an_entry_a_sample_are_cut_and_others_are_not() -> None:
    batch = {
        **xy(),
        "texts": [str(i) for i in range(N)],
        "lengths": [[i] * i for i in range(N)],
        "names": ["x", "y"],
        "size": (2,) * N,
        "labels": tuple("abcdefgh"),
    }
    part = slice_batch(batch, 1, 3)
    assert part["texts"] == ["1", "2"] and part["lengths"] == [[1], [2, 2]] and part["labels"] == ("b", "c")
    assert part["names"] == ["x", "y"] and part["size"] == (2,) * N
    assert slice_batch(Slotted(**xy(), lengths=list(range(N))), 6, 8).lengths == [6, 7]


DETECTION = {
    "lists": (images(), targets()),
    "tuples": (tuple(images()), tuple(targets())),
    "by name": {"images": images(), "targets": targets()},
    "a tensor and a list": (torch.stack(images(same=True)), targets()),
}


@pytest.mark.parametrize("kind", DETECTION)
def test_detection_targets_are_cut_by_sample(kind: str) -> None:
    batch = DETECTION[kind]
    assert batch_size_of(batch) == 3
    part = slice_batch(batch, 1, 3)
    found, wanted = (part["images"], part["targets"]) if isinstance(part, dict) else part
    assert len(found) == 2 and [len(t["boxes"]) for t in wanted] == [2, 3]
    assert all(torch.equal(one, other) for one, other in zip(found, list(images(kind[0] == "a"))[1:], strict=True))


def test_a_list_of_records_has_a_record_a_sample() -> None:
    batch = [{"image": i, "instances": SimpleNamespace(**t)} for i, t in zip(images(), targets(), strict=True)]
    assert batch_size_of(batch) == 3 and slice_batch(batch, 2, 3) == [batch[2]] and take(batch, [0, 2])[1] is batch[2]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_packed_sequences_are_the_sequences(lengths: list[int], is_sorted: bool, data: Any) -> None:
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    sequences = [torch.arange(n) * 10.0 + i for i, n in enumerate(lengths)]
    batch = {"packed": pack_sequence(sequences, enforce_sorted=is_sorted), "y": torch.arange(len(lengths))}
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    part = slice_batch(batch, start, stop)
    padded, found = pad_packed_sequence(part["packed"], batch_first=True)
    assert batch_size_of(part) == stop - start == len(part["y"]) and found.tolist() == lengths[start:stop]
    for row, n, sequence in zip(padded, found, sequences[start:stop], strict=True):
        assert torch.equal(row[:n], sequence)


@pytest.mark.parametrize(
    "batch",
    [
        graphs(),
        {"x": torch.zeros(5, 2), "edges": torch.zeros(2, 9, dtype=torch.long)},
        (torch.zeros(4), torch.zeros(3)),
        {"adjacency": normalised(4), "x": torch.zeros(4, 2)},
        {"pair": (torch.zeros(5, 2), torch.zeros(2, 7, dtype=torch.long)), "y": torch.zeros(2)},
    ],
    ids=["object", "dict", "tuple", "sparse", "a record as long as the batch"],
)
def test_a_batch_of_different_first_dimensions_is_one_sample(batch: Any) -> None:
    assert batch_size_of(batch) == 1 and tokens_per_sample(batch) is None
    with pytest.raises(WorkloadError, match=r"can't be cut .* Workload\.split"):
        slice_batch(batch, 0, 1)


def test_what_sparse_and_nested_tensors_hold_is_counted() -> None:
    adjacency = normalised()
    found = tensors_of(SimpleNamespace(adjacency=adjacency))
    assert [t.shape for t in found] == [adjacency._indices().shape, adjacency._values().shape]
    jagged = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(2, 2)], layout=torch.jagged)
    assert [tuple(t.shape) for t in tensors_of([jagged])] == [(5, 2), (3,)]


def test_objects_may_refer_to_each_other() -> None:
    model = nn.Linear(3, 3)  # models and optimizers are no part of a batch
    mixed = {"x": torch.ones(2, 3), "model": model, "optimizer": torch.optim.SGD(model.parameters())}
    assert len(tensors_of(mixed)) == 1 and slice_batch(mixed, 0, 1)["model"] is model
    batch = Data(**xy())
    part = slice_batch(batch, 0, 2)
    assert part.store.parent is part and part.x.shape == (2, 16) and batch.x.shape == (N, 16)
    batch.store.weak = weakref.ref(batch)
    part = slice_batch(batch, 0, 2)
    assert part.store.weak() is part


def test_what_was_cut_is_freed_without_the_collector() -> None:
    batch = {"packed": pack_sequence([torch.ones(2), torch.ones(1)])}
    gc.disable()
    try:
        part = slice_batch(batch, 0, 1)
        data = weakref.ref(part["packed"].data)
        del part
        assert data() is None
    finally:
        gc.enable()


def test_frozen_objects_stay_as_they_are() -> None:
    batch = Frozen(**xy())
    part = slice_batch(batch, 0, 2)
    assert part.name == "frozen" and part.x.shape[0] == 2 and batch.x.shape[0] == N
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.x = batch.x


def test_packed_sequences_are_found_anywhere() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert packed_in([{"a": SimpleNamespace(b=packed)}]) == [packed]
    moved = map_tensors(lambda t: t.double(), packed)
    assert moved.data.dtype is torch.float64 and moved.batch_sizes is packed.batch_sizes


LONG, SHORT = torch.zeros(4, 9), torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((LONG, SHORT), [LONG, SHORT]),
        ([LONG, LONG], (LONG, LONG)),
        (((LONG, LONG), SHORT), [[LONG, LONG], SHORT]),
        ({"x": (LONG, LONG)}, {"x": [LONG, LONG]}),
        ([{"x": LONG}, {"x": SHORT}], ({"x": LONG}, {"x": SHORT})),
    ],
)
def test_a_loaders_list_of_a_tuples_parts_is_no_larger(one: Any, other: Any) -> None:
    assert Extent.of(one).covers(Extent.of(other)) and Extent.of(other).covers(Extent.of(one))


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        ((LONG, SHORT), [LONG, LONG]),
        ([LONG, SHORT], [LONG, SHORT, SHORT]),
        ({"images": [SHORT, SHORT]}, {"images": [SHORT, LONG]}),
        ({"images": [SHORT, SHORT]}, {"images": [SHORT, SHORT, SHORT]}),
        ({"images": [SHORT, SHORT]}, {"images": (SHORT, LONG)}),
        ({"images": [SHORT, SHORT]}, {"images": (SHORT, SHORT, SHORT)}),
        ({"images": (SHORT, SHORT)}, {"images": [SHORT, SHORT, SHORT]}),
        ({"images": (SHORT, SHORT)}, {"images": [SHORT, LONG]}),
        ({"images": [SHORT]}, {"pictures": [SHORT]}),
    ],
)
def test_a_part_that_grew_is_larger_though_another_one_is_as_large(planned: Any, given: Any) -> None:
    assert not Extent.of(planned).covers(Extent.of(given))


def test_images_of_a_list_are_within_it_in_any_order() -> None:
    assert Extent.of({"images": [LONG, SHORT, SHORT]}).covers(Extent.of({"images": [SHORT, LONG]}))
