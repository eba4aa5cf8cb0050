"""Batches, and what identifies a workload."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.errors import WorkloadError
from memfit.recipes import byte_lm
from memfit.workload import Workload, batch_size_of, fingerprint, slice_batch, tensors_of
from tests.models import BUILDERS, convnet, step_of, twice

Pair = namedtuple("Pair", "x y")


def batches(n: int) -> dict[str, Any]:
    one, two = torch.arange(n), torch.arange(3 * n).view(n, 3)
    return {
        "a tensor": one,
        "a dict": {"x": one, "y": two},
        "a tuple": (one, two),
        "a list": [one, two],
        "a named tuple": Pair(one, two),
        "nested": {"a": [one, (two, {"b": one})], "name": "text", "weight": 0.5, "none": None},
        "ordered": OrderedDict(x=one),
    }


@pytest.mark.parametrize("kind", batches(1))
def test_slices_are_the_samples_in_order(kind: str) -> None:
    batch = batches(6)[kind]
    assert batch_size_of(batch) == 6
    pieces = [slice_batch(batch, start, start + 2) for start in (0, 2, 4)]
    assert all(type(piece) is type(batch) and batch_size_of(piece) == 2 for piece in pieces)
    for index, whole in enumerate(tensors_of(batch)):
        joined = torch.cat([tensors_of(piece)[index] for piece in pieces])
        assert torch.equal(joined, whole)
        assert tensors_of(pieces[0])[index].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if kind == "nested":
        assert [pieces[0][name] for name in ("name", "weight", "none")] == ["text", 0.5, None]


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_a_slice_has_as_many_samples_as_fit(n: int, start: int, stop: int) -> None:
    piece = slice_batch({"x": torch.arange(n)}, start, stop)
    assert piece["x"].tolist() == list(range(n))[start:stop]


@pytest.mark.parametrize("batch", [{}, "text", None, torch.tensor(3.0), {"x": torch.zeros(0, 4)}])
def test_batches_without_samples_are_refused(batch: Any) -> None:
    with pytest.raises(WorkloadError, match="has no samples"):
        batch_size_of(batch)


def test_every_workload_has_its_own_fingerprint_and_keeps_it() -> None:
    builders = {name: build for name, build in BUILDERS.items() if name != "tied"}  # ties play no part in it
    found = {name: fingerprint(build()) for name, build in builders.items()}
    assert len(set(found.values())) == len(found)
    assert found == {name: fingerprint(build()) for name, build in builders.items()}


def test_training_and_checkpointing_keep_the_fingerprint() -> None:
    workload = twice()
    before = fingerprint(workload)
    with step_of(workload, regions={"shared": ()}) as step:
        assert fingerprint(workload) == before
        for _ in range(2):
            step(workload.batch)
    workload.model.eval()
    assert fingerprint(workload) == before


def changed(change: Callable[[Any], Any]) -> Callable[[Workload], Workload]:
    """Return a change of a workload's model as one of the workload."""

    def apply(workload: Workload) -> Workload:
        change(workload.model)
        return workload

    return apply


def renamed(model: Any) -> None:
    model.tail = model.head
    del model.head


CHANGES = {
    "a frozen parameter": changed(lambda model: next(model.parameters()).requires_grad_(False)),
    "another name": changed(renamed),
    "another buffer": changed(lambda model: model.register_buffer("more", torch.zeros(3))),
    "another module of the same shape": changed(lambda model: setattr(model.shared, "1", nn.Sigmoid())),
    "another dtype": lambda w: dataclasses.replace(w, model=w.model.double()),
    "another batch size": lambda w: dataclasses.replace(w, batch=slice_batch(w.batch, 0, 4)),
    "another batch dtype": lambda w: dataclasses.replace(w, batch=tuple(t.double() for t in w.batch)),
    "another optimizer": lambda w: dataclasses.replace(w, optimizer=torch.optim.Adam(w.model.parameters())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_workload_changes_the_fingerprint(change: str) -> None:
    assert fingerprint(CHANGES[change](twice())) != fingerprint(twice())


@pytest.mark.parametrize(
    "same",
    [
        lambda w: dataclasses.replace(w, name="other", max_grad_norm=3.0),
        lambda w: dataclasses.replace(w, batch=tuple(torch.zeros_like(t) for t in w.batch)),
        lambda w: dataclasses.replace(w, optimizer=torch.optim.SGD(w.model.parameters(), lr=9.0)),
    ],
)
def test_values_play_no_part_in_the_fingerprint(same: Any) -> None:
    assert fingerprint(same(twice())) == fingerprint(twice())


def test_the_fingerprint_tells_tied_weights_from_equal_ones() -> None:
    tied, untied = (
        byte_lm(n_layer=1, d_model=16, n_head=2, context=8, max_bytes=50_000, tied_embedding=t) for t in (True, False)
    )
    assert fingerprint(tied) != fingerprint(untied)
    model = untied.model
    model.head.weight = model.embed.weight  # type: ignore[union-attr, assignment]
    assert fingerprint(untied) == fingerprint(tied)


def rows() -> Any:
    yield torch.ones(2, 2)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that can be iterated by its index alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 1:
            raise IndexError
        return torch.ones(2, 2)


class Source:
    def __iter__(self) -> Any:
        raise AssertionError("a check runs nothing of the user's")


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
WRONG: dict[str, list[Any]] = {
    "model": [lambda x: x, nn.Linear],
    "loss_fn": [None, torch.ones(1)],
    "name": [3],
    "batch": [rows, rows(), Rows(), torch.utils.data.DataLoader(Rows())],
    "batches": [rows, lambda: rows(), Source, 5],
    "evaluate": [{"loss": 1.0}],
    "scheduler": [0.1, torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)],
    "max_grad_norm": [0, -1.0, True, "1"],
    "loss_scaling": [2.0**16, None],
    "bf16_updates": ["master"],
    "fp32_modules": ["head", 1],
    "values": [[("train.py:42", 1)]],
    "batch_size": [2.5, "2", True],
    "split": [2],
    "loop": ["after-step"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_field_of_another_kind_is_refused_when_a_workload_is_made(field: str, value: Any) -> None:
    workload = convnet()
    with pytest.raises(WorkloadError, match=rf"^Workload\.{field} is .*[:;] (give|call|create|take) "):
        dataclasses.replace(workload, **{field: value})


@pytest.mark.parametrize("batches", [[], rows(), Rows(), Source(), torch.utils.data.DataLoader(Rows()), iter([])])
def test_whatever_can_be_iterated_gives_batches(batches: Any) -> None:
    assert dataclasses.replace(convnet(), batches=batches).batches is batches
