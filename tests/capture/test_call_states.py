"""Calls whose module reads what has changed by the backward pass are marked, those of all others are not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.hardware import find_device
from memfit.ir import Levers, Regions
from memfit.planner import capture_levers
from memfit.solver import refusals
from memfit.workload import Place, Reader, held_state
from tests.capture.steps import squared

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0)


class Constants:
    """Numbers that several modules read."""

    scale = 1.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Block(nn.Module):
    """A linear layer, and something else of its output."""

    factor = 1.0
    other = 1.0

    def __init__(self, what: Callable[[Any, torch.Tensor], torch.Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(8, 8), what
        self.number, self.table, self.state, self.seen = 1, {"a": [1.0]}, None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x).tanh())


class ByMethod(Block):
    @property
    def scale(self) -> float:
        return self.hidden

    hidden = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * self.scale


def _counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.number += 1
    return x


def _recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.state is None else x + self.state
    self.state = x.detach()
    return x


class Averaging(Block):
    """Puts another running mean in the place of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Positions(Block):
    """Makes a buffer as large as it is needed, and keeps it."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        del self.table
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(x):
            self.table = torch.arange(len(x)).unsqueeze(1) / 10
        return self.linear(x).tanh() + self.table[: len(x)]


class Watched(Block):
    """Sets attributes before it reads them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear(x).tanh()
        self.number = len(x)
        return self.seen * self.number


def counting() -> Callable[[Any, torch.Tensor], torch.Tensor]:
    count = 0

    def count_up(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return count_up


Before = Callable[[int, Any], object]


def _set_global(index: int, block: Any) -> None:
    global SCALE
    SCALE = float(index)


def twice(block: nn.Module) -> list[nn.Module]:
    return [block, block]


def two(what: Callable[[Any, torch.Tensor], torch.Tensor] = lambda self, x: x) -> list[nn.Module]:
    return [Block(what), Block(what)]


def nothing(index: int, block: Any) -> None:
    """Change nothing."""


def setting(name: str, owner: Any = None) -> Before:
    """Set an attribute of an owner, or of each block, to another number for each."""
    return lambda index, block: setattr(block if owner is None else owner, name, float(index))


HERE = "SCALE of tests.capture.test_call_states"
CHANGED: dict[str, tuple[Callable[[], list[nn.Module]], Before, str]] = {
    "an attribute of the class": (
        lambda: two(lambda self, x: x * self.factor),
        setting("factor", Block),
        "factor of Block",
    ),
    "an attribute, by a property and a method": (
        lambda: twice(ByMethod()),
        setting("hidden"),
        "hidden of blocks.0",
    ),
    "an item of a list in a dict": (
        lambda: twice(Block(lambda self, x: x * self.table["a"][0])),
        lambda i, block: block.table["a"].__setitem__(0, i),
        "table of blocks.0",
    ),
    "a counter": (lambda: [Block(_counted)], nothing, "number of blocks.0"),
    "a state": (lambda: [Block(_recurrent)], nothing, "state of blocks.0"),
    "a buffer that another takes the place of": (lambda: [Averaging()], nothing, "mean of blocks.0"),
    "a global": (lambda: two(lambda self, x: x * SCALE), _set_global, HERE),
    "a global, by a function": (lambda: two(lambda self, x: helper(x)), _set_global, HERE),
    "an attribute of a class elsewhere": (
        lambda: two(lambda self, x: x * Constants.scale),
        setting("scale", Constants),
        "scale of Constants",
    ),
    "an attribute of an object": (
        lambda: two(lambda self, x: x * SETTINGS.scale),
        setting("scale", SETTINGS),
        "scale of SimpleNamespace",
    ),
    "a closure": (lambda: [Block(counting())], nothing, "count of counting.<locals>.count_up"),
}
UNCHANGED: dict[str, tuple[Callable[[], list[nn.Module]], Before]] = {
    "nothing": (two, nothing),
    "what is set before it is read": (lambda: twice(Watched()), nothing),
    "a buffer that is made once": (lambda: [Positions(), Positions()], nothing),
    "what it does not read": (two, setting("other", Block)),
    "another number for each of two": (lambda: two(lambda self, x: x * self.number), setting("number")),
    "the mode of a module, which is set back as it runs again": (
        lambda: twice(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())),
        lambda i, block: block.train(i == 1),
    ),
    "a counter that nothing reads": (lambda: twice(Block()), setting("number")),
}


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], before: Before) -> None:
        super().__init__()
        self.blocks, self.before = nn.ModuleList(blocks), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            self.before(index, block)
            x = block(x)
        return x


def refused(blocks: list[nn.Module], before: Before, microbatch_size: int = 4) -> dict[str, str]:
    model = Chain(blocks, before)
    trace = capture_levers(
        squared(model, torch.randn(4, 8)), Levers(microbatch_size=microbatch_size), find_device("cpu")
    )
    return refusals(Regions(trace))


@pytest.mark.parametrize("name", CHANGED)
def test_a_module_that_reads_what_has_changed_is_refused(name: str) -> None:
    make, before, what = CHANGED[name]
    found = refused(make(), before)
    assert f"reads {what}, and this has changed" in found["blocks.0"]
    assert not {fqn for fqn in found if fqn.endswith(("linear", ".2"))}


@pytest.mark.parametrize("name", UNCHANGED)
def test_no_other_module_is_refused(name: str) -> None:
    make, before = UNCHANGED[name]
    assert refused(make(), before) == {}


def test_each_microbatch_has_a_backward_pass_of_its_own() -> None:
    steps = iter(range(1000))
    make = functools.partial(Block, lambda self, x: x * self.number)
    found = refused([make()], lambda i, block: setattr(block, "number", next(steps)), microbatch_size=2)
    assert list(found) == [""]  # which would set another number again


def test_what_is_around_a_module_sets_what_it_reads_again() -> None:
    inner = Chain(twice(Block(lambda self, x: x * self.number)), setting("number"))
    found = refused([inner], nothing)
    assert list(found) == ["blocks.0.blocks.0"]


class Raising:
    """Has a length and an iteration of its own, which raise."""

    def __len__(self) -> int:
        raise TypeError("no length of mine")

    def __iter__(self) -> Any:
        raise TypeError("no items of mine")


class Pair(Raising, tuple):  # type: ignore[type-arg]
    pass


class Items(Raising, list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("kind", [Pair, Items])
def test_containers_are_read_by_pythons_own_methods_whatever_their_class_makes_of_them(kind: Any) -> None:
    held = {"pair": kind([1, 2])}
    place = Place("a module", lambda: held, None)
    before = place.read()
    assert place.read() == before
    held["pair"] = kind([1, 3])
    assert place.read() != before


class Tools:
    """Methods that lead to one another."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(x)

    def third(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


TOOLS = Tools()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_code_that_leads_to_more_functions_than_are_followed_is_read_so_far(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Block(lambda self, x: TOOLS.first(x))
    assert any("SCALE" in (place.names or ()) for place in Reader().places("", module))
    monkeypatch.setattr(held_state, "_MOST_FUNCTIONS", most)
    assert not any("SCALE" in (place.names or ()) for place in Reader().places("", module))
