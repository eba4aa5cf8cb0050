"""Plans for several ranks are compared with data parallelism, on the same ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

import memfit
from memfit.errors import UsageError
from memfit.hardware.host import find_device
from memfit.pipeline import _verify
from tests.processes import on_ranks
from tests.ranks.trainings import ZERO3, plan_for, workload

GIB = 2**30


def comparing(rank: int) -> Iterator[Any]:
    given = workload()
    given.model.eval()  # without dropout, of which the two steps draw different masks
    plan = plan_for(given, ZERO3)
    yield memfit.verify(plan, given, steps=3).comparison
    cpu = find_device("cpu")
    seen = replace(cpu, usable_bytes=2 * GIB if rank else cpu.usable_bytes)  # the ranks see different amounts
    some = replace(plan, plain=replace(plan.plain, peak_bytes=3 * GIB, peak_reserved_bytes=None))
    with mock.patch.object(_verify, "find_device", return_value=seen), pytest.raises(UsageError) as e:
        _verify.compare(some, given, steps=2)
    yield str(e.value)


def test_ranks_compare_with_data_parallelism_and_agree() -> None:
    (first, text), (second, other) = on_ranks(2, comparing)
    assert text == other and "cpu has 2.0 GiB: memfit can't run it to compare the plan with it" in text
    assert first == second
    assert len(first.plain_losses) == len(first.planned_losses) == 3
    assert first.planned_losses == pytest.approx(first.plain_losses, rel=1e-4)
    assert 0 < first.planned_peak_bytes != first.plain_peak_bytes > 0
    assert first.plain_step_seconds > 0 and first.planned_step_seconds > 0
