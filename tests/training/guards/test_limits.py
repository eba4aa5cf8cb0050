"""A limit counts what the allocator reports, to the byte, and fails before it is exceeded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import measure_peak_bytes
from memfit.errors import MemoryLimitError, UsageError
from memfit.hardware import allocated
from memfit.ir import Plan
from memfit.training import AcceleratorLimit, CpuLimit
from memfit.training.guards.limits import has_room
from tests.models import BUILDERS, LARGE

CPU = torch.device("cpu")


def plan_of(workload: memfit.Workload) -> Plan:
    return memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1)


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.ci), "convnet", "recurrent"])
def test_what_it_counts_is_what_is_predicted_and_what_the_allocator_reports(name: str) -> None:
    workload = BUILDERS[name](**LARGE[name])
    plan = plan_of(workload)
    with memfit.apply(plan, workload, limit_bytes=2**40) as step:
        step(workload.batch)
        for _ in range(2):
            step(workload.batch)
            assert isinstance(step.limit, CpuLimit)
            assert step.limit.peak_bytes == plan.predicted.peak_bytes
        step.change(limit=None)
        assert measure_peak_bytes(step, workload.batch) == pytest.approx(plan.predicted.peak_bytes, abs=64)


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_a_byte_below_the_peak_it_fails_and_at_the_peak_it_does_not(name: str) -> None:
    workload = BUILDERS[name](**LARGE[name])
    plan = plan_of(workload)
    with memfit.apply(plan, workload, limit_bytes=plan.predicted.peak_bytes) as step:
        for _ in range(3):
            step(workload.batch)
    weights = [p.clone() for p in workload.model.parameters()]
    with memfit.apply(plan, workload, limit_bytes=plan.predicted.peak_bytes - 1) as step:
        with pytest.raises(MemoryLimitError, match=r"are allocated \(parameters .*activations") as caught:
            step(workload.batch)
    error = caught.value
    assert error.held_bytes <= error.limit_bytes < error.held_bytes + error.requested_bytes
    assert sum(error.by_category.values()) == error.held_bytes and error.where.startswith("aten.")
    assert error.by_category["parameters"] == sum(p.nbytes for p in workload.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, workload.model.parameters(), strict=True))


def test_nothing_beyond_the_limit_is_ever_allocated() -> None:
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    plan = plan_of(workload)
    with memfit.apply(plan, workload) as step:
        step(workload.batch)
        resident = sum(t.nbytes for t in workload.model.parameters()) * 3 + sum(
            t.nbytes for t in workload.batch.values()
        )
    for share in (0.9, 0.6, 0.4):
        limit_bytes = int(share * plan.predicted.peak_bytes)
        with memfit.apply(plan, workload, limit_bytes=limit_bytes) as step, allocated() as meter:
            with pytest.raises(MemoryLimitError):
                step(workload.batch)
        assert 0.5 * (limit_bytes - resident) < meter.peak_bytes <= limit_bytes - resident + 1024


def test_under_a_limit_a_run_recovers_with_a_plan_that_fits_it() -> None:
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    plan = memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=3)
    leanest = min(plan.frontier, key=lambda c: c.peak_bytes)
    with memfit.apply(plan, workload, recover=True, limit_bytes=leanest.peak_bytes + 64) as step:
        step(workload.batch)
        result = step(workload.batch)
    assert result.predicted_peak_bytes == leanest.peak_bytes


def test_in_the_optimizer_room_is_what_the_limit_leaves() -> None:
    model = nn.Linear(8, 8)
    limit = CpuLimit(1000, lambda batch: {"parameters": model.parameters()})
    assert has_room(10**12, CPU)
    with limit(None):
        held = limit.held_bytes
        assert held == 72 * 4 and has_room(1000 - held, CPU) and not has_room(1001 - held, CPU)
        kept = torch.empty(100, dtype=torch.uint8)
        with pytest.raises(MemoryLimitError):
            torch.empty(1000 - held - 99, dtype=torch.uint8)
        torch.empty(1000 - held - 100, dtype=torch.uint8)
        assert limit.held_bytes == held + 100
        view = kept[:50]
        assert limit.held_bytes == held + 100
        del kept, view
        assert limit.held_bytes == held
    assert CpuLimit.active is None


def test_batches_that_are_kept_count_while_their_step_runs() -> None:
    limit = CpuLimit(10**6, lambda batch: {"inputs": [batch]})
    kept = [torch.zeros(1000) for _ in range(5)]
    for batch in [*kept, kept[0]]:
        with limit(batch):
            assert limit.held_bytes == 4000
            batch.sum()
    assert limit.held_bytes == 0


def test_what_depends_on_values_is_counted_afterwards() -> None:
    limit = CpuLimit(10**6, lambda batch: {})
    with limit(None):
        found = torch.nonzero(torch.ones(1000))
        assert limit.held_bytes == found.nbytes == 8000


def test_a_limit_is_a_number_of_bytes() -> None:
    workload = BUILDERS["twice"]()
    with pytest.raises(UsageError, match="limit_bytes=0"):
        memfit.apply(plan_of(workload), workload, limit_bytes=0)


def test_on_a_gpu_the_allocator_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls, with a stand-in for the GPU: that the allocator obeys was not seen here."""
    fractions: list[float] = []
    cuda = SimpleNamespace(
        mem_get_info=lambda device: (0, 1000),
        get_per_process_memory_fraction=lambda device: 0.9,
        set_per_process_memory_fraction=lambda fraction, device: fractions.append(fraction),
        memory_allocated=lambda device: 300,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    weight = torch.empty(50)
    limit = AcceleratorLimit(400, lambda batch: {"parameters": [weight], "inputs": [batch]}, torch.device("cuda", 0))

    @contextlib.contextmanager
    def failing(error: Exception) -> Iterator[None]:
        with pytest.raises(type(error) if isinstance(error, ValueError) else MemoryLimitError):
            with limit(torch.empty(5)):
                raise error
        yield

    with limit(torch.empty(5)):
        pass
    assert fractions == [0.4, 0.9]
    with failing(ValueError("another")):
        assert fractions[-1] == 0.9
    out: Any = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 150 bytes.")
    with pytest.raises(MemoryLimitError) as caught, limit(torch.empty(5)):
        raise out
    assert (caught.value.held_bytes, caught.value.requested_bytes) == (300, 150)
    assert caught.value.by_category == {"parameters": 200, "inputs": 20, "activations and temporaries": 80}
