"""Kernels whose outputs and workspaces are not those of fake ones: other layouts, other storages, jagged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.capture.steps import assert_predicted, squared


class Normalised(nn.Module):
    """Normalises features that are not the dimension behind the samples, as patch transformers do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, channels), nn.BatchNorm1d(channels)
        self.last = nn.Linear(channels, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.last(y.contiguous()).sin()
        return out


class Padded(nn.Module):
    """Pads volumes that are channels-last."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.layer = nn.Conv3d(2, 4, 1).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(self.layer(x.contiguous(memory_format=torch.channels_last_3d)), (1,) * 6, self.mode)
        return y.contiguous().sin()


class Scattered(nn.Module):
    """Writes into a copy of a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        part = self.layer(x).chunk(3, -1)[1]
        return torch.slice_scatter(part, part[:, :4].sin(), 1, 0, 4).cos()


class Compared(nn.Module):
    """Raises a number to the power of a transposed tensor, and adds logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).mT
        powers = 2.0**y
        return torch.logaddexp(powers, y.mT.contiguous().mT[:1].expand_as(y)).contiguous().sin()


class Directional(nn.Module):
    """Takes the derivative of a layer along a direction that leaves its weights, and much else, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            out = self.last(self.layer(dual).sin() * self.layer.bias.exp())
            tangent: Tensor = forward_ad.unpack_dual(out).tangent
        return tangent


class Bags(nn.Module):
    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(200, 64, mode=mode, **options), nn.Linear(64, 8)

    def forward(self, indices: Tensor) -> Any:
        return self.head(self.bags(indices))


class Counting(nn.Module):
    """Weighs its output by numbers that are found once or more, in order."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(32, 64), options

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        found = torch.unique_consecutive((x.detach() * 3).round().flatten().sort().values, **self.options)
        values = found[0] if isinstance(found, tuple) else found
        kept = self.layer(x).sigmoid()
        return y * kept * values.mean()


class Taught(nn.Module):
    """Learns from an encoder that does not train: PyTorch runs each of its layers in one operator."""

    def __init__(self, nested: bool, padded: bool, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True, **options)
        self.teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.teacher.requires_grad_(False)
        self.student, self.padded = nn.Linear(32, 32), padded

    def forward(self, x: Tensor) -> Any:
        self.teacher.eval()
        padding = torch.arange(x.shape[1]) >= torch.tensor([x.shape[1], *[17] * (len(x) - 1)])[:, None]
        with torch.no_grad():
            known = self.teacher(x, src_key_padding_mask=padding if self.padded else None)
        return self.student(x) - known


class Packing(nn.Module):
    """Packs rows of several lengths, and returns their values, or pads them again."""

    def __init__(self, *, pads: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.pads = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), pads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 8, x.shape[0] * x.shape[1]])
        rows = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets)
        rows = self.last(self.norm(self.first(rows)).relu())
        return rows.to_padded_tensor(0.0) if self.pads else rows.values()


INDICES = torch.arange(24 * 10).reshape(24, 10) % 200
STEPS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "normalised behind a transposition": lambda: (Normalised(48), torch.randn(6, 20, 32)),
    "more channels than rows": lambda: (Normalised(96), torch.randn(6, 4, 32)),
    "reflected volumes": lambda: (Padded("reflect"), torch.randn(2, 2, 6, 7, 8)),
    "repeated edges": lambda: (Padded("replicate"), torch.randn(2, 2, 6, 7, 8)),
    "written into a copy": lambda: (Scattered(), torch.randn(8, 10, 32)),
    "a directional derivative": lambda: (Directional(), torch.randn(8, 10, 32)),
    "powers of a transposed tensor": lambda: (Compared(), torch.randn(8, 10, 32)),
    "sums of embeddings": lambda: (Bags("sum"), INDICES),
    "greatest embeddings": lambda: (Bags("max"), INDICES),
    "greatest embeddings of few": lambda: (Bags("max"), INDICES[:, :3]),
    "numbers found": lambda: (Counting(), torch.randn(64, 32)),
    "numbers found and counted": lambda: (Counting(return_counts=True), torch.randn(64, 32)),
    "numbers found by place": lambda: (Counting(return_inverse=True), torch.randn(64, 32)),
    "an encoder in one operator": lambda: (Taught(False, False), torch.randn(6, 24, 32)),
    "a padded encoder": lambda: (Taught(False, True, norm_first=True), torch.randn(6, 24, 32)),
    "a nested encoder": lambda: (Taught(True, True), torch.randn(6, 24, 32)),
    "jagged rows": lambda: (Packing(pads=False), torch.randn(4, 32, 16)),
    "padded jagged rows": lambda: (Packing(pads=True), torch.randn(4, 32, 16)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] if "jagged" in name else []) for name in STEPS]
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # by what PyTorch imports for derivatives
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_the_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    assert_predicted(squared(*STEPS[name]()), rel=0.0 if "jagged" in name else 1e-3)
