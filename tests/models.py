"""Small training steps that the tests share: each builder returns a new, seeded `Workload`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfit.capture import CaptureJob, capture, capture_with_data
from memfit.ir import CostTable, Keep, Precision, Region, Trace
from memfit.levers.precision import autocast
from memfit.recomputation import checkpointed
from memfit.solver import Option
from memfit.training import LossScaler, Step, StepOptions
from memfit.workload import Workload, batch_size_of

COSTS = CostTable(
    device="test",
    torch_version="",
    threads=1,
    ops={},
    dispatch_seconds=1e-6,
    checkpoint_seconds=2e-5,
    selective_op_seconds=3e-6,
    peak_error=0.01,
)
"""Costs that say nothing about the machine: every operator takes a microsecond and no workspace."""


class Block(nn.Module):
    """A pre-norm transformer block with dropout and residuals."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5).softmax(-1)
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(b, t, d)))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token ids to logits; with `tied`, the head's weight is the embedding's."""

    def __init__(self, vocabulary: int, dim: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dim, 4, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class ResidualConv(nn.Module):
    """Two convolutions with BatchNorm, and a skip connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + x)


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(*[ResidualConv(channels) for _ in range(blocks)])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.pool(self.stages(self.stem(x))).mean((2, 3)))
        return out


class UNet(nn.Module):
    """A recursive U-Net: each level holds the next one inside, with a skip connection around it."""

    def __init__(self, channels: int, levels: int, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(2, width), nn.LeakyReLU(0.1))
        self.inner = UNet(width, levels - 1, width * 2) if levels > 1 else None
        inner_width = width * 3 if self.inner else width
        self.up = nn.Sequential(nn.Conv2d(inner_width, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        if self.inner is not None:
            deep = F.interpolate(self.inner(F.max_pool2d(skip, 2)), scale_factor=2.0)
            skip = torch.cat([skip, deep], 1)
        out: torch.Tensor = self.up(skip)
        return out


class Segmenter(nn.Module):
    """A U-Net and its head."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.unet = UNet(1, levels, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.unet(x))
        return out


class Recurrent(nn.Module):
    """An LSTM, then multi-head attention over its outputs."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(hidden, 4, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        y = self.norm(y + self.attention(y, y, y)[0])
        out: torch.Tensor = self.head(y)
        return out


class Twice(nn.Module):
    """One module called two times, and a list of modules called in turn."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim), nn.Dropout(0.2))
        self.between = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shared(x)
        x = self.between(x)
        out: torch.Tensor = self.head(x + self.shared(x))
        return out


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of logits whose classes are in the last dimension."""
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch["y"].flatten())


def pixel_cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of logits whose classes are in the second dimension."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean squared error."""
    x, y = batch
    return F.mse_loss(model(x), y)


def transformer(
    *, batch: int = 4, tokens: int = 12, dim: int = 32, layers: int = 2, dropout: float = 0.1, tied: bool = False
) -> Workload:
    """A tiny transformer with dropout and residuals, with AdamW."""
    torch.manual_seed(0)
    model = Transformer(40, dim, layers, dropout, tied)
    ids = torch.randint(0, 40, (batch, tokens + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}
    return Workload(model, data, cross_entropy, optimizer, name="transformer", max_grad_norm=1.0)


def tied(**sizes: Any) -> Workload:
    """The transformer whose head and embedding share their weight."""
    return transformer(tied=True, **sizes)


def convnet(*, batch: int = 4, channels: int = 8, blocks: int = 2, size: int = 12) -> Workload:
    """A residual network with BatchNorm, with SGD and momentum."""
    torch.manual_seed(1)
    model = ConvNet(channels, blocks)
    data = {"x": torch.randn(batch, 3, size, size), "y": torch.randint(0, 10, (batch,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, data, cross_entropy, optimizer, name="convnet")


def unet(*, batch: int = 2, levels: int = 3, width: int = 4, size: int = 16) -> Workload:
    """A U-Net with nested modules, with Adam."""
    torch.manual_seed(2)
    model = Segmenter(levels, width)
    data = {"x": torch.randn(batch, 1, size, size), "y": torch.randint(0, 3, (batch, size, size))}
    return Workload(model, data, pixel_cross_entropy, torch.optim.Adam(model.parameters()), name="unet")


def recurrent(*, batch: int = 4, tokens: int = 6, features: int = 8, hidden: int = 16) -> Workload:
    """An LSTM with attention, with Adam."""
    torch.manual_seed(3)
    model = Recurrent(features, hidden)
    data = (torch.randn(batch, tokens, features), torch.randn(batch, tokens, features))
    return Workload(model, data, squared_error, torch.optim.Adam(model.parameters()), name="recurrent")


def twice(*, batch: int = 8, dim: int = 16) -> Workload:
    """A module that is called two times, with SGD."""
    torch.manual_seed(4)
    model = Twice(dim)
    data = (torch.randn(batch, dim), torch.randn(batch, dim))
    return Workload(model, data, squared_error, torch.optim.SGD(model.parameters(), lr=0.1), name="twice")


BUILDERS: dict[str, Callable[..., Workload]] = {
    "transformer": transformer,
    "tied": tied,
    "convnet": convnet,
    "unet": unet,
    "recurrent": recurrent,
    "twice": twice,
}
"""Every builder, by the name of its workload."""

LARGE: dict[str, dict[str, int]] = {
    "transformer": {"batch": 8, "tokens": 64, "dim": 64},
    "tied": {"batch": 8, "tokens": 64, "dim": 64},
    "convnet": {"batch": 8, "channels": 16, "size": 32},
    "unet": {"batch": 4, "width": 16, "size": 32},
    "recurrent": {"batch": 16, "tokens": 24, "features": 32, "hidden": 64},
    "twice": {"batch": 1024, "dim": 128},
}
"""Sizes at which a step's peak is a few MiB."""


@contextmanager
def step_of(
    workload: Workload,
    *,
    precision: Precision = "32-true",
    microbatch_size: int | None = None,
    regions: Mapping[str, Keep] | Sequence[Region] = (),
) -> Iterator[Step]:
    """Run a workload as a step with levers, until the context is left."""
    with checkpointed(workload.model, regions_of(regions)):
        yield Step(
            workload,
            StepOptions(
                microbatch_size=microbatch_size,
                autocast=partial(autocast, precision, "cpu"),
                scaler=LossScaler() if precision == "16-mixed" else None,
            ),
        )


def captured(workload: Workload, *, real: bool = False, **levers: Any) -> Trace:
    """Return the trace of a workload's step with levers (those of `step_of`), under fake tensors or really run."""
    run = capture_with_data if real else capture
    given = {name: levers[name] for name in ("precision", "microbatch_size") if name in levers}
    return run(CaptureJob(workload, partial(step_of, **levers), **given))


@functools.cache
def plain_trace(name: str, precision: Precision = "32-true", microbatches: int = 1, large: bool = False) -> Trace:
    """Return the trace of a builder's step with nothing checkpointed, captured once."""
    workload = BUILDERS[name](**(LARGE[name] if large else {}))
    size = batch_size_of(workload.batch)
    return captured(workload, precision=precision, microbatch_size=size // microbatches)


def random_selection(rng: random.Random, options: Iterable[Option], share: float = 0.6) -> list[Region]:
    """Return the regions of some options, none of which is inside another's."""
    shuffled = list(options)
    rng.shuffle(shuffled)
    chosen: list[Option] = []
    for option in shuffled:
        if not any(_related(a, b) for c in chosen for a in c.modules for b in option.modules) and rng.random() < share:
            chosen.append(option)
    return [region for option in chosen for region in option.regions]


def _related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def regions_of(given: Mapping[str, Keep] | Sequence[Region]) -> Sequence[Region]:
    """Return a region for each module of a mapping to what it keeps; regions as they are."""
    return [Region((fqn,), keep) for fqn, keep in given.items()] if isinstance(given, Mapping) else given
