"""The models of `jittor_models` in PyTorch, with the same names of parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.frameworks.subject import TransformerSizes, UNetSizes


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Up(nn.Module):
    """Doubles the resolution, joins what was there on the way down, and convolves."""

    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv = DoubleConv(inputs + outputs, outputs, conv, norm)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> Any:
        return self.conv(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skip], dim=1))


class UNet(nn.Module):
    def __init__(self, sizes: UNetSizes) -> None:
        super().__init__()
        is_flat = sizes.dims == 2
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if is_flat else (nn.Conv3d, nn.BatchNorm3d)
        widths = sizes.widths
        self.levels = sizes.levels
        self.pool = nn.MaxPool2d(2) if is_flat else nn.MaxPool3d(2)
        for level, width in enumerate(widths):
            setattr(self, f"down{level}", DoubleConv(widths[level - 1] if level else sizes.inputs, width, conv, norm))
        for level in range(sizes.levels):
            setattr(self, f"up{level}", Up(widths[level + 1], widths[level], conv, norm))
        self.head = conv(sizes.base, sizes.outputs, 1)

    def forward(self, x: torch.Tensor) -> Any:
        skips = []
        for level in range(self.levels):
            x = getattr(self, f"down{level}")(x)
            skips.append(x)
            x = self.pool(x)
        x = getattr(self, f"down{self.levels}")(x)
        for level in reversed(range(self.levels)):
            x = getattr(self, f"up{level}")(x, skips[level])
        return self.head(x)


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> Any:
        samples, length, width = x.shape
        split = (part.reshape(samples, length, self.heads, -1) for part in self.qkv(x).chunk(3, dim=2))
        q, k, v = (part.transpose(1, 2) for part in split)
        weights = torch.softmax(q @ k.transpose(2, 3) * (width // self.heads) ** -0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(samples, length, width))

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(sizes: TransformerSizes) -> Any:
    return nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)))
