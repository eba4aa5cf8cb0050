"""A step that was captured is known again, and any other is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit import ir
from memfit.hardware import find_device
from memfit.ir import Levers, Prediction, Trace
from memfit.planner import StepVariant, capture_levers, captured_through
from memfit.workload import Workload
from tests import remembered
from tests.workloads import quick


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Any]]:
    """A list that grows by what is captured, where nothing was before."""
    found: list[Any] = []

    def counted(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        found.append(capture(variant))
        return found[-1]

    with (
        captured_through(counted),
        mock.patch.dict(remembered._known, clear=True),
        remembered.remembered_captures(tmp_path),
    ):
        yield found


def estimated() -> Prediction:
    return replace(memfit.estimate(quick()), device_bytes=0)  # what is free on this machine, now


def test_the_same_step_is_captured_once_and_read_by_other_processes(made: list[Any]) -> None:
    first, second = estimated(), estimated()
    assert first == second and len(made) == 1
    remembered._known.clear()  # as in another process
    assert estimated() == first and len(made) == 1
    (known,) = remembered._known.values()
    assert ir.codec.encode(known) == ir.codec.encode(made[0])


def other_weights(workload: Workload) -> Workload:
    with torch.no_grad():
        next(workload.model.parameters()).view(-1)[0] += 1
    return workload


def other_loss(workload: Workload) -> Workload:
    return dataclasses.replace(workload, loss_fn=lambda model, batch: model(batch["x"]).square().mean())


def other_batch(workload: Workload) -> Workload:
    return dataclasses.replace(workload, batch={name: values[:128] for name, values in workload.batch.items()})


def a_hook(workload: Workload) -> Workload:
    workload.model[0].register_forward_hook(lambda module, inputs, out: out * 2)  # type: ignore[index, operator]
    return workload


def frozen(workload: Workload) -> Workload:
    next(workload.model.parameters()).requires_grad_(False)
    return workload


def other_random_numbers(workload: Workload) -> Workload:
    torch.manual_seed(1)
    return workload


@pytest.mark.parametrize("change", [other_weights, other_loss, other_batch, a_hook, frozen, other_random_numbers])
def test_another_step_is_captured(made: list[Any], change: Callable[[Workload], Workload]) -> None:
    memfit.estimate(quick())
    memfit.estimate(change(quick()))
    assert len(made) == 2


def test_other_levers_are_captured(made: list[Any]) -> None:
    workload, device = quick(), find_device("cpu")
    for size in (256, 128, 256):
        capture_levers(workload, Levers(microbatch_size=size), device)
    assert len(made) == 2
