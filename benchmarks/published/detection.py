"""YOLOv5m (v6.0), written from its published table of layers, as its AutoBatch profiles it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Loop, Workload

WIDTHS = (48, 96, 192, 384, 768)
"""Channels of the five scales: those of the table (64 to 1024) by its width multiple, 0.75."""
REPEATS = (2, 4, 6, 2)
"""Bottlenecks of the backbone's stages: those of the table (3, 6, 9, 3) by its depth multiple, 0.67."""
ANCHORS = 3


class HalvedConv(nn.Module):
    """A convolution whose float32 weights are at rest, and which runs with float16 copies that have no gradient.

    AutoBatch runs all of its passes in one autocast. Its first pass counts operations without gradients, and autocast
    keeps the float16 weights that it makes there: all later passes take them, and no weight gets a gradient.
    """

    half_weight: Tensor

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, padding: int, bias: bool, runs: bool
    ) -> None:
        super().__init__()
        shapes = {"weight": (outputs, inputs, kernel, kernel), **({"bias": (outputs,)} if bias else {})}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))
            if runs:
                self.register_buffer(f"half_{name}", torch.empty(shape, dtype=torch.float16))
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.half_weight, getattr(self, "half_bias", None), self.stride, self.padding)


class Conv(nn.Module):
    """A convolution without bias, batch norm, and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, runs: bool) -> None:
        super().__init__()
        padding = 2 if kernel == 6 else kernel // 2
        self.conv = HalvedConv(inputs, outputs, kernel, stride, padding, False, runs)
        self.norm, self.activation = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.activation(self.norm(self.conv(x)))
        return found


class Bottleneck(nn.Module):
    """Convolutions of 1 and 3 pixels, with or without the input added."""

    def __init__(self, channels: int, adds: bool, *, runs: bool) -> None:
        super().__init__()
        self.first, self.second = Conv(channels, channels, runs=runs), Conv(channels, channels, 3, runs=runs)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return x + found if self.adds else found


class C3(nn.Module):
    """Two halves of the channels, one of them through bottlenecks, joined by a convolution."""

    def __init__(self, inputs: int, outputs: int, repeats: int, adds: bool = True, *, runs: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.through, self.past = Conv(inputs, half, runs=runs), Conv(inputs, half, runs=runs)
        self.joined = Conv(2 * half, outputs, runs=runs)
        self.bottlenecks = nn.Sequential(*(Bottleneck(half, adds, runs=runs) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.joined(torch.cat((self.bottlenecks(self.through(x)), self.past(x)), 1))
        return found


class SPPF(nn.Module):
    """Three poolings of 5 pixels after one another, joined with their input."""

    def __init__(self, channels: int, *, runs: bool) -> None:
        super().__init__()
        self.first, self.joined = Conv(channels, channels // 2, runs=runs), Conv(2 * channels, channels, runs=runs)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [self.first(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        found: Tensor = self.joined(torch.cat(pooled, 1))
        return found


class YOLOv5m(nn.Module):
    """The model of three outputs, an eighth to a 32nd of the image's size.

    Args:
        classes: Number of classes.
        runs: Whether it has the float16 copies that its passes need.
    """

    def __init__(self, classes: int, runs: bool) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = WIDTHS
        n2, n3, n4, n5 = REPEATS
        self.stem = Conv(3, c1, 6, 2, runs=runs)
        self.down = nn.ModuleList(Conv(*pair, 3, 2, runs=runs) for pair in ((c1, c2), (c2, c3), (c3, c4), (c4, c5)))
        stages = zip(WIDTHS[1:], (n2, n3, n4, n5), strict=True)
        self.stages = nn.ModuleList(C3(width, width, count, runs=runs) for width, count in stages)
        self.pool = SPPF(c5, runs=runs)
        self.narrow5, self.narrow4 = Conv(c5, c4, runs=runs), Conv(c4, c3, runs=runs)
        self.up4, self.up3 = C3(2 * c4, c4, 2, False, runs=runs), C3(2 * c3, c3, 2, False, runs=runs)
        self.down3, self.down4 = Conv(c3, c3, 3, 2, runs=runs), Conv(c4, c4, 3, 2, runs=runs)
        self.out4, self.out5 = C3(2 * c3, c4, 2, False, runs=runs), C3(2 * c4, c5, 2, False, runs=runs)
        outputs = ANCHORS * (classes + 5)
        self.heads = nn.ModuleList(HalvedConv(width, outputs, 1, 1, 0, True, runs) for width in (c3, c4, c5))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, scales = self.stem(x), []
        for down, stage in zip(self.down, self.stages, strict=True):
            x = stage(down(x))
            scales.append(x)
        narrow5 = self.narrow5(self.pool(x))
        narrow4 = self.narrow4(self.up4(torch.cat((_doubled(narrow5), scales[2]), 1)))
        small = self.up3(torch.cat((_doubled(narrow4), scales[1]), 1))
        medium = self.out4(torch.cat((self.down3(small), narrow4), 1))
        large = self.out5(torch.cat((self.down4(medium), narrow5), 1))
        return [_by_anchor(head(x)) for head, x in zip(self.heads, (small, medium, large), strict=True)]


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


def _by_anchor(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    return x.view(batch, ANCHORS, channels // ANCHORS, height, width).permute(0, 1, 3, 4, 2).contiguous()


class Profiled(nn.Module):
    """The copy that is profiled, the model that it is a copy of, and what autocast keeps of the batches before."""

    def __init__(self, classes: int, pixels: int, images_before: int) -> None:
        super().__init__()
        self.original = YOLOv5m(classes, runs=False).requires_grad_(False)
        self.copied = YOLOv5m(classes, runs=True)
        if images_before:
            self.register_buffer("before", torch.empty(images_before, 3, pixels, pixels, dtype=torch.float16))

    def forward(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = self.copied(x)
        return found


def autobatch(batch: int, classes: int = 4, pixels: int = 416) -> Workload:
    """A pass of AutoBatch, which takes batches of 1, 2, 4, 8 and 16 in turn, forward and backward.

    Autocast keeps the float16 images too, as it does the weights: it takes them for weights, being leaves that require
    gradients. So no gradient reaches the images.
    """
    shape = (batch, 3, pixels, pixels)
    images = {"given": torch.empty(shape), "half": torch.empty(shape, dtype=torch.float16)}
    return Workload(
        Profiled(classes, pixels, batch - 1).train(),
        images,
        lambda model, batch: sum(x.sum(dtype=torch.float32) for x in model(batch["half"])),
        None,  # type: ignore[arg-type]
        loop=Loop(holds_outputs="next-forward", set_to_none=False),
    )
