"""Marks by which learning-rate schedulers notice steps in the wrong order, and hooks of all optimizers."""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.optim import optimizer as _optimizer

Hooks = MutableMapping[int, Callable[..., Any]]


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
