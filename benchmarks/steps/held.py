"""Steps whose loss or hooks hold tensors in containers: memories, banks, teachers and prototypes beside the model."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import class_loss, convolved, images, seed_all
from memfit import Workload

Batch = dict[str, Tensor]


def _network(width: int = 256, depth: int = 4, out: int = 64) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, out))


def _rows(rows: int = 1024, width: int = 256, classes: int = 10) -> Batch:
    return {"x": torch.randn(rows, width), "y": torch.randint(0, classes, (rows,))}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Transition(NamedTuple):
    """What an agent saw, did, and got."""

    state: Tensor
    action: Tensor
    reward: Tensor


def replay_in_a_dict() -> Workload:
    """Q-learning from a memory that is a dict of tensors, written to and read from by the loss."""
    seed_all(310)
    model = _network(out=8)
    memory = {"state": torch.randn(4096, 256), "action": torch.randint(0, 8, (4096,)), "reward": torch.randn(4096)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        memory["state"][: len(batch["x"])] = batch["x"]
        rows = torch.arange(0, 4096, 4)
        values = model(memory["state"][rows]).gather(1, memory["action"][rows, None]).squeeze(1)
        return F.smooth_l1_loss(values, memory["reward"][rows])

    return Workload(model, _rows(512), loss, _adam(model), name="replay_in_a_dict", batch_size=1)


def replay_in_a_deque() -> Workload:
    """A memory of named tuples in a deque, of which the loss stacks some."""
    seed_all(311)
    model = _network(out=8)
    memory = deque(Transition(torch.randn(256), torch.randint(0, 8, ()), torch.randn(())) for _ in range(600))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state, action, reward = (torch.stack(part) for part in zip(*list(memory)[:512], strict=True))
        values = model(torch.cat([state, batch["x"]]))[: len(state)]
        return F.mse_loss(values.gather(1, action[:, None]).squeeze(1), reward)

    return Workload(model, _rows(512), loss, _adam(model), name="replay_in_a_deque", batch_size=1)


def many_projections() -> Workload:
    """A loss through 300 fixed networks in a list (Burda et al. 2018, random network distillation, as an ensemble)."""
    seed_all(312)
    model = _network(out=32)
    fixed = [nn.Linear(256, 32).requires_grad_(False) for _ in range(300)]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["x"])
        with torch.no_grad():
            aims = torch.stack([net(batch["x"][:64]) for net in fixed]).mean(0)
        lost: Tensor = F.mse_loss(found[:64], aims) + found.square().mean()
        return lost

    return Workload(model, _rows(), loss, _adam(model), name="many_projections", batch_size=1)


def _prototypes_loss(model: nn.Module, batch: Batch, prototypes: list[Tensor], weights: dict[str, Tensor]) -> Tensor:
    distances = torch.cdist(model(batch["x"]), torch.cat(prototypes))
    return F.cross_entropy(-distances, batch["y"], weight=weights["class"])


def partial_prototypes() -> Workload:
    """Prototypes in a list and class weights in a dict, that a partial gives to the loss."""
    seed_all(313)
    model = _network()
    prototypes = [torch.randn(100, 64) for _ in range(10)]
    loss = functools.partial(_prototypes_loss, prototypes=prototypes, weights={"class": torch.rand(1000)})
    return Workload(model, _rows(), loss, _adam(model), name="partial_prototypes")


class BankedLoss:
    """A loss against a bank in a tuple, replaced as it is called (Wu et al. 2018, "Instance Discrimination")."""

    def __init__(self, size: int) -> None:
        self.bank, self.at = (F.normalize(torch.randn(size, 64)), torch.zeros(size)), 0

    def of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return how far features are from their own row of the bank, beside all others."""
        rows, ages = self.bank
        features = F.normalize(model(batch["x"]), dim=1)
        loss = F.cross_entropy(features @ rows.T / 0.1, torch.arange(len(features)))
        with torch.no_grad():
            new = torch.cat([features, rows[len(features) :]])
        self.bank = (new, ages + 1)
        return loss


def bank_of_a_method() -> Workload:
    """A memory bank in a tuple, of the object whose method is the loss."""
    seed_all(314)
    model = _network()
    return Workload(model, _rows(512), BankedLoss(4096).of, _adam(model), name="bank_of_a_method", batch_size=1)


def statistics_of_hooks() -> Workload:
    """Forward hooks whose closures keep running means of activations in a list, which the loss pulls to zero."""
    seed_all(315)
    model = nn.Sequential(
        convolved(3, 24), convolved(24, 32), convolved(32, 32), nn.Flatten(), nn.Linear(32 * 1600, 10)
    )
    means = [torch.zeros(24, 40, 40), torch.zeros(32, 40, 40), torch.zeros(32, 40, 40)]

    def keeping(at: int) -> None:
        def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
            means[at] = 0.9 * means[at] + 0.1 * output.detach().mean(0)

        model[at].register_forward_hook(keep)

    for at in range(3):
        keeping(at)
    return Workload(model, images(10, 40), class_loss, _adam(model), name="statistics_of_hooks", batch_size=1)


ANCHORS: dict[str, tuple[Tensor, ...]] = {}


def _anchored_loss(model: nn.Module, batch: Batch) -> Tensor:
    features = model(batch["x"])
    return torch.stack([torch.cdist(features, anchors).min(1).values.mean() for anchors in ANCHORS["levels"]]).sum()


def global_anchors() -> Workload:
    """Anchors of several levels, in a tuple within a dict of the module that has the loss."""
    seed_all(316)
    ANCHORS["levels"] = tuple(torch.randn(rows, 64) for rows in (2000, 1000, 500))
    model = _network()
    return Workload(model, _rows(768), _anchored_loss, _adam(model), name="global_anchors")


@dataclass
class Level:
    """A level of a codebook."""

    codes: Tensor
    counts: Tensor = field(default_factory=lambda: torch.ones(1024))


@dataclass
class Codebook:
    """Levels by name."""

    levels: dict[str, Level]


def nested_codebook() -> Workload:
    """Residual codes in data classes within a dict, that the loss moves towards what they stand for."""
    seed_all(317)
    model = _network()
    book = Codebook({name: Level(torch.randn(1024, 64)) for name in ("coarse", "fine")})

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rest, lost = model(batch["x"]), torch.zeros(())
        for level in book.levels.values():
            with torch.no_grad():
                nearest = torch.cdist(rest, level.codes).argmin(1)
                level.counts.index_add_(0, nearest, torch.ones(len(nearest)))
            rest = rest - level.codes[nearest]
            lost = lost + rest.square().mean()
        return lost

    return Workload(model, _rows(), loss, _adam(model), name="nested_codebook", batch_size=1)


def teachers_in_a_dict() -> Workload:
    """Two frozen teachers in a dict that only the loss holds."""
    seed_all(318)
    model = _network(out=10)
    teachers = {name: _network(depth=depth, out=10).requires_grad_(False) for name, depth in (("a", 3), ("b", 6))}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["x"]).log_softmax(-1)
        with torch.no_grad():
            aims = [teacher(batch["x"]).log_softmax(-1) for teacher in teachers.values()]
        return torch.stack([F.kl_div(found, aim, log_target=True, reduction="batchmean") for aim in aims]).mean()

    return Workload(model, _rows(), loss, _adam(model), name="teachers_in_a_dict")
