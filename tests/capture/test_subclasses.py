"""Tensor subclasses: weights and states that wrap others, parameters of other classes, and batches."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import memfit
from memfit import hardware
from memfit.capture import KnownValues, fake_copy, mode_of, packed, real_copy
from memfit.errors import WorkloadError
from memfit.ir import Levers, Region
from memfit.workload import Workload
from tests.capture.steps import assert_predicted, squared
from tests.capture.test_complete_copies import run
from tests.measuring import peaks

_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


class Int8(Tensor):
    """A weight of 8 bits with a scale for each row, as torchao's, widened for each operator."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, q: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, q.shape, strides=q.stride(), dtype=torch.float32, device=q.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.detach().abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["q"], inner["scale"])

    def wide(self) -> Tensor:
        return self.q.to(torch.float32) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT:
            return cls(func(args[0].q), func(args[0].scale))
        if func is torch.ops.aten.copy_.default:
            made = cls.of(args[1])
            args[0].q.copy_(made.q)
            args[0].scale.copy_(made.scale)
            return args[0]
        args, kwargs = tree_map_only(cls, lambda t: t.wide(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Nested(Int8):
    """One whose scale is quantised too."""

    @classmethod
    def of(cls, weight: Tensor) -> Nested:
        plain = Int8.of(weight)
        return cls(plain.q, Int8.of(plain.scale))

    def wide(self) -> Tensor:
        return self.q.to(torch.float32) * self.scale.wide()  # type: ignore[attr-defined]


class Untold(Int8):
    """One that says nothing of its parts."""

    __tensor_flatten__ = __tensor_unflatten__ = None  # type: ignore[assignment]


class Coded(nn.Parameter):
    """A parameter that makes itself anew, with its table as an attribute, as bitsandbytes' have it."""

    def __new__(cls, data: Any = None, requires_grad: bool = False, table: Any = None) -> Coded:
        made: Coded = Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[attr-defined]
        made.table = table  # type: ignore[attr-defined]
        return made

    def __deepcopy__(self, memo: Any) -> Coded:
        return Coded(copy.deepcopy(self.data), self.requires_grad, copy.deepcopy(self.table))  # type: ignore[attr-defined]

    def wide(self) -> Tensor:
        return self.table[self.long()]  # type: ignore[attr-defined, no-any-return]


class Frozen(nn.Module):
    """A layer with a frozen weight and one of low rank."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(made, False) if type(made := make(torch.randn(64, 64))) is not Coded else made
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.wide() if isinstance(self.weight, Coded) else self.weight
        return torch.nn.functional.linear(x, weight) + self.up(self.down(x))  # type: ignore[no-any-return]


def coded(weight: Tensor) -> Coded:
    return Coded((weight * 8).long().clamp(-7, 7).add(7).to(torch.uint8), table=torch.linspace(-1, 1, 15))


class LowBit(torch.optim.SGD):
    """Keeps its momentum in 8 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = Int8.of(torch.zeros_like(parameter))
            wide = state["momentum"].wide().mul_(0.9).add_(parameter.grad)
            state["momentum"].copy_(wide)
            parameter.add_(wide, alpha=-1e-4)


KINDS: dict[str, Callable[[Tensor], Any]] = {"int8": Int8.of, "nested": Nested.of, "a class of parameters": coded}


def workload_of(kind: str, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Frozen(KINDS[kind]) for _ in range(3)), nn.Linear(64, 8))
    return squared(model, torch.randn(16, 64), optimizer([p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_predicted_peak_is_the_measured_one_with_weights_at_their_own_size(kind: str) -> None:
    workload = workload_of(kind)
    assert_predicted(workload)
    if kind != "a class of parameters":
        held = memfit.estimate(workload).by_category["parameters"]
        wide = sum(p.numel() * 4 for p in workload.model.parameters())
        assert held < wide - 3 * 64 * 64 * 2  # two of four bytes and more


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_with_data_is_of_the_class_and_trains_as_the_original(kind: str) -> None:
    workload = workload_of(kind)
    copied = real_copy(workload)
    mine, yours = (w.model.get_parameter("0.weight") for w in (copied, workload))
    assert type(mine) is type(yours) and isinstance(mine, nn.Parameter) and not mine.requires_grad
    assert run(copied) == run(workload)


def test_a_fake_copy_of_a_fake_copy_is_of_the_same_class() -> None:
    workload = workload_of("a class of parameters")
    once = fake_copy(workload, KnownValues.of(mode_of(workload)))
    twice = fake_copy(once, KnownValues.of(mode_of(once)))
    for each in (once, twice):
        weight = each.model.get_parameter("0.weight")
        assert isinstance(weight, Coded) and weight.table.shape == (15,)  # type: ignore[attr-defined]
    assert type(once.model.get_parameter("0.weight")) is type(twice.model.get_parameter("0.weight"))


def test_states_of_a_low_bit_optimizer_count_at_their_own_size() -> None:
    workload = workload_of("int8", LowBit)
    assert_predicted(workload)
    trained = sum(p.nbytes for p in workload.model.parameters() if p.requires_grad)
    states = memfit.estimate(workload).by_category["optimizer state"]
    assert 0.25 * trained <= states < 0.5 * trained


@pytest.mark.ci
def test_a_plan_keeps_its_budget_and_is_verified() -> None:
    workload = workload_of("nested")
    budget = math.ceil(0.95 * memfit.estimate(workload).peak_bytes)
    plan = memfit.plan(workload, budget=budget, numerics="reordered", points=1)
    verification = memfit.verify(plan, workload, steps=0)
    assert verification.holds and verification.measured_peak_bytes <= budget, verification.failures


def test_a_class_that_does_not_tell_its_parts_is_refused_by_name() -> None:
    model = nn.Linear(64, 64)
    model.weight = nn.Parameter(Untold.of(model.weight), False)
    workload = squared(model, torch.randn(2, 64))
    for verb in (memfit.estimate, real_copy):
        with pytest.raises(WorkloadError, match="the class Untold, which has no __tensor_flatten__"):
            verb(workload)  # type: ignore[operator]


def kinds_of(workload: Workload, progress: Any) -> list[Any]:
    """Describe the weights, and run a hook, in the process that received them."""
    weight: Any = workload.model.get_parameter("0.weight")
    inner = [
        tuple(part.shape) for part in (getattr(weight, "q", None), getattr(weight, "table", None)) if part is not None
    ]
    hooks = (
        len(workload.optimizer._optimizer_step_post_hooks),
        len(workload.model.get_parameter("3.bias")._backward_hooks),
    )
    return [type(weight).__name__, isinstance(weight, nn.Parameter), inner, hooks, hasattr(workload.optimizer, "step")]


@pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here: nothing is sent")
@pytest.mark.parametrize(("kind", "inner"), [("nested", [(64, 64)]), ("a class of parameters", [(15,)])])
def test_they_travel_with_hooks_of_parameters_and_optimizers(kind: str, inner: list[Any]) -> None:
    workload = workload_of(kind)
    workload.optimizer.register_step_post_hook(lambda *_: None)
    torch.optim.lr_scheduler.StepLR(workload.optimizer, 1)
    workload.model.get_parameter("3.bias").register_hook(lambda gradient: gradient)
    found = hardware.process.run(packed(kinds_of, workload, {}), lambda *_: None)
    assert found == [type(workload.model.get_parameter("0.weight")).__name__, True, inner, (1, 1), True]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_weights_of_bitsandbytes_are_predicted(kind: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)

    def quantised() -> Any:
        if kind == "nf4":
            layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        else:
            layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        layer.load_state_dict({"weight": torch.randn(64, 64)})
        return layer.to("cpu").requires_grad_(False)

    model = nn.Sequential(nn.Linear(64, 64), quantised(), nn.Linear(64, 64), quantised(), nn.Linear(64, 8))
    workload = squared(model, torch.randn(16, 64), torch.optim.AdamW([*model[0].parameters()]))
    assert_predicted(workload)
    assert not memfit.estimate(workload).notes


# Batches of a subclass: a step holds what views and writes in place make autograd hold


class Tagged(torch.Tensor):
    """A tensor whose functions return such tensors, as MONAI's `MetaTensor`."""

    @property
    def tag(self) -> Any:
        return vars(self).get("tag")


class Quiet(torch.Tensor):
    """A tensor whose functions return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def of_batch(kind: type) -> Workload:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(inplace=True)) for _ in range(3))
    return squared(nn.Sequential(*layers, nn.Linear(64, 2)), torch.randn(512, 64).as_subclass(kind))


LEVERS = {
    "plain": Levers(microbatch_size=512),
    "microbatches": Levers(microbatch_size=128),
    "regions": Levers(microbatch_size=512, regions=(Region(("0",)), Region(("1.1", "1.2")))),
}


@pytest.mark.parametrize("name", LEVERS)
@pytest.mark.parametrize("kind", [Tagged, Quiet, torch.Tensor])
def test_the_predicted_peak_is_the_measured_one_with_batches_of_a_subclass(kind: type, name: str) -> None:
    predicted, measured = peaks(of_batch(kind), LEVERS[name])
    assert predicted == measured


def test_a_subclass_takes_more_where_operators_write_in_place() -> None:
    tagged, quiet, plain = (peaks(of_batch(kind), LEVERS["plain"])[0] for kind in (Tagged, Quiet, torch.Tensor))
    assert tagged > quiet == plain


def test_copies_with_data_are_of_the_class_with_its_attributes_and_share_nothing() -> None:
    workload = of_batch(Tagged)
    vars(workload.batch)["tag"] = ["of the user"]
    copied = real_copy(workload)
    assert type(copied.batch) is Tagged and copied.batch.tag == ["of the user"]
    assert copied.batch.tag is not workload.batch.tag and not copied.batch.requires_grad
    assert copied.batch.data_ptr() != workload.batch.data_ptr() and torch.equal(copied.batch, workload.batch)
    asked = dataclasses.replace(workload, batch=workload.batch.detach().requires_grad_())
    assert real_copy(asked).batch.requires_grad and real_copy(asked).batch.is_leaf


def test_a_volume_of_monai_is_predicted() -> None:
    data = pytest.importorskip("monai.data")
    workload = of_batch(torch.Tensor)
    predicted, measured = peaks(dataclasses.replace(workload, batch=data.MetaTensor(workload.batch)), LEVERS["regions"])
    assert predicted == measured > peaks(workload, LEVERS["regions"])[0]
