"""Marks by which learning-rate schedulers notice steps in the wrong order."""

from typing import Any

import torch


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as one that has taken a step."""
    marked: Any = optimizer
    marked._opt_called = True


def count_step(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Add a step to a scheduler's count, so that it does not check for its optimizer's first one."""
    scheduler._step_count += 1
