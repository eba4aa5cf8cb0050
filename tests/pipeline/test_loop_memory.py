"""Loops whose later batches are larger, planned again or ended by an error; memory that grows, or is held beside."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import memfit
from memfit._torch import FakeTensor
from memfit.errors import InfeasibleError
from memfit.foundations import format_bytes
from memfit.training import Growth, beside_text, held_beside
from tests.measuring import peak_bytes_of
from tests.pipeline.loops import classified, deep, quiet, updated
from tests.pipeline.plans import exact

SMALL, LARGE = 256, 1024


def reader() -> nn.Module:
    """Return a model that reads tokens, as many as there are."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(50, 64), *blocks, nn.Linear(64, 50))


class Matcher(nn.Module):
    """Compares what is in each image with as many anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        scores = [self.inner(i) @ t["boxes"].mT for i, t in zip(images, targets, strict=True)]
        return {"match": torch.stack([s.softmax(1).square().mean() for s in scores]).mean()}


def text(model: nn.Module, size: int) -> torch.Tensor:
    tokens = torch.randint(0, 50, (8, size // 8 + 1))
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def crowds(model: nn.Module, size: int) -> torch.Tensor:
    images = [torch.randn(128, 16) for _ in range(2)]
    return model(images, [{"boxes": torch.randn(size, 64)}, {"boxes": torch.randn(3, 64)}])["match"]  # type: ignore


def in_pairs(model: nn.Module, size: int) -> torch.Tensor:
    """The loop itself says a size that another batch does not have."""
    out = model(torch.randn(size, 64)).view(size // 2, 2, 10)
    loss: torch.Tensor = (out[:, 0] - out[:, 1]).square().mean()
    return loss


LossOf = Callable[[nn.Module, int], torch.Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], LossOf]] = {
    "rows": (deep, classified),
    "text": (reader, text),
    "crowds": (Matcher, crowds),
    "pairs": (deep, in_pairs),
}


def loop(name: str, sizes: list[int]) -> Iterator[object]:
    """Yield the model and the optimizer, and then what the loop returns: its losses, and its weights."""
    make, loss_of = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    yield model, optimizer

    def run() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(7)
        losses = []
        for size in sizes:
            losses.append(updated(optimizer, loss_of(model, size)))
        return losses, [p.detach().clone() for p in model.parameters()]

    (losses, weights), peak_bytes = peak_bytes_of(run)
    yield losses, weights, peak_bytes + sum(p.nbytes for p in model.parameters())


def plain(name: str, sizes: list[int]) -> tuple[list[float], list[torch.Tensor], int]:
    _, found = loop(name, sizes)
    return found  # type: ignore[return-value]


def fitted(name: str, sizes: list[int], budget: int) -> tuple[list[float], list[torch.Tensor], int, list[str]]:
    told: list[str] = []
    running = loop(name, sizes)
    model, optimizer = next(running)  # type: ignore[misc]
    with memfit.fit(model, optimizer, budget=budget, tell=told.append):
        losses, weights, peak_bytes = next(running)  # type: ignore[misc]
    return losses, weights, peak_bytes, [line for line in told if "larger than planned" in line]


@pytest.mark.parametrize(
    ("name", "share", "said"),
    [
        ("rows", 0.75, "planned again"),
        pytest.param("text", 0.8, "planned again", marks=pytest.mark.ci),
        pytest.param("crowds", 0.95, "planned again", marks=pytest.mark.ci),
        pytest.param("pairs", 0.8, "can't be resized to it", marks=pytest.mark.ci),
        pytest.param("rows", 1.2, "the plan still fits", marks=pytest.mark.ci),
    ],
)
def test_a_larger_batch_stays_within_the_budget(name: str, share: float, said: str) -> None:
    sizes = [SMALL, SMALL, SMALL, LARGE, SMALL, LARGE]
    losses, weights, plain_bytes = plain(name, sizes)
    budget = int(share * plain_bytes)
    found, ended, peak_bytes, told = fitted(name, sizes, budget)
    assert found == losses and all(map(torch.equal, ended, weights))
    assert peak_bytes <= 1.02 * budget
    assert len(told) == 1 and said in told[0]


def test_a_batch_that_no_plan_holds_ends_the_loop_before_it_runs() -> None:
    _, _, plain_bytes = plain("rows", [SMALL, SMALL])
    running = loop("rows", [SMALL, SMALL, SMALL, 16 * LARGE])
    model, optimizer = next(running)  # type: ignore[misc]
    with (
        pytest.raises(InfeasibleError, match=f"{16 * LARGE}x64 instead of the planned {SMALL}x64") as caught,
        memfit.fit(model, optimizer, budget=int(1.2 * plain_bytes), tell=quiet),
    ):
        next(running)
    assert caught.value.lowest_peak_bytes > caught.value.budget_bytes
    assert all(optimizer.state[p]["step"] == 3 for p in model.parameters())


@pytest.mark.ci
def test_batches_that_grow_each_time_are_planned_a_few_times_only() -> None:
    sizes = [SMALL, SMALL, *range(SMALL + 32, LARGE, 32)]
    losses, weights, plain_bytes = plain("rows", sizes)
    found, ended, peak_bytes, told = fitted("rows", sizes, int(0.8 * plain_bytes))
    assert found == losses and all(map(torch.equal, ended, weights))
    assert peak_bytes <= 1.02 * 0.8 * plain_bytes
    assert 3 <= len(told) <= 9


def test_memory_that_grows_in_a_loop_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growth, "free_seconds", 1e9)
    model, told = deep(), list[str]()
    optimizer = AdamW(model.parameters(), fused=True)
    kept = []
    with memfit.fit(model, optimizer, budget="64MiB", tell=told.append):
        for _ in range(60):  # what the tests before have left is freed meanwhile
            out = model(torch.randn(SMALL, 64))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append((out.softmax(1) * out).sum())
    lines = [line for line in told if "memory grows" in line]
    assert len(lines) == 1
    assert "`kept` (a list" in lines[0] and "test_loop_memory.py:" in lines[0] and "graphs" in lines[0]


def test_memory_that_grows_in_a_run_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growth, "free_seconds", 1e9)
    model, kept = deep(), list[torch.Tensor]()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        if not isinstance(loss, FakeTensor):
            kept.append(batch.repeat(8, 1))
        return loss

    workload = memfit.Workload(model, torch.randn(SMALL, 64), loss_fn, AdamW(model.parameters(), fused=True))
    record = memfit.train(exact(workload, "64MiB"), workload, out=tmp_path / "run", steps=14)
    assert [event.kind for event in record.events] == ["growing memory"]
    assert "`kept` (a list" in record.events[0].text and "test_loop_memory.py:" in record.events[0].text


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


def trained(model: nn.Module, keep: Any = None) -> list[str]:
    """Train a model for three steps, with what the caller keeps; return what memfit tells of it."""
    told: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, budget="64MiB", tell=told.append):
        for _ in range(3):
            updated(optimizer, classified(model, ROWS, DIM))
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
    told: list[str] = []
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, budget=f"{share}x", tell=told.append) as fitted:
        for _ in range(3):
            outs = [model(torch.randn(ROWS, DIM)) for _ in range(4)]
            updated(optimizer, torch.stack([out.square().mean() for out in outs]).sum())
    assert fitted.plan is not None
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
