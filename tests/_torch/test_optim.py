"""What memfit relies on of how schedulers watch optimizers; warnings are errors in the tests."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit._torch.optim import count_step, hooks_of_all, mark_as_stepped, step_hooks


def made() -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("told", [mark_as_stepped, count_step, None])
def test_a_scheduler_warns_of_a_step_before_its_optimizers_unless_it_was_told(told: object) -> None:
    """By `mark_as_stepped` or `count_step`."""
    optimizer, scheduler = made()
    if told is mark_as_stepped:
        mark_as_stepped(optimizer)
    elif told is count_step:
        count_step(scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert bool(caught) is (told is None)


def test_hooks_of_steps_are_found() -> None:
    optimizer, _ = made()  # whose scheduler counts its steps
    pre, post = hooks_of_all()
    assert not step_hooks(optimizer) and not pre and not post

    def hook(*_: object) -> None:
        """Do nothing."""

    handles = [
        optimizer.register_step_pre_hook(hook),
        optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ]
    assert step_hooks(optimizer) == [hook] * 4 and [*pre.values(), *post.values()] == [hook] * 2
    for handle in handles:
        handle.remove()
    optimizer.step = hook  # type: ignore[method-assign, assignment]
    assert step_hooks(optimizer) == [hook]
