"""What a region draws from Python's, NumPy's and its own generators is drawn again, against plain loops, bit by bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit.ir import Region
from memfit.recomputation import checkpointed
from tests.recomputation.steps import Residual, differing, loss, results

ALWAYS = np.random.default_rng(5)


class Skipped(nn.Module):
    """Layers of which each runs with some probability, as something outside of PyTorch draws."""

    def __init__(self, draw: Callable[[Any], float], layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(16) for _ in range(layers)])
        self.draw = draw
        self.own, self.held, self.numbers = torch.Generator(), [random.Random(3)], np.random.default_rng(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw(self) < 0.6:
                x = layer(x)
            x = x + torch.rand(16, generator=self.own)
        return x


def _own(self: Any) -> float:
    return float(torch.rand((), generator=self.own))


def _shared(self: Any) -> float:
    return float(ALWAYS.random())


def _shuffled(self: Any) -> float:
    order = list(range(10))
    random.shuffle(order)
    return order[0] / 10


DRAWS: dict[str, Callable[[Any], float]] = {
    "Python": lambda self: random.random(),
    "Python, shuffled": _shuffled,
    "Python, normal, in pairs": lambda self: abs(random.gauss(0, 1)),
    "NumPy": lambda self: float(np.random.rand()),
    "NumPy, normal, in pairs": lambda self: abs(float(np.random.randn())),
    "both": lambda self: (random.random() + float(np.random.rand())) / 2,
    "a torch.Generator of the module": _own,
    "a random.Random in a list of the module": lambda self: self.held[0].random(),
    "NumPy's new generator of the module": lambda self: float(self.numbers.random()),
    "a generator in a global": _shared,
}
REGIONS = {
    "whole": [Region(("",))],
    "modules": [Region(("0",)), Region(("2",))],
    "a run": [Region(("0", "1", "2"))],
    "nested": [Region(("2",)), Region(("2.layers.0",))],
}


def model(draw: Callable[[Any], float]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Skipped(draw), nn.Linear(16, 16), Skipped(draw))


def run(draw: Callable[[Any], float], regions: list[Region]) -> dict[str, Any]:
    """Return what some steps leave, with the states of the generators after them."""
    made = model(draw)
    random.seed(0), np.random.seed(0), np.random.randn()
    ALWAYS.bit_generator.state = np.random.default_rng(6).bit_generator.state
    found = results(made, loss, regions)
    for name, state in (
        ("Python's", random.getstate()),
        ("NumPy's", np.random.get_state()),
        ("global", ALWAYS.random()),
    ):
        found[f"{name} state"] = torch.tensor(list(repr(state).encode()))
    return found


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_layers_that_are_left_out_at_random_are_left_out_again(draw: Callable[[Any], float]) -> None:
    plain = run(draw, [])
    for regions in REGIONS.values():
        assert differing(plain, run(draw, regions)) == []


class DrawingNorm(nn.Module):
    """A normalisation of someone's own that draws."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.draw()).sigmoid()


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, functools.partial(torch.rand, 16)], ids=["random", "numpy", "torch"]
)
def test_lean_modules_draw_again_what_they_drew(draw: Callable[[], Any]) -> None:
    def drawn(patterns: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Linear(16, 16), DrawingNorm(draw), nn.Linear(16, 16), DrawingNorm(draw), nn.Linear(16, 4)
        )
        random.seed(seed), np.random.seed(seed)
        return results(made, functools.partial(loss, samples=32), patterns=patterns)

    assert differing(drawn(("*",)), drawn(())) == []
    assert isinstance(draw, functools.partial) or "gradient 0 of 0.weight" in differing(drawn(()), drawn((), seed=1))


@pytest.mark.parametrize(
    ("draw", "times"),
    [(lambda: 0.0, 0), (random.random, 0), (np.random.rand, 1), (np.random.randn, 1)],
    ids=["nothing", "Python's", "NumPy's", "the other of a pair, for which no bits are drawn"],
)
def test_only_the_states_of_generators_that_were_drawn_from_are_kept(
    draw: Callable[[], float], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    own = np.random.set_state
    monkeypatch.setattr(np.random, "set_state", lambda state: written.append(state) or own(state))
    np.random.seed(0), np.random.randn()
    made = nn.Sequential(nn.Linear(16, 16), DrawingNorm(draw), nn.Linear(16, 4))
    with checkpointed(made, [Region(("1",))]):
        loss(made).backward()
    assert len(written) == 2 * times  # before the recomputation, and back after it
