from __future__ import annotations

import pytest
import torch

from benchmarks.exactness import compared, trained
from benchmarks.frontier.models import QUICK


@pytest.mark.ci
def test_exact_steps_are_counted() -> None:
    case = compared("lstm", QUICK["lstm"], steps=3)
    assert case["equal_steps"] == 3 and case["regions"] and case["last_loss"] != case["first_loss"]


def test_another_gradient_is_seen() -> None:
    """A weight off by one rounding step changes the digests, if not the loss."""
    first, second = QUICK["lstm"].make(), QUICK["lstm"].make()
    weight = next(second.model.parameters())
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    plain, other = trained(first, 1), trained(second, 1)
    assert plain[0][1] != other[0][1]
