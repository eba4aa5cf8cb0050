"""A U-Net in two or three dimensions and a small Transformer, in Jittor; `torch_models` holds the same ones."""

from __future__ import annotations

from typing import Any

import jittor as jt
from jittor import nn

from benchmarks.frameworks.subject import TransformerSizes, UNetSizes


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)

    def execute(self, x: Any) -> Any:
        return nn.relu(self.norm2(self.conv2(nn.relu(self.norm1(self.conv1(x))))))


class Up(nn.Module):
    """Doubles the resolution, joins what was there on the way down, and convolves."""

    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv = DoubleConv(inputs + outputs, outputs, conv, norm)

    def execute(self, x: Any, skip: Any) -> Any:
        for axis in range(2, len(x.shape)):
            shape = list(x.shape)
            x = x.unsqueeze(axis + 1).broadcast([*shape[: axis + 1], 2, *shape[axis + 1 :]])
            x = x.reshape([*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]])
        return self.conv(jt.concat([x, skip], dim=1))


class UNet(nn.Module):
    def __init__(self, sizes: UNetSizes, norm: Any = nn.BatchNorm) -> None:
        super().__init__()
        conv, pool = (nn.Conv, nn.Pool) if sizes.dims == 2 else (nn.Conv3d, nn.Pool3d)
        widths = sizes.widths
        self.levels = sizes.levels
        self.pool = pool(2, op="maximum")
        for level, width in enumerate(widths):
            setattr(self, f"down{level}", DoubleConv(widths[level - 1] if level else sizes.inputs, width, conv, norm))
        for level in range(sizes.levels):
            setattr(self, f"up{level}", Up(widths[level + 1], widths[level], conv, norm))
        self.head = conv(sizes.base, sizes.outputs, 1)

    def execute(self, x: Any) -> Any:
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

    def attention(self, x: Any) -> Any:
        samples, length, width = x.shape
        q, k, v = (
            part.reshape((samples, length, self.heads, -1)).transpose(0, 2, 1, 3)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        weights = nn.softmax(nn.bmm_transpose(q, k) * (width // self.heads) ** -0.5, dim=-1)
        return self.out(nn.bmm(weights, v).transpose(0, 2, 1, 3).reshape((samples, length, width)))

    def execute(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.gelu(self.up(self.norm2(x))))


def transformer(sizes: TransformerSizes) -> Any:
    return nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)))
