"""Precision as a lever: contexts around the step and its forward pass, and modules that compute in another dtype.

`bf16-mixed` and `16-mixed` are autocast around the forward pass, `tf32` is a setting of float32 products around the
whole step, and `bf16-true` is weights in bf16 (`memfit.levers.precision`). Modules that are to stay in fp32 have
their `forward` wrapped on the instance, within what checkpointing puts around it, so that a recomputation goes the
same way.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.errors import PlanError, WorkloadError
from memfit.hardware import float32_precision
from memfit.ir import Precision, enclosing
from memfit.recomputation import mapped

_AUTOCAST: dict[Precision, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def autocast(precision: Precision, device: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the forward pass runs."""
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def tf32() -> contextlib.AbstractContextManager[None]:
    """Let float32 products run as TF32 where there are units for it, until the context is left."""
    return float32_precision("high")


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
