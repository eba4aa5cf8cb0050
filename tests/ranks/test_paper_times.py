"""Times of a rank's step on paper, as `estimate` has them, against those of the captured one, as plans have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.hardware import find_device
from memfit.ir import Levers, Mode, Precision, Sharding
from memfit.planner import capture_levers, costs_of, predict
from memfit.ranks import of_engine, of_one_rank
from memfit.workload import Workload
from tests.models import squared_error

RANKS, WIDTH, ROWS = 4, 2048, 4096


class Block(nn.Module):
    """A block whose parameters take about as long to copy as it takes to compute with them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def workload() -> Workload:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
        batch: Any = tuple(torch.empty(2 * RANKS, ROWS // RANKS, WIDTH) for _ in range(2))
    return Workload(model, batch, squared_error, torch.optim.AdamW(model.parameters()))


CASES: list[tuple[Mode, Precision, int]] = [
    ("zero3", "bf16-mixed", 2),
    ("zero3", "32-true", 1),
    ("zero2", "bf16-mixed", 1),
    ("ddp", "bf16-mixed", 2),
    ("ddp", "32-true", 1),
]


LONGER = [pytest.param(*case, marks=pytest.mark.ci) for case in CASES[1:]]


@pytest.mark.parametrize(("mode", "precision", "size"), [CASES[0], *LONGER])
def test_a_step_on_paper_takes_as_long_as_the_captured_one(mode: Mode, precision: Precision, size: int) -> None:
    units = tuple(map(str, range(4))) if mode != "ddp" else None
    sharding = Sharding(world_size=RANKS, mode=mode, units=units, gradient_as_bucket_view=mode == "ddp")
    levers = Levers(sharding=sharding, precision=precision, microbatch_size=size)
    mine, here = workload(), find_device("cpu")
    captured = capture_levers(mine, levers, here)
    alone = Levers(precision=precision, microbatch_size=size)
    paper = of_engine(capture_levers(of_one_rank(mine, RANKS), alone, here), sharding)
    for name in ("h100", "rtx-4090"):
        device = find_device(name)
        seconds = [predict(t, costs_of([t], device), device)[0].step_seconds for t in (captured, paper)]
        assert seconds[1] == pytest.approx(seconds[0], rel=0.04), name
