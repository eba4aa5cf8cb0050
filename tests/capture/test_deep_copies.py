"""What models hold beside tensors, in the copies that are captured."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import memfit
from memfit.capture import real_copy
from memfit.errors import WorkloadError
from memfit.ir import Levers
from memfit.workload import Workload
from tests.measuring import peaks


class Noisy(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.locks = {"one": threading.Lock(), "other": threading.RLock()}
        self.log = Path(__file__).open()
        weakref.finalize(self, self.log.close)

    def forward(self, x: Tensor) -> Tensor:
        with self.locks["one"], self.locks["other"]:
            return super().forward(x)


class Closing(nn.Module):
    """Calls its layer through a function that refers to it, and another by a default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        other = self.other
        self.functions = [lambda x: self.layer(x), lambda x, layer=other: layer(x)]

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Any:
        return self.parent().layer(x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.child = Child(self)

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class Keeping(nn.Linear):
    """Holds a tensor that is no leaf."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.doubled = self.weight * 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a generator": Noisy,
    "locks and files": Locked,
    "closures": Closing,
    "a weak reference": Parent,
    "a tensor that is no leaf": Keeping,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 16)),
}


def built(model: nn.Module) -> Workload:
    torch.manual_seed(0)
    batch = torch.randn(8, 16)
    return Workload(model, batch, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_predicted(name: str) -> None:
    predicted, measured = peaks(built(MODELS[name]()), Levers(microbatch_size=8))
    assert predicted == measured


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_what_the_model_does_with_parameters_of_its_own(name: str) -> None:
    workload = built(MODELS[name]())
    copied = real_copy(workload)
    losses = [w.loss_fn(w.model, w.batch) for w in (copied, workload)]
    assert torch.equal(losses[0], losses[1])  # type: ignore[arg-type]
    losses[0].backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for p in copied.model.parameters())
    assert all(p.grad is None for p in workload.model.parameters())


def test_estimates_leave_a_models_generator_where_it_was() -> None:
    workload = built(Noisy())
    before = workload.model.generator.get_state()  # type: ignore[union-attr, operator]
    memfit.estimate(workload)
    assert torch.equal(workload.model.generator.get_state(), before)  # type: ignore[union-attr, operator]


def test_labels_on_parameters_and_attributes_of_tensor_classes_are_kept() -> None:
    class Measured(torch.Tensor):
        spacing: float

    workload = built(nn.Linear(16, 16))
    workload.model.weight.kind = "matrix"  # type: ignore[union-attr]
    batch = workload.batch.as_subclass(Measured)
    batch.spacing = 0.5

    def loss_fn(model: Any, x: Any) -> Tensor:
        assert model.weight.kind == "matrix"
        return model(x).square().mean() * x.spacing

    assert memfit.estimate(Workload(workload.model, batch, loss_fn, workload.optimizer)).peak_bytes > 0


def test_what_is_used_up_by_reading_is_not_shared() -> None:
    model = nn.Linear(16, 16)
    model.stream = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(WorkloadError, match=r"can't be copied .*generator"):
        memfit.estimate(built(model))
    assert list(model.stream) == [0, 1, 2]  # type: ignore[arg-type]
