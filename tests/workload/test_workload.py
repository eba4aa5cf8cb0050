"""What identifies a workload, and fields that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import WorkloadError
from memfit.recipes import byte_lm
from memfit.workload import Workload, fingerprint, slice_batch
from tests.models import BUILDERS, convnet, step_of, twice


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
    return lambda workload: (change(workload.model), workload)[1]


def renamed(model: Any) -> None:
    model.tail = model.head
    del model.head


CHANGES: dict[str, Callable[[Workload], Workload]] = {
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
