"""`torchrun -m memfit train`: ranks that are killed, told to stop, or given different plans."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

import memfit
from memfit.errors import PlanMismatchError, UsageError
from memfit.ir import Sharding
from tests import warm
from tests.processes import on_ranks
from tests.ranks.killed import DEATHS
from tests.ranks.trainings import DDP, HYBRID, ZERO3, is_same, plan_for, workload
from tests.training.conftest import lines_of

STEPS = 8


def torchrun(
    sharding: Sharding, folder: Path, *flags: str, deaths: list[Any] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start ranks as forks of the warm server, under torchrun."""
    folder.mkdir(exist_ok=True)
    (folder / "deaths").write_text(json.dumps(deaths or []))
    plan_for(workload(), sharding).save(folder / "plan.json")
    given = {"steps": STEPS, "checkpoint-every": 2, "evaluate-every": 3, **options}
    line = [
        *("train", "tests.ranks.killed:workload", "--plan", str(folder / "plan.json")),
        *("--out", str(folder / "out"), "--resume", *flags),
        *(word for name, value in given.items() for word in (f"--{name}", str(value))),
    ]
    restarts = ["--max-restarts", str(len(deaths or []))]
    return ranks(line, sharding.world_size, *restarts, **{DEATHS: str(folder / "deaths")})


def ranks(line: list[str], number: int, *options: str, **environment: str) -> subprocess.Popen[str]:
    """Start a memfit command on ranks, under torchrun."""
    return subprocess.Popen(
        [
            *warm.command("-m", "torch.distributed.run"),
            *("--nproc-per-node", str(number), *options, "--no-python"),
            *warm.command("-m", "memfit", *line),
        ],
        cwd=warm.ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str], status: int | None = 0) -> str:
    try:
        text, _ = process.communicate(timeout=300)
    finally:
        process.kill()  # what hangs would be waited for by all that follows
    assert status is None or process.returncode == status, text
    return text


def left(out: Path, steps: int) -> dict[str, Any]:
    """Return what the last checkpoint of a run holds, by file."""
    files = sorted((out / f"checkpoint-{steps}").iterdir())
    texts = {path.name: path.read_text() for path in files if path.suffix == ".json"}
    texts.pop("checkpoint.json")  # it has sums of headers, in which safetensors writes metadata in any order
    return {**texts, **{path.name: load_file(path) for path in files if path.suffix == ".safetensors"}}


def lines(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "peak_bytes"} for line in lines_of(out)]


def check_killed(
    sharding: Sharding, deaths: list[Any], folder: Path, *flags: str, steps: int = STEPS, unused: int = 0
) -> None:
    """Check that ranks that are killed end as others do, and nothing is lost or doubled.

    Args:
        flags: Of the ranks that are killed.
        unused: Deaths that the run may end before.
    """
    end(torchrun(sharding, folder / "undisturbed", steps=steps))
    text = end(torchrun(sharding, folder / "killed", *flags, deaths=deaths, steps=steps))
    assert len(json.loads((folder / "killed" / "deaths").read_text())) <= unused, text
    outs = [folder / name / "out" for name in ("undisturbed", "killed")]
    expected, found = (left(out, steps) for out in outs)
    assert is_same(expected, found), [name for name in expected if not is_same(expected[name], found[name])]
    assert lines(outs[0]) == lines(outs[1])
    assert [path.name for path in outs[1].iterdir() if path.name.endswith(".tmp") or path.name == "run.lock"] == []
    assert json.loads((outs[1] / "run.json").read_text())["status"] == "finished"


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_that_are_killed_end_bitwise_as_they_would_have(tmp_path: Path) -> None:
    check_killed(ZERO3, [[0, "before the rename", 2], [1, "in a step", 5]], tmp_path)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "hybrid"])
def test_ranks_that_are_killed_at_many_places_end_bitwise_as_they_would_have(name: str, tmp_path: Path) -> None:
    sharding = {"ddp": DDP, "hybrid": HYBRID}[name]
    chance = random.Random(name)
    last = sharding.world_size - 1
    deaths: list[Any] = [[last, "before the update", 3], [0, "before the sums", 2], [last, "in an evaluation", 1]]
    deaths += [[chance.randint(0, last), "at a time", chance.uniform(0.1, 2.0)] for _ in range(2)]
    check_killed(sharding, deaths, tmp_path, steps=60, unused=3)


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_that_are_killed_while_threads_write_end_bitwise_as_they_would_have(tmp_path: Path) -> None:
    deaths = [[1, "while a thread writes", 4], [0, "before the rename", 2], [1, "while a thread writes", 3]]
    check_killed(ZERO3, deaths, tmp_path, "--async-checkpoints")


@pytest.mark.ci
def test_sigterm_stops_all_ranks_with_a_checkpoint_from_which_they_go_on(tmp_path: Path) -> None:
    process = torchrun(ZERO3, tmp_path / "stopped", steps=10**6)
    metrics = tmp_path / "stopped" / "out" / "metrics.jsonl"
    ends = time.monotonic() + 120
    while time.monotonic() < ends and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text = end(process, None)
    assert process.returncode != 0 and "stopping after this step" in text
    run = json.loads((tmp_path / "stopped" / "out" / "run.json").read_text())
    assert run["error"].startswith("interrupted after step"), text
    assert (tmp_path / "stopped" / "out" / f"checkpoint-{run['steps']}").is_dir()


def with_plans(rank: int, out: Path) -> Iterator[Any]:
    """Each rank has a plan of its own; and ranks ask for what does not go with sharding."""
    given = workload()
    other = plan_for(given, replace(ZERO3, kept=("blocks.1",)) if rank else ZERO3)
    texts = []
    for kind, verb in (
        (PlanMismatchError, lambda: memfit.train(other, given, out=out, steps=1)),
        (PlanMismatchError, lambda: memfit.apply(other, given)),
        (UsageError, lambda: memfit.train(plan_for(given, ZERO3), given, out=out, steps=1, adaptive=True)),
        (UsageError, lambda: memfit.train(plan_for(given, HYBRID), given, out=out, steps=1)),
    ):
        with pytest.raises(kind) as e:
            verb()
        texts.append(str(e.value))
    yield texts


def test_ranks_with_different_plans_say_so_on_all(tmp_path: Path) -> None:
    first, second = (rank[0] for rank in on_ranks(2, with_plans, tmp_path / "out"))
    assert first == second
    expected = ["have different plans", "have different plans", "adaptive=True"]
    expected.append("the plan is for world_size=4, and there are 2 ranks")
    assert all(part in text for part, text in zip(expected, first, strict=True)), first
    assert not (tmp_path / "out").exists()


def in_a_group(rank: int, out: Path) -> Iterator[Any]:
    """Train in a group that was joined before, in a folder without a checkpoint, and then go on."""
    given = workload()
    record = memfit.train(plan_for(given, ZERO3), given, out=out, steps=2, resume=True)
    given = workload()
    again = memfit.train(plan_for(given, DDP), given, out=out, steps=3, resume=True)
    # The budget of these plans is of nothing real.
    yield record.steps, again.steps, [event.kind for event in again.events if event.kind != "over budget"]


@pytest.mark.ci
def test_a_group_that_was_joined_before_trains_too(tmp_path: Path) -> None:
    for found in on_ranks(2, in_a_group, tmp_path):
        assert found == [(2, 3, ["another plan"])]
    given = workload()
    record = memfit.train(plan_for(given, None), given, out=tmp_path, steps=4, resume=True)
    assert record.steps == 4


def under_torchrun(*arguments: str) -> tuple[int, str]:
    """Run a memfit command on two ranks; return its status and what it wrote."""
    process = ranks(list(arguments), 2)
    text = end(process, None)
    return process.returncode, text


@pytest.mark.ci
@pytest.mark.slow
def test_a_plan_that_does_not_hold_fails_on_all_ranks_and_the_first_says_why(tmp_path: Path) -> None:
    plan_for(workload(), DDP).save(tmp_path / "plan.json")  # of made-up predictions
    name = "tests.ranks.trainings:workload"
    status, text = under_torchrun("verify", name, "--plan", str(tmp_path / "plan.json"), "--steps", "0")
    assert status != 0 and text.count("Plain step and planned step") == 1, text
    assert "the plan states predicted.peak_bytes" in " ".join(text.split())
    assert text.count("exitcode  : 4") == 2 or "exitcode  : -15" in text, text


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_plan_and_verify_and_train_by_one_command(tmp_path: Path) -> None:
    name, out = "tests.ranks.trainings:workload", str(tmp_path / "out")
    train = ("train", name, "--budget", "90MiB", "--out", out)
    status, text = under_torchrun(*train, "--steps", "2", "--compare", "2")
    assert status == 0, text
    plan = memfit.Plan.load(tmp_path / "out" / "plan.json")
    assert plan.levers.sharding is not None and plan.levers.sharding.world_size == 2
    written = memfit.write_report(out)
    assert written.stat().st_size > 50_000
    status, text = under_torchrun(*train, "--steps", "3", "--resume")  # under the plan that the folder holds
    assert status == 0 and "frontier" not in text, text
    assert lines(tmp_path / "out")[-1]["step"] == 3
    status, text = under_torchrun("verify", name, "--plan", str(tmp_path / "out" / "plan.json"), "--steps", "2")
    assert status == 0 and text.count("Plain and planned step") == 1, text
    status, text = under_torchrun("train", name, "--budget", "1000", "--out", out, "--steps", "3", "--overwrite")
    assert status != 0 and "Does not fit" in text, text
