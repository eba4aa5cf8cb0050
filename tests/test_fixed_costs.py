"""Costs that no clock tells are the same each time, and grow with the work."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from memfit.cost import cache_path, costs_from, measure
from memfit.workload import signature
from tests.fixed_costs import CALL_SECONDS, SOURCE, VIEW_SECONDS, seconds_of

aten = torch.ops.aten


def product(width: int) -> str:
    return signature(aten.mm.default, (torch.zeros(width, width), torch.zeros(width, width)), {})


def test_every_test_has_them() -> None:
    text = product(64)
    first, second = (measure([text])[text] for _ in range(2))
    assert first == second and first.measured and first.seconds == seconds_of(text)


def test_costs_of_another_source_are_kept_apart() -> None:
    text, before = product(64), cache_path()
    with costs_from(replace(SOURCE, name="other", seconds=lambda text: 7.0)):
        assert measure([text])[text].seconds == 7.0 and cache_path() != before
    assert measure([text])[text].seconds == seconds_of(text) and cache_path() == before


def test_more_work_takes_longer_and_a_view_no_time_to_speak_of() -> None:
    small, large = seconds_of(product(256)), seconds_of(product(512))
    assert 6 < (large - CALL_SECONDS) / (small - CALL_SECONDS) < 9  # eight times the arithmetic
    assert seconds_of(signature(aten.t.default, (torch.zeros(64, 64),), {})) == VIEW_SECONDS
    one, other = (signature(aten.add.Tensor, (torch.zeros(n), torch.zeros(n)), {}) for n in (2**16, 2**18))
    assert seconds_of(one) < seconds_of(other)
