"""Base classes of PyTorch's layers, the private state of modules, and hooks and step counts of optimizers."""

import operator
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

from memfit._torch.dispatch import replaced_here

BatchNormBase = batchnorm._BatchNorm
DropoutBase = dropout._DropoutNd
InstanceNormBase = instancenorm._InstanceNorm
NormBase = batchnorm._NormBase

Hooks = MutableMapping[int, Callable[..., Any]]
"""Hooks by the numbers of their handles, which hold the mapping."""

Apply = Callable[..., nn.Module]
"""A method that applies a function to the tensors of a module, and of its children if asked, and returns the module."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
"""A module's own mappings by name, without its children's; not copies."""

forward_hooks: Callable[[nn.Module], Hooks] = operator.attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[nn.Module], Hooks] = operator.attrgetter("_forward_pre_hooks")
all_forward_hooks: Callable[[nn.Module], tuple[MutableMapping[int, Any], ...]] = operator.attrgetter(
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""A module's forward hooks, and the notes about some of them by the same numbers."""
backward_hooks: Callable[[nn.Module], tuple[Hooks, Hooks]] = operator.attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
"""A module's hooks of its backward pass."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = operator.attrgetter("_compiled_call_impl")
"""The function that a module's call runs after `Module.compile`; None without it."""


def hooks_of_all_modules() -> list[Callable[..., Any]]:
    """Return the hooks that run with the forward and backward passes of all modules."""
    named = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return [hook for name in named for hook in getattr(_module, f"_global_{name}").values()]


def set_forward_hooks(module: nn.Module, hooks: Any, pre_hooks: Any) -> None:
    """Replace the mappings of a module's forward hooks and forward pre-hooks."""
    module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks


def apply_as_its_class(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to the tensors of a module and its children, by its class's own `_apply`."""
    module._apply(fn)


def converted_by(replacement: Callable[[Apply], Apply]) -> AbstractContextManager[None]:
    """Replace the method by which all modules convert tensors (`Module.to`, `.half`), until the context is left."""
    return replaced_here(nn.Module, "_apply", replacement(nn.Module._apply))


class _TellingCall:
    """A module's call, which tells where it ends by an exception. A deep copy of the module has a copy bound to it."""

    def __init__(self, module: nn.Module, begun: Callable[[], Callable[[], None]]) -> None:
        self.module, self.begun = module, begun

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TellingCall":
        return _TellingCall(memo.get(id(self.module), self.module), self.begun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        undo = self.begun()
        try:
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        except BaseException:
            undo()
            raise


@contextmanager
def undone_by_exceptions(model: nn.Module, begun: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Have the calls of a model's modules undo what their hooks noted, where they end by an exception of any kind.

    Hooks alone can't: those that are "always called" are not after a `BaseException`, such as the end of a
    recomputation, or KeyboardInterrupt. Calls that `Module.compile` compiled are left as they are.

    Args:
        begun: A function that each call runs before its hooks; it returns the one that undoes what they note.
    """
    modules = list(model.modules())
    for module in modules:
        module.__dict__["_call_impl"] = _TellingCall(module, begun)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("_call_impl", None)


@contextmanager
def untold_calls(model: nn.Module) -> Iterator[None]:
    """Take `undone_by_exceptions` off a model's modules, until the context is left: a compiler would look into it."""
    calls = [(module, module.__dict__.pop("_call_impl")) for module in model.modules() if _tells(module)]
    try:
        yield
    finally:
        for module, call in calls:
            module.__dict__["_call_impl"] = call


def _tells(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("_call_impl"), _TellingCall)


def hooks_of_all() -> tuple[Hooks, Hooks]:
    """Return the hooks that run before and after the steps of all optimizers."""
    return _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after an optimizer's steps, and a step that it has for itself.

    A scheduler's count of steps is none.
    """
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    step: Any = vars(optimizer).get("step")
    counts = step is None or hasattr(step, "_wrapped_by_lr_sched")
    return [*(hook for hooks in (*hooks_of_all(), *own) for hook in hooks.values()), *([] if counts else [step])]


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as one that has taken a step."""
    marked: Any = optimizer
    marked._opt_called = True


def count_step(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Add a step to a scheduler's count, so that it does not check for its optimizer's first one."""
    scheduler._step_count += 1
