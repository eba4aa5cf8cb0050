"""The measured peak, and the predicted one against it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memfit.capture import measure_peak_bytes
from memfit.cost import calibrate
from memfit.hardware import allocated
from memfit.ir import Precision, Regions, simulate
from memfit.workload import Workload, batch_size_of
from tests.covering import each
from tests.models import BUILDERS, LARGE, captured, plain_trace, regions_of, squared_error, step_of, tied

BIGGER: dict[str, dict[str, int]] = {
    "transformer": {"batch": 8, "tokens": 64, "dim": 128},
    "tied": {"batch": 8, "tokens": 64, "dim": 128},
    "convnet": {"batch": 16, "channels": 16, "size": 32},
    "unet": {"batch": 8, "width": 16, "size": 32},
    "recurrent": {"batch": 32, "tokens": 24, "features": 64, "hidden": 64},
    "twice": {"batch": 1024, "dim": 128},
}
"""Sizes at which a step's peak is 5 MiB at least."""


def measured(workload: Workload, precision: Precision = "32-true", size: int | None = None) -> int:
    with step_of(workload, precision=precision, microbatch_size=size) as step:
        step(workload.batch)
        return measure_peak_bytes(step, workload.batch)


def off(name: str, precision: Precision, microbatches: int) -> tuple[float, int]:
    """Return how far the prediction is from the measurement, as a share of it, and the measurement."""
    workload = BUILDERS[name](**BIGGER[name])
    size = batch_size_of(workload.batch) // microbatches
    trace = captured(workload, precision=precision, microbatch_size=size)
    peak = measured(workload, precision, size)
    return simulate(trace, calibrate([trace])).peak_bytes / peak - 1, peak


@pytest.mark.parametrize(("name", "levers"), each(BUILDERS, [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1)]))
def test_the_predicted_peak_is_the_measured_one(name: str, levers: tuple[Precision, int]) -> None:
    precision, microbatches = levers
    error, peak = off(name, precision, microbatches)
    assert peak > 4 * 2**20
    assert abs(error) < 0.02


def test_the_comparison_notices_a_step_without_its_optimizer_state() -> None:
    workload = BUILDERS["transformer"](**BIGGER["transformer"])
    state = 2 * sum(p.numel() * 4 for p in workload.model.parameters())
    trace = captured(workload)
    predicted = simulate(trace, calibrate([trace])).peak_bytes
    assert abs((predicted - state) / measured(workload) - 1) > 0.02


def test_a_peak_with_checkpointing_is_the_measured_one() -> None:
    workload = BUILDERS["transformer"](**BIGGER["transformer"])
    regions = {"blocks.0": ("aten.addmm.default#0",), "blocks.1": ()}
    trace = captured(workload, regions=regions)
    with step_of(workload, regions=regions) as step:
        step(workload.batch)
        peak = measure_peak_bytes(step, workload.batch)
    assert abs(simulate(trace, calibrate([trace])).peak_bytes / peak - 1) < 0.02
    assert peak < 0.95 * measured(BUILDERS["transformer"](**BIGGER["transformer"]))


@pytest.mark.parametrize("name", ["tied", "convnet", "recurrent"])
def test_the_measured_peak_is_that_of_a_session_that_builds_everything(name: str) -> None:
    sizes = LARGE[name]
    with allocated() as meter:
        workload = BUILDERS[name](**sizes)
        with step_of(workload) as step:
            step(workload.batch)
            step(workload.batch)
    again = BUILDERS[name](**sizes)
    assert measured(again) == pytest.approx(meter.peak_bytes, rel=0.01)


def test_a_prediction_knows_the_memory_format() -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.MaxPool2d(2))
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    images = torch.randn(16, 3, 66, 66).contiguous(memory_format=torch.channels_last)
    batch = (images, torch.randn(16, 8, 32, 32))
    workload = Workload(model, batch, squared_error, torch.optim.SGD(model.parameters(), lr=0.1))
    trace = captured(workload)
    assert simulate(trace, calibrate([trace])).peak_bytes == pytest.approx(measured(workload), rel=0.02)


def test_what_stays_counts_each_storage_once_in_the_trace_and_in_the_measurement() -> None:
    workload = tied()
    parameters = sum(p.numel() * 4 for p in workload.model.parameters())
    batch = sum(t.numel() * 8 for t in workload.batch.values())
    resident = 3 * parameters + batch + 4 * len(list(workload.model.parameters()))  # and counters
    assert sum(s.nbytes for s in plain_trace("tied").storages if s.birth < 0) == resident
    with step_of(workload) as step:
        step(workload.batch)
        with allocated() as meter:
            step(workload.batch)
        assert measure_peak_bytes(step, workload.batch) == resident + meter.peak_bytes


def test_measuring_is_a_step_of_the_training_and_nothing_else() -> None:
    one, other = BUILDERS["convnet"](), BUILDERS["convnet"]()
    for workload, measure in ((one, True), (other, False)):
        torch.manual_seed(0)
        with step_of(workload) as step:
            step(workload.batch)
            if measure:
                measure_peak_bytes(step, workload.batch)
            else:
                step(workload.batch)
    after = copy.deepcopy(one.model.state_dict())
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in after.items())


@pytest.mark.parametrize("name", ["twice", "transformer"])
def test_small_peaks_with_checkpointing_are_right_to_the_generator_states(name: str) -> None:
    workload = BUILDERS[name]()
    regions = {"shared": ()} if name == "twice" else {"blocks.0": (), "blocks.1": ()}
    trace, plain = captured(workload, regions=regions), captured(workload)
    with step_of(workload, regions=regions) as step:
        step(workload.batch)
        peak = measure_peak_bytes(step, workload.batch)
    state_bytes = torch.get_rng_state().nbytes
    assert Regions(plain).generator_state_bytes == state_bytes == 5056
    assert abs(simulate(trace, calibrate([trace])).peak_bytes - peak) < state_bytes / 2
    assert abs(simulate(plain, calibrate([plain]), regions_of(regions)).peak_bytes - peak) < state_bytes / 2
