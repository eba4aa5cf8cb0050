"""Steps with derivatives within the loss, or with a backward pass of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import class_loss, convolved, images, seed_all
from memfit import Workload


def _adapted_loss(model: nn.Module, batch: dict[str, Tensor], steps: int = 2, rate: float = 0.1) -> Tensor:
    """Return the loss after some steps on each task, through which the gradient goes (Finn et al. 2017)."""
    losses = []
    for x, y, other, label in zip(batch["x"], batch["y"], batch["other"], batch["label"], strict=True):
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(steps):
            loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - rate * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        losses.append(F.mse_loss(torch.func.functional_call(model, weights, (other,)), label))
    return torch.stack(losses).mean()


def meta_learning() -> Workload:
    """MAML: inner steps by `torch.func.functional_call`, with derivatives of derivatives."""
    seed_all(330)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    shapes = {"x": (4, 256, 16), "y": (4, 256, 4), "other": (4, 256, 16), "label": (4, 256, 4)}
    batch = {name: torch.randn(shape) for name, shape in shapes.items()}
    return Workload(model, batch, _adapted_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="meta_learning")


def _per_sample(weights: dict[str, Tensor], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])


def _balanced_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss with samples of large gradients weighted less, by `torch.func.vmap` of `grad`."""
    weights = {name: w.detach() for name, w in model.named_parameters()}
    slopes = torch.func.vmap(torch.func.grad(_per_sample), (None, None, 0, 0))(weights, model, batch["x"], batch["y"])
    norms = torch.stack([s.flatten(1).norm(dim=1) for s in slopes.values()]).norm(dim=0)
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    loss: Tensor = (losses * (1 / (1 + norms))).mean()
    return loss


def sample_gradients() -> Workload:
    """A loss weighted by each sample's gradient, from `torch.func.vmap(torch.func.grad(...))`."""
    seed_all(331)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    batch = {"x": torch.randn(128, 64), "y": torch.randint(0, 10, (128,))}
    return Workload(model, batch, _balanced_loss, torch.optim.SGD(model.parameters(), lr=0.1), name="sample_gradients")


def _derivative(of: Tensor, by: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(of.sum(), by, create_graph=True)
    return slope


def _burgers_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return how far a network is from Burgers' equation, and from its start and its edges (Raissi et al. 2019)."""
    time, place = (batch["inside"][:, [at]].clone().requires_grad_() for at in range(2))
    u = model(torch.cat([time, place], 1))
    by_time, by_place = _derivative(u, time), _derivative(u, place)
    residual = by_time + u * by_place - 0.01 / torch.pi * _derivative(by_place, place)
    start = model(batch["start"]) + torch.sin(torch.pi * batch["start"][:, 1:])
    return residual.square().mean() + start.square().mean() + model(batch["edge"]).square().mean()  # type: ignore[no-any-return]


def physics_informed() -> Workload:
    """Burgers' equation: first and second derivatives of the network by its inputs."""
    seed_all(332)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), *layers, nn.Linear(64, 1))
    inside = torch.rand(1024, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
    start = torch.stack([torch.zeros(1024), 2 * torch.rand(1024) - 1], 1)
    edge = torch.stack([torch.rand(1024), torch.randint(0, 2, (1024,)) * 2.0 - 1], 1)
    batch = {"inside": inside, "start": start, "edge": edge}
    return Workload(model, batch, _burgers_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="physics_informed")


class Slope(nn.Module):
    """What a differential equation follows: convolutions that see the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width + 1, width, 3, padding=1)
        self.second = nn.Conv2d(width + 1, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, time: float, x: Tensor) -> Tensor:
        clock = torch.full_like(x[:, :1], time)
        hidden = F.relu(self.norm(self.first(torch.cat([x, clock], 1))))
        slope: Tensor = self.second(torch.cat([hidden, clock], 1))
        return slope


def _runge_kutta(slope: Any, time: float, x: Tensor, step: float) -> Tensor:
    one = slope(time, x)
    two = slope(time + step / 2, x + step / 2 * one)
    three = slope(time + step / 2, x + step / 2 * two)
    four = slope(time + step, x + step * three)
    after: Tensor = x + step / 6 * (one + 2 * two + 2 * three + four)
    return after


class Flowing(nn.Module):
    """A differential equation, solved with steps of a fixed length (Chen et al. 2018)."""

    def __init__(self, width: int, steps: int = 3) -> None:
        super().__init__()
        self.slope, self.steps = Slope(width), steps

    def forward(self, x: Tensor) -> Tensor:
        for at in range(self.steps):
            x = _runge_kutta(self.slope, at / self.steps, x, 1 / self.steps)
        return x


def _around(middle: nn.Module, width: int = 16) -> nn.Sequential:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(convolved(3, width, 2), middle, *head)


def neural_ode() -> Workload:
    """A neural differential equation by Runge and Kutta's method, in a loop."""
    seed_all(333)
    model = _around(Flowing(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, images(16, 40), class_loss, optimizer, name="neural_ode")


class _Adjoint(torch.autograd.Function):
    """Solves an equation without keeping anything, and its adjoint backwards in time."""

    @staticmethod
    def forward(ctx: Any, slope: nn.Module, steps: int, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.slope, ctx.steps = slope, steps
        with torch.no_grad():
            for at in range(steps):
                x = x + slope(at / steps, x) / steps
        ctx.save_for_backward(x, *weights)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        total = [torch.zeros_like(w) for w in weights]
        for at in reversed(range(ctx.steps)):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                change = ctx.slope(at / ctx.steps, x)
                by_x, *by_weights = torch.autograd.grad(change, [x, *weights], gradient, allow_unused=True)
            total = [t if s is None else t + s / ctx.steps for t, s in zip(total, by_weights, strict=True)]
            x, gradient = x - change.detach() / ctx.steps, gradient + by_x / ctx.steps
        return None, None, gradient, *total


class Adjoint(nn.Module):
    """A differential equation whose backward pass solves it backwards."""

    def __init__(self, width: int, steps: int = 6) -> None:
        super().__init__()
        self.slope, self.steps = Slope(width), steps

    def forward(self, x: Tensor) -> Tensor:
        solved: Tensor = _Adjoint.apply(self.slope, self.steps, x, *self.slope.parameters())  # type: ignore[no-untyped-call]
        return solved


def adjoint_ode() -> Workload:
    """A neural differential equation with its adjoint as a custom `autograd.Function`."""
    seed_all(334)
    model = _around(Adjoint(32), 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, images(16, 64), class_loss, optimizer, name="adjoint_ode")


class _Reversible(torch.autograd.Function):
    """A chain of blocks that keeps its last output only: inputs are computed from outputs (Gomez et al. 2017)."""

    @staticmethod
    def forward(ctx: Any, blocks: Any, one: Tensor, other: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.blocks = blocks
        with torch.no_grad():
            for first, second in blocks:
                one = one + first(other)
                other = other + second(one)
        ctx.save_for_backward(one, other)
        return one, other

    @staticmethod
    def backward(ctx: Any, to_one: Tensor, to_other: Tensor) -> tuple[Any, ...]:
        one, other = ctx.saved_tensors
        found: list[Tensor] = []
        for first, second in reversed(ctx.blocks):
            other, to_one, slopes = _undone(second, one, other, to_one, to_other)
            one, to_other, more = _undone(first, other, one, to_other, to_one)
            found = [*more, *slopes, *found]
        return None, to_one, to_other, *found


def _undone(block: nn.Module, given: Tensor, made: Tensor, to_given: Tensor, to_made: Tensor) -> Any:
    """Return what `made` was before `block(given)` was added, and the gradients."""
    with torch.enable_grad():
        given = given.detach().requires_grad_()
        added = block(given)
    by_given, *slopes = torch.autograd.grad(added, [given, *block.parameters()], to_made)
    return made - added.detach(), to_given + by_given, slopes


class ReversibleChain(nn.Module):
    """Pairs of blocks, each of which can be undone."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([self._block(width), self._block(width)]) for _ in range(layers))

    def _block(self, width: int) -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        blocks: list[Any] = [tuple(pair) for pair in self.blocks]  # type: ignore[arg-type]
        weights = [p for pair in blocks for block in pair for p in block.parameters()]
        made = _Reversible.apply(blocks, one.contiguous(), other.contiguous(), *weights)  # type: ignore[no-untyped-call]
        return torch.cat(made, 1)


def reversible() -> Workload:
    """Reversible residual blocks: the backward pass computes their inputs from their outputs."""
    seed_all(335)
    model = _around(ReversibleChain(16, 4), 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(model, images(16, 64), class_loss, optimizer, name="reversible")


class Implicit(nn.Module):
    """A fixed point whose backward pass is a fixed point too, by a hook on the output (Bai et al. 2019)."""

    def __init__(self, width: int, steps: int = 8) -> None:
        super().__init__()
        self.mix, self.norm, self.steps = nn.Linear(width, width), nn.LayerNorm(width), steps

    def forward(self, x: Tensor) -> Tensor:
        step = functools.partial(self._step, x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(self.steps):
                z = step(z)
        z = step(z)
        if z.requires_grad:
            before = z.detach().requires_grad_()
            after = step(before)
            z.register_hook(functools.partial(self._solved, before, after))
        return z

    def _step(self, x: Tensor, z: Tensor) -> Tensor:
        stepped: Tensor = self.norm(torch.tanh(0.5 * self.mix(z) + x))
        return stepped

    def _solved(self, before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
        found = gradient
        for _ in range(self.steps):
            found = torch.autograd.grad(after, before, found, retain_graph=True)[0] * 0.5 + gradient
        return found


def implicit_layer() -> Workload:
    """An implicit layer: a tensor hook that runs autograd within the backward pass."""
    seed_all(336)
    model = nn.Sequential(nn.Linear(128, 384), Implicit(384), nn.Linear(384, 10))
    batch = {"x": torch.randn(1024, 128), "y": torch.randint(0, 10, (1024,))}
    return Workload(model, batch, class_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="implicit_layer")


def _smooth_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss with a penalty on its slope by the input, and on a sample of its curvature (Hutchinson 1989)."""
    x = batch["x"].clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch["y"])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    direction = torch.randint(0, 2, x.shape) * 2.0 - 1
    (curved,) = torch.autograd.grad((slope * direction).sum(), x, create_graph=True)
    return loss + 10 * slope.square().sum((1, 2, 3)).mean() + 0.1 * (curved * direction).sum().abs()


def smooth_classifier() -> Workload:
    """A classifier penalised by first and second derivatives of its loss by the images."""
    seed_all(337)
    stages = [nn.Conv2d(3, 16, 3, padding=1), nn.Softplus(), nn.Conv2d(16, 16, 3, 2, 1), nn.Softplus()]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, images(8, 32), _smooth_loss, optimizer, name="smooth_classifier")


def _adversarial_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss on images moved against the model, by `backward()` in the loss (Madry et al. 2018)."""
    moved = torch.zeros_like(batch["x"], requires_grad=True)
    for _ in range(2):
        F.cross_entropy(model(batch["x"] + moved), batch["y"]).backward()
        assert moved.grad is not None
        moved = (moved + 0.01 * moved.grad.sign()).clamp(-0.03, 0.03).detach().requires_grad_()
    model.zero_grad()
    return F.cross_entropy(model(batch["x"] + moved.detach()), batch["y"])


def adversarial_training() -> Workload:
    """Adversarial training: images are moved by gradients that `backward()` leaves, within the loss."""
    seed_all(338)
    stages = [convolved(3, 24), convolved(24, 32, 2), convolved(32, 32)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return Workload(model, images(8, 40), _adversarial_loss, optimizer, name="adversarial_training")
