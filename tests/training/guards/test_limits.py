"""A limit counts what the allocator reports, and fails before it is exceeded; a ledger tells it by category."""

from __future__ import annotations

import dataclasses
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
from memfit.training import AcceleratorLimit, CpuLimit, Rollback, Step
from memfit.workload import tensors_of
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
    assert Rollback.has_room(10**12, CPU)
    with limit(None):
        held = limit.held_bytes
        assert held == 72 * 4 and Rollback.has_room(1000 - held, CPU) and not Rollback.has_room(1001 - held, CPU)
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

    with limit(torch.empty(5)):
        pass
    assert fractions == [0.4, 0.9]
    with pytest.raises(ValueError), limit(torch.empty(5)):
        raise ValueError("another")
    assert fractions[-1] == 0.9
    out: Any = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 150 bytes.")
    with pytest.raises(MemoryLimitError) as caught, limit(torch.empty(5)):
        raise out
    assert (caught.value.held_bytes, caught.value.requested_bytes) == (300, 150)
    assert caught.value.by_category == {"parameters": 200, "inputs": 20, "activations and temporaries": 80}


# The ledger


def test_under_a_limit_predicted_and_measured_agree_by_category() -> None:
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    plan = plan_of(workload)
    with memfit.apply(plan, workload, limit_bytes=2**30) as step:
        for _ in range(2):
            step(workload.batch)
        found = step.memory_summary()
    parameters = sum(p.nbytes for p in workload.model.parameters())
    assert found.measured_bytes["parameters"] == parameters
    assert found.measured_bytes["inputs"] == sum(t.nbytes for t in tensors_of(workload.batch))
    state = sum(t.nbytes for values in workload.optimizer.state.values() for t in tensors_of(values))
    assert found.measured_bytes["optimizer state"] == state
    assert found.measured_bytes == found.predicted_bytes
    assert found.peak_bytes == found.predicted_peak_bytes == sum(found.measured_bytes.values())
    assert found.limit_bytes == 2**30 and found.allocation_retries is None and found.pinned_bytes is None
    assert found.host_bytes > found.peak_bytes and found.host_free_bytes > 0
    lines = str(found).splitlines()
    assert lines[0] == "Memory after step 2"
    assert lines[2].split() == ["parameters", *2 * [f"{parameters / 2**10:.1f}", "KiB"]]


def test_without_a_plan_or_a_limit_it_says_what_is_known() -> None:
    workload = BUILDERS["convnet"]()
    step = Step(workload)
    step(workload.batch)
    found = step.memory_summary()
    assert found.predicted_bytes == {} and found.peak_bytes is None and "in the step" not in found.measured_bytes
    assert found.measured_bytes["buffers"] == sum(b.nbytes for b in workload.model.buffers())


def test_warnings() -> None:
    workload = BUILDERS["twice"]()
    found = Step(workload).memory_summary()
    quiet = dataclasses.replace(found, host_bytes=100, host_free_bytes=100)
    assert quiet.warnings == []
    for changes, word in (
        ({"allocation_retries": 3}, "3 times"),
        ({"limit_bytes": 100, "peak_bytes": 99}, "limit_bytes=100"),
        ({"host_free_bytes": 1}, "host"),
    ):
        loud = dataclasses.replace(quiet, **changes)  # type: ignore[arg-type]
        assert len(loud.warnings) == 1 and word in loud.warnings[0] and f"Warning: {loud.warnings[0]}" in str(loud)
