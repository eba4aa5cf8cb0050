"""The tensors at a peak are told by what they are, in captured steps of real models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.ir import PeakPart, Precision, peak_parts, simulate
from memfit.workload import Workload
from tests.models import COSTS, Block, captured


class Tagger(nn.Module):
    """Tokens, some layers of any kind, and a head."""

    def __init__(self, *layers: nn.Module, dim: int, classes: int) -> None:
        super().__init__()
        self.table, self.layers, self.head = nn.Embedding(8, dim), nn.Sequential(*layers), nn.Linear(dim, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(tokens)))


def step(*layers: nn.Module, dim: int, classes: int, samples: int, tokens: int) -> Workload:
    model = Tagger(*layers, dim=dim, classes=classes)
    batch = torch.zeros(samples, tokens, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, batch, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), optimizer)


def segmented() -> Workload:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 40, 1))
    batch = torch.zeros(2, 1, 32, 32)
    labels = torch.zeros(2, 32, 32, dtype=torch.long)
    return Workload(
        model, (batch, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1]), torch.optim.SGD(model.parameters())
    )


CASES: dict[str, Callable[[], Workload]] = {
    "logits": functools.partial(step, nn.GELU(), dim=8, classes=512, samples=4, tokens=24),
    "logits of pixels": segmented,
    "scores": functools.partial(step, Block(16, 4, 0.1), dim=16, classes=8, samples=2, tokens=96),
    "activations": functools.partial(
        step, *(nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16)) for _ in range(3)), dim=16, classes=8,
        samples=8, tokens=64,
    ),
    "state": functools.partial(step, nn.Linear(256, 256), dim=256, classes=8, samples=1, tokens=1),
}  # fmt: skip


@functools.cache
def parts(name: str, precision: Precision = "32-true") -> tuple[tuple[PeakPart, ...], int]:
    trace = captured(CASES[name](), precision=precision)
    timeline = simulate(trace, COSTS)
    return peak_parts(trace, timeline), timeline.peak_bytes


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("logits", "logits", "logits of 4 × 24 × 512 (3 tensors)"),
        ("logits of pixels", "logits", "logits of 2 × 40 × 32 × 32 (3 tensors)"),
        ("scores", "attention scores", "attention scores of 2 × 4 × 96 × 96"),
        ("activations", "activations", "activations, the largest in layers.0.0 to layers.2.0 (addmm, 8 × 64 × 512)"),
        ("state", "optimizer state", "optimizer state"),
    ],
)
def test_the_largest_tensors_are_named(name: str, kind: str, text: str) -> None:
    found, peak_bytes = parts(name)
    assert found[0].kind == kind and found[0].text.startswith(text), found
    assert [part.nbytes for part in found] == sorted((part.nbytes for part in found), reverse=True)
    assert 0.25 * peak_bytes < found[0].nbytes <= sum(part.nbytes for part in found) <= peak_bytes


def test_logits_are_logits_with_their_casts_under_autocast() -> None:
    found, _ = parts("logits", "bf16-mixed")
    assert found[0].kind == "logits" and "512" in found[0].text
    assert not any("512" in part.text for part in found[1:])  # the copies in fp32 are of them


def test_activations_of_the_logits_size_are_not_taken_for_logits() -> None:
    """A layer as wide as there are classes makes tensors of the logits' shape."""
    trace = captured(step(nn.Linear(64, 64), nn.GELU(), dim=64, classes=64, samples=4, tokens=32))
    logits = [part for part in peak_parts(trace, simulate(trace, COSTS)) if part.kind == "logits"]
    assert logits and logits[0].nbytes <= 3 * 4 * 32 * 64 * 4


@pytest.mark.parametrize(
    ("name", "place"),
    [("logits", "start of the backward pass (log_softmax_backward_data)"), ("state", "optimizer step (")],
)
def test_the_place_of_a_peak_is_told_in_words(name: str, place: str) -> None:
    assert place in simulate(captured(CASES[name]()), COSTS).where()
