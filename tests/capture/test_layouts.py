"""Operators whose real kernels lay out their outputs, or allocate them, unlike PyTorch's fake kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from memfit.ir import Levers
from memfit.workload import Workload
from tests.measuring import peaks


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


STEPS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "normalised behind a transposition": (Normalised(48), (6, 20, 32)),
    "more channels than rows": (Normalised(96), (6, 4, 32)),
    "reflected volumes": (Padded("reflect"), (2, 2, 6, 7, 8)),
    "repeated edges": (Padded("replicate"), (2, 2, 6, 7, 8)),
    "written into a copy": (Scattered(), (8, 10, 32)),
    "a directional derivative": (Directional(), (8, 10, 32)),
    "powers of a transposed tensor": (Compared(), (8, 10, 32)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # by what PyTorch imports for derivatives
def test_the_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    model, shape = STEPS[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, torch.randn(shape), lambda model, x: model(x).square().mean(), optimizer)
    predicted, measured = peaks(workload, Levers(microbatch_size=len(workload.batch)))
    assert predicted == pytest.approx(measured, rel=1e-3)
