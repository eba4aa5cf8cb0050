"""What a loop holds beside its step is told when it is planned: by the variables that hold it, with their bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.foundations import format_bytes
from memfit.training import beside_text, held_beside

DIM, ROWS = 128, 64


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(2))
    )


def nbytes(held: Any) -> int:
    return sum(t.nbytes for t in (held.values() if isinstance(held, dict) else held.parameters()))


class Averaged:
    """An average of weights, in an object of the user's."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]


def patterned() -> type[nn.Module]:
    """Return a class of modules whose closure keeps the layer that they copy."""
    layer = nn.Linear(DIM, 16 * DIM)

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(copy.deepcopy(layer), nn.GELU(), nn.Linear(16 * DIM, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)
            return found

    return Copying


def trained(model: nn.Module, beside: Callable[[], object] = lambda: None, keep: Any = None) -> list[str]:
    """Train a model for three steps, with what the caller keeps; return what memfit tells of it."""
    told: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, budget="64MiB", tell=told.append):
        for _ in range(3):
            x, y = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            beside()
    return [line for line in told if "outside the step" in line]


def test_a_step_alone_is_told_nothing_of() -> None:
    assert not trained(made())


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("a second model", made),
        pytest.param("a checkpoint", lambda: made().state_dict(), marks=pytest.mark.ci),
        pytest.param("an average", lambda: Averaged(made()), marks=pytest.mark.ci),
    ],
)
def test_what_the_loop_holds_beside_it_is_told_with_its_bytes(name: str, keep: Callable[[], Any]) -> None:
    kept = keep()
    (line,) = trained(made(), keep=kept)
    expected = nbytes(made())
    assert f"your loop keeps {format_bytes(expected)}" in line
    assert re.search(rf"`kee?pt?` \({type(kept).__name__}, ", line) and "within the budget of 64.0 MiB" in line


@pytest.mark.ci
def test_a_layer_that_a_closure_of_the_models_class_keeps_is_told() -> None:
    kind = patterned()
    (line,) = trained(kind())
    assert "`kind` (type" in line or "`model` (Copying" in line
    assert format_bytes(4 * (DIM + 1) * 16 * DIM) in line


@pytest.mark.ci
@pytest.mark.parametrize("share", [0.8, 1.5])
def test_a_first_step_above_the_budget_is_told(share: float) -> None:
    """Before it is seen, nobody knows that the loop calls its model four times before it goes back."""

    def run(told: list[str], budget: str) -> None:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memfit.fit(model, optimizer, budget=budget, tell=told.append) as fitted:
            for _ in range(3):
                outs = [model(torch.randn(ROWS, DIM)) for _ in range(4)]
                torch.stack([out.square().mean() for out in outs]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert fitted.plan is not None

    told: list[str] = []
    run(told, f"{share}x")
    assert any("the first step needed about" in line for line in told) == (share < 1)


class Lazy(dict[str, torch.Tensor]):
    """A dictionary whose own methods do more than read, as the models of transformers."""

    def values(self) -> Any:
        raise ValueError("could not be imported")

    __iter__ = items = keys = values  # type: ignore[assignment]


def test_objects_are_read_without_their_own_methods() -> None:
    lazy = Lazy()
    dict.__setitem__(lazy, "weights", torch.ones(1000))
    assert {each.name: each.nbytes for each in held_beside([], [], "cpu")}["lazy"] == 4000


def test_results_and_the_next_data_are_of_the_step() -> None:
    model, x = made(), torch.randn(ROWS, DIM)
    out = model(x)
    held = held_beside([*model.parameters()], [torch.empty(ROWS, DIM)], "cpu")
    assert not {"x", "out"} & {each.name for each in held} and out.grad_fn is not None
    other = torch.empty(ROWS + 1, DIM)
    found = {each.name: each.nbytes for each in held_beside([*model.parameters()], [x], "cpu")}
    assert found["other"] == other.nbytes
    assert "over the budget of 1.0 KiB" in beside_text(held_beside([], [], "cpu"), 100, 1024)
