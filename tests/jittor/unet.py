"""A U-Net in Jittor, in two or three dimensions."""

from __future__ import annotations

from typing import Any

import jittor as jt

nn = jt.nn


class DoubleConv(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)

    def execute(self, x: Any) -> Any:
        return nn.relu(self.norm2(self.conv2(nn.relu(self.norm1(self.conv1(x))))))


class Up(nn.Module):  # type: ignore[misc]
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


class UNet(nn.Module):  # type: ignore[misc]
    """Base channels double with each of the levels."""

    def __init__(
        self, *, inputs: int = 3, outputs: int = 2, base: int = 8, levels: int = 3, dims: int = 2, norm: Any = None
    ) -> None:
        super().__init__()
        norm = norm or nn.BatchNorm
        conv = nn.Conv if dims == 2 else nn.Conv3d
        widths = [base * 2**level for level in range(levels + 1)]
        self.levels = levels
        self.pool = nn.Pool(2, op="maximum") if dims == 2 else nn.Pool3d(2, op="maximum")
        for level, width in enumerate(widths):
            setattr(self, f"down{level}", DoubleConv(widths[level - 1] if level else inputs, width, conv, norm))
        for level in range(levels):
            setattr(self, f"up{level}", Up(widths[level + 1], widths[level], conv, norm))
        self.head = conv(base, outputs, 1)

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
