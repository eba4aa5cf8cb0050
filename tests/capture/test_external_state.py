"""What a step's code holds outside the model: it takes memory, and what runs for memfit's sake leaves it alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from benchmarks.common import whole_run_peak_bytes
from memfit.capture import external_tensors, real_copy
from memfit.errors import WorkloadError
from memfit.ir import Levers
from memfit.workload import Workload
from tests.capture.steps import assert_predicted, mean_square, squared
from tests.covering import some


def network() -> nn.Sequential:
    """With running statistics, which a forward pass writes to."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))


TEACHER, IMAGES = network(), torch.randn(2, 3, 64, 64)


def by_a_global(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), TEACHER(x).detach())


def taught(x: Tensor) -> Any:
    return TEACHER(x)


def by_a_helper(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), taught(x).detach())


def by_an_argument(teacher: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), teacher(x).detach())


class Trainer:
    """Counts its calls."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher, self.calls = teacher, 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return by_an_argument(self.teacher, model, x)

    __call__ = loss


class Naming(nn.Module):
    """Its own code names a network that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            known = TEACHER(x)
        return self.inner(x) - known


class Listing(nn.Module):
    """Holds a network and a tensor where PyTorch does not look for them."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.inner, self.teachers = network(), [teacher]
        self.options = types.SimpleNamespace(weight=torch.randn(3, 64, 64))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            known = self.teachers[0](x) * self.options.weight
        return self.inner(x) - known


def closed_over(teacher: nn.Module, with_gradient: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def critic(model: nn.Module, x: Tensor) -> Tensor:
        score: Tensor = -teacher(model(x)).mean()
        return score

    return critic if with_gradient else lambda model, x: by_an_argument(teacher, model, x)


def summed(losses: list[Callable[..., Any]]) -> Callable[..., Any]:
    return lambda model, x: sum(loss(model, x) for loss in losses)


Made = tuple[nn.Module, Callable[..., Any]]
WAYS: dict[str, Callable[[nn.Module], Made]] = {
    "a global": lambda teacher: (network(), by_a_global),
    "a global of a helper": lambda teacher: (network(), by_a_helper),
    "a closure": lambda teacher: (network(), closed_over(teacher, with_gradient=False)),
    "a critic": lambda teacher: (network(), closed_over(teacher, with_gradient=True)),
    "a default": lambda teacher: (network(), lambda model, x, held=teacher: by_an_argument(held, model, x)),
    "a method's object": lambda teacher: (network(), Trainer(teacher).loss),
    "an object": lambda teacher: (network(), Trainer(teacher)),
    "a partial": lambda teacher: (network(), functools.partial(by_an_argument, teacher)),
    "a list of functions": lambda teacher: (network(), summed([closed_over(teacher, True), mean_square])),
    "a global of forward": lambda teacher: (Naming(), mean_square),
    "a list of a module": lambda teacher: (Listing(teacher), mean_square),
}


def workload_of(way: str) -> tuple[Workload, nn.Module]:
    """Return a step, and the network that it reaches outside the model."""
    torch.manual_seed(0)
    teacher = network()
    model, loss_fn = WAYS[way](teacher)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    reached = TEACHER if "global" in way else teacher
    return Workload(model, torch.randn(2, 3, 64, 64), loss_fn, optimizer), reached


def held(module: nn.Module) -> dict[str, tuple[Tensor, Any]]:
    return {name: (t.detach().clone(), t.grad) for name, t in module.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("way", some(WAYS, ["a critic", "an object", "a global of forward", "a list of a module"]))
def test_it_is_in_the_peak_and_stays_as_it_is(way: str) -> None:
    workload, reached = workload_of(way)
    before = held(reached)
    predicted = memfit.estimate(workload)
    found = memfit.plan(workload, budget=int(0.97 * predicted.peak_bytes), numerics="reordered")
    after = held(reached)
    assert all(torch.equal(value, after[name][0]) for name, (value, _) in before.items())
    assert all(gradient is after[name][1] is None for name, (_, gradient) in before.items())
    assert predicted.peak_bytes == whole_run_peak_bytes(workload, Levers(microbatch_size=2))
    assert whole_run_peak_bytes(workload, found.levers) <= found.budget_bytes


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_and_counted_as_what_stays(way: str) -> None:
    workload, reached = workload_of(way)
    storages = {t.untyped_storage().data_ptr() for t in external_tensors(workload)}
    assert {t.untyped_storage().data_ptr() for t in reached.parameters()} <= storages
    assert not {t.untyped_storage().data_ptr() for t in workload.model.parameters()} & storages
    assert_predicted(workload)


def test_a_method_is_called_on_a_copy_of_its_object() -> None:
    trainer = Trainer(network())
    workload = squared(network(), IMAGES, loss_fn=trainer.loss)
    copied = real_copy(workload)
    copied.loss_fn(copied.model, copied.batch)
    assert trainer.calls == 0
    assert copied.loss_fn.__self__.calls == 1  # type: ignore[attr-defined]


class Task:
    """Holds the model besides being given it, as the trainers of other libraries do, and a teacher."""

    def __init__(self, model: nn.Module, teacher: nn.Module | None) -> None:
        self.model, self.teacher = model, teacher

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        assert self.model is not None
        out: Tensor = model(x).square().mean()
        return out if self.teacher is None else out + self.teacher(x).mean().detach()


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_model_that_the_loss_holds_too_counts_once(has_teacher: bool) -> None:
    torch.manual_seed(0)
    model, teacher = network(), network() if has_teacher else None
    workload = squared(model, IMAGES, loss_fn=Task(model, teacher).loss)
    assert_predicted(workload)
    weights = sum(t.nbytes for t in model.state_dict().values())
    extra = memfit.estimate(workload).peak_bytes - memfit.estimate(squared(model, IMAGES)).peak_bytes
    assert extra >= weights if has_teacher else extra < weights


def test_a_loss_that_reaches_nothing_else_is_the_same_function() -> None:
    workload = squared(network(), IMAGES)
    assert real_copy(workload).loss_fn is mean_square
    assert external_tensors(workload) == []


def test_the_model_itself_is_to_be_reached_by_the_argument() -> None:
    model = network()
    workload = squared(model, IMAGES, loss_fn=lambda _, x: model(x).mean())
    with pytest.raises(WorkloadError, match="Workload.loss_fn returned a loss that depends on no"):
        memfit.estimate(workload)
