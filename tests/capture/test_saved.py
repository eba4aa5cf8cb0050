"""What autograd saves and when it lets go, against the measured peak: what no backward pass enters, and what one within
the loss takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.hardware import find_device
from memfit.ir import Levers, Regions
from memfit.planner import capture_levers
from memfit.solver import refusals
from memfit.workload import Workload
from tests.capture.steps import assert_predicted

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def network(*, classes: int = 500) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(32, classes))


def workload(loss: Loss, model: nn.Module | None = None) -> Workload:
    model = model or network()
    batch = {"x": torch.randn(48, 32), "y": torch.randint(0, 10, (48,))}
    return Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


# Outputs that autograd saves with a node which no backward pass enters


def accuracy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (logits.softmax(1).argmax(1) == batch["y"]).float().mean()


METRICS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "accuracy": accuracy,
    "nearest": lambda logits, batch: torch.cdist(logits, logits).argmin(1),
    "large": lambda logits, batch: logits.exp() > 1,
    "detached": lambda logits, batch: logits.sigmoid().tanh().relu().sqrt().detach(),
    "distances": lambda logits, batch: logits.norm(dim=1, keepdim=True).cumprod(0) < 2,
}


def beside(metric: str) -> Workload:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        METRICS[metric](logits, batch)
        return F.cross_entropy(logits, batch["y"])

    return workload(loss)


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_of_the_logits_is_let_go_of_as_it_is_without_hooks(metric: str) -> None:
    assert_predicted(beside(metric))


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        with torch.enable_grad():
            y = x + layer(x)
        ctx.save_for_backward(y.detach())  # type: ignore[attr-defined]
        return y.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
        with torch.enable_grad():
            x = y.detach().requires_grad_()
            out = x + ctx.layer(x)  # type: ignore[attr-defined]
        out.backward(gradient)
        assert x.grad is not None
        return x.grad, None


class ReversibleNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32)) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = Reversible.apply(x, layer)
        out: Tensor = self.head(x)
        return out


def test_a_graph_that_a_function_makes_and_drops_is_let_go_of() -> None:
    assert_predicted(workload(cross_entropy, ReversibleNetwork()))


# Autograd within the loss


def gradient_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch["y"]) + (gradient.norm(dim=1) - 1).pow(2).mean()


def second_derivative(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    u = model(x)[:, :1]
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second.sum(1) - u[:, 0]).pow(2).mean()


def backward_within(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    cross_entropy(model, batch).backward()
    out: Tensor = model(batch["x"])
    return out.pow(2).mean()


def saliency(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x)
    return cross_entropy(model, {**batch, "x": batch["x"] + 0.1 * gradient.sign()})


def one_step_ahead(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(cross_entropy(model, batch), list(named.values()), create_graph=True)
    ahead = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, ahead, (batch["x"],)), batch["y"])


def by_transform(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def total(x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        return out.sum()

    gradient = torch.func.grad(total)(batch["x"])
    assert isinstance(gradient, Tensor)
    return cross_entropy(model, batch) + gradient.pow(2).mean()


def by_vmap(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def of_one(x: Tensor) -> Tensor:
        out: Tensor = model(x[None])
        return out.logsumexp(1).sum()

    return cross_entropy(model, batch) + torch.func.vmap(torch.func.grad(of_one))(batch["x"]).pow(2).mean()


WITHIN = [gradient_penalty, second_derivative, backward_within, saliency, one_step_ahead, by_transform, by_vmap]


@pytest.mark.parametrize("loss", WITHIN)
def test_autograd_within_the_loss(loss: Loss) -> None:
    assert_predicted(workload(loss))


@pytest.mark.parametrize("loss", [gradient_penalty, backward_within])
def test_autograd_within_the_loss_of_each_microbatch(loss: Loss) -> None:
    assert_predicted(workload(loss), microbatch_size=16)


# Held from the step before


class Clearing(nn.Module):
    """Keeps what its layers made, and lets go of it as the next step begins, before any operator."""

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 10)
        self.features: list[Tensor] = []
        self.by_hook = by_hook
        if by_hook:
            for layer in self.layers:
                layer.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.features.append(out)

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        for layer in self.layers:
            x = layer(x).relu()
            if not self.by_hook:
                self.features.append(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("by_hook", [True, False])
def test_what_is_held_from_the_step_before_and_dropped_before_the_first_operator(by_hook: bool) -> None:
    assert_predicted(workload(cross_entropy, Clearing(by_hook=by_hook)))


class Tangent(nn.Module):
    """Adds to what a block makes the derivative of its sum, by a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        def total(y: Tensor) -> Tensor:
            out: Tensor = self.block(y)
            return out.sum()

        gradient = torch.func.grad(total)(x)
        assert isinstance(gradient, Tensor)
        made: Tensor = self.block(x)
        return made + gradient


def test_modules_within_which_a_transform_runs_are_no_regions() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.GELU()), Tangent(), nn.Linear(32, 10))
    work = workload(cross_entropy, model)
    assert_predicted(work)
    refused = refusals(Regions(capture_levers(work, Levers(microbatch_size=48), find_device("cpu"))))
    assert "torch.func" in refused["1"] and "0" not in refused


def test_modules_that_are_differentiated_within_the_loss_are_no_regions() -> None:
    trace = capture_levers(workload(gradient_penalty), Levers(microbatch_size=48), find_device("cpu"))
    assert all("differentiated within the loss" in why for why in refusals(Regions(trace)).values())
    assert refusals(Regions(trace))
