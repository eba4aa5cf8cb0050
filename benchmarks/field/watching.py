"""How much longer a watched step takes: a loop within `memfit.fit` takes turns with itself while nobody looks.

The budget is above what the step takes as it is, so that no lever is on: all that differs is memfit's watching. Both
are one loop of one process: two processes differ by more, in where their memory lies.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn import functional as F

import memfit
from benchmarks.field.scripts import networks

STEPS = 2


def overhead(rounds: int) -> float:
    """Return the ratio of processor seconds of a watched step to those of the plain one: a median over rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = networks.perceptron(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def turn(steps: int = STEPS) -> float:
        began = time.process_time()
        for _ in range(steps):
            x, y = networks.samples()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.process_time() - began

    with memfit.fit(model, optimizer, budget="2x", tell=lambda text: None) as fitted:
        turn()

        def unseen() -> float:
            with fitted._watcher.paused():
                return turn()

        ratios = []
        for i in range(rounds):
            first, second = (unseen, turn) if i % 2 else (turn, unseen)
            seconds = {first: first(), second: second()}
            ratios.append(seconds[turn] / seconds[unseen])
        return statistics.median(ratios)
