"""Optimizer states in host memory: bitwise the plain step, one parameter's states on the device at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.ir import Levers
from memfit.levers import applied
from tests.levers.test_optimizer_in_backward import OPTIMIZERS, after, workload


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_steps_are_bitwise_those_of_the_plain_step(optimizer: str, microbatch_size: int) -> None:
    made = dataclasses.replace(workload(optimizer), max_grad_norm=0.5)
    found, expected = (
        after(made, Levers(microbatch_size=microbatch_size, optimizer=lever)) for lever in ("offloaded", "as-is")
    )
    assert found[:2] == expected[:2]
    assert len(found[2]) == len(expected[2])
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))


class Moved(TorchDispatchMode):
    """Counts what is copied to the host and back."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"copy_out": 0, "copy_in": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.partition(".")[0]
        if func.namespace == "memfit" and name in self.bytes:
            self.bytes[name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_large_states_are_moved_once_each_way_and_states_that_were_there_go_on() -> None:
    made = workload(vocabulary_size=1024)
    with applied(Levers(microbatch_size=4), made) as step:
        step(made.batch)
    large = sum(v.nbytes for values in made.optimizer.state.values() for v in values.values() if v.nbytes >= 2**16)
    with applied(Levers(microbatch_size=4, optimizer="offloaded"), made) as step:
        held = {id(v) for values in made.optimizer.state.values() for v in values.values()}
        with Moved() as moved:
            step(made.batch)
        assert moved.bytes == {"copy_out": large, "copy_in": large}
        assert {id(v) for values in made.optimizer.state.values() for v in values.values()} == held


@pytest.mark.ci
def test_a_training_goes_on_from_either_kind_of_checkpoint(tmp_path: Path) -> None:
    sizes = {"vocabulary_size": 1024}
    plan = memfit.plan(workload(**sizes), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    offloaded = replace(plan, levers=replace(plan.levers, optimizer="offloaded"), frontier=[])
    weights = []
    for folder, first, second in (("a", plan, plan), ("b", offloaded, plan), ("c", plan, offloaded)):
        torch.manual_seed(0)
        memfit.train(first, workload(**sizes), out=tmp_path / folder, steps=2)
        made = workload(**sizes)
        memfit.train(second, made, out=tmp_path / folder, steps=4, resume=True)
        weights.append([p.detach().clone() for p in made.model.parameters()])
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))
