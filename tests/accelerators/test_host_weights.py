"""Weights in host memory on an accelerator: predicted to the byte, bitwise, planned, trained, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit.capture import measure_peaks, real_copy
from memfit.hardware import find_device
from memfit.ir import FrozenWeights, Levers, Region, Tiles
from memfit.levers import applied
from memfit.planner import capture_levers, costs_of, predict
from tests.accelerators.steps import same, state_of
from tests.frozen_blocks import COUNT, EACH, HELD, MATRIX_BYTES, NAMES, PLAIN, made

LORA: dict[str, dict[str, Any]] = {
    "alone": {},
    "regions": {"regions": EACH},
    "a run": {"regions": (Region(NAMES[:3]),)},
    "microbatches": {"microbatch_size": 2, "regions": EACH[1:]},
    "bf16-mixed": {"precision": "bf16-mixed", "regions": EACH},
    "offloaded inputs": {"regions": tuple(Region((NAMES[i],), offload=True, prefetch=NAMES[i + 1]) for i in range(3))},
    "states in the host": {"optimizer_state": "offloaded", "regions": EACH[:1]},
    "tiles": {"tiles": Tiles(modules=tuple(f"{name}.mlp" for name in NAMES), tokens=64), "regions": EACH},
}


def run(levers: Levers, place: torch.device) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the peak of a step's allocations, and what three steps leave, weights on the device again."""
    copied = real_copy(made(), place)
    torch.manual_seed(1)
    with applied(levers, copied) as step:
        for _ in range(3):
            step(copied.batch)
        left = state_of(copied)
        found = measure_peaks(step, copied.batch)
    assert found is not None and all(p.device == place for p in copied.model.parameters())
    return found.allocated_bytes, left


@pytest.mark.parametrize("case", LORA)
def test_peaks_are_as_predicted_and_the_numbers_those_without_it(case: str, kind: str, place: torch.device) -> None:
    plain = replace(PLAIN, **LORA[case])
    held, device = replace(plain, host_weights=HELD), find_device(kind)
    trace = capture_levers(made(), held, device)
    predicted, _ = predict(trace, costs_of([trace], device), device)
    measured, left = run(held, place)
    without, expected = run(plain, place)
    assert same(left, expected)
    assert predicted.peak_bytes == measured
    assert without - measured >= 2 * (COUNT - 2) * MATRIX_BYTES - 2 * MATRIX_BYTES * ("run" in case)
    expected[next(iter(expected))] += 1
    assert not same(left, expected)  # the comparison can fail


def test_a_plan_with_it_is_verified_trained_and_leaves_the_model_there(
    kind: str, place: torch.device, tmp_path: Path
) -> None:
    plain_bytes = memfit.estimate(made(), device=kind).peak_bytes
    options: dict[str, Any] = {"numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 1}
    budget = int(0.72 * plain_bytes)  # nothing else reaches it
    plan = memfit.plan(made(), budget=budget, device=kind, host_budget="64MiB", **options)
    assert plan.levers.host_weights == HELD
    found = memfit.verify(plan, made(), steps=2)
    assert found.bitwise and found.measured_peak_bytes is not None and found.measured_peak_bytes <= budget
    finals = []
    for chosen in (plan, replace(plan, levers=PLAIN)):
        workload = made()
        parameters = list(workload.model.parameters())
        torch.manual_seed(1)
        memfit.train(chosen, workload, out=tmp_path, steps=3, overwrite=True)
        assert all(a is b for a, b in zip(parameters, workload.model.parameters(), strict=True))
        finals.append(state_of(workload))
    assert same(*finals)


@pytest.mark.ci
def test_codes_of_weights_in_fewer_bits_wait_there(kind: str, place: torch.device) -> None:
    pytest.importorskip("bitsandbytes")
    levers = replace(PLAIN, frozen_weights=FrozenWeights(quantizer="int8"), regions=EACH)
    try:
        _, expected = run(levers, place)
    except NotImplementedError:
        pytest.skip(f"bitsandbytes has no operators for {kind}")
    measured, left = run(replace(levers, host_weights=HELD), place)
    assert same(left, expected) and measured < run(levers, place)[0]
