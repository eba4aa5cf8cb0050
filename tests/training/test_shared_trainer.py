"""Runs of several ranks: they end bitwise as they would have, and all of their ranks stop together."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import MemfitError, MemoryLimitError, RankError
from memfit.ir.sharding import Sharding
from memfit.training.interrupt import PREEMPTED
from memfit.training.trainer import Trainer
from tests.processes import on_ranks
from tests.ranks.trainings import DDP, HYBRID, ZERO2, ZERO3, Kind, fit, is_same, plan_for, state_of, step_of, workload
from tests.training.conftest import lines_of

SHARDINGS = {"ddp": DDP, "zero2": ZERO2, "zero3": ZERO3, "hybrid": HYBRID}


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
    plan = plan_for(given, ZERO3)
    torch.manual_seed(5)
    with step_of(given, plan) as step:
        try:
            Trainer(step, plan, out=out, steps=9).fit()
        except BaseException as e:
            yield type(e).__name__, str(e), step.steps
            yield getattr(e, "__notes__", [])
    given = workload(seed=7)
    with step_of(given, plan) as step:
        Trainer(step, plan, out=out, steps=6, resume=True).fit()
        yield state_of(step)


def undisturbed(rank: int, out: Path) -> Iterator[Any]:
    yield fit(ZERO3, out, steps=6)[0]


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks(2, undisturbed, tmp_path_factory.mktemp("undisturbed") / "out")[0][0]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("act", ACTS)
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
        assert other[:2] == ("RankError", f"rank {who} stopped before the step: see what it says")
    else:
        assert own[0] == other[0] == "RankError" and "gave a batch of 3 samples on one rank" in own[1]
    assert all("resume=True goes on from" in rank[1][0] for rank in ranks)
    assert all(is_same(rank[2], six_steps) for rank in ranks)


def over_its_memory(rank: int, out: Path) -> Iterator[Any]:
    given = workload()
    plan = plan_for(given, ZERO2)

    def watch() -> None:
        if rank == 1 and step.steps == 2:
            raise MemoryLimitError("full", limit_bytes=1, held_bytes=1, requested_bytes=1, by_category={}, where="here")

    with step_of(given, plan) as step, pytest.raises(MemoryLimitError) as e:
        Trainer(step, plan, out=out, steps=9, watch=watch).fit()
    yield str(e.value), step.steps


def test_a_rank_that_uses_up_its_hosts_memory_stops_all(tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, over_its_memory, tmp_path))
    assert first == ("rank 1 stopped before the step: see what it says", 2) and second == ("full", 2)
    assert (tmp_path / "checkpoint-2").is_dir()


def overflowing(rank: int, sharding: Sharding, out: Path) -> Iterator[Any]:
    """Gradients of one rank's part overflow in fp16 at the first scale."""
    given = workload("fp16")
    scaling = dataclasses.replace(given.loss_scaling, initial=2.0**24)
    given = dataclasses.replace(given, loss_scaling=scaling)
    plan = plan_for(given, sharding, "fp16")
    with step_of(given, plan) as step:
        record = Trainer(step, plan, out=out, steps=3).fit()
        assert step.scaler is not None
        yield step.scaler.state_dict(), record.steps, state_of(step)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_ranks_skip_the_same_updates(name: str, tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, overflowing, SHARDINGS[name], tmp_path))
    assert first[:2] == second[:2] and is_same(first[2], second[2])
    assert first[0]["skips"] > 0


def not_empty(rank: int, out: Path) -> Iterator[Any]:
    given = workload()
    plan = plan_for(given, ZERO3)
    with step_of(given, plan) as step:
        with pytest.raises(MemfitError) as e:
            Trainer(step, plan, out=out, steps=1)
        yield type(e.value).__name__, str(e.value)


def test_the_first_rank_looks_at_the_folder_and_all_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    first, second = (rank[0] for rank in on_ranks(2, not_empty, tmp_path))
    assert first == second and "is not empty" in first[1]


def test_a_rank_error_is_one_of_memfit() -> None:
    assert issubclass(RankError, MemfitError) and RankError("x").exit_status == 1
