"""The ledger's bytes are those of the tensors, and its predictions those of the plan."""

from __future__ import annotations

import dataclasses

import memfit
from memfit.train.ledger import IN_THE_STEP
from memfit.train.step import Step
from memfit.workload import tensors_of
from tests.models import BUILDERS, LARGE


def test_under_a_limit_predicted_and_measured_agree_by_category() -> None:
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    plan = memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1)
    with memfit.apply(plan, workload, limit_bytes=2**30) as step:
        for _ in range(2):
            step(workload.batch)
        ledger = memfit.memory_summary(step)
    parameters = sum(p.nbytes for p in workload.model.parameters())
    assert ledger.measured_bytes["parameters"] == parameters
    assert ledger.measured_bytes["inputs"] == sum(t.nbytes for t in tensors_of(workload.batch))
    state = sum(t.nbytes for values in workload.optimizer.state.values() for t in tensors_of(values))
    assert ledger.measured_bytes["optimizer state"] == state
    assert ledger.measured_bytes == ledger.predicted_bytes
    assert ledger.peak_bytes == ledger.predicted_peak_bytes == sum(ledger.measured_bytes.values())
    assert ledger.limit_bytes == 2**30 and ledger.allocation_retries is None and ledger.pinned_bytes is None
    assert ledger.host_bytes > ledger.peak_bytes and ledger.host_free_bytes > 0
    lines = str(ledger).splitlines()
    assert lines[0] == "Memory after step 2"
    assert lines[2].split() == ["parameters", *2 * [f"{parameters / 2**10:.1f}", "KiB"]]


def test_without_a_plan_or_a_limit_it_says_what_is_known() -> None:
    workload = BUILDERS["convnet"]()
    step = Step(workload)
    step(workload.batch)
    ledger = memfit.memory_summary(step)
    assert ledger.predicted_bytes == {} and ledger.peak_bytes is None and IN_THE_STEP not in ledger.measured_bytes
    assert ledger.measured_bytes["buffers"] == sum(b.nbytes for b in workload.model.buffers())


def test_warnings() -> None:
    workload = BUILDERS["twice"]()
    ledger = memfit.memory_summary(Step(workload))
    quiet = dataclasses.replace(ledger, host_bytes=100, host_free_bytes=100)
    assert quiet.warnings == []
    for changes, word in (
        ({"allocation_retries": 3}, "3 times"),
        ({"limit_bytes": 100, "peak_bytes": 99}, "limit_bytes=100"),
        ({"host_free_bytes": 1}, "host"),
    ):
        loud = dataclasses.replace(quiet, **changes)  # type: ignore[arg-type]
        assert len(loud.warnings) == 1 and word in loud.warnings[0] and f"Warning: {loud.warnings[0]}" in str(loud)
