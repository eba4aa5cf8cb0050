"""What a run takes of the host, its memory and its disk, is counted before it begins, and watched while it runs."""

from __future__ import annotations

import json
import mmap
import re
import resource
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.errors import BudgetError, MemoryLimitError, OutputError
from memfit.hardware import own_bytes
from memfit.ir import Mode, Plan, Region, Sharding
from memfit.levers import host_bytes_of
from memfit.training import HostWatch, RunOptions, Step, Trainer, check_disk, check_host, host_needs
from memfit.workload import Workload, tensors_of
from tests.models import BUILDERS, transformer
from tests.training.conftest import make_plan, make_workload

GIB = 2**30
OUT = Path()


def plan_of(workload: memfit.Workload) -> Plan:
    return memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1)


def sharded(plan: Plan, mode: Mode) -> Plan:
    """Return a plan for four ranks, in two copies of the state where it is sharded."""
    sharding = Sharding(world_size=4, mode=mode, replicas=2 if mode == "zero3" else 1)
    return replace(plan, levers=replace(plan.levers, sharding=sharding))


def free(monkeypatch: pytest.MonkeyPatch, left: Callable[[], int]) -> None:
    """Let the host have so much left."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=left(), total=64 * GIB))


def test_what_a_run_needs_is_what_is_not_there_yet() -> None:
    workload = BUILDERS["convnet"]()
    plan = plan_of(workload)
    batch_bytes = sum(t.nbytes for t in tensors_of(workload.batch))
    buffers = sum(b.nbytes for b in workload.model.buffers())
    there = sum(p.nbytes for p in workload.model.parameters()) + buffers + batch_bytes
    assert host_needs(plan, workload, {}, RunOptions(out=OUT, prefetch_batches=3, recover=True)) == {
        "steps of the plan": plan.predicted.peak_upper_bytes - there,
        "prefetch_batches=3": 4 * batch_bytes,
        "recover=True": buffers,
    }
    name, writing = "async_checkpoints=True", RunOptions(out=OUT, async_checkpoints=True)
    copies = host_needs(plan, workload, {}, writing)[name]
    assert copies == there - batch_bytes + plan.plain.by_category["optimizer state"]
    assert host_needs(sharded(plan, "ddp"), workload, {}, writing)[name] == copies
    parts = host_needs(sharded(plan, "zero3"), workload, {}, writing)[name]
    assert parts == -(-copies // 2)
    before = host_needs(plan, workload, {})["steps of the plan"]
    Step(workload)(workload.batch)
    state = sum(t.nbytes for values in workload.optimizer.state.values() for t in tensors_of(values))
    assert host_needs(plan, workload, {}) == {"steps of the plan": before - state} and state > 0


def test_offloaded_activations_and_what_checkpoints_copy_count() -> None:
    workload = BUILDERS["transformer"]()
    plan = plan_of(workload)
    levers = replace(plan.levers, regions=(Region(("blocks.0",), offload=True),))
    offloading = replace(plan, levers=levers, host_budget_bytes=5 * GIB)
    assert host_needs(offloading, workload, host_bytes_of(offloading))["activation offload"] == 5 * GIB
    assert host_bytes_of(replace(plan, host_budget_bytes=GIB)) == {}
    writing = "writing checkpoints"
    assert writing not in host_needs(plan, workload, {})  # contiguous tensors on the host are written as they are
    model = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    turned = memfit.Workload(
        model, torch.zeros(1, 4, 8, 8), BUILDERS["convnet"]().loss_fn, torch.optim.SGD(model.parameters())
    )
    assert host_needs(plan, turned, {})[writing] == model.weight.nbytes


def test_a_run_that_needs_too_much_is_refused_by_argument_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = BUILDERS["transformer"]()
    plan, out = plan_of(workload), tmp_path / "run"
    with pytest.raises(
        BudgetError,
        match=r"more of the host's memory.*steps of the plan: .*prefetch_batches=8.*host_budget=1000 allows",
    ):
        memfit.train(plan, workload, out=out, steps=1, prefetch_batches=8, host_budget=1000)
    with pytest.raises(BudgetError, match=r"async_checkpoints=True: .*Leave out async_checkpoints=, lower prefetch_"):
        memfit.train(plan, workload, out=out, steps=1, checkpoint_every=1, async_checkpoints=True, host_budget=1000)
    free(monkeypatch, lambda: 2000)
    with pytest.raises(BudgetError, match=r"the host has 2\.0 KiB free, within the limits of control groups"):
        memfit.train(plan, workload, out=out, steps=1, host_budget="1GiB")
    with pytest.raises(BudgetError, match="host_budget='much'"):
        memfit.train(plan, workload, out=out, steps=1, host_budget="much")
    assert not out.exists() and workload.optimizer.state == {}
    levers = replace(plan.levers, regions=(Region(("blocks.0",), offload=True),))
    with pytest.raises(BudgetError, match="activation offload: 1.0 GiB"):
        memfit.apply(replace(plan, levers=levers, host_budget_bytes=GIB), workload)
    free(monkeypatch, lambda: GIB)
    check_host({"steps of the plan": GIB}, None)
    with pytest.raises(BudgetError):
        check_host({"steps of the plan": GIB, "recover=True": 1}, None)


@pytest.mark.parametrize("what", [pytest.param("the host is full", marks=pytest.mark.ci), "the process grows"])
@pytest.mark.ci
def test_a_run_that_takes_too_much_stops_with_a_checkpoint_that_is_gone_on_from(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostWatch, "check_seconds", 0.0)
    workload, resumed, whole = (transformer(layers=1, dim=16) for _ in range(3))
    plan = plan_of(workload)
    lines: list[dict[str, Any]] = []
    options: dict[str, Any] = {"host_budget": "2GiB"} if what == "the process grows" else {}
    if options:
        held = lambda process: SimpleNamespace(rss=(10 if len(lines) < 3 else 14) * GIB, shared=0)  # noqa: E731
        monkeypatch.setattr(psutil.Process, "memory_info", held)
    else:
        free(monkeypatch, lambda: GIB if len(lines) < 3 else 2**20)
    torch.manual_seed(0)
    with pytest.raises(MemoryLimitError, match=r"stops after step 3.*can be resumed") as caught:
        memfit.train(plan, workload, out=tmp_path / "run", steps=6, log=lines.append, **options)
    assert caught.value.where == "between two steps" and "checkpoint-3" in caught.value.__notes__[0]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    memfit.train(plan, resumed, out=tmp_path / "run", steps=6, resume=True)
    torch.manual_seed(0)
    memfit.train(plan, whole, out=tmp_path / "whole", steps=6)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_the_host_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    watch = HostWatch(Step(BUILDERS["twice"]()), None)
    free(monkeypatch, lambda: looks.append(1) or GIB)
    for _ in range(1000):
        watch.check()
    assert len(looks) == 1


def test_what_the_process_holds_rises_with_what_it_takes() -> None:
    """Mapped anew: an allocator may have as much left from before, and the process then takes nothing."""
    with mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        before = own_bytes()
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert 0.9 * len(taken) < own_bytes() - before < 1.5 * len(taken)


# The disk


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
    check(monkeypatch, plan, tmp_path / "run", checkpoints * EACH + 2**24 + 2**16, **options)
    with pytest.raises(OutputError, match="free, and the run needs") as caught:
        check(monkeypatch, plan, tmp_path / "run", checkpoints * EACH + 2**24 - 2**16, **options)
    assert re.search(rf": {checkpoints} checkpoints? of 12", str(caught.value))
    assert "keep_checkpoints=" in str(caught.value) and not (tmp_path / "run").exists()


def test_checkpoints_that_are_there_make_room_and_a_disk_of_no_size_is_not_believed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, plan, tmp_path, 0, total=0)
    memfit.train(plan, wide(), out=tmp_path, steps=1)
    there = sum(f.stat().st_size for f in (tmp_path / "checkpoint-1").iterdir())
    assert EACH < there < EACH + 2**16
    check(monkeypatch, plan, tmp_path, 2**24 + 2**16)


def test_a_small_disk_is_noticed_before_the_first_step(plan: Plan, small_disk: Path) -> None:
    out = small_disk / "run"
    assert memfit.train(plan, wide(), out=out, steps=2).steps == 2
    with pytest.raises(OutputError, match="has 2[0-9.]+ MiB free, and the run needs 52"):
        memfit.train(plan, wide(), out=small_disk / "other", steps=2, checkpoint_every=1)
    assert not (small_disk / "other").exists()
    memfit.train(plan, wide(), out=out, steps=2, overwrite=True)


def test_a_disk_without_any_room_is_noticed_when_the_folder_is_taken(small_disk: Path) -> None:
    workload = make_workload()
    trainer = Trainer(Step(workload), make_plan(workload), RunOptions(out=small_disk / "run", steps=1))
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
