"""The ledger's bytes are those of the tensors, and its predictions those of the plan."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import memfit
from memfit.training.guards import limits
from memfit.training.guards.limits import IN_THE_STEP, allocation_retries
from memfit.training.step import Step
from memfit.workload import tensors_of
from tests.models import BUILDERS, LARGE


def test_under_a_limit_predicted_and_measured_agree_by_category() -> None:
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    plan = memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1)
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
    assert found.predicted_bytes == {} and found.peak_bytes is None and IN_THE_STEP not in found.measured_bytes
    assert found.measured_bytes["buffers"] == sum(b.nbytes for b in workload.model.buffers())


def test_allocation_retries_are_those_of_the_step_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(BUILDERS["twice"]())
    assert allocation_retries(step) is None
    asked = []

    def memory_stats(device: torch.device) -> dict[str, int]:
        asked.append(device)
        return {"num_alloc_retries": 5}

    device = torch.device("cuda", 1)
    monkeypatch.setattr(limits, "device_of", lambda step: device)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(memory_stats=memory_stats))
    assert allocation_retries(step) == 5 and asked == [device]


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
