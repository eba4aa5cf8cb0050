"""Training loops as people write them, for `memfit.fit` to fit: each returns its losses, which must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Loop = Callable[[list[nn.Module], list[Optimizer]], list[float]]
STEPS = 3


def quiet(text: str) -> None:
    """Take what memfit tells, where a test does not look at it."""


def updated(optimizer: Optimizer, loss: torch.Tensor) -> float:
    """Go back from a loss, step and zero; return the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def classified(model: nn.Module, samples: int = 256, width: int = 64) -> torch.Tensor:
    """Return the loss of a model on random samples of ten classes."""
    x, y = torch.randn(samples, width), torch.randint(0, 10, (samples,))  # before: the next batch is not of the step
    return F.cross_entropy(model(x), y)


class Plans:
    """Counts the plans that `memfit.fit` makes, by what it tells of their making: its `progress`."""

    made = 0

    def __call__(self, *stage: Any) -> None:
        self.made += stage == ("capture", 0, 1)


def deep(width: int = 64, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.LayerNorm(width), nn.Linear(width, 10))


def batches(samples: int = 2048, width: int = 64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield (
            torch.randn(samples, width, generator=generator),
            torch.randint(0, 10, (samples,), generator=generator),
        )


def one(optimizer: type[Optimizer] = AdamW, blocks: int = 2) -> tuple[list[nn.Module], list[Optimizer]]:
    model = deep(blocks=blocks)
    fused = {"fused": True} if optimizer is AdamW else {}  # or its operators are a third of each capture
    return [model], [optimizer(model.parameters(), lr=1e-3, **fused)]


def loss_outside(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Clip, step, zero: as in most tutorials."""
    (model,), (optimizer,) = models, optimizers
    criterion, losses = nn.CrossEntropyLoss(), []
    for x, y in batches():
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulating(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Several backward passes for one update; the next data are made between them."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        for part, labels in zip(x.split(512), y.split(512), strict=True):
            loss = F.cross_entropy(model(part), labels) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def with_a_penalty(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Parameters in the loss itself, and autograd within it."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():
        x = x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        decay = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss = F.cross_entropy(out, y) + 1e-3 * gradient.square().mean() + 1e-4 * decay
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_autocast_and_scaler(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Mixed precision, as the loop asks for it."""
    (model,), (optimizer,) = models, optimizers
    scaler, losses = torch.amp.GradScaler("cpu"), []
    for x, y in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_a_closure(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """The step is within the optimizer's, as Lightning has it."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore
        return 3 * gradient


def with_a_function_of_its_own(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """An autograd function, rows taken apart by iteration, and what changes in place."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():
        scaled = _Scaled.apply(model(x))
        first, *others = scaled.chunk(4)
        total = first.clone()
        for part in others:
            total += part
        rows = torch.stack([row * 2 for row in total])
        losses.append(updated(optimizer, F.cross_entropy(rows, y[:512])))
    return losses


def pair() -> tuple[list[nn.Module], list[Optimizer]]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    critic = nn.Sequential(
        nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
    )
    return [generator, critic], [Adam(generator.parameters(), 2e-4), SGD(critic.parameters(), 1e-2)]


def adversarial(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Two models and two optimizers in turn, over what a generator of numbers draws."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
    numbers, loss_of, losses = torch.Generator().manual_seed(3), nn.BCEWithLogitsLoss(), []
    for _ in range(STEPS):
        real = torch.randn(2048, 64, generator=numbers)
        fake = generator(torch.randn(2048, 16, generator=numbers))
        of_critic.zero_grad()
        told = loss_of(critic(real), torch.ones(2048, 1)) + loss_of(critic(fake.detach()), torch.zeros(2048, 1))
        told.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = loss_of(critic(fake), torch.ones(2048, 1))
        fooled.backward()
        of_generator.step()
        losses += [told.item(), fooled.item()]
    return losses


def adversarial_in_three(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Two backward passes of the critic before its update, noise drawn between them: as DCGAN's."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
    loss_of, losses = nn.BCEWithLogitsLoss(), []
    for _ in range(STEPS):
        critic.zero_grad()
        label = torch.full((2048, 1), 1.0)
        of_real = loss_of(critic(torch.randn(2048, 64)), label)
        of_real.backward()
        fake = generator(torch.randn(2048, 16))
        label.fill_(0.0)
        of_fake = loss_of(critic(fake.detach()), label)
        of_fake.backward()
        of_critic.step()
        generator.zero_grad()
        label.fill_(1.0)
        fooled = loss_of(critic(fake), label)
        fooled.backward()
        of_generator.step()
        losses += [(of_real + of_fake).item(), fooled.item()]
    return losses


def with_a_running_mean(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """What one backward pass leaves, its loss and its gradients, weighs the next loss."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():
        mean = torch.zeros(())
        for part, labels in zip(x.split(1024), y.split(1024), strict=True):
            loss = F.cross_entropy(model(part), labels)
            (loss / (1 + mean)).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            mean = 0.5 * mean + 0.5 * loss.detach() + norm
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_transforms(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """Each batch is made of values that only data have, and gradients are zeroed after that, as with MONAI's crops."""
    (model,), (optimizer,) = models, optimizers
    losses = []
    for x, y in batches():
        bright = (x.sum(1) > 0).nonzero().squeeze(1)
        rows = bright.repeat(-(-len(x) // max(1, len(bright))))[: len(x)]
        part, labels = x[rows], y[rows]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(part), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distilling(models: list[nn.Module], optimizers: list[Optimizer]) -> list[float]:
    """A teacher without gradients beside the model."""
    (model, teacher), (optimizer,) = models, optimizers
    losses = []
    for x, _ in batches():
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        losses.append(updated(optimizer, F.cross_entropy(model(x), wanted)))
    return losses


def taught() -> tuple[list[nn.Module], list[Optimizer]]:
    model, teacher = deep(), deep(blocks=1)
    return [model, teacher], [AdamW(model.parameters(), lr=1e-3)]
