"""Steps that keep something from one call to the next: counters, lists, what hooks saw, running means."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import class_loss, convolved, images, seed_all
from memfit import Workload


class WarmedDropout(nn.Module):
    """Dropout whose rate rises with the calls that it counts (Morerio et al. 2017, "Curriculum Dropout")."""

    def __init__(self, rate: float, calls: int) -> None:
        super().__init__()
        self.rate, self.calls, self.called = rate, calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        return F.dropout(x, self.rate * min(1.0, self.called / self.calls), self.training)


def counted_calls() -> Workload:
    """One dropout, shared by all layers, whose rate follows how often it was called."""
    seed_all(130)
    dropout = WarmedDropout(0.3, 40)
    widths = [256, 512, 512, 512, 512, 512]
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), dropout]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    batch = {"x": torch.randn(1024, 256), "y": torch.randint(0, 10, (1024,))}
    return Workload(model, batch, class_loss, torch.optim.Adam(model.parameters()), name="counted_calls")


class Backbone(nn.Module):
    """A network that lists the features of its stages, which it clears as it is called."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [3, width, width, 2 * width, 2 * width]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.stages = nn.ModuleList(convolved(a, b, 1 + at % 2) for at, (a, b) in enumerate(pairs))
        self.heads = nn.ModuleList(nn.Conv2d(w, 8, 1) for w in widths[1:])
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        self.features.clear()
        for stage in self.stages:
            x = stage(x)
            self.features.append(x)
        maps = [head(f) for head, f in zip(self.heads, self.features, strict=True)]
        return torch.stack([F.interpolate(m, size, mode="bilinear") for m in maps]).mean(0)


def listed_features() -> Workload:
    """A segmentation network that keeps its features in a list until the next call."""
    seed_all(131)
    batch = {"x": torch.randn(6, 3, 64, 64), "y": torch.randint(0, 8, (6, 64, 64))}
    model = Backbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, batch, class_loss, optimizer, name="listed_features")


class Distilled(nn.Module):
    """A student and a frozen teacher, whose features hooks keep for the loss (Romero et al. 2015, "FitNets")."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(convolved(3, 16), convolved(16, 32, 2), convolved(32, 32))
        self.teacher = nn.Sequential(convolved(3, 48), convolved(48, 64, 2), convolved(64, 64)).requires_grad_(False)
        self.match = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in ((16, 48), (32, 64), (32, 64)))
        self.head = nn.Linear(32, 10)
        self.seen: dict[str, Tensor] = {}
        for name, network in (("student", self.student), ("teacher", self.teacher)):
            for at, stage in enumerate(network):
                stage.register_forward_hook(self._keeping(f"{name}.{at}"))

    def _keeping(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[name] = output

        return keep

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.student(x)
        with torch.no_grad():
            self.teacher(x)
        pairs = [(m(self.seen[f"student.{at}"]), self.seen[f"teacher.{at}"]) for at, m in enumerate(self.match)]
        return self.head(hidden.mean((2, 3))), torch.stack([F.mse_loss(a, b) for a, b in pairs]).sum()


def _distilled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, hint = model(batch["x"])
    loss: Tensor = F.cross_entropy(logits, batch["y"]) + 0.1 * hint
    return loss


class Slow(nn.Module):
    """A network followed by a copy whose weights are a running mean of its own, updated as it is called."""

    def __init__(self, rate: float = 0.99) -> None:
        super().__init__()
        self.online, self.target = self._network(), self._network().requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        self.predict, self.rate = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), rate

    def _network(self) -> nn.Sequential:
        stages = [convolved(3, 24), convolved(24, 32, 2), convolved(32, 64, 2)]
        return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    @torch.no_grad()
    def follow(self) -> None:
        """Move the target towards the network."""
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.mul_(self.rate).add_(fast, alpha=1 - self.rate)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        self.follow()
        losses = []
        for a, b in ((one, other), (other, one)):
            guess = F.normalize(self.predict(self.online(a)), dim=1)
            with torch.no_grad():
                aim = F.normalize(self.target(b), dim=1)
            losses.append((2 - 2 * (guess * aim).sum(1)).mean())
        return losses[0] + losses[1]


def _two_views(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    loss: Tensor = model(x + 0.1 * torch.randn_like(x), x.flip(-1))
    return loss


def byol() -> Workload:
    """BYOL (Grill et al. 2020): two views, a network and its slow copy, updated within `forward`."""
    seed_all(133)
    model = Slow()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return Workload(model, images(12, 40), _two_views, optimizer, name="byol")


def hooked_features() -> Workload:
    """Distillation by features that forward hooks keep, of a student and a frozen teacher."""
    seed_all(132)
    model = Distilled()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return Workload(model, images(8, 48), _distilled_loss, optimizer, name="hooked_features")


class Memory(nn.Module):
    """A recurrent language model that carries its state, detached, from one batch to the next."""

    def __init__(self, symbols: int = 512, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(symbols, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, symbols)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        hidden, state = self.lstm(self.embedding(ids), self.state)
        self.state = (state[0].detach(), state[1].detach())
        logits: Tensor = self.head(hidden)
        return logits


def carried_state() -> Workload:
    """Truncated backpropagation through time: the LSTM's state stays in the module between steps."""
    seed_all(134)
    model = Memory()
    batch = {"x": torch.randint(0, 512, (24, 48)), "y": torch.randint(0, 512, (24, 48))}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Workload(model, batch, _sequence_loss, optimizer, name="carried_state", max_grad_norm=0.25)


def _sequence_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
