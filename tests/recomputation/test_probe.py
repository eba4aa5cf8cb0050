"""Regions that do something else when they run again: an error that names them, and a probe that finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import RecomputationError
from memfit.ir import Region
from memfit.recomputation import checking, checkpointed, probing
from tests.recomputation.steps import Chain, blocks, loss


class Odd(nn.Module):
    """Does something else each time."""

    def __init__(self, what: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f, self.what, self.calls, self.seen = nn.Linear(16, 16), what, 0, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.f(self.what(self, x)).tanh()


def _cached(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = torch.cat([self.seen, torch.ones(1)])
    return (x.unsqueeze(-1) * self.seen).sum(-1)


def _state(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen.detach() + 1
    return x * self.seen


SHAPES = {
    "a cache that grows": lambda self, x: _cached(self, x),
    "more saves": lambda self, x: x.sin() if self.calls == 1 else x.sin().sin(),
    "fewer saves": lambda self, x: x.sin().sin() if self.calls == 1 else x,
    "another type": lambda self, x: x.sin() if self.calls == 1 else x.double().sin().float(),
    "an exception": lambda self, x: x if self.calls == 1 else x[:, [99]],
}
VALUES = {"a counter": lambda self, x: x + self.calls, "state in a tensor": _state}


def model_with(what: Callable[[Any, torch.Tensor], torch.Tensor]) -> Chain:
    torch.manual_seed(0)
    model = Chain()
    model.blocks[1].f.insert(1, nn.Linear(32, 16))
    model.blocks[1].f.insert(2, Odd(what))
    model.blocks[1].f.insert(3, nn.Linear(16, 32))
    return model


def step(model: nn.Module) -> torch.Tensor:
    value = loss(model)
    value.backward()
    return value.detach()


REGIONS = {
    "the module": ([Region(("blocks.1.f.2",))], "blocks.1.f.2"),
    "a run": ([blocks(0, 1, 2)], "blocks.1"),
    "within another": ([Region(("",)), Region(("blocks.0",)), Region(("blocks.1.f.2",))], "blocks.1.f.2"),
}


@pytest.mark.parametrize("regions", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
def test_a_recomputation_of_other_shapes_is_an_error_that_names_the_module(what: Any, regions: Any) -> None:
    chosen, culprit = regions
    model = model_with(what)
    with checkpointed(model, chosen), pytest.raises(RecomputationError, match="can't be recomputed") as e:
        step(model)
    assert e.value.module in (culprit, "")


@pytest.mark.parametrize("what", [*SHAPES.values(), *VALUES.values()], ids=[*SHAPES, *VALUES])
def test_the_probe_finds_every_culprit_and_only_those(what: Any) -> None:
    plain = step(model_with(what))
    for name, (regions, culprit) in REGIONS.items():
        model = model_with(what)
        with checkpointed(model, [*regions, blocks(4)]), probing() as differences:
            found = step(model)
        expected = {"the module": [("blocks.1.f.2",)], "a run": [("blocks.0", "blocks.1", "blocks.2")]}.get(name)
        if expected is None:
            assert set(differences) <= {("",), ("blocks.1.f.2",)} and differences
        else:
            assert list(differences) == expected
            assert differences[expected[0]].module == culprit
        assert torch.equal(found, plain)


TAKEN = {
    "a number": (lambda self, x: x + self.calls, "aten.add.Tensor#0"),
    "a tensor": (lambda self, x: x - torch.full((16,), float(self.calls)), "aten.sub.Tensor#0"),
    "a number by name": (lambda self, x: torch.add(x, x.detach(), alpha=self.calls), "aten.add.Tensor#0"),
}


@pytest.mark.parametrize(("what", "kept"), TAKEN.values(), ids=TAKEN)
def test_a_kept_output_does_not_hide_that_its_operator_takes_something_else(what: Any, kept: str) -> None:
    region = Region(("blocks.1.f.2",), (kept,))
    model = model_with(what)
    with checkpointed(model, [region]), probing() as differences:
        step(model)
    assert "inputs of other values than in the forward pass" in str(differences["blocks.1.f.2",])
    model, raises = (
        model_with(what),
        pytest.raises(RecomputationError, match="inputs of other values than in the forward pass"),
    )
    with checkpointed(model, [region]), checking(), raises:
        step(model)


def test_kept_outputs_of_the_same_arguments_are_reused_in_silence() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    layers = nn.Linear(16, 16), norm, nn.Dropout(0.5), norm  # called twice: its statistics have moved on
    kept = "aten.addmm.default#0", "aten.native_batch_norm.default#0", "aten.native_dropout.default#0"
    for mode in (checking, probing):
        model = nn.Sequential(*layers)
        with checkpointed(model, [Region(("",), kept)]), mode() as differences:
            step(model)
        assert not differences


@pytest.mark.parametrize("mode", [checking, probing])
def test_nothing_is_found_where_nothing_differs(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16))
    keep = Region(("0", "1", "2"), ("aten.addmm.default#0",))
    for regions in ([keep], [Region(("",)), Region(("0", "1"))], [Region((str(i),)) for i in range(4)]):
        with checkpointed(model, regions), mode() as differences:
            step(model)
        assert not differences


@pytest.mark.parametrize("what", VALUES.values(), ids=VALUES)
def test_a_check_finds_every_difference(what: Any) -> None:
    for regions, _ in REGIONS.values():
        odd = model_with(what)
        with checkpointed(odd, regions), checking(), pytest.raises(RecomputationError, match="has other values"):
            step(odd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_probes_see_one_bit_and_nan(dtype: torch.dtype) -> None:
    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        factor = torch.tensor([0.0, 1.0, torch.nan, 2.0]).repeat(4)
        if self.calls > 1:
            factor[1] = 0.0 if dtype is torch.bool else torch.nextafter(factor[1], torch.tensor(2.0))
        factor = factor.to(dtype)
        return x.masked_fill(factor, 0.0) if dtype is torch.bool else (x * factor).real

    model = model_with(other)
    with checkpointed(model, [Region(("blocks.1.f.2",))]), probing() as differences:
        step(model)
    (found,) = differences.values()
    assert "1 of 16 elements of a saved tensor have other values" in str(found)


OTHERWISE: dict[str, Callable[[], nn.Module]] = {
    "a recurrent kernel's workspace": lambda: First(nn.LSTM(16, 16, 2)),
    "running statistics of instances": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "what an operator fills after it was saved": lambda: nn.Sequential(nn.RReLU(), nn.Tanh()),
}


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


@pytest.mark.parametrize("make", OTHERWISE.values(), ids=OTHERWISE)
def test_what_need_not_be_the_same_is_not_compared(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), make())
    with checkpointed(model, [Region(("1",))]):
        for _ in range(2):
            with checking():
                model(torch.randn(4, 8, 16)).sum().backward()
            with probing() as differences:
                model(torch.randn(4, 8, 16)).sum().backward()
            assert not differences


def test_a_kernel_that_writes_after_the_last_save_is_not_run_again_and_found() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.RReLU())
    with checkpointed(model, [Region(("1",))]), probing() as differences:
        model(torch.randn(4, 16)).sum().backward()
    assert list(differences) == [("1",)]
