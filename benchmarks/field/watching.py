"""How much longer a watched step takes: two processes take turns, of one loop as it is, and in `memfit.fit`.

The budget is above what the step takes as it is, so that no lever is on: all that differs is memfit's watching.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch.nn import functional as F

import memfit
from benchmarks.field.cases import ROOT
from benchmarks.field.scripts import networks

STEPS = 10


def overhead(rounds: int) -> float:
    """Return the ratio of processor seconds of a watched step to those of the plain one: a median over rounds."""
    with _started("plain") as plain, _started("watched") as watched:
        ratios = []
        for i in range(rounds):
            first, second = (plain, watched) if i % 2 else (watched, plain)
            seconds = {id(process): _turn(process) for process in (first, second)}
            ratios.append(seconds[id(watched)] / seconds[id(plain)])
        return statistics.median(ratios)


@contextlib.contextmanager
def _started(way: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.field.watching", way]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.communicate()


def _turn(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None and process.stdout is not None
    print("go", file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    """Make a few steps for each line of standard input, and print their processor seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = networks.perceptron(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        x, y = networks.samples()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    watched = sys.argv[1] == "watched"
    with memfit.fit(model, optimizer, budget="2x") if watched else contextlib.nullcontext():
        for _ in range(4):
            step()
        for _ in sys.stdin:
            began = time.process_time()
            for _ in range(STEPS):
                step()
            print((time.process_time() - began) / STEPS, flush=True)


if __name__ == "__main__":
    main()
