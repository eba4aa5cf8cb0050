"""Of the equal parts of a loop one is recorded, and stands for all: operations and peak are those of the whole loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, Levers, Region, Tiles
from memfit.levers import applied
from memfit.planner import capture_levers
from memfit.workload import Workload
from tests.measuring import peaks

CLASSES = 53


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 96), nn.SiLU(), nn.Linear(96, 16)) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens)))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def chosen(model: nn.Module, tokens: Tensor) -> Tensor:
    logs = torch.log_softmax(model(tokens)[:, :-1], -1)
    return -logs.gather(2, tokens[:, 1:, None]).mean()


class Flops(TorchDispatchMode):
    """Adds up the operations of what runs."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


TILES = Tiles(modules=("blocks.0", "blocks.1"), tokens=16)
CHUNKS = ChunkedLoss(head="head", rows=16)
LEVERS: dict[str, dict[str, Any]] = {
    "tiles": {"tiles": TILES},
    "chunks": {"chunked_loss": CHUNKS},
    "both, in regions": {
        "tiles": TILES,
        "chunked_loss": CHUNKS,
        "regions": (Region(("blocks.0",)), Region(("blocks.1",))),
    },
    "both, of microbatches": {"tiles": TILES, "chunked_loss": CHUNKS, "microbatch_size": 1},
}


@pytest.mark.parametrize("loss", [next_token, chosen])
@pytest.mark.parametrize("tokens", [128, 101, 17], ids=["equal parts", "a smaller last one", "few"])
@pytest.mark.parametrize("name", LEVERS)
def test_what_is_recorded_stands_for_the_whole_loop(name: str, tokens: int, loss: Any) -> None:
    torch.manual_seed(0)
    model, batch = Model(), torch.randint(CLASSES, (3, tokens))
    workload = Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    levers = Levers(**{"microbatch_size": 3, **LEVERS[name]})
    trace = capture_levers(workload, levers, find_device("cpu"))
    with applied(levers, workload) as step, Flops() as counted:
        step(batch)
    flops = sum(trace.works[op.signature].flops * times for op, times in zip(trace.ops, trace.repeats, strict=True))
    assert flops == counted.total
    predicted, measured = peaks(workload, levers)
    assert predicted == pytest.approx(measured, rel=0.005)
    if tokens == 128 and levers.microbatch_size == 3:  # 24 parts, of which two run
        assert max(op.times for op in trace.ops) >= 20 and len(trace.ops) < 1_000
