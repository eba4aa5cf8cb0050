"""The plain training loop, as anyone writes it: what planned steps are held against, bit by bit.

Nothing here is memfit's: neither its step nor its `verify`. Both runs begin with the same workload, made anew, and with
the same seeds of PyTorch, Python and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import memfit
from benchmarks.steps.data import seed_all
from memfit import Plan, Workload

STEPS = 2
SEED = 20
"""Of the generators before a run."""


@dataclass(frozen=True)
class Trained:
    """What a run of some steps leaves.

    Attributes:
        losses: Of each step.
        tensors: Parameters and buffers by FQN.
    """

    losses: list[float]
    tensors: dict[str, Tensor]


def plain_steps(workload: Workload, steps: int = STEPS) -> Iterator[float]:
    """Train as a loop without memfit does; yield the loss of each step."""
    updated = [p for group in workload.optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        workload.optimizer.zero_grad()
        value = workload.loss_fn(workload.model, workload.batch)
        loss = value if isinstance(value, Tensor) else value[0] / value[1]
        loss.backward()
        if workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(updated, workload.max_grad_norm)
        workload.optimizer.step()
        yield loss.item()


def trained_plainly(make: Callable[[], Workload]) -> Trained:
    """Return what the plain loop makes of a workload."""
    workload = make()
    seed_all(SEED)
    losses = list(plain_steps(workload))
    return Trained(losses, _tensors(workload))


def trained_by_plan(make: Callable[[], Workload], plan: Plan) -> Trained:
    """Return what the steps of a plan make of a workload."""
    workload = make()
    seed_all(SEED)
    with memfit.apply(plan, workload) as step:
        losses = [step(workload.batch).loss for _ in range(STEPS)]
    return Trained(losses, _tensors(workload))


def difference(plain: Trained, other: Trained) -> str | None:
    """Return what is not bitwise equal between two runs, in words; None where all is."""
    if plain.tensors.keys() != other.tensors.keys():
        return f"other tensors: {sorted(plain.tensors.keys() ^ other.tensors.keys())}"
    differing = [name for name, tensor in plain.tensors.items() if not _equal(tensor, other.tensors[name])]
    if differing:
        return f"{len(differing)} of {len(plain.tensors)} tensors differ, first {differing[0]}"
    return None if plain.losses == other.losses else f"losses {plain.losses} and {other.losses}"


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensors(workload: Workload) -> dict[str, Tensor]:
    model = workload.model
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}
