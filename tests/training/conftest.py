"""Small workloads, and comparisons of trainings, for the tests of `memfit.train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.ir import Levers, Plan, Prediction, Solution
from memfit.recipes import SeededBatches
from memfit.training import METRICS, Step, read_lines
from memfit.training.runs import checkpoint
from memfit.workload import Workload, fingerprint

WIDTH, SAMPLES, BATCH = 6, 24, 4


class Tied(nn.Module):
    """Two tied linear layers, dropout, and BatchNorm for its buffers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.dropout(self.norm(self.first(x))))
        return hidden


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = ((model(batch[0]) - batch[1]) ** 2).mean()
    return loss


def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


class EndsEmpty:
    """Batches with a state that, restored at the end of an epoch, first give an empty rest of it."""

    def __init__(self) -> None:
        self.epoch, self.index, self.is_restored = 0, 0, False

    def __iter__(self) -> Any:
        if not self.is_restored:
            self.index = 0
        self.is_restored = False
        while self.index < 6:
            self.index += 1
            yield draw(torch.Generator().manual_seed(100 * self.epoch + self.index))
        self.epoch += 1

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": torch.tensor(self.index)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.index, self.is_restored = state["epoch"], int(state["index"]), True


def make_batches(kind: str) -> Any:
    """Return six batches an epoch."""
    if kind == "seeded":
        return SeededBatches(draw, 6, 5)  # type: ignore[arg-type]
    if kind == "ends empty":
        return EndsEmpty()
    if kind == "none":
        return None
    data = TensorDataset(*draw_many(SAMPLES))
    if kind == "list":
        return list(DataLoader(data, BATCH))
    generator = torch.Generator().manual_seed(3) if kind == "shuffled by a generator" else None
    return DataLoader(data, BATCH, shuffle=True, generator=generator)


def draw_many(samples: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(samples, width, generator=generator), torch.randn(samples, width, generator=generator)


def make_workload(kind: str = "seeded", *, seed: int = 0, width: int = WIDTH, **changes: Any) -> Workload:
    """Return a workload; `seed` sets the weights and the global generator."""
    torch.manual_seed(seed)
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fields = {
        "model": model,
        "batch": draw_many(BATCH, width),
        "loss_fn": squared_error,
        "optimizer": optimizer,
        "name": "tied",
        "batches": make_batches(kind),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        "max_grad_norm": 1.0,
    }
    return Workload(**(fields | changes))


def make_plan(workload: Workload, **levers: Any) -> Plan:
    prediction = Prediction(
        peak_bytes=1000, peak_upper_bytes=1100, step_seconds=0.1, by_category={"parameters": 1000}, where="first"
    )
    return Plan(
        memfit_version="0",
        torch_version="2",
        workload=workload.name,
        fingerprint=fingerprint(workload),
        device="cpu",
        batch_size=BATCH,
        budget_bytes=2000,
        levers=Levers(microbatch_size=BATCH, **levers),
        numerics="exact",
        uses=(),
        allowed="exact",
        plain=prediction,
        predicted=prediction,
        solution=Solution(status="optimal", bound_seconds=0.1, gap=0.0, solve_seconds=0.0),
    )


def describe(value: Any) -> Any:
    """Return a value such that two are equal only if they are so bitwise, types and strides included."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)
        return ("tensor", str(value.dtype), tuple(value.shape), value.stride(), raw.tolist())
    if isinstance(value, dict):
        return (type(value).__name__, [(k, describe(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [describe(v) for v in value])
    return (type(value).__name__, repr(value))


def training_state(step: Step) -> Any:
    """Return all that a step changes in a training, described."""
    workload = step.workload
    return describe(
        {
            "model": dict(workload.model.state_dict()),
            "optimizer": workload.optimizer.state_dict(),
            "scheduler": workload.scheduler.state_dict() if workload.scheduler else None,
            "scaler": step.scaler.state_dict() if step.scaler else None,
            "steps": step.steps,
        }
    )


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the log without times, which differ from run to run."""
    times = ("seconds", "data_seconds", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in times} for line in read_lines(out / METRICS)]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small operators are faster in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}


def restored(path: Path, step: Step) -> checkpoint.Loaded:
    """Read a checkpoint into a step, as resuming does."""
    loaded = checkpoint.read(path, step)
    loaded.restore()
    return loaded
