"""Precision: autocast, TF32 products, or weights, activations and gradients in bf16.

`bf16-mixed` and `16-mixed` are autocast around the forward pass, `tf32` is a setting of float32 products around the
whole step, and `bf16-true` is weights in bf16. Modules that are to stay in fp32 have their `forward` wrapped on the
instance, within what checkpointing puts around it, so that a recomputation goes the same way.

A bf16 number can't tell a change below 1/256 of itself, and most updates are smaller: a model whose weights are bf16
alone stops learning (Micikevicius et al. 2018, *Mixed Precision Training*, section 3.1). Two ways around it:

- *Master weights*: the optimizer keeps updating the fp32 parameters, each gradient goes to them in fp32 as soon as
  autograd has it, and after the update the bf16 weights are rounded from them. The parameters that the optimizer was
  made with are the masters.
- *Stochastic rounding*: no fp32 copy is kept. Each parameter is widened for its update, and rounded up or down with
  the probability that makes the rounding right on average (Gupta et al. 2015, *Deep Learning with Limited Numerical
  Precision*, section 2.1; Zamirai et al. 2020, *Revisiting BFloat16 Training*). Optimizer states are fp32.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from memfit._torch import NormBase, foreach_copy_, own_parameters
from memfit.errors import PlanError, WorkloadError
from memfit.hardware import float32_precision, precisions, supports_tf32
from memfit.ir import Device, Levers, enclosing
from memfit.levers.lever import ADAPTING, Conflict, Lever, LeversOn, Rung, Running, Setting
from memfit.levers.parameter_updates import restricted
from memfit.recomputation import mapped
from memfit.training import LossScaler
from memfit.workload import Workload, samples_of

NO_UPDATES = "Workload.bf16_updates=None"
NO_TF32 = "a device without TF32"
Swaps = Mapping[nn.Parameter, nn.Parameter]
_WIDE, _HALF = torch.float32, torch.bfloat16


_AUTOCAST: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Precision(Lever):
    """The precision of the forward pass and of the gradients it leads to."""

    name = "precision"
    field = "precision"
    numerics_class = "reduced"
    conflicts = (
        Conflict(
            "bf16-true",
            NO_UPDATES,
            "bf16 weights lose every update below 1/256 of their value",
            "give bf16_updates='master-weights' (fp32 copies that the optimizer updates) or 'stochastic-rounding', or"
            " use 'bf16-mixed'",
        ),
        Conflict(
            "bf16-true",
            ADAPTING,
            "predictions for other shapes need the original model, and its weights are in bf16 by then",
            "use 'bf16-mixed', or memfit.apply with one plan for all shapes",
        ),
        Conflict(
            "tf32", NO_TF32, "the device has no TF32 units", "use '32-true'; NVIDIA's GPUs from Ampere on have TF32"
        ),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        return on.levers.precision, on.levers.precision

    def names(self, levers: Levers) -> set[str]:
        return {self.name, levers.precision}

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        no_updates = {NO_UPDATES} if workload.bf16_updates is None else set()
        return no_updates | ({NO_TF32} if device is not None and not supports_tf32(device) else set())

    def changes_state(self, levers: Levers) -> bool:
        return levers.precision == "bf16-true"

    def may_switch(self, on: LeversOn, to: Levers) -> bool:
        levers = on.levers
        if levers.precision == "bf16-true":  # where gradients are held depends on whether they are added up
            accumulates = levers.microbatch_size < on.batch_size, to.microbatch_size < on.batch_size
            return levers.precision == to.precision and accumulates[0] == accumulates[1]
        return levers.precision == to.precision

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        workload, options = running.workload, running.options
        if levers.precision == "bf16-true":
            with bf16_weights(workload, accumulates=levers.microbatch_size < samples_of(workload)) as weights:
                yield replace(running, options=replace(options, update=weights.update, masters=weights.masters))
        elif levers.precision == "tf32":
            yield replace(running, options=replace(options, around=functools.partial(float32_precision, "high")))
        else:
            device = next((p.device.type for p in workload.model.parameters()), "cpu")
            scaler = LossScaler(workload.loss_scaling) if levers.precision == "16-mixed" else None
            casts = functools.partial(autocast, levers.precision, device)
            with kept_in_fp32(workload.model, workload.fp32_modules, device):
                yield replace(running, options=replace(options, autocast=casts, scaler=scaler))

    def is_applied(self, workload: Workload) -> bool:
        return is_cast(workload.model)

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        with uncast(workload.model):  # weights that are in bf16 stay so
            yield

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        return [msgspec.structs.replace(levers, precision=p) for p in step.precisions for levers in wanted]

    def rungs(self) -> Mapping[str, Rung]:
        return {"precision": _advised}


def _advised(step: Setting, levers: Levers) -> tuple[Levers, str]:
    chosen = precisions(step.device)[-1]
    return msgspec.structs.replace(levers, precision=chosen), chosen


def autocast(precision: str, device: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the forward pass runs."""
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def modules_within(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose FQN matches a pattern, and those inside them.

    Raises:
        WorkloadError: A pattern matches none.
    """
    named = dict(model.named_modules())
    outermost: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise WorkloadError(
                f"Workload.fp32_modules has {pattern!r}, and no module of Workload.model matches it: its modules are"
                f" {', '.join(list(named)[1:6])} and so on"
            )
        outermost |= set(matching)
    return {fqn: module for fqn, module in named.items() if not outermost.isdisjoint(enclosing(fqn))}


@contextlib.contextmanager
def kept_in_fp32(model: nn.Module, patterns: Sequence[str], device: str) -> Iterator[None]:
    """Have modules compute in fp32 though autocast is on around them, until the context is left."""
    with contextlib.ExitStack() as stack:
        for module in modules_within(model, patterns).values():
            stack.enter_context(casting(module, torch.float32, device=device))
        yield


@contextlib.contextmanager
def casting(
    module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None = None, device: str | None = None
) -> Iterator[None]:
    """Cast what a module is given, and what it returns, until the context is left.

    Args:
        module: Its `forward` is wrapped on the instance.
        inputs: What floating-point arguments become: bf16 of fp32 ones, fp32 of narrower ones.
        outputs: What floating-point outputs become, alike; None leaves them.
        device: Where autocast is off meanwhile; None leaves it.
    """
    before = module.__dict__.get("forward")
    if isinstance(before, Casting):
        raise PlanError(
            f"{type(module).__name__} computes in another dtype already: call close() on the earlier step first"
        )
    module.forward = Casting(module, before, inputs, outputs, device)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextlib.contextmanager
def uncast(model: nn.Module) -> Iterator[None]:
    """Take the casts off a model's modules, until the context is left."""
    casts = [(m, m.__dict__["forward"]) for m in model.modules() if isinstance(m.__dict__.get("forward"), Casting)]
    for module, cast_forward in casts:
        del module.forward
        if cast_forward.forward is not None:
            module.forward = cast_forward.forward
    try:
        yield
    finally:
        for module, cast_forward in casts:
            module.forward = cast_forward


def is_cast(model: nn.Module) -> bool:
    """Tell whether modules compute in another dtype at present."""
    return any(isinstance(module.__dict__.get("forward"), Casting) for module in model.modules())


class Casting:
    """A module's `forward` with casts around it. Copies with the module (`copy.deepcopy`), bound to the copy."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any] | None,
        inputs: torch.dtype,
        outputs: torch.dtype | None,
        device: str | None,
    ) -> None:
        self.module, self.forward = module, forward
        self.inputs, self.outputs, self.device = inputs, outputs, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        forward = self.forward or functools.partial(type(self.module).forward, self.module)
        off = torch.autocast(self.device, enabled=False) if self.device else contextlib.nullcontext()
        with off:
            args, kwargs = cast((args, kwargs), self.inputs)
            out = forward(*args, **kwargs)
        return out if self.outputs is None else cast(out, self.outputs)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors in fp32, or with those that are fp32 in a narrower dtype."""
    narrow = dtype is not torch.float32

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dtype is torch.float32 if narrow else tensor.is_floating_point() and tensor.itemsize < 4
        return tensor.to(dtype) if fits else tensor

    return mapped(value, torch.Tensor, changed)


class Bf16Weights:
    """Bf16 weights of a step; `masters` has, for a parameter of the model, the one that the optimizer updates.

    Attributes:
        update: Updates the weights from the gradients.
    """

    def __init__(self, masters: Swaps, update: Callable[[], None]) -> None:
        self.masters = masters
        self.update = update


@contextlib.contextmanager
def bf16_weights(workload: Workload, *, accumulates: bool) -> Iterator[Bf16Weights]:
    """Put a model's weights in bf16 until the context is left.

    Left in fp32 are the modules that `Workload.fp32_modules` names, normalisations that keep running statistics, and
    all buffers. Every module that has parameters casts its inputs to their dtype; the model returns fp32.

    Args:
        workload: Its `bf16_updates` says how weights are updated.
        accumulates: Whether gradients of several microbatches are added up, which is done in fp32.
    """
    model, optimizer = workload.model, workload.optimizer
    kept = _kept(model, set(map(id, modules_within(model, workload.fp32_modules).values())))
    with contextlib.ExitStack() as stack:
        _cast_calls(model, kept, stack)
        halves = {p: _half(p) for m in model.modules() if id(m) not in kept for p in _own(m)}
        if workload.bf16_updates == "master-weights":
            found = _with_masters(model, optimizer, halves, stack)
        else:
            found = _without_masters(model, optimizer, halves, accumulates, stack)
        del halves
        yield found


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dtype in (_WIDE, _HALF)]


def _kept(model: nn.Module, named: set[int]) -> set[int]:
    """Return the modules whose parameters stay as they are: those named, normalisations, and what shares with them."""
    kept = named | {id(m) for m in model.modules() if isinstance(m, NormBase)}
    while True:
        shared = {id(p) for m in model.modules() if id(m) in kept for p in _own(m)}
        more = {id(m) for m in model.modules() if id(m) not in kept and any(id(p) in shared for p in _own(m))}
        if not more:
            return kept
        kept |= more


def _cast_calls(model: nn.Module, kept: set[int], stack: contextlib.ExitStack) -> None:
    for module in model.modules():
        wide = id(module) in kept
        if wide and isinstance(module, NormBase):
            continue  # it takes bf16 as it is
        if module is model:
            stack.enter_context(casting(module, _WIDE if wide else _HALF, _WIDE))
        elif _own(module) or wide:
            stack.enter_context(casting(module, _WIDE if wide else _HALF, _HALF if wide else None))


def _half(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in bf16; one that is bf16 as it is."""
    if parameter.dtype is _HALF:
        return parameter
    half = nn.Parameter(parameter.detach().to(_HALF), requires_grad=parameter.requires_grad)
    half.memfit_dtype = parameter.dtype  # type: ignore[attr-defined]
    return half


def _wide(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in fp32, a new one."""
    return nn.Parameter(parameter.detach().to(_WIDE), requires_grad=parameter.requires_grad)


def _swap_in_model(model: nn.Module, swaps: Swaps) -> None:
    for module in model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None and parameter in swaps:
                setattr(module, name, swaps[parameter])


def _swap_in_optimizer(optimizer: torch.optim.Optimizer, swaps: Swaps) -> None:
    for group in optimizer.param_groups:
        group["params"] = [swaps.get(p, p) for p in group["params"]]
    for old, new in swaps.items():
        if old is not new and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


# Master weights


def _with_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, halves: Swaps, stack: contextlib.ExitStack
) -> Bf16Weights:
    masters = {half: _wide(p) if p is half else p for p, half in halves.items()}
    widened = {half: master for half, master in masters.items() if half in halves}
    back = {half: p for p, half in halves.items()}
    _swap_in_model(model, halves)
    stack.callback(_swap_in_model, model, back)
    _swap_in_optimizer(optimizer, widened)
    stack.callback(_swap_in_optimizer, optimizer, {master: half for half, master in widened.items()})
    for half, master in masters.items():
        if half.requires_grad:
            stack.callback(half.register_post_accumulate_grad_hook(_giving_gradient_to(master)).remove)
    stack.callback(model.register_state_dict_post_hook(_showing(masters)).remove)
    stack.callback(model.register_load_state_dict_pre_hook(_loading(masters)).remove)
    trained = [(half, master) for half, master in masters.items() if half.requires_grad]

    def update() -> None:
        optimizer.step()
        with torch.no_grad():
            foreach_copy_([half for half, _ in trained], [master for _, master in trained])

    return Bf16Weights(masters, update)


def _giving_gradient_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a gradient to a master weight, in fp32, and adds up those of microbatches there."""

    def hook(half: torch.Tensor) -> None:
        gradient, half.grad = half.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(_WIDE)
        else:
            master.grad.add_(gradient)

    return hook


def _showing(masters: Swaps) -> Callable[..., None]:
    """Return a hook that puts the master weights in a state dict, in place of the rounded ones."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in masters:
                state[prefix + name] = masters[parameter].detach()

    return hook


def _loading(masters: Swaps) -> Callable[..., None]:
    """Return a hook that loads the master weights of a state dict; the rounded ones are loaded from it after."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter in masters and prefix + name in state:
                    masters[parameter].copy_(state[prefix + name])

    return hook


# Stochastic rounding


def _without_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, halves: Swaps, accumulates: bool, stack: contextlib.ExitStack
) -> Bf16Weights:
    _swap_in_model(model, halves)
    _swap_in_optimizer(optimizer, halves)
    converted = [half for p, half in halves.items() if p is not half]
    stack.callback(_widen_again, model, optimizer, converted)
    for half in halves.values():
        if accumulates and half.requires_grad:
            stack.callback(setattr, half, "grad_dtype", half.grad_dtype)
            half.grad_dtype = _WIDE
    ours = set(halves.values())

    def update() -> None:
        for each in getattr(optimizer, "optimizers", [optimizer]):
            _update_one_by_one(each, ours)

    return Bf16Weights({}, update)


def _widen_again(model: nn.Module, optimizer: torch.optim.Optimizer, halves: list[nn.Parameter]) -> None:
    swaps = {half: _wide(half) for half in halves}
    _swap_in_model(model, swaps)
    _swap_in_optimizer(optimizer, swaps)


def _update_one_by_one(optimizer: torch.optim.Optimizer, halves: set[nn.Parameter]) -> None:
    """Have an optimizer update one parameter at a time, widened meanwhile; what it counts by group it counts once."""
    for group in optimizer.param_groups:
        before = dict(group)
        for parameter in before["params"]:
            if parameter.grad is not None:
                group.clear()
                group.update(before)
                _update_one(optimizer, group, parameter, parameter in halves)


def _update_one(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, is_half: bool
) -> None:
    master = _wide(parameter) if is_half else parameter
    if is_half:
        assert parameter.grad is not None
        master.grad, parameter.grad = parameter.grad.to(_WIDE), None
        if parameter in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(parameter)
    try:
        with restricted(optimizer, group, [master]):
            optimizer.step()
        if is_half:
            with torch.no_grad():
                parameter.copy_(stochastically_rounded(master.detach()))
    finally:
        if is_half and master in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(master)


def stochastically_rounded(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values in bf16, each rounded up or down at random so that the mean is right.

    A random number of 16 bits is added to the 16 bits that are cut off; they carry with the right probability.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).to(_HALF)
