"""Jagged nested tensors that a model makes itself: their operators run on the values, which are counted to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.ir import Levers
from memfit.workload import Workload
from tests.measuring import peaks

pytestmark = pytest.mark.filterwarnings("ignore")  # of nested tensors, and of what PyTorch imports for them


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


@pytest.mark.ci
@pytest.mark.parametrize("pads", [False, True])
def test_the_peak_is_the_measured_one(pads: bool) -> None:
    torch.manual_seed(0)
    model = Packing(pads=pads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, torch.randn(4, 32, 16), lambda model, x: model(x).square().mean(), optimizer)
    predicted, measured = peaks(workload, Levers(microbatch_size=4))
    assert predicted == measured
