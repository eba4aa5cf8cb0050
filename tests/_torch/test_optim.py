"""What memfit relies on of how schedulers watch optimizers; warnings are errors in the tests."""

from __future__ import annotations

import warnings

import pytest
import torch

from memfit._torch.optim import count_step, mark_as_stepped


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
