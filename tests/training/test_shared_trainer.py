"""Runs of several ranks: they end bitwise as they would have, and all of their ranks stop together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import MemfitError, MemoryLimitError, OutputError
from memfit.ir import Sharding
from memfit.training import RunOptions, Trainer
from memfit.workload import Workload
from tests.covering import each
from tests.processes import on_ranks
from tests.ranks.trainings import DDP, HYBRID, ZERO2, ZERO3, Kind, fit, is_same, plan_for, state_of, step_of, workload
from tests.training.conftest import lines_of
from tests.training.held_writes import HeldWrites, names, stored

PREEMPTED = 75  # what SIGTERM ends a run with
SHARDINGS = {"ddp": DDP, "zero2": ZERO2, "zero3": ZERO3, "hybrid": HYBRID}


@contextlib.contextmanager
def trainer_of(
    sharding: Sharding, out: Path, *, given: Workload | None = None, kind: Kind = "adamw", **options: Any
) -> Iterator[Trainer]:
    """Make a trainer of nine steps on this rank, and its step's end."""
    given = given or workload(kind)
    plan, watch = plan_for(given, sharding, kind), options.pop("watch", None)
    torch.manual_seed(5)
    with step_of(given, plan) as step:
        yield Trainer(step, plan, RunOptions(out=out, **({"steps": 9} | options)), watch=watch)


def whole_and_resumed(rank: int, sharding: Sharding, kind: Kind, folder: Path) -> Iterator[Any]:
    """Train nine steps at once, and four and then five, with evaluations in between."""
    expected, _ = fit(sharding, folder / "whole", kind, steps=9, evaluate_every=2, checkpoint_every=3)
    fit(sharding, folder / "halves", kind, steps=4, evaluate_every=2)
    found, record = fit(sharding, folder / "halves", kind, seed=7, steps=9, evaluate_every=2, resume=True)
    yield is_same(expected, found), record.steps, expected["scaler"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("zero3", "fp16"), ("zero2", "momentum"), ("ddp", "adamw"), pytest.param("hybrid", "adamw", marks=pytest.mark.ci)],
)
def test_a_resumed_run_of_ranks_ends_bitwise_as_a_whole_one(name: str, kind: Kind, tmp_path: Path) -> None:
    sharding = SHARDINGS[name]
    found = [rank[0] for rank in on_ranks(sharding.world_size, whole_and_resumed, sharding, kind, tmp_path)]
    assert {each[:2] for each in found} == {(True, 9)}
    assert all(each[2] == found[0][2] for each in found)
    whole, halves = (lines_of(tmp_path / part) for part in ("whole", "halves"))
    assert [_without_peak(line) for line in whole] == [_without_peak(line) for line in halves]
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["status"] == "finished"


def _without_peak(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "peak_bytes"}


def evaluated(rank: int, sharding: Sharding | None, out: Path) -> Iterator[Any]:
    state, record = fit(sharding, out, steps=3, evaluate_every=1)
    yield [e.values["loss"] for e in record.evaluations], state["model"]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_evaluation_runs_on_all_ranks_with_the_models_own_forward_pass(name: str, tmp_path: Path) -> None:
    (one, weights), (other, _) = (rank[0] for rank in on_ranks(2, evaluated, SHARDINGS[name], tmp_path / name))
    assert one == other and len(one) == 3
    alone = workload()
    alone.model.load_state_dict(weights)
    assert alone.evaluate is not None
    assert alone.evaluate(alone.model.eval())["loss"] == pytest.approx(one[-1], rel=1e-6)


class Stops:
    """Batches that do something on one rank before the third is made."""

    def __init__(self, batches: Any, act: Any) -> None:
        self.batches, self.act = batches, act

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            yield self.act(batch) if index == 2 else batch


def _terminate(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return batch


def _fail(batch: Any) -> Any:
    raise FileNotFoundError("shard-7.tar")


def _shorten(batch: Any) -> Any:
    return [tensor[:3] for tensor in batch]


ACTS = {"SIGTERM": _terminate, "fails": _fail, "shorter": _shorten}


def stopped(rank: int, act: str, who: int, out: Path) -> Iterator[Any]:
    given = workload()
    if rank == who:
        given = dataclasses.replace(given, batches=Stops(given.batches, ACTS[act]))
    with trainer_of(ZERO3, out, given=given) as trainer:
        try:
            trainer.fit()
        except BaseException as e:
            yield type(e).__name__, str(e), trainer.step.steps
            yield getattr(e, "__notes__", [])
    with trainer_of(ZERO3, out, given=workload(seed=7), steps=6, resume=True) as trainer:
        trainer.fit()
        yield state_of(trainer.step)


def undisturbed(rank: int, out: Path) -> Iterator[Any]:
    yield fit(ZERO3, out, steps=6)[0]


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks(2, undisturbed, tmp_path_factory.mktemp("undisturbed") / "out")[0][0]


@pytest.mark.parametrize(("act", "who"), each(ACTS, [0, 1]))
def test_what_stops_one_rank_stops_all_after_the_same_step_with_a_checkpoint(
    act: str, who: int, six_steps: Any, tmp_path: Path
) -> None:
    ranks = on_ranks(2, stopped, act, who, tmp_path)
    errors = [rank[0] for rank in ranks]
    own, other = errors[who], errors[1 - who]
    assert own[2] == other[2] == (3 if act == "SIGTERM" else 2)
    if act == "SIGTERM":
        assert own[:2] == other[:2] == ("SystemExit", str(PREEMPTED))
    elif act == "fails":
        assert own[:2] == ("FileNotFoundError", "shard-7.tar")
        assert other[:2] == ("RankError", f"rank {who} stopped before the step: read that rank's output")
    else:
        assert own[0] == other[0] == "RankError" and "gave a batch of 3 samples on one rank" in own[1]
    assert all("resume=True continues from" in rank[1][0] for rank in ranks)
    assert all(is_same(rank[2], six_steps) for rank in ranks)


def with_a_slow_writer(rank: int, sharding: Sharding, out: Path) -> Iterator[Any]:
    """Train twice; the second time one rank's thread is held from the fourth step to the sixth."""
    expected, _ = fit(sharding, out / "waits", steps=9, checkpoint_every=4, keep_checkpoints=9)
    seen: dict[int, list[str]] = {}
    slow = 0 if sharding.mode == "ddp" else sharding.world_size - 1  # with ddp the others have nothing to write

    def on_step(progress: Any) -> None:
        seen[progress.step] = names(out / "goes-on")
        if progress.step == (6 if rank == slow else 5):
            held.end()

    options = {"checkpoint_every": 4, "keep_checkpoints": 9, "async_checkpoints": True, "on_step": on_step}
    with trainer_of(sharding, out / "goes-on", **options) as trainer, pytest.MonkeyPatch.context() as patch:
        held = HeldWrites(patch)
        if rank != slow:
            held.let_go()
        trainer.fit()
        yield is_same(state_of(trainer.step), expected), seen


@pytest.mark.parametrize("name", ["zero3", pytest.param("ddp", marks=pytest.mark.ci)])
@pytest.mark.ci
def test_a_checkpoint_has_its_place_when_the_slowest_rank_has_written_and_training_goes_on(
    name: str, tmp_path: Path
) -> None:
    sharding = SHARDINGS[name]
    for rank in on_ranks(sharding.world_size, with_a_slow_writer, sharding, tmp_path):
        same, seen = rank[0]
        in_the_making = ["checkpoint-0", "checkpoint-4 in the making"]
        assert same and seen[4] in (["checkpoint-0"], in_the_making)  # which another rank may have begun
        assert seen[5] == seen[6] == in_the_making
        assert seen[7] == ["checkpoint-0", "checkpoint-4"]
    waits, goes_on = tmp_path / "waits", tmp_path / "goes-on"
    assert names(goes_on) == names(waits) == [f"checkpoint-{n}" for n in (0, 4, 8, 9)]
    assert all(is_same(stored(goes_on / name), stored(waits / name)) for name in names(waits))
    assert [_without_peak(line) for line in lines_of(goes_on)] == [_without_peak(line) for line in lines_of(waits)]


def full_for_one(rank: int, out: Path) -> Iterator[Any]:
    def on_step(progress: Any) -> None:
        if rank == 1 and progress.step == 3:
            held.end()

    options = {"checkpoint_every": 2, "async_checkpoints": True, "on_step": on_step}
    with trainer_of(ZERO3, out, **options) as trainer, pytest.MonkeyPatch.context() as patch:
        held = HeldWrites(patch, OSError(28, "No space left on device") if rank == 1 else None)
        if rank == 0:
            held.let_go()
        with pytest.raises(OutputError) as e:
            trainer.fit()
        yield str(e.value), trainer.step.steps, names(out), getattr(e.value, "__notes__", [])


def test_a_disk_that_is_full_for_one_rank_ends_all_before_the_next_step(tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, full_for_one, tmp_path / "out"))
    assert first[:2] == second[:2] and "checkpoint-2: No space left" in first[0] and first[1] == 3
    assert "memfit: the error is from rank 1" in first[3]
    assert "checkpoint-0" in first[3][-1] and "checkpoint-0" in second[3][-1]
    assert names(tmp_path / "out") == ["checkpoint-0"]


def stopped_while_writing(rank: int, out: Path) -> Iterator[Any]:
    """One rank is told to stop while the thread of the other still writes."""

    def on_step(progress: Any) -> None:
        if progress.step == 3:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            held.let_go()

    options = {"checkpoint_every": 2, "async_checkpoints": True}
    with trainer_of(ZERO3, out, on_step=on_step, **options) as trainer, pytest.MonkeyPatch.context() as patch:
        held = HeldWrites(patch)
        with pytest.raises(SystemExit) as e:
            trainer.fit()
        yield e.value.code, trainer.step.steps
    with trainer_of(ZERO3, out, given=workload(seed=7), steps=6, resume=True, **options) as trainer:
        trainer.fit()
        yield state_of(trainer.step)


@pytest.mark.ci
def test_ranks_that_are_told_to_stop_finish_what_their_threads_write(six_steps: Any, tmp_path: Path) -> None:
    ranks = on_ranks(2, stopped_while_writing, tmp_path)
    assert [rank[0] for rank in ranks] == [(PREEMPTED, 3)] * 2
    assert all(is_same(rank[1], six_steps) for rank in ranks)


def over_its_memory(rank: int, out: Path) -> Iterator[Any]:
    def watch() -> None:
        if rank == 1 and trainer.step.steps == 2:
            raise MemoryLimitError("full", limit_bytes=1, held_bytes=1, requested_bytes=1, by_category={}, where="here")

    with trainer_of(ZERO2, out, watch=watch) as trainer, pytest.raises(MemoryLimitError) as e:
        trainer.fit()
    yield str(e.value), trainer.step.steps


def test_a_rank_that_uses_up_its_hosts_memory_stops_all(tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, over_its_memory, tmp_path))
    assert first == ("rank 1 stopped before the step: read that rank's output", 2) and second == ("full", 2)
    assert (tmp_path / "checkpoint-2").is_dir()


def overflowing(rank: int, sharding: Sharding, out: Path) -> Iterator[Any]:
    """Gradients of one rank's part overflow in fp16 at the first scale."""
    given = workload("fp16")
    scaling = dataclasses.replace(given.loss_scaling, initial=2.0**24)
    given = dataclasses.replace(given, loss_scaling=scaling)
    with trainer_of(sharding, out, given=given, kind="fp16", steps=3) as trainer:
        record = trainer.fit()
        assert trainer.step.scaler is not None
        yield trainer.step.scaler.state_dict(), record.steps, state_of(trainer.step)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_ranks_skip_the_same_updates(name: str, tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, overflowing, SHARDINGS[name], tmp_path))
    assert first[:2] == second[:2] and is_same(first[2], second[2])
    assert first[0]["skips"] > 0


def not_empty(rank: int, out: Path) -> Iterator[Any]:
    with pytest.raises(MemfitError) as e, trainer_of(ZERO3, out):
        pass
    yield type(e.value).__name__, str(e.value)


def test_the_first_rank_looks_at_the_folder_and_all_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    first, second = (rank[0] for rank in on_ranks(2, not_empty, tmp_path))
    assert first == second and "is not empty" in first[1]
