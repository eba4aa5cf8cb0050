"""Loops whose later batches are larger: planned again before they run, or ended by an error; and memory that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import memfit
from memfit.errors import InfeasibleError
from memfit.training.guards import loop_memory as growth
from tests.measuring import peak_bytes_of
from tests.pipeline.loops import deep

SMALL, LARGE = 256, 1024


class Reader(nn.Module):
    """Reads tokens, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.inner = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.table(tokens)))
        return out


class Matcher(nn.Module):
    """Compares what is in each image with as many anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        scores = [self.inner(i) @ t["boxes"].mT for i, t in zip(images, targets, strict=True)]
        return {"match": torch.stack([s.softmax(1).square().mean() for s in scores]).mean()}


def rows(model: nn.Module, size: int) -> torch.Tensor:
    x, y = torch.randn(size, 64), torch.randint(0, 10, (size,))
    return F.cross_entropy(model(x), y)


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
    "rows": (deep, rows),
    "text": (Reader, text),
    "crowds": (Matcher, crowds),
    "pairs": (deep, in_pairs),
}


def loop(name: str, sizes: list[int], after: Callable[[], object] = lambda: None) -> Iterator[object]:
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
            loss = loss_of(model, size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            after()
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
        memfit.fit(model, optimizer, budget=int(1.2 * plain_bytes), tell=lambda _: None),
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
    monkeypatch.setattr(growth, "_FREE_SECONDS", 1e9)
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
    assert "`kept` (a list" in lines[0] and "test_fit_growing.py:" in lines[0] and "graphs" in lines[0]
