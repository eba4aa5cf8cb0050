"""Batches made ahead: the same ones, in the same order, from the same position, whatever happens in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.errors import UsageError, WorkloadError
from memfit.training import METRICS, BatchStream, on_device, read_lines
from tests.training.conftest import make_batches, make_workload, squared_error
from tests.training.test_trainer import Run


class Made(Exception):
    pass


@settings(max_examples=40, deadline=None)
@given(items=st.integers(0, 8), depth=st.integers(1, 5), taken=st.integers(0, 9))
def test_items_come_in_order_and_never_too_many_ahead(items: int, depth: int, taken: int) -> None:
    made: list[int] = []

    class Batches:
        def __iter__(self) -> Iterator[int]:
            for item in range(items):
                made.append(item)
                yield item
            raise Made

    stream = BatchStream(make_workload(batches=Batches()), depth)
    for n in range(min(taken, items)):
        assert stream.next_batch(1) == (n,)
        assert len(made) <= n + 1 + depth
    if taken > items:
        with pytest.raises(Made):
            stream.next_batch(1)
    stream.close()
    assert len(made) <= min(taken, items) + depth
    assert not [thread for thread in threading.enumerate() if thread.name == "memfit-prefetch"]


def test_making_goes_on_while_the_step_runs(tmp_path: Path) -> None:
    """The loss function of a step waits until the batches after it are made, which inline would never be."""
    made, batches = [], make_batches("list")

    class Counted:
        def __iter__(self) -> Iterator[Any]:
            for index in range(8):
                made.append(index)
                yield batches[index % 6]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        used = trainer.step.steps + 1
        deadline = time.monotonic() + 30
        while len(made) < min(used + 2, 8) and used > 1:  # the first two batches are made inline
            assert time.monotonic() < deadline, "the batches ahead were not made while the step ran"
            time.sleep(0.001)
        assert len(made) <= used + 2
        loss: torch.Tensor = squared_error(model, batch)
        return loss

    run = Run(tmp_path / "run", batches=Counted(), loss_fn=loss_fn)
    trainer = run.trainer(prefetch_batches=2)
    trainer.fit()
    assert made == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_resumes_bitwise(workers: int, tmp_path: Path) -> None:
    """Its workers make batches ahead; the order and the position are the same as without."""

    def loader(workers: int) -> Any:
        data = TensorDataset(*[torch.cat(column) for column in zip(*make_batches("list"), strict=True)])
        return DataLoader(data, 4, shuffle=True, num_workers=workers)

    whole = Run(tmp_path / "whole", batches=loader(0))
    broken = Run(tmp_path / "broken", batches=loader(workers))
    expected = whole.fit(steps=9)
    broken.crash(7, steps=9, checkpoint_every=4)
    assert broken.fit(steps=9, resume=True, seed=7) == expected


def test_the_batches_are_left_where_the_run_ended(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    trainer = run.trainer(steps=3, prefetch_batches=3)
    trainer.fit()
    assert trainer.step.workload.batches.state_dict()["index"] == 3  # type: ignore[union-attr]


class Fails:
    """Batches of which one can't be made, with or without a position of their own."""

    def __init__(self, fails_at: int | None, draws: bool = False) -> None:
        self.batches, self.fails_at, self.draws = make_batches("list"), fails_at, draws

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if self.draws:
                torch.rand(2)
            if index == self.fails_at:
                raise OSError(5, "Input/output error")
            yield batch


@pytest.mark.parametrize(("prefetch_batches", "draws"), [(0, False), (0, True), (2, False)])
@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_batch_that_cannot_be_made_ends_the_run_with_a_checkpoint(
    prefetch_batches: int, draws: bool, fails_at: int, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "whole", batches=Fails(None, draws))
    broken = Run(tmp_path / "broken", batches=Fails(fails_at, draws))
    expected = whole.fit(steps=8)
    with pytest.raises(OSError, match="Input/output error") as caught:
        broken.fit(steps=8, prefetch_batches=prefetch_batches)
    assert broken.checkpoints == [f"checkpoint-{fails_at}"] and "continues from" in caught.value.__notes__[0]
    broken.changes["batches"] = Fails(None, draws)
    assert broken.fit(steps=8, prefetch_batches=prefetch_batches, resume=True, seed=4) == expected
    assert broken.lines == whole.lines


def test_batches_that_draw_from_the_global_generators_are_not_made_ahead(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", batches=Fails(None, draws=True))
    broken = Run(tmp_path / "broken", batches=Fails(None, draws=True))
    expected = whole.fit()
    with pytest.raises(WorkloadError, match=r"draws from the global.*prefetch_batches=2.*num_workers"):
        broken.fit(prefetch_batches=2)
    assert broken.checkpoints == ["checkpoint-1"]
    assert broken.fit(resume=True, seed=4) == expected


@pytest.mark.parametrize(
    ("prefetch_batches", "workers", "message"),
    [(-1, 0, "prefetch_batches=-1"), (True, 0, "True"), (2, 1, "num_workers=1")],
)
def test_arguments_that_cannot_be(prefetch_batches: int, workers: int, message: str) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8, 6)), 4, num_workers=workers)
    with pytest.raises(UsageError, match=message):
        BatchStream(make_workload(batches=loader), prefetch_batches)


def test_waiting_for_data_is_measured(tmp_path: Path) -> None:
    batches = make_batches("list")

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches:
                time.sleep(0.02)
                yield batch

    slow, fast = Run(tmp_path / "slow", batches=Slow()), Run(tmp_path / "fast", "list")
    slow.fit(steps=4)
    fast.fit(steps=1)
    assert slow.record.data_share is not None and 0 < slow.record.data_share < 1
    lines = read_lines(slow.out / METRICS)
    waited = slow.record.data_share / (1 - slow.record.data_share) * sum(line["seconds"] for line in lines[1:])
    assert waited >= 3 * 0.02 and all(line["data_seconds"] >= 0.02 for line in lines)
    assert fast.record.data_share is None


def test_tensors_are_moved_to_the_device_and_the_rest_is_kept() -> None:
    batch = {"x": torch.zeros(2), "pair": [torch.ones(3), "name", 4]}
    moved = on_device(batch, torch.device("meta"))
    assert moved["x"].device.type == moved["pair"][0].device.type == "meta" and moved["pair"][1:] == ["name", 4]
    same = on_device(batch, torch.device("cpu"))
    assert same["x"] is batch["x"] and same["pair"][0] is batch["pair"][0]
