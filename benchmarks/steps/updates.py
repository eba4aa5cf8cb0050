"""Steps whose optimizer has hooks, or whose parameters have them: averages, projections, noise, clipping."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.steps.data import class_loss, convolved, images, seed_all
from memfit import Workload


def _perceptron(width: int = 384) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _workload(name: str, seed: int, register: Any, rows: int = 768) -> Workload:
    """Return a step whose hooks `register` puts on a model and its optimizer."""
    seed_all(seed)
    model = _perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    register(model, optimizer)
    batch = {"x": torch.randn(rows, 384), "y": torch.randint(0, 10, (rows,))}
    return Workload(model, batch, class_loss, optimizer, name=name)


def averaged_after() -> Workload:
    """A moving average of the model, updated by a hook after each step of the optimizer."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))

    return _workload("averaged_after", 320, register)


def shadow_weights() -> Workload:
    """A shadow of the weights in a dict, that a hook after the step updates by `lerp_`."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

        @torch.no_grad()
        def follow(*_: Any) -> None:
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.01)

        optimizer.register_step_post_hook(follow)

    return _workload("shadow_weights", 321, register)


def polyak() -> Workload:
    """The mean of all weights so far (Polyak and Juditsky 1992), kept as float64 by a hook after the step."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        sums = [p.detach().double() for p in model.parameters()]

        @torch.no_grad()
        def add(*_: Any) -> None:
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.double()

        optimizer.register_step_post_hook(add)

    return _workload("polyak", 322, register)


def projected_weights() -> Workload:
    """Rows of weights are scaled to norm 1 at most after each step."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        @torch.no_grad()
        def project(*_: Any) -> None:
            for p in model.parameters():
                if p.dim() == 2:
                    p.copy_(p / p.norm(dim=1, keepdim=True).clamp(min=1))

        optimizer.register_step_post_hook(project)

    return _workload("projected_weights", 323, register)


def noisy_gradients() -> Workload:
    """A hook before the step adds noise to gradients (Neelakantan et al. 2015)."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def add(*_: Any) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad += 0.01 * torch.randn_like(p.grad)

        optimizer.register_step_pre_hook(add)

    return _workload("noisy_gradients", 324, register)


def clipped_before() -> Workload:
    """A hook before the step clips gradients, value by value, and keeps a copy of them."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept: dict[int, Tensor] = {}

        def clip(*_: Any) -> None:
            for at, p in enumerate(model.parameters()):
                assert p.grad is not None
                kept[at] = p.grad.clone()
                p.grad.clamp_(-0.01, 0.01)

        optimizer.register_step_pre_hook(clip)

    return _workload("clipped_before", 325, register)


def gradient_hooks() -> Workload:
    """Hooks of parameters scale their gradients by layer; others sum their squares once they are complete."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

        def summing(name: str) -> Any:
            def add(p: Tensor) -> None:
                assert p.grad is not None
                squares[name].addcmul_(p.grad, p.grad)

            return add

        for at, (name, p) in enumerate(model.named_parameters()):
            p.register_hook(lambda grad, rate=0.9**at: grad * rate)
            p.register_post_accumulate_grad_hook(summing(name))

    return _workload("gradient_hooks", 326, register)


def lookahead() -> Workload:
    """The optimizer's own `step` is replaced on the instance: slow weights follow (Zhang et al. 2019, "Lookahead")."""

    def register(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        slow = [p.detach().clone() for p in model.parameters()]
        own = optimizer.step

        def step(self: torch.optim.Optimizer, *arguments: Any) -> Any:
            result = own(*arguments)
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    p.copy_(s.lerp_(p, 0.5))
            return result

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    return _workload("lookahead", 327, register)


def patched_forward() -> Workload:
    """Layers whose `forward` was replaced on the instance, by closures over a frozen copy, as libraries do."""
    seed_all(328)
    model = nn.Sequential(convolved(3, 24), convolved(24, 24), convolved(24, 24))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    for layer in list(model)[1:]:
        frozen = copy.deepcopy(layer).requires_grad_(False)

        def forward(x: Tensor, own: Any = layer.forward, frozen: nn.Module = frozen) -> Tensor:
            return own(x) + 0.1 * frozen(x)  # type: ignore[no-any-return]

        layer.forward = forward
    whole = nn.Sequential(model, head)
    return Workload(whole, images(8, 48), class_loss, torch.optim.AdamW(whole.parameters()), name="patched_forward")
