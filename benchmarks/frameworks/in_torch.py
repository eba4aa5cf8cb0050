"""One run in PyTorch: `python -m benchmarks.frameworks.in_torch SUBJECT BUDGET_BYTES STEPS WEIGHTS OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

import memfit
from benchmarks.frameworks.subject import LEARNING_RATE, SUBJECTS, UNetSizes, data, report, resident_bytes
from benchmarks.frameworks.torch_models import UNet, transformer
from memfit.capture import measure_peak_bytes
from memfit.training import Step


def workload(name: str) -> memfit.Workload:
    """Return a subject's workload, with weights drawn anew."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model = UNet(subject.sizes) if isinstance(subject.sizes, UNetSizes) else transformer(subject.sizes)
    batch = {key: torch.from_numpy(value) for key, value in data(subject).items()}

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        y = model(batch["x"])
        return F.cross_entropy(y, batch["y"]) if isinstance(model, UNet) else F.mse_loss(y, batch["y"])

    return memfit.Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters(), LEARNING_RATE), name=name)


def main(name: str, budget: str, steps: str, weights: str, out: str) -> None:
    """Run one case; a budget of 0 is the plain step, which also writes the weights."""
    mine = workload(name)
    levers: Any = None
    if int(budget):
        plan = memfit.plan(mine, budget=int(budget))
        step, levers = memfit.apply(plan, mine), msgspec.to_builtins(plan.levers)
    else:
        step = Step(mine)
        np.savez(weights, **{key: value.numpy() for key, value in mine.model.state_dict().items()})
    base = resident_bytes()
    report(
        int(steps),
        lambda: step(mine.batch).loss,
        lambda: measure_peak_bytes(step, mine.batch),
        levers,
        int(budget),
        Path(out),
        base,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
