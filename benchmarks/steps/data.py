"""Data of random numbers, and the losses that several steps share."""

from __future__ import annotations

import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2048
IGNORED = -100


def seed_all(seed: int) -> None:
    """Seed the generators that a step may draw from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def tokens(batch: int, length: int) -> Tensor:
    """Return the ids of full rows."""
    return torch.randint(3, VOCABULARY, (batch, length))


def padded(batch: int, length: int) -> dict[str, Tensor]:
    """Return rows of different lengths, named as the models of transformers take them; padding has no label."""
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    ids = tokens(batch, length) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def images(batch: int, size: int, classes: int = 10, channels: int = 3) -> dict[str, Tensor]:
    """Return images and their classes."""
    return {"x": torch.randn(batch, channels, size, size), "y": torch.randint(0, classes, (batch,))}


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a module that returns logits."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers returns for the arguments in a batch."""
    loss: Tensor = model(**batch).loss
    return loss


def convolved(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution, BatchNorm and ReLU in place."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))
