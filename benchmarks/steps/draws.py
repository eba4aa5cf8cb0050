"""Steps that draw at random from Python, NumPy or PyTorch, and go another way by what was drawn."""

from __future__ import annotations

import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.branches import TransformerBlock
from benchmarks.steps.data import VOCABULARY, class_loss, convolved, images, seed_all, tokens
from memfit import Workload


class LayerDrop(nn.Module):
    """A language model that leaves blocks out by Python's `random` (Fan et al. 2020)."""

    def __init__(self, width: int = 128, layers: int = 6, dropped: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(layers))
        self.head, self.dropped = nn.Linear(width, VOCABULARY), dropped

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if not self.training or random.random() >= self.dropped:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def layer_drop() -> Workload:
    """Blocks left out by `random.random()`."""
    seed_all(120)
    model = LayerDrop()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(8, 96), _next_token_loss, optimizer, name="layer_drop", max_grad_norm=1.0)


class DroppedResidual(nn.Module):
    """A residual block that is left out for the whole batch, decided by `torch.rand(())` (Huang et al. 2016)."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolved(width, width), convolved(width, width))
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < self.dropped:
            return x
        return x + self.layers(x)  # type: ignore[no-any-return]


def stochastic_depth() -> Workload:
    """A residual network whose blocks survive a draw of `torch.rand(()) < p`."""
    seed_all(121)
    blocks = [DroppedResidual(24, 0.5 * at / 5) for at in range(1, 6)]
    model = nn.Sequential(convolved(3, 24), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Workload(model, images(8, 48), class_loss, optimizer, name="stochastic_depth")


def _mixed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """CutMix or MixUp, whose share, rectangle and order NumPy draws (Yun et al. 2019; Zhang et al. 2018)."""
    x, y = batch["x"], batch["y"]
    share, order = float(numpy.random.beta(0.4, 0.4)), torch.from_numpy(numpy.random.permutation(len(x)))
    if numpy.random.rand() < 0.5:
        mixed = share * x + (1 - share) * x[order]
    else:
        size = int(x.shape[-1] * (1 - share) ** 0.5)
        at = int(numpy.random.randint(0, x.shape[-1] - size + 1))
        mixed = x.clone()
        mixed[..., at : at + size, at : at + size] = x[order][..., at : at + size, at : at + size]
    logits = model(mixed)
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def mixed_images() -> Workload:
    """MixUp or CutMix of the batch, drawn by NumPy in the loss."""
    seed_all(122)
    stages = [convolved(3, 32), convolved(32, 32, 2), convolved(32, 64), convolved(64, 64, 2)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    return Workload(model, images(10, 48), _mixed_loss, optimizer, name="mixed_images")


def _masked_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Masked language modelling: a share of the tokens is replaced at random, and guessed (Devlin et al. 2019)."""
    masked = torch.rand(ids.shape) < 0.15
    replaced = ids.clone()
    replaced[masked & (torch.rand(ids.shape) < 0.8)] = 0
    hidden = model[:-1](replaced)  # type: ignore[index]
    return F.cross_entropy(model[-1](hidden[masked]), ids[masked])  # type: ignore[index]


def random_masks() -> Workload:
    """A masked language model whose mask is drawn in the loss, and selects what the head computes."""
    seed_all(123)
    width = 128
    blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
    return Workload(
        model, tokens(8, 96), _masked_loss, torch.optim.AdamW(model.parameters(), lr=5e-4), name="random_masks"
    )


class SampledPaths(nn.Module):
    """A supernet: each layer runs one of its choices, which Python draws (Guo et al. 2020, "single path one-shot")."""

    def __init__(self, width: int = 24, layers: int = 5) -> None:
        super().__init__()
        self.stem = convolved(3, width)
        self.layers = nn.ModuleList(nn.ModuleList(self._choice(width, k) for k in (1, 3, 5)) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def _choice(self, width: int, kernel: int) -> nn.Sequential:
        depthwise = nn.Conv2d(2 * width, 2 * width, kernel, padding=kernel // 2, groups=2 * width)
        return nn.Sequential(nn.Conv2d(width, 2 * width, 1), depthwise, nn.Hardswish(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for choices in self.layers:
            assert isinstance(choices, nn.ModuleList)
            x = x + random.choice(choices)(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def sampled_paths() -> Workload:
    """A supernet of which Python's `random.choice` takes one path a step; other weights have no gradient."""
    seed_all(124)
    model = SampledPaths()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(model, images(8, 40), class_loss, optimizer, name="sampled_paths", max_grad_norm=5.0)
