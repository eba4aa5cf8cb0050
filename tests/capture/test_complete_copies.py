"""Copies are the step that trains: whatever hangs on the user's objects is in them, counted, and of their own.

The truth is a plain loop over the user's own objects, which shares nothing with memfit's copies.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.optimizer import register_optimizer_step_post_hook

import memfit
from benchmarks.common import whole_run_peak_bytes
from memfit.capture import differences, external_tensors, real_copy
from memfit.errors import WorkloadError
from memfit.hardware import allocated, find_device
from memfit.ir import Levers, Region
from memfit.levers import applied
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.capture.steps import assert_predicted, mean_square, squared
from tests.covering import some

_SCALARS = 16  # bytes: the sum of the losses, which memfit's step holds and the plain loop does not


def network(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(count)))


def table() -> Tensor:
    return torch.randn(128, 64)


def of_loss(loss_fn: Callable[..., Any], *, rows: int = 32, count: int = 2) -> Workload:
    model = network(count)
    return squared(model, torch.randn(rows, 64), torch.optim.AdamW(model.parameters()), loss_fn=loss_fn)


def of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Workload:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return squared(model, torch.randn(32, 64), optimizer)


def reading(held: Any, read: Callable[[Any], Tensor]) -> Workload:
    return of_loss(lambda model, x: mean_square(model, x) + read(held).mean())


# What a loss function holds


class Pair(collections.namedtuple("Pair", "first second")):
    def __len__(self) -> int:
        raise TypeError("no length of mine")


@dataclasses.dataclass(frozen=True)
class Bag:
    items: Any


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def in_a_queue() -> Workload:
    recent = collections.deque([table() for _ in range(5)], maxlen=5)

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        recent.append(table())
        return mean_square(model, x) + recent[0].mean()

    return of_loss(loss_fn)


def nested(depth: int) -> Any:
    held: Any = Bag({"a": (Slots([table()]),)})
    for _ in range(depth):
        held = types.SimpleNamespace(inner=held)
    return held


def far_within(held: Any) -> Tensor:
    while hasattr(held, "inner"):
        held = held.inner
    found: Tensor = held.items["a"][0].held[0]
    return found


def cyclic() -> dict[str, Any]:
    held: dict[str, Any] = {"t": table()}
    held["list"] = [held]
    return held


def in_a_partial() -> Workload:
    def loss_fn(memory: Any, model: nn.Module, x: Tensor, *, other: Any) -> Any:
        return mean_square(model, x) + memory["x"][0].mean() + other[0].mean()

    return of_loss(functools.partial(loss_fn, {"x": [table()]}, other=collections.OrderedDict({0: table()})))


def in_a_default() -> Workload:
    kept = {"t": table()}

    def loss_fn(model: nn.Module, x: Tensor, held: Any = kept) -> Any:
        return mean_square(model, x) + held["t"].mean()

    return of_loss(loss_fn)


def filled_by_the_step() -> Workload:
    memory: dict[str, Tensor] = {}

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        memory["last"] = model(x).detach()
        return mean_square(model, x)

    return of_loss(loss_fn)


def of_functions_that_call_each_other() -> Workload:
    teacher = network()

    def even(model: nn.Module, x: Tensor, n: int = 2) -> Any:
        return mean_square(model, x) + teacher(x).detach().mean() if n == 0 else odd(model, x, n - 1)

    def odd(model: nn.Module, x: Tensor, n: int) -> Any:
        return even(model, x, n - 1)

    return of_loss(even)


def teacher() -> nn.Module:
    """With running statistics, which a forward pass writes to."""
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))


TEACHER = teacher()


def by_a_global(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), TEACHER(x).detach())


def taught(x: Tensor) -> Any:
    return TEACHER(x)


def of_critic(critic: nn.Module) -> Callable[[nn.Module, Tensor], Any]:
    return lambda model, x: -critic(model(x)).mean()


class Trainer:
    """Counts its calls."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher, self.calls = teacher, 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(model(x), self.teacher(x).detach())

    __call__ = loss


def summed(losses: list[Callable[..., Any]]) -> Callable[..., Any]:
    return lambda model, x: sum(loss(model, x) for loss in losses)


# What hangs on the model and its parameters


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

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.teachers = network(), [teacher()]
        self.options = types.SimpleNamespace(weight=torch.randn(64))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            known = self.teachers[0](x) * self.options.weight
        return self.inner(x) - known


class Forgetful(nn.Module):
    """Leaves a table and its cache out of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.cache = nn.Linear(64, 64), table(), {"x": table()}

    def __getstate__(self) -> Any:
        kept = dict(self.__dict__, cache={})
        del kept["table"]
        return kept

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + self.table.mean() + self.cache["x"].mean()


class Only(nn.Linear):
    """Takes itself for its copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Noisy(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
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
        self.layer, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
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
        self.layer = nn.Linear(64, 64)
        self.child = Child(self)

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class Keeping(nn.Linear):
    """Holds a tensor that is no leaf."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.doubled = self.weight + self.weight


def with_a_weak_dictionary() -> Workload:
    model = network()
    tables: Any = weakref.WeakKeyDictionary({layer: table() for layer in model})
    held = list(model)
    model[0].register_forward_hook(lambda module, args, out: out + tables[module].mean() * len(held))
    return of_model(model)


def with_features_in_hooks() -> Workload:
    model, found = network(4), {}  # type: ignore[var-annotated]

    def keep(at: int, module: nn.Module, args: Any, out: Tensor) -> None:
        found[at] = out.detach().clone()

    for at, layer in enumerate(model):
        layer.register_forward_hook(functools.partial(keep, at))
    return of_model(model)


def with_a_bound_method_of_a_list() -> Workload:
    model, outputs = network(4), collections.deque[Tensor](maxlen=3)
    for layer in model:
        layer.register_forward_hook(lambda module, args, out, keep=outputs.append: keep(out.detach() * 2))
    return of_model(model)


def with_a_patched_forward() -> Workload:
    model, held = network(), [table()]
    own = model[0].forward
    model[0].forward = lambda x: own(x) + held[0].mean()  # type: ignore[method-assign, assignment]
    return of_model(model)


def with_hooks_of_gradients() -> Workload:
    model = network()
    noise = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradient + noise[name].add_(0.1))
    return of_model(model)


def with_optimizers_in_hooks() -> Workload:
    model = network()
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))

    def loss_fn(model: Any, x: Tensor) -> Any:
        return mean_square(model, x) * model.scale

    return dataclasses.replace(of_model(model, torch.optim.SGD([model.scale], 0.1)), loss_fn=loss_fn)  # type: ignore[list-item]


def with_a_hook_of_all_gradients() -> Workload:
    model, seen = network(), collections.deque[Any](maxlen=1)
    keep = lambda gradients: seen.append([gradient.clone() for gradient in gradients])  # noqa: E731
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), keep)
    return of_model(model)


def with_tensors_on_parameters() -> Workload:
    model = network()
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def gather(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.main_grad.add_(parameter.grad)

    optimizer.register_step_pre_hook(gather)
    return of_model(model, optimizer)


# What hangs on the optimizer


def with_an_average() -> Workload:
    workload = of_model(network())
    averaged = torch.optim.swa_utils.AveragedModel(
        workload.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    model = workload.model
    workload.optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    return workload


class Average:
    """An average of weights, called as a hook."""

    def __init__(self, model: nn.Module, by: Callable[[Tensor], Any]) -> None:
        self.model, self.by = model, by
        self.shadow = {by(p): p.detach().clone() for p in model.parameters()}

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        for parameter in self.model.parameters():
            self.shadow[self.by(parameter)].lerp_(parameter, 0.1)


def itself(value: Any) -> Any:
    return value


def with_an_average_by(key: Callable[[Any], Any]) -> Workload:
    workload = of_model(network())
    workload.optimizer.register_step_post_hook(Average(workload.model, key))
    return workload


def with_weights_pulled_back() -> Workload:
    workload, before = of_model(network()), {}  # type: ignore[var-annotated]
    model = workload.model

    @torch.no_grad()
    def keep(*_: Any) -> None:
        before.update({name: p.detach().clone() for name, p in model.named_parameters()})

    @torch.no_grad()
    def pull(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.lerp_(before[name], 0.5)

    workload.optimizer.register_step_pre_hook(keep)
    workload.optimizer.register_step_post_hook(pull)
    return workload


def with_a_step_of_its_own() -> Workload:
    workload = of_model(network())
    own, model = workload.optimizer.step, workload.model
    sums = [torch.zeros_like(p) for p in model.parameters()]

    def step(self: Any, closure: Any = None) -> None:
        own()
        with torch.no_grad():
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(parameter.sigmoid())

    workload.optimizer.step = types.MethodType(step, workload.optimizer)  # type: ignore[method-assign]
    return workload


class Slow(torch.optim.SGD):
    """Keeps slow weights, which `torch.optim.Optimizer` leaves out of copies."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.slow = {id(p): p.detach().clone() for p in self.param_groups[0]["params"]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.slow[id(parameter)].lerp_(parameter, 0.5)
                parameter.copy_(self.slow[id(parameter)])


def with_a_scheduler() -> Workload:
    workload = of_model(network())
    torch.optim.lr_scheduler.StepLR(workload.optimizer, 1)
    return workload


STEPS: dict[str, Callable[[], Workload]] = {
    "a replay memory": lambda: reading({number: (table(), number) for number in range(20)}, lambda held: held[3][0]),
    "a queue": in_a_queue,
    "a tuple without a length": lambda: reading(Pair(table(), [table()]), lambda held: held.second[0]),
    "a set": lambda: reading({table() for _ in range(3)}, lambda held: next(iter(held))),
    "far within": lambda: reading(nested(8), far_within),
    "many modules": lambda: reading([nn.Linear(16, 16) for _ in range(300)], lambda held: held[7].weight.detach()),
    "a partial": in_a_partial,
    "a default argument": in_a_default,
    "a distribution": lambda: reading(torch.distributions.Normal(table(), torch.ones(128, 64)), lambda held: held.loc),
    "a cycle": lambda: reading(cyclic(), lambda held: held["list"][0]["t"]),
    "filled by the step": filled_by_the_step,
    "functions that call each other": of_functions_that_call_each_other,
    "a global": lambda: of_loss(by_a_global, rows=512, count=8),
    "a global of a helper": lambda: of_loss(lambda model, x: F.mse_loss(model(x), taught(x).detach())),
    "a critic": lambda: of_loss(of_critic(teacher()), rows=512, count=8),
    "a method's object": lambda: of_loss(Trainer(teacher()).loss),
    "an object": lambda: of_loss(Trainer(teacher()), rows=512, count=8),
    "a list of functions": lambda: of_loss(summed([of_critic(teacher()), mean_square])),
    "a global of forward": lambda: of_model(Naming()),
    "a list of a module": lambda: of_model(Listing()),
    "a class that leaves things out": lambda: of_model(Forgetful()),
    "a class that takes itself for its copy": lambda: of_model(nn.Sequential(Only(64, 64), nn.Linear(64, 64))),
    "a generator of the model": lambda: of_model(Noisy()),
    "locks and files": lambda: of_model(Locked()),
    "closures of a module": lambda: of_model(Closing()),
    "a weak reference to the parent": lambda: of_model(Parent()),
    "a tensor that is no leaf": lambda: of_model(Keeping()),
    "parametrized": lambda: of_model(parametrizations.weight_norm(nn.Linear(64, 64))),
    "spectral norm": lambda: of_model(parametrizations.spectral_norm(nn.Linear(64, 64))),
    "a weak dictionary": with_a_weak_dictionary,
    "features in hooks": with_features_in_hooks,
    "a list's bound method": with_a_bound_method_of_a_list,
    "a patched forward": with_a_patched_forward,
    "gradient hooks": with_hooks_of_gradients,
    "optimizers in hooks": with_optimizers_in_hooks,
    "a hook of all gradients": with_a_hook_of_all_gradients,
    "tensors on parameters": with_tensors_on_parameters,
    "AveragedModel": with_an_average,
    "an average by parameter": lambda: with_an_average_by(itself),
    "an average by id": lambda: with_an_average_by(id),
    "weights pulled back": with_weights_pulled_back,
    "a step of its own": with_a_step_of_its_own,
    "slow weights": lambda: of_model(model := network(), Slow(model.parameters(), lr=0.1)),
    "a scheduler": with_a_scheduler,
}
QUICK = [
    *("a replay memory", "far within", "a generator of the model", "locks and files", "closures of a module"),
    *("a weak reference to the parent", "a tensor that is no leaf", "parametrized", "spectral norm"),
    *("a weak dictionary", "optimizers in hooks", "an average by id", "slow weights"),
    *("a critic", "an object", "a global of forward", "a list of a module"),
]


def run(workload: Workload, steps: int = 3) -> list[float]:
    """Run steps of a plain loop, and return their losses."""
    losses = []
    for _ in range(steps):
        workload.optimizer.zero_grad()
        loss: Any = workload.loss_fn(workload.model, workload.batch)
        losses.append(loss.item())
        loss.backward()
        del loss
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    return losses


def made(step: str) -> Workload:
    torch.manual_seed(0)
    return STEPS[step]()


@pytest.mark.parametrize("step", some(STEPS, QUICK))
def test_the_peak_is_that_of_a_plain_loop_over_the_users_own_objects(step: str) -> None:
    device, workload = find_device("cpu"), made(step)
    trace = capture_levers(workload, Levers(microbatch_size=len(workload.batch)), device)
    predicted = predict(trace, costs_of([trace], device), device)[0].peak_bytes
    with allocated() as meter:
        run(made(step))
    there_bytes = sum(t.nbytes for t in TEACHER.state_dict().values()) if "a global" in step else 0
    assert 0 <= predicted - there_bytes - meter.peak_bytes <= _SCALARS


@pytest.mark.parametrize("step", STEPS)
def test_a_copy_trains_as_the_original_does_and_leaves_it_alone(step: str) -> None:
    workload = made(step)
    held = [*workload.model.parameters(), *external_tensors(workload)]
    before = [(tensor.detach().clone(), tensor.grad if tensor.is_leaf else None) for tensor in held]
    copied = real_copy(workload)
    state = torch.get_rng_state()
    losses = run(copied)
    for tensor, (was, gradient) in zip(held, before, strict=True):
        assert torch.equal(tensor, was) and (not tensor.is_leaf or tensor.grad is gradient)
    assert [t.shape for t in external_tensors(workload)] == [
        t.shape for t in held[len(list(workload.model.parameters())) :]
    ]
    torch.set_rng_state(state)
    assert losses == run(workload)
    weights = zip(copied.model.parameters(), workload.model.parameters(), strict=True)
    assert all(torch.equal(mine, yours) and mine is not yours for mine, yours in weights)


@pytest.mark.parametrize("step", some(["a global", "a critic", "an object"], ["a critic"]))
def test_a_plan_keeps_its_budget_with_it(step: str) -> None:
    workload = made(step)
    found = memfit.plan(workload, budget=int(0.97 * memfit.estimate(workload).peak_bytes), numerics="reordered")
    assert whole_run_peak_bytes(workload, found.levers) <= found.budget_bytes


@pytest.mark.parametrize("step", STEPS)
def test_walked_side_by_side_a_copy_is_as_its_original(step: str) -> None:
    workload = made(step)
    assert differences(workload, real_copy(workload)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda copied: copied.optimizer._optimizer_step_post_hooks.clear(),
            "_optimizer_step_post_hooks[0] is missing",
        ),
        (lambda copied: copied.model[0][0].weight._backward_hooks.clear(), "].hooks[0] is missing in the copy"),
        (lambda copied: vars(copied.model[0]).pop("table"), "Workload.model._modules['0'].table is missing"),
        (lambda copied: setattr(copied.model[0], "table", None), "table is of the class NoneType"),
    ],
)
def test_what_a_copy_lacks_is_named(change: Callable[[Any], Any], told: str) -> None:
    workload = with_an_average_by(id)
    model: Any = workload.model
    model[0].table = table()
    model[0][0].weight.register_hook(lambda gradient: gradient)
    copied = real_copy(workload)
    assert differences(workload, copied) == []
    change(copied)
    (only,) = differences(workload, copied)
    assert told in only


def test_what_is_shared_is_named() -> None:
    workload = made("a replay memory")
    shared = dataclasses.replace(real_copy(workload), model=workload.model)
    assert "Workload.model is shared with the copy" in differences(workload, shared)


def test_hooks_of_all_optimizers_run_on_copies_of_what_they_hold() -> None:
    workload = of_model(network())
    average = Average(workload.model, itself)
    before = {p: held.clone() for p, held in average.shadow.items()}
    weights = sum(p.nbytes for p in workload.model.parameters())
    plain = external_tensors(workload)
    handle = register_optimizer_step_post_hook(average)
    try:
        assert sum(t.nbytes for t in external_tensors(workload)) == weights and not plain
        copied = real_copy(workload)
        run(copied)
        again = real_copy(copied)
        assert sum(t.nbytes for t in external_tensors(again)) == weights
        assert all(torch.equal(held, before[p]) for p, held in average.shadow.items())
        run(workload)
        assert not any(torch.equal(held, before[p]) for p, held in average.shadow.items() if p.dim() > 1)
    finally:
        handle.remove()


def test_estimates_leave_a_models_generator_where_it_was() -> None:
    workload = of_model(Noisy())
    before = workload.model.generator.get_state()  # type: ignore[union-attr, operator]
    memfit.estimate(workload)
    assert torch.equal(workload.model.generator.get_state(), before)  # type: ignore[union-attr, operator]


def test_labels_on_parameters_and_attributes_of_tensor_classes_are_kept() -> None:
    class Measured(torch.Tensor):
        spacing: float

    workload = of_model(nn.Linear(64, 64))
    workload.model.weight.kind = "matrix"  # type: ignore[union-attr]
    batch = workload.batch.as_subclass(Measured)
    batch.spacing = 0.5

    def loss_fn(model: Any, x: Any) -> Tensor:
        assert model.weight.kind == "matrix"
        return mean_square(model, x) * x.spacing

    assert memfit.estimate(Workload(workload.model, batch, loss_fn, workload.optimizer)).peak_bytes > 0


def test_what_is_used_up_by_reading_is_not_shared() -> None:
    model = nn.Linear(64, 64)
    model.stream = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(WorkloadError, match=r"can't be copied .*generator"):
        memfit.estimate(of_model(model))
    assert list(model.stream) == [0, 1, 2]  # type: ignore[arg-type]


def test_a_method_is_called_on_a_copy_of_its_object() -> None:
    trainer = Trainer(teacher())
    workload = of_loss(trainer.loss)
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
    model, x = network(), torch.randn(32, 64)
    workload = squared(model, x, loss_fn=Task(model, network() if has_teacher else None).loss)
    assert_predicted(workload)
    weights = sum(t.nbytes for t in model.state_dict().values())
    extra = memfit.estimate(workload).peak_bytes - memfit.estimate(squared(model, x)).peak_bytes
    assert extra >= weights if has_teacher else extra < weights


def test_a_loss_that_reaches_nothing_else_is_the_same_function() -> None:
    workload = of_model(network())
    assert real_copy(workload).loss_fn is mean_square
    assert external_tensors(workload) == []


class Normed(nn.Module):
    """Has a weight that a property of its class computes, which the copy's class shares with the original's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_nothing_of_the_original_hangs_on_a_copy_whose_regions_ran() -> None:
    copied = real_copy(of_model(nn.Sequential(Normed(), Normed(), nn.Linear(64, 8))))
    levers = Levers(microbatch_size=32, regions=(Region(modules=("0",)), Region(modules=("1",))))
    with applied(levers, copied) as step:
        step(copied.batch)
        assert external_tensors(copied) == []


def test_the_model_itself_is_to_be_reached_by_the_argument() -> None:
    model = network()
    workload = squared(model, torch.randn(32, 64), loss_fn=lambda _, x: model(x).mean())
    with pytest.raises(WorkloadError, match="Workload.loss_fn returned a loss that depends on no"):
        memfit.estimate(workload)
