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
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from memfit._torch import NormBase, foreach_copy_, own_parameters
from memfit.errors import PlanError, WorkloadError
from memfit.hardware import float32_precision, precisions, supports
from memfit.ir import Device, Levers, enclosing
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, Running, Setting
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
    rungs = ("precision",)
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
            Circumstance.ADAPTING,
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
        return no_updates | ({NO_TF32} if device is not None and not supports(device, "tf32") else set())

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
            with bf16_weights(workload, accumulates=levers.microbatch_size < samples_of(workload)) as (masters, update):
                yield replace(running, options=replace(options, update=update, masters=masters))
        elif levers.precision == "tf32":
            yield replace(running, options=replace(options, around=functools.partial(float32_precision, "high")))
        else:
            device = next((p.device.type for p in workload.model.parameters()), "cpu")
            scaler = LossScaler(workload.loss_scaling) if levers.precision == "16-mixed" else None
            casts = functools.partial(autocast, levers.precision, device)
            with contextlib.ExitStack() as stack:
                for module in modules_within(workload.model, workload.fp32_modules).values():
                    stack.enter_context(_casting(module, _WIDE, device=device))
                yield replace(running, options=replace(options, autocast=casts, scaler=scaler))

    def is_applied(self, workload: Workload) -> bool:
        return bool(casts_of(workload.model))

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        casts = casts_of(workload.model)  # weights that are in bf16 stay so
        for cast_forward in casts:
            _set_forward(cast_forward.module, cast_forward.forward)
        try:
            yield
        finally:
            for cast_forward in casts:
                cast_forward.module.forward = cast_forward

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        return [msgspec.structs.replace(levers, precision=p) for p in step.precisions for levers in wanted]

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
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
def _casting(
    module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None = None, device: str | None = None
) -> Iterator[None]:
    """Cast what a module is given, and what it returns, until the context is left.

    Floating-point arguments become `inputs`: bf16 of fp32 ones, fp32 of narrower ones; and so do outputs `outputs`.
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
        _set_forward(module, before)


def casts_of(model: nn.Module) -> list[Casting]:
    """Return the casts that are around a model's modules at present."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, Casting)]


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward


@dataclass(eq=False)
class Casting:
    """A module's `forward` with casts around it. Copies with the module (`copy.deepcopy`), bound to the copy."""

    module: nn.Module
    forward: Callable[..., Any] | None
    inputs: torch.dtype
    outputs: torch.dtype | None
    device: str | None  # where autocast is off meanwhile

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


@contextlib.contextmanager
def bf16_weights(workload: Workload, *, accumulates: bool) -> Iterator[tuple[Swaps, Callable[[], None]]]:
    """Put a model's weights in bf16 until the context is left.

    Left in fp32 are the modules that `Workload.fp32_modules` names, normalisations that keep running statistics, and
    all buffers. Every module that has parameters casts its inputs to their dtype; the model returns fp32.

    Args:
        workload: Its `bf16_updates` says how weights are updated.
        accumulates: Whether gradients of several microbatches are added up, which is done in fp32.

    Returns:
        For a parameter of the model, the one that the optimizer updates, where it is another one; and what updates the
        weights from the gradients.
    """
    model, optimizer = workload.model, workload.optimizer
    kept = set(map(id, modules_within(model, workload.fp32_modules).values()))
    kept |= {id(m) for m in model.modules() if isinstance(m, NormBase)}
    shared = set[int]()
    while more := {id(p) for m in model.modules() if id(m) in kept for p in _own(m)} - shared:
        shared |= more
        kept |= {id(m) for m in model.modules() if any(id(p) in shared for p in _own(m))}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            wide = id(module) in kept
            if wide and isinstance(module, NormBase):
                continue  # it takes bf16 as it is
            if module is model:
                stack.enter_context(_casting(module, _WIDE if wide else _HALF, _WIDE))
            elif _own(module) or wide:
                stack.enter_context(_casting(module, _WIDE if wide else _HALF, _HALF if wide else None))
        halves = {p: _half(p) for m in model.modules() if id(m) not in kept for p in _own(m)}
        if workload.bf16_updates == "master-weights":
            found = _with_masters(model, optimizer, halves, stack)
        else:
            found = {}, _without_masters(model, optimizer, halves, accumulates, stack)
        del halves
        yield found


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dtype in (_WIDE, _HALF)]


def _half(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in bf16; one that is bf16 as it is."""
    if parameter.dtype is _HALF:
        return parameter
    half = nn.Parameter(parameter.detach().to(_HALF), requires_grad=parameter.requires_grad)
    half.memfit_dtype = parameter.dtype  # type: ignore[attr-defined]
    return half


def _wide(parameter: nn.Parameter) -> nn.Parameter:
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


def _with_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, halves: Swaps, stack: contextlib.ExitStack
) -> tuple[Swaps, Callable[[], None]]:
    masters = {half: _wide(p) if p is half else p for p, half in halves.items()}
    widened = {half: master for half, master in masters.items() if half in halves}
    back = {half: p for p, half in halves.items()}

    def moving_gradient_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def move(half: torch.Tensor) -> None:
            """Move a gradient to a master weight, in fp32, and add up those of microbatches there."""
            gradient, half.grad = half.grad, None
            if gradient is not None and master.grad is not None:
                master.grad.add_(gradient)
            elif gradient is not None:
                master.grad = gradient.to(_WIDE)

        return move

    def show(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put the master weights in a state dict, in place of the rounded ones."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in masters:
                state[prefix + name] = masters[parameter].detach()

    @torch.no_grad()
    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load the master weights of a state dict; the rounded ones are loaded from it after."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in masters and prefix + name in state:
                masters[parameter].copy_(state[prefix + name])

    _swap_in_model(model, halves)
    stack.callback(_swap_in_model, model, back)
    _swap_in_optimizer(optimizer, widened)
    stack.callback(_swap_in_optimizer, optimizer, {master: half for half, master in widened.items()})
    trained = [(half, master) for half, master in masters.items() if half.requires_grad]
    for half, master in trained:
        stack.callback(half.register_post_accumulate_grad_hook(moving_gradient_to(master)).remove)
    stack.callback(model.register_state_dict_post_hook(show).remove)
    stack.callback(model.register_load_state_dict_pre_hook(load).remove)

    def update() -> None:
        optimizer.step()
        with torch.no_grad():
            foreach_copy_([half for half, _ in trained], [master for _, master in trained])

    return masters, update


def _without_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, halves: Swaps, accumulates: bool, stack: contextlib.ExitStack
) -> Callable[[], None]:
    def widen_again(halves: list[nn.Parameter]) -> None:
        swaps = {half: _wide(half) for half in halves}
        _swap_in_model(model, swaps)
        _swap_in_optimizer(optimizer, swaps)

    _swap_in_model(model, halves)
    _swap_in_optimizer(optimizer, halves)
    stack.callback(widen_again, [half for p, half in halves.items() if p is not half])
    for half in halves.values():
        if accumulates and half.requires_grad:
            stack.callback(setattr, half, "grad_dtype", half.grad_dtype)
            half.grad_dtype = _WIDE
    ours = set(halves.values())

    def update_one(each: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if parameter not in ours:
            with restricted(each, group, [parameter]):
                each.step()
            return
        assert parameter.grad is not None
        master = _wide(parameter)
        master.grad, parameter.grad = parameter.grad.to(_WIDE), None
        if parameter in each.state:
            each.state[master] = each.state.pop(parameter)
        try:
            with restricted(each, group, [master]):
                each.step()
            with torch.no_grad():
                parameter.copy_(stochastically_rounded(master.detach()))
        finally:
            if master in each.state:
                each.state[parameter] = each.state.pop(master)

    def update() -> None:
        """Have each optimizer update one parameter at a time, widened meanwhile; what it counts by group, once."""
        for each in getattr(optimizer, "optimizers", [optimizer]):
            for group in each.param_groups:
                before = dict(group)
                for parameter in before["params"]:
                    if parameter.grad is not None:
                        group.clear()
                        group.update(before)
                        update_one(each, group, parameter)

    return update


def stochastically_rounded(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values in bf16, each rounded up or down at random so that the mean is right.

    A random number of 16 bits is added to the 16 bits that are cut off; they carry with the right probability.
    """
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).to(_HALF)
