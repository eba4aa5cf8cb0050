"""The room on disk that a run takes is counted before it begins, and real full disks are errors with their numbers."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import OutputError
from memfit.ir.plan import Plan
from memfit.training.guards.host_resources import _REST_BYTES, check_disk
from memfit.training.runs.log import RunOptions
from memfit.training.step import Step
from memfit.training.trainer import Trainer
from memfit.workload import Workload

WIDTH = 1024
EACH = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # weights, and two states of AdamW


def wide() -> Workload:
    """A linear layer whose checkpoint takes 12 MiB."""
    model = nn.Linear(WIDTH, WIDTH)
    return Workload(
        model=model,
        batch=torch.ones(2, WIDTH),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
        name="wide",
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(wide(), budget="1GiB", precisions=["32-true"], points=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "memfit-test", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


Usage = namedtuple("Usage", "total used free")


def check(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, out: Path, free: int, total: int = 2**40, **options: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, total - free, free))
    arguments = {"steps": 10, "checkpoint_every": None, "keep_checkpoints": 2} | options
    check_disk(plan, wide(), RunOptions(out=out, **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({}, 1),
        ({"checkpoint_every": 5}, 3),
        ({"checkpoint_every": 10, "keep_checkpoints": 9}, 3),
        ({"checkpoint_every": 100, "keep_checkpoints": 9}, 2),
        ({"checkpoint_every": 1, "keep_checkpoints": 1}, 2),
        ({"checkpoint_every": 1, "keep_checkpoints": 4, "steps": None}, 5),
    ],
)
def test_what_is_needed_is_what_checkpoints_take_at_a_time(
    options: dict[str, int], checkpoints: int, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer has no state yet: it is as large as predicted."""
    check(monkeypatch, plan, tmp_path / "run", checkpoints * EACH + _REST_BYTES + 2**16, **options)
    with pytest.raises(OutputError, match="free, and the run needs") as caught:
        check(monkeypatch, plan, tmp_path / "run", checkpoints * EACH + _REST_BYTES - 2**16, **options)
    assert re.search(rf": {checkpoints} checkpoints? of 12", str(caught.value))
    assert "keep_checkpoints=" in str(caught.value) and not (tmp_path / "run").exists()


def test_checkpoints_that_are_there_make_room_and_a_disk_of_no_size_is_not_believed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, plan, tmp_path, 0, total=0)
    memfit.train(plan, wide(), out=tmp_path, steps=1)
    there = sum(f.stat().st_size for f in (tmp_path / "checkpoint-1").iterdir())
    assert EACH < there < EACH + 2**16
    check(monkeypatch, plan, tmp_path, _REST_BYTES + 2**16)


def test_a_small_disk_is_noticed_before_the_first_step(plan: Plan, small_disk: Path) -> None:
    out = small_disk / "run"
    assert memfit.train(plan, wide(), out=out, steps=2).steps == 2
    with pytest.raises(OutputError, match="has 2[0-9.]+ MiB free, and the run needs 52"):
        memfit.train(plan, wide(), out=small_disk / "other", steps=2, checkpoint_every=1)
    assert not (small_disk / "other").exists()
    memfit.train(plan, wide(), out=out, steps=2, overwrite=True)


def test_a_disk_without_any_room_is_noticed_when_the_folder_is_taken(cases: SimpleNamespace, small_disk: Path) -> None:
    workload = cases.workload()
    trainer = Trainer(Step(workload), cases.plan(workload), RunOptions(out=small_disk / "run", steps=1))
    with (small_disk / "filler").open("wb") as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(2**20))
    with pytest.raises(OutputError, match="can't write to out=.*No space left"):
        trainer.fit()
    assert not (small_disk / "run").exists()


def test_a_limit_of_files_is_noticed(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_FSIZE: (2**20, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[kind])
    with pytest.raises(OutputError, match=r"at most 1.0 MiB \(ulimit -f\)"):
        memfit.train(plan, wide(), out=tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()
