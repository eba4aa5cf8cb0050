"""One run in Jittor: `python -m benchmarks.frameworks.in_jittor SUBJECT BUDGET_BYTES STEPS WEIGHTS OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import memfit.jittor as mj
from benchmarks.frameworks.subject import LEARNING_RATE, SUBJECTS, UNetSizes, data, report, resident_bytes
from memfit.errors import InfeasibleError
from memfit.jittor.variables import named_variables


def workload(name: str, weights: str) -> mj.Workload:
    """Return a subject's workload, with weights from a file."""
    import jittor as jt

    from benchmarks.frameworks.jittor_models import UNet, transformer

    subject = SUBJECTS[name]
    model = UNet(subject.sizes) if isinstance(subject.sizes, UNetSizes) else transformer(subject.sizes)
    arrays = np.load(weights)
    for fqn, variable in named_variables(model).items():
        variable.assign(jt.array(arrays[fqn]))
    given = data(subject)
    y = jt.array(given["y"].astype("int32" if isinstance(model, UNet) else "float32")).stop_grad()
    batch = {"x": jt.array(given["x"]).stop_grad(), "y": y}
    classes = [0, *range(2, len(subject.shape)), 1]

    def loss_fn(model: Any, batch: Any) -> Any:
        y = model(batch["x"])
        if not isinstance(model, UNet):
            return (y - batch["y"]).sqr().mean()
        return jt.nn.cross_entropy_loss(y.transpose(*classes).reshape((-1, y.shape[1])), batch["y"].reshape((-1,)))

    return mj.Workload(model, batch, loss_fn, jt.nn.SGD(model.parameters(), LEARNING_RATE), name=name)


def main(name: str, budget: str, steps: str, weights: str, out: str) -> None:
    """Run one case; a budget of 0 is the plain step. What operators take to compile is not in its times."""
    mine = workload(name, weights)
    levers: Any = None
    step = mj.Step(mine)
    if int(budget):
        try:
            plan = mj.plan(mine, budget=int(budget))
        except InfeasibleError as e:  # the leanest then, and its own budget is in the result
            plan = mj.plan(mine, budget=e.lowest_peak_bytes + 2**20)
        step, levers = mj.apply(plan, mine), msgspec.to_builtins(plan.levers)
    step.gradients(mine.batch)
    mj.memory.release()
    base = resident_bytes()

    def own_peak_bytes() -> int:
        with mj.memory.measure() as measured:
            step(mine.batch)
        return measured.peak_bytes

    planned_for = plan.budget_bytes if int(budget) else 0
    report(int(steps), lambda: step(mine.batch).loss, own_peak_bytes, levers, planned_for, Path(out), base)


if __name__ == "__main__":
    main(*sys.argv[1:])
