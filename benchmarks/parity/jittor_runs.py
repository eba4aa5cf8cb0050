"""Trainings in Jittor's own environment, which `in_jittor` starts with `python -m benchmarks.parity.jittor_runs`."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memfit.jittor as mj
from memfit.errors import InfeasibleError
from memfit.ir import Levers, Plan
from memfit.jittor.variables import named_variables

LEARNING_RATE, FINAL_SHARE = 4e-3, 0.1
N_HELD_OUT = 360
EXACT_SHARE = 0.7
"""The budget of plans, as a share of the plain peak; the lowest peak there is, where that is more."""

STRICT = "-fno-fast-math -ffp-contract=off"
"""What keeps the compiler from arithmetic whose result depends on what is fused."""


@dataclass(frozen=True)
class Sizes:
    """Of the network and its batch."""

    channels: int = 8
    blocks: int = 4
    batch_size: int = 128


class Digits:
    """Handwritten digits from a file: those to learn from, and those held out."""

    def __init__(self, path: Path) -> None:
        data = np.load(path)
        order = np.random.RandomState(0).permutation(len(data["y"]))
        x = (data["x"][order][:, None] / 16).astype("float32")
        y = data["y"][order].astype("int32")
        self.held_out = x[:N_HELD_OUT], y[:N_HELD_OUT]
        self._x, self._y = x[N_HELD_OUT:], y[N_HELD_OUT:]

    def batches(self, seed: int, size: int) -> Iterator[dict[str, Any]]:
        """Yield batches without end, in an order of the seed."""
        import jittor as jt

        random = np.random.RandomState(seed)
        while True:
            order = random.permutation(len(self._y))
            for start in range(0, len(order) - size + 1, size):
                picked = order[start : start + size]
                yield {"x": jt.array(self._x[picked]).stop_grad(), "y": jt.array(self._y[picked]).stop_grad()}


def workload(digits: Digits, seed: int, sizes: Sizes) -> mj.Workload:
    """Return the training step of a residual network with BatchNorm, with the initial weights of a seed."""
    from jittor import nn

    from benchmarks.parity.jittor_models import resnet

    mj.seed(seed)
    model = resnet(sizes.channels, sizes.blocks)
    return mj.Workload(
        model=model,
        batch=next(digits.batches(seed, sizes.batch_size)),
        loss_fn=lambda model, batch: nn.cross_entropy_loss(model(batch["x"]), batch["y"]),
        optimizer=nn.Adam(model.parameters(), LEARNING_RATE),
        name="digits_resnet",
    )


def plan_of(mine: mj.Workload, budget: int | str) -> Plan:
    """Return the plan for a budget, or for a MiB more than the lowest peak that there is: peaks differ by as much."""
    try:
        return mj.plan(mine, budget=budget, points=1)
    except InfeasibleError as e:
        return mj.plan(mine, budget=e.lowest_peak_bytes + 2**20, points=1)


def step_of(condition: str, mine: mj.Workload, seed: int, plan: Plan | None) -> mj.Step:
    """Return the training step of a condition."""
    levers = Levers(microbatch_size=_size(mine)) if plan is None else plan.levers
    if condition == "microbatches":
        levers = Levers(microbatch_size=_size(mine) // 4)
    if condition == "16-mixed":
        levers = Levers(precision="16-mixed", microbatch_size=_size(mine))
    regions = mj.structure.lean_regions(mine.model) if condition == "lean" else levers.regions
    return mj.Step(mine, microbatch_size=levers.microbatch_size, precision=levers.precision, regions=regions, seed=seed)


def _size(mine: mj.Workload) -> int:
    return int(mine.batch["y"].shape[0])


def run(digits: Digits, condition: str, seed: int, steps: int, plan: Plan | None) -> dict[str, Any]:
    """Return what came of a training under a condition."""
    mine = workload(digits, seed, Sizes())
    step, batches = step_of(condition, mine, seed, plan), digits.batches(seed, Sizes().batch_size)
    losses, scales, seconds, skips = [], [], 0.0, 0
    for index in range(steps):
        mine.optimizer.lr = LEARNING_RATE * (1 - (1 - FINAL_SHARE) * index / steps)
        batch = next(batches)
        started = time.process_time()
        result = step(batch)
        seconds += time.process_time() - started
        losses.append(result.loss)
        scales.append(result.loss_scale)
        skips = result.skips
    return {
        "condition": condition,
        "seed": seed,
        "steps": steps,
        "metric": accuracy(mine.model, digits),
        "weights": digest(mine.model),
        "last_loss": float(np.mean(losses[-max(1, steps // 10) :])),
        "skips": skips,
        "first_scale": scales[0],
        "last_scale": scales[-1],
        "cpu_seconds": seconds,
        "levers": [] if plan is None else [use.brief for use in plan.uses],
        "peak_bytes": peak_bytes(step, mine) if seed == 0 else None,
    }


def accuracy(model: Any, digits: Digits) -> float:
    """Return the share of held-out digits that are recognised."""
    import jittor as jt

    images, labels = digits.held_out
    model.eval()
    with jt.no_grad():
        found = model(jt.array(images)).numpy().argmax(1)
    model.train()
    return float((found == labels).mean())


def digest(model: Any) -> str:
    """Return a digest of every bit of a model's parameters and buffers."""
    found = hashlib.blake2b(digest_size=16)
    for name, variable in sorted(named_variables(model).items()):
        found.update(name.encode() + np.ascontiguousarray(variable.numpy()).tobytes())
    return found.hexdigest()


def peak_bytes(step: mj.Step, mine: mj.Workload) -> int:
    """Return the peak of Jittor's pools in a step."""
    with mj.memory.measure() as measured:
        step(mine.batch)
    return measured.peak_bytes


def use(digits: Digits, plain: dict[str, int], larger: dict[str, int], seeds: int, seconds: float) -> dict[str, Any]:
    """Return what comes of something larger, in the bytes and in as many CPU seconds as the plain training."""
    small, large = Sizes(**plain), Sizes(**larger)
    peaks = []
    for sizes in (small, large):
        mine = workload(digits, 0, sizes)
        step = mj.Step(mine)
        step(mine.batch)  # compiles
        peaks.append(peak_bytes(step, mine))
        del mine, step
    mine = workload(digits, 0, large)
    found: dict[str, Any] = {"plain": plain, "larger": larger, "seconds": seconds, "budget_bytes": peaks[0]}
    found["unplanned_bytes"] = peaks[1]
    try:
        plan = mj.plan(mine, budget=peaks[0], points=1)
    except InfeasibleError as e:
        return {**found, "infeasible": str(e)}
    del mine
    rows = []
    for seed in range(seeds):
        for way, sizes, chosen in (("plain", small, None), ("planned", large, plan)):
            mine = workload(digits, seed, sizes)
            step, batches = step_of("exact", mine, seed, chosen), digits.batches(seed, sizes.batch_size)
            spent, steps = 0.0, 0
            while spent < seconds:
                mine.optimizer.lr = LEARNING_RATE * (1 - (1 - FINAL_SHARE) * spent / seconds)
                batch = next(batches)
                started = time.process_time()
                step(batch)
                spent += time.process_time() - started
                steps += 1
            metric, peak = accuracy(mine.model, digits), peak_bytes(step, mine)
            rows.append({"way": way, "seed": seed, "steps": steps, "metric": metric, "peak_bytes": peak})
            del mine, step
    return {**found, "levers": [use.brief for use in plan.uses], "runs": rows}


def main(asked: str, out: str) -> None:
    """Do what is asked for as JSON, and write rows as JSON."""
    import jittor as jt

    given = json.loads(asked)
    digits = Digits(Path(given["digits"]))
    if given.get("strict"):
        jt.flags.cc_flags = f"{jt.flags.cc_flags} {STRICT}"
        jt.flags.compile_options = {"strict": 1}  # kernels of their own
    if "larger" in given:
        rows = [use(digits, given["plain"], given["larger"], given["seeds"], given["seconds"])]
    else:
        condition, steps = given["condition"], given["steps"]
        plan = plan_of(workload(digits, 0, Sizes()), f"{EXACT_SHARE}x") if condition == "exact" else None
        rows = [run(digits, condition, seed, steps, plan) for seed in range(given["seeds"])]
    Path(out).write_text(json.dumps([{**row, "jittor": jt.__version__} for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
