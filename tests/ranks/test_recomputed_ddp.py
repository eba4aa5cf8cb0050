"""Steps of several ranks that recompute modules with submodules, captured without the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.hardware import find_device
from memfit.ir import Levers, Region, Regions, Sharding
from memfit.planner import capture_levers
from memfit.workload import Workload
from tests.models import squared_error


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(x)))


@pytest.mark.parametrize("lean", [(), ("*",)])
@pytest.mark.parametrize("size", [1, 2])
def test_data_parallel_steps_with_recomputed_blocks_are_captured(size: int, lean: tuple[str, ...]) -> None:
    """Every call has the parents that it has without recomputation, in the last of several captured steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    data = (torch.randn(4, 8, 16), torch.randn(4, 8, 16))
    workload = Workload(model, data, squared_error, torch.optim.SGD(model.parameters(), lr=0.1))
    sharding = Sharding(world_size=2, mode="ddp")
    regions = (Region(modules=("0",)), Region(modules=("1", "2")))
    levers = Levers(sharding=sharding, microbatch_size=size, regions=regions, lean=lean)
    trace = capture_levers(workload, levers, find_device("cpu"))
    assert any(op.phase == "recompute" for op in trace.ops) and Regions(trace).calls
    for chain in trace.ancestors:
        fqns = [trace.modules[trace.calls[i].module].fqn for i in chain]
        assert all(inner.startswith(f"{outer}.") or not outer for inner, outer in zip(fqns, fqns[1:], strict=False))
    assert all(trace.fqn_of(op.call) == "" for op in trace.ops if op.phase == "optimizer")
