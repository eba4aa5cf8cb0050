"""Estimates of one rank of several: the one with the most samples of the global batch."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import memfit
from memfit.errors import UsageError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_plain, costs_of, predict
from memfit.ranks import Mode, Sharding, shard, with_samples, with_share_of_update
from memfit.workload import Workload, slice_batch, tensors_of
from tests.models import convnet, transformer

SHAPES = {"transformer": functools.partial(transformer, tokens=4), "convnet": convnet}


def by_hand(workload: Workload, samples: int, ranks: int, mode: Mode, microbatch_size: int | None = None) -> int:
    """The peak of a rank that has some samples of the batch, captured with them and sharded."""
    cpu = find_device("cpu")
    levers = Levers(microbatch_size=microbatch_size or samples)
    trace = capture_plain(with_samples(workload, samples), levers, cpu)
    sharding = Sharding(world_size=ranks, mode=mode)
    trace = with_share_of_update(shard(trace, sharding), sharding)
    return predict(trace, costs_of([trace], cpu), cpu)[0].peak_bytes


@pytest.mark.ci
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("samples", "ranks", "most", "mode"),
    [(8, 2, 4, "ddp"), (7, 2, 4, "zero3"), (8, 3, 3, "zero2"), (5, 4, 2, "zero1"), (4, 4, 1, "ddp")],
)
def test_the_rank_with_the_most_samples_is_predicted(
    name: str, samples: int, ranks: int, most: int, mode: Mode
) -> None:
    workload = SHAPES[name](batch=samples)
    found = memfit.estimate(workload, world_size=ranks, sharding=mode)
    assert found.peak_bytes == by_hand(workload, most, ranks, mode)
    said = f"the rank with the largest part of the batch's {samples} samples has {most}"
    assert any(said in note for note in found.notes)


def test_microbatches_cut_the_part_of_a_rank() -> None:
    workload = transformer(batch=8)
    found = memfit.estimate(workload, world_size=2, microbatch_size=2)
    assert found.peak_bytes == by_hand(workload, 4, 2, "ddp", 2)
    assert found.peak_bytes < memfit.estimate(workload, world_size=2).peak_bytes


def test_a_batch_is_cut_as_the_workload_says() -> None:
    """By its own count and its own function."""
    plain = transformer(batch=8)
    counted = dataclasses.replace(plain, batch_size=lambda batch: len(tensors_of(batch)[0]), split=slice_batch)
    for ranks in (1, 2, 3):
        assert memfit.estimate(counted, world_size=ranks).peak_bytes == (
            memfit.estimate(plain, world_size=ranks).peak_bytes
        )


@pytest.mark.parametrize("device", ["cpu", "a100-80gb"])
def test_more_ranks_than_samples_are_refused(device: str) -> None:
    with pytest.raises(
        UsageError, match="world_size=9 ranks share a batch of 8 samples, so some ranks would have none"
    ):
        memfit.estimate(transformer(batch=8), world_size=9, device=device)
