"""Whether exact plans are exact: 20 steps planned against 20 plain ones, bit by bit, on the frontier's seven models.

Each model trains twice from the same weights, with the same seeds and its own dropout, clipping and optimizer: as it
is, and with the plan for a budget, of class `exact`. Compared are the loss of each step and the bytes of every
gradient as the optimizer sees it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import memfit
from benchmarks.common import Case, main
from benchmarks.frontier.models import QUICK, SUBJECTS, Subject
from memfit import InfeasibleError, Plan, Workload
from memfit.foundations import format_bytes
from memfit.pipeline import placed
from memfit.training import Step

STEPS = 20
SHARE = 0.6
"""The budget, as a share of the plain peak; the lowest peak there is, where that is more."""

Trace = list[tuple[float, str]]


def run(
    quick: bool, models: Sequence[str] | None = None, threads: int | None = None, device: str = "cpu"
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each model, and in how many every step was equal."""
    if threads is not None:
        torch.set_num_threads(threads)
    subjects = QUICK if quick else SUBJECTS
    cases = [compared(name, subjects[name], device=device) for name in models or subjects]
    equal = sum(case["equal_steps"] == STEPS for case in cases)
    return cases, {"models": len(cases), "models_bitwise_equal": equal, "steps": STEPS}


def compared(name: str, subject: Subject, steps: int = STEPS, device: str = "cpu") -> Case:
    """Return how many steps of a model's exact plan have the plain one's loss and gradients."""
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)  # needs CUBLAS_WORKSPACE_CONFIG too
    plan = _plan(subject.make(), device)
    planned = trained(subject.make(), steps, plan)
    plain = trained(placed(subject.make(), plan), steps)
    row = {
        "model": name,
        "equal_steps": sum(a == b for a, b in zip(planned, plain, strict=True)),
        "first_loss": plain[0][0],
        "last_loss": plain[-1][0],
        "regions": len(plan.levers.regions),
        "predicted_share": plan.predicted.peak_bytes / plan.plain.peak_bytes,
    }
    print(
        f"{name}: {row['equal_steps']} of {steps} steps equal, {row['regions']} regions,"
        f" {format_bytes(plan.predicted.peak_bytes)} of {format_bytes(plan.plain.peak_bytes)}",
        flush=True,
    )
    return row


def _plan(workload: Workload, device: str) -> Plan:
    plain = memfit.estimate(workload, device=device)
    plan = functools.partial(memfit.plan, workload, device=device, numerics="exact", precisions=("32-true",), points=1)
    try:
        return plan(budget=int(SHARE * (plain.peak_reserved_bytes or plain.peak_bytes)))
    except InfeasibleError as e:
        return plan(budget=e.lowest_peak_bytes)


def trained(workload: Workload, steps: int, plan: Plan | None = None) -> Trace:
    """Return the loss of each step, and a digest of its gradients as the optimizer sees them."""
    found: Trace = []
    with _stepping(workload, plan) as step, _digests(workload) as digests:
        for index in range(steps):
            torch.manual_seed(index)
            loss = float(step(workload.batch).loss)
            found.append((loss, digests[-1]))
    return found


def _stepping(workload: Workload, plan: Plan | None) -> contextlib.AbstractContextManager[Step]:
    return contextlib.nullcontext(Step(workload)) if plan is None else memfit.apply(plan, workload)


@contextlib.contextmanager
def _digests(workload: Workload) -> Iterator[list[str]]:
    """Yield a list to which a digest of all gradients is added before each update."""
    digests: list[str] = []

    def add(*_: Any) -> None:
        digest = hashlib.blake2b()
        for parameter in workload.model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.cpu().reshape(-1).view(torch.uint8).numpy().data)
        digests.append(digest.hexdigest())

    handle = workload.optimizer.register_step_pre_hook(add)
    try:
        yield digests
    finally:
        handle.remove()


if __name__ == "__main__":
    main(
        "exactness",
        run,
        __doc__,
        options={
            "--models": {"nargs": "+", "choices": list(SUBJECTS), "help": "all by default"},
            "--device": {"default": "cpu", "help": "where the steps run: cpu, or cuda"},
            "--threads": {"type": int, "help": "PyTorch's own number by default"},
        },
    )
