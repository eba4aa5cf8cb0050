"""Small trainings for several ranks, and what there is of them on all ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.ir import Levers, Plan, RunRecord, Sharding
from memfit.levers import applied
from memfit.training import RunOptions, Step, Trainer
from memfit.workload import LossScaling, Workload
from tests.training.conftest import make_plan

UNITS = ("blocks.0", "blocks.1")
BATCH, SAMPLES = 4, 22  # the last batch of an epoch has two samples
DDP = Sharding(world_size=2, mode="ddp")
ZERO2 = Sharding(world_size=2, mode="zero2", units=UNITS)
ZERO3 = Sharding(world_size=2, mode="zero3", units=UNITS)
FOUR = replace(ZERO3, world_size=4)
HYBRID = replace(FOUR, replicas=2)
Kind = Literal["adamw", "momentum", "fp16"]


class Block(nn.Sequential):
    """A block with a parameter that has fewer elements than there are ranks."""

    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(8, 10), nn.GELU(), nn.Dropout(dropout), nn.Linear(10, 8))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.scale * super().forward(x)
        return changed


class Model(nn.Module):
    """Tied weights, a frozen prefix, dropout, and a buffer."""

    count: torch.Tensor

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.prefix = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.arange(3))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.prefix(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(tokens))
        return logits


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def workload(kind: Kind = "adamw", seed: int = 0) -> Workload:
    """Return a workload; `seed` sets the weights."""
    data = TensorDataset(*torch.randint(13, (2, SAMPLES, 5), generator=torch.Generator().manual_seed(3)).unbind())
    torch.manual_seed(seed)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9) if kind == "momentum" else torch.optim.AdamW(groups, 0.02)
    return Workload(
        model,
        data[:BATCH],
        loss_fn,
        optimizer,
        name="shared",
        batches=DataLoader(data, BATCH, shuffle=True),
        evaluate=lambda model: {"loss": loss_fn(model, data[:8]).item()},
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        max_grad_norm=1.0,
        loss_scaling=LossScaling(initial=2.0**10, growth_interval=3),
    )


def plan_for(given: Workload, sharding: Sharding | None, kind: Kind = "adamw") -> Plan:
    plan = make_plan(given, sharding=sharding, precision="16-mixed" if kind == "fp16" else "32-true")
    levers: Levers = replace(plan.levers, microbatch_size=1 if sharding and sharding.world_size > 2 else 2)
    return replace(plan, levers=levers)


@contextlib.contextmanager
def step_of(given: Workload, plan: Plan) -> Iterator[Step]:
    with applied(plan.levers, given) as step:
        yield step


def fit(sharding: Sharding | None, out: Path, kind: Kind = "adamw", seed: int = 0, **options: Any) -> Any:
    """Train with a `Trainer`; return what there is afterwards, and the record."""
    given = workload(kind, seed)
    plan = plan_for(given, sharding, kind)
    if not options.get("resume"):
        torch.manual_seed(5)
    with applied(plan.levers, given) as step:
        record: RunRecord = Trainer(step, plan, RunOptions(out=out, **options)).fit()
        return state_of(step), record


def whole(value: Any) -> Any:
    """Return a value with its tensors whole."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(v) for v in value)
    return value


def state_of(step: Step) -> dict[str, Any]:
    """Return all that a step changes in a training, of all ranks together."""
    given = step.workload
    return {
        "model": whole(dict(given.model.state_dict())),
        "optimizer": whole(given.optimizer.state_dict()),
        "scheduler": given.scheduler.state_dict() if given.scheduler else None,
        "scaler": step.scaler.state_dict() if step.scaler else None,
        "steps": step.steps,
    }


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two values are the same, tensors bitwise."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
