"""Checkpoints of a step that ranks share: any number of ranks reads them, and all that is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace
from torch.distributed import checkpoint as dcp

from memfit import ir
from memfit.errors import CheckpointError, OutputError
from memfit.ir import Sharding
from memfit.training import BatchStream
from memfit.training.runs import checkpoint
from tests.processes import on_ranks
from tests.ranks.trainings import DDP, FOUR, HYBRID, ZERO2, ZERO3, Kind, is_same, plan_for, state_of, step_of, workload

CHAIN = {"four": FOUR, "two": ZERO2, "one": None, "hybrid": HYBRID, "data parallel": DDP, "two again": ZERO3}
TRAINED = 11  # parameters: the embedding, which is the head too, and five of each block


def saved(rank: int, sharding: Sharding | None, kind: Kind, folder: Path) -> Iterator[Any]:
    """Train for some steps, and write a checkpoint."""
    given = workload(kind)
    plan = plan_for(given, sharding, kind)
    with step_of(given, plan) as step:
        for _ in range(4):
            step(given.batch)
        checkpoint.Writing(folder, step, plan, BatchStream(given).position()).finish()
        yield state_of(step)


def loaded(rank: int, sharding: Sharding | None, kind: Kind, folder: Path, again: Path) -> Iterator[Any]:
    """Read a checkpoint into a training that begins otherwise, and write it again."""
    given = workload(kind, seed=7)
    plan = plan_for(given, sharding, kind)
    with step_of(given, plan) as step:
        found, damages = checkpoint.read_newest(folder, step, plan.levers.precision)
        assert not damages
        before = state_of(step)
        found.restore()
        checkpoint.Writing(again, step, plan, found.state.position).finish()
        yield before, state_of(step), len(given.optimizer.state)


def run(sharding: Sharding | None, program: Any, *args: Any) -> list[Any]:
    if sharding is None:
        return [next(program(0, None, *args))]
    return [found[0] for found in on_ranks(sharding.world_size, program, sharding, *args)]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["adamw", "fp16"])
def test_a_state_is_bitwise_the_same_however_many_ranks_read_and_write_it(kind: Kind, tmp_path: Path) -> None:
    names = list(CHAIN)
    expected, *others = run(CHAIN[names[0]], saved, kind, tmp_path / names[0])
    assert all(is_same(expected, other) for other in others)
    for was, name in zip(names, names[1:], strict=False):
        for before, state, count in run(CHAIN[name], loaded, kind, tmp_path / was, tmp_path / name):
            assert not is_same(before["model"], expected["model"])
            assert is_same(expected, state), name
            assert count == TRAINED
    shards = [len(list((tmp_path / name / "checkpoint-4").glob("*-shard-*"))) for name in names]
    assert shards == [8, 4, 0, 8, 0, 4]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_the_shards_and_they_hold_each_element_once(tmp_path: Path) -> None:
    expected = run(HYBRID, saved, "adamw", tmp_path)[0]
    path = tmp_path / "checkpoint-4"
    model = {name: torch.empty_like(t) for name, t in expected["model"].items() if name != "head.weight"}
    moments = {
        f"optimizer.state.{i}.exp_avg": torch.empty_like(expected["optimizer"]["state"][i]["exp_avg"])
        for i in range(TRAINED)
    }
    dcp.load({**model, **moments}, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in model.items())
    states = expected["optimizer"]["state"]
    assert all(torch.equal(moments[f"optimizer.state.{i}.exp_avg"], states[i]["exp_avg"]) for i in range(TRAINED))
    there = [tensor for file in path.glob("model-shard-*") for tensor in safetensors.torch.load_file(file).values()]
    assert sum(tensor.numel() for tensor in there) == sum(t.numel() for t in model.values())


def without_a_shard(path: Path) -> None:
    next(path.glob("optimizer-shard-00002*")).unlink()


def with_another_byte(path: Path) -> None:
    file = next(path.glob("model-shard-00001*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def with_shards_of_others(path: Path) -> None:
    """As if a rank had been left out, with sums that agree."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if "00002-of" not in name}
    record = ir.codec.decode(json.dumps(manifest).encode(), checkpoint.Checkpoint, source="")
    (path / "checkpoint.json").write_bytes(ir.codec.encode(record.sealed()))


DAMAGES = {"a shard is missing": without_a_shard, "a byte changed": with_another_byte, "fewer": with_shards_of_others}


def refused(rank: int, sharding: Sharding, folder: Path, is_another: bool = False) -> Iterator[Any]:
    given = workload(seed=7)
    if is_another:
        given.model.prefix.requires_grad_(True)
    with step_of(given, plan_for(given, sharding)) as step:
        with pytest.raises(CheckpointError) as e:
            checkpoint.read_newest(folder, step)
        yield str(e.value)


@pytest.mark.ci
@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_refuse_a_damaged_checkpoint(damage: str, tmp_path: Path) -> None:
    run(ZERO3, saved, "adamw", tmp_path)
    DAMAGES[damage](tmp_path / "checkpoint-4")
    first, second = run(ZERO3, refused, tmp_path)
    assert first == second and ("damaged" in first or "can't read" in first or "names the files" in first)


def full_on_one(rank: int, sharding: Sharding, folder: Path) -> Iterator[Any]:
    given = workload()
    plan = plan_for(given, sharding)
    with step_of(given, plan) as step, pytest.MonkeyPatch.context() as patch:
        step(given.batch)
        if rank == 1:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OutputError, match="No space left on device") as e:
            checkpoint.Writing(folder, step, plan, BatchStream(given).position()).finish()
        yield getattr(e.value, "__notes__", [])


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run(ZERO3, full_on_one, tmp_path)
    assert first == ["memfit: the error is from rank 1"] and second == []
    assert list(tmp_path.iterdir()) == []


def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    run(ZERO3, saved, "adamw", tmp_path)
    for text in run(replace(ZERO3, world_size=2), refused, tmp_path, True):
        assert "is of another workload" in text
