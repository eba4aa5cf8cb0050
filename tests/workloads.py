"""Workloads that tests name on the command line."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit import Workload
from memfit.recipes import byte_lm


def tiny() -> Workload:
    """A byte-level GPT that plans and trains in seconds."""
    return byte_lm(n_layer=2, d_model=64, n_head=4, context=128, batch_size=4, max_bytes=200_000)


def lean() -> Workload:
    """A byte-level GPT of one layer and without dropout, which takes a quarter of the time to plan."""
    return byte_lm(n_layer=1, d_model=64, n_head=4, context=64, batch_size=4, dropout=0.0, max_bytes=200_000)


def large() -> Workload:
    """A GPT of 7.89 billion parameters in few layers, to be estimated and not run."""
    from examples.large_gpt import gpt

    return gpt("large", n_layer=4, width=12288, n_head=96, batch_size=4)


def large_of_8() -> Workload:
    """The same, with as many samples for each of 8 ranks."""
    from examples.large_gpt import gpt

    return gpt("large_of_8", n_layer=4, width=12288, n_head=96, batch_size=8 * 4)


def quick() -> Workload:
    """Blocks of linear layers that plan in a moment."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    batch = {"x": torch.randn(256, 64), "y": torch.randint(0, 10, (256,))}
    return Workload(
        model=model,
        batch=batch,
        loss_fn=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=torch.optim.AdamW(model.parameters()),
        name="quick",
    )


def wide() -> Workload:
    """Layers on the meta device whose products take most of the step on any GPU."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
        batch = {"x": torch.empty(8192, 4096)}
    return Workload(
        model=model,
        batch=batch,
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        name="wide",
    )


def other() -> Workload:
    """The same with another width."""
    return byte_lm(n_layer=2, d_model=32, n_head=4, context=128, batch_size=4, max_bytes=200_000)


def not_finite() -> Workload:
    """A step whose loss is infinite."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    return Workload(
        model=model,
        batch=torch.ones(16, 8),
        loss_fn=lambda model, batch: model(batch).mean() / 0.0,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        name="not_finite",
    )


def a_number() -> int:
    """Not a workload."""
    return 3


def broken() -> Workload:
    """Raises."""
    raise ValueError("no such dataset")


def needs_an_extra() -> Workload:
    """Imports a package that an extra brings, as if it were not installed."""
    raise ModuleNotFoundError("No module named 'monai'", name="monai")


def wrong_shapes() -> Workload:
    """A step that does not run: rows of 7 numbers for a layer of 8."""
    model = nn.Linear(8, 1)
    return Workload(
        model=model,
        batch=torch.randn(16, 8),
        loss_fn=lambda model, batch: model(batch[:, 1:]).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        name="wrong_shapes",
    )


class Preempting:
    """Batches of which the third comes with a SIGTERM, as from a scheduler that wants the machine back."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if index == 2:
                signal.raise_signal(signal.SIGTERM)
            yield batch


def preempted() -> Workload:
    """The lean GPT on a machine that is wanted back."""
    workload = lean()
    return dataclasses.replace(workload, batches=Preempting(workload.batches))
