"""What guards a training on an accelerator: out of memory, limits, signals, resuming, host memory, and the ledger."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit import hardware
from memfit._torch import FakeTensor
from memfit.errors import MemoryLimitError, OutOfMemoryError
from memfit.hardware import out_of_memory
from memfit.ir import Levers, Plan, Region
from memfit.training.runs import checkpoint
from memfit.workload import Workload, rng_preserved
from tests.accelerators.steps import language_model, same, slow, state_of, weights

STEPS = 4


@functools.cache
def frontier_plan(kind: str) -> Plan:
    """Return a plan without any lever, with lower ones on its frontier."""
    options = {"numerics": "exact", "precisions": ["32-true"], "points": 4, "time_limit_seconds": 1}
    plan = memfit.plan(language_model(), budget="90%", device=kind, **options)  # type: ignore[arg-type]
    assert plan.levers == Levers(microbatch_size=plan.batch_size)
    return plan


class Bomb:
    """A loss function that asks for more than the accelerator has, in some of its calls."""

    def __init__(self, inner: Any, calls: set[int]) -> None:
        self.inner, self.calls, self.count = inner, calls, 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.count += not isinstance(next(model.parameters()), FakeTensor)  # of a capture, which memory is no matter of
        loss = self.inner(model, batch)
        if self.count in self.calls:
            place = next(model.parameters()).device
            torch.empty(2 * hardware.accelerators.memory_info(place)[1], dtype=torch.uint8, device=place)
        return loss


def trained(plan: Plan, workload: Workload, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    memfit.train(plan, workload, out=out, **{"steps": STEPS, **options})
    return state_of(workload)


def test_its_out_of_memory_error_is_known_by_its_type(place: torch.device) -> None:
    """Acc#1934: errors that were looked for by their text, and missed."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * hardware.accelerators.memory_info(place)[1], dtype=torch.uint8, device=place)
    found = out_of_memory(caught.value)
    assert found is not None and found.kind == "allocator" and found.requested_bytes


def test_a_step_that_runs_out_is_run_again_lower_and_nothing_is_lost(
    kind: str, place: torch.device, tmp_path: Path
) -> None:
    """PT#27600 (memory that the exception holds), HF#33281 (weights and random states), HF#25956 (the plan found)."""
    plan = frontier_plan(kind)
    expected = trained(plan, language_model(), tmp_path / "plain")
    workload = language_model()
    workload = dataclasses.replace(workload, loss_fn=Bomb(workload.loss_fn, {2}))
    before = hardware.accelerators.allocated_bytes(place)
    found = trained(plan, workload, tmp_path / "run")
    assert same(found, expected)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("kind") == "out of memory" or "out of memory" in str(line)]
    assert "ran its batch again under the plan of" in str(event) and "stayed allocated" not in str(event)
    saved = memfit.Plan.load(tmp_path / "run" / f"checkpoint-{STEPS}" / "plan.json")
    assert saved.levers != plan.levers and saved.predicted.peak_bytes < plan.predicted.peak_bytes
    del workload, found
    gc.collect()
    assert hardware.accelerators.allocated_bytes(place) - before < 2**20


def test_without_a_lower_plan_the_run_ends_with_a_checkpoint_and_goes_on(kind: str, tmp_path: Path) -> None:
    plan = replace(frontier_plan(kind), frontier=[])
    expected = trained(plan, language_model(), tmp_path / "plain")
    workload = language_model()
    bomb = dataclasses.replace(workload, loss_fn=Bomb(workload.loss_fn, {3}))
    with pytest.raises(OutOfMemoryError, match="Nothing was updated"):
        trained(plan, bomb, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("*.pickle")] == ["out-of-memory-3.pickle"]
    assert same(trained(plan, language_model(), tmp_path / "run", resume=True), expected)


def test_the_allocator_keeps_a_limit_and_says_what_is_held(kind: str, place: torch.device) -> None:
    plan, workload = frontier_plan(kind), language_model()
    hardware.accelerators.release_cache()
    limit_bytes = hardware.accelerators.reserved_bytes(place) + 3 * 2**20
    with memfit.apply(plan, workload, limit_bytes=limit_bytes) as step:
        with pytest.raises(MemoryLimitError, match=f"limit_bytes={limit_bytes}.*parameters") as caught:
            for _ in range(3):
                step(workload.batch)
    assert caught.value.by_category["parameters"] > 2**18 and caught.value.limit_bytes == limit_bytes
    gc.collect()
    big = torch.empty(16 * 2**20, dtype=torch.uint8, device=place)  # the limit is off again
    assert big.device == place
    with memfit.apply(plan, language_model(), limit_bytes=2**29) as step:
        step(workload.batch)


def test_under_a_limit_a_run_recovers_to_a_plan_that_keeps_it(kind: str, place: torch.device, tmp_path: Path) -> None:
    plan = frontier_plan(kind)
    expected = trained(plan, language_model(), tmp_path / "plain")
    gc.collect()
    hardware.accelerators.release_cache()
    room = min(point.peak_bytes for point in plan.frontier) + plan.predicted.peak_bytes
    limit_bytes = hardware.accelerators.reserved_bytes(place) + room // 2 + 2**19
    found = trained(plan, language_model(), tmp_path / "run", limit_bytes=limit_bytes)
    assert same(found, expected)
    assert memfit.Plan.load(tmp_path / "run" / "plan.json").levers.regions


def test_batches_are_loaded_ahead_into_pinned_memory_and_the_run_is_the_same(kind: str, tmp_path: Path) -> None:
    plan = frontier_plan(kind)
    runs = [trained(plan, language_model(), tmp_path / str(n), prefetch_batches=n) for n in (0, 2)]
    assert same(*runs)


def test_a_thread_writes_checkpoints_from_pinned_memory_and_they_are_the_same(
    kind: str, place: torch.device, tmp_path: Path
) -> None:
    plan, options = frontier_plan(kind), {"checkpoint_every": 2, "keep_checkpoints": 9}
    waits = trained(plan, language_model(), tmp_path / "waits", **options)
    goes_on = trained(plan, language_model(), tmp_path / "goes-on", async_checkpoints=True, **options)
    assert same(waits, goes_on)
    assert all(same(weights(tmp_path / "waits", n), weights(tmp_path / "goes-on", n)) for n in (0, 2, 4))
    given = torch.arange(6.0, device=place).view(2, 3).T
    copy = checkpoint.HostBuffers().copied({"file": {"x": given}})["file"]["x"]
    assert torch.equal(copy, given.cpu()) and copy.is_contiguous()
    assert copy.is_pinned() == hardware.accelerators.pins_memory(kind)


def test_offloaded_activations_and_optimizer_states_leave_the_same_training(kind: str, tmp_path: Path) -> None:
    plan = frontier_plan(kind)
    region = Region(("blocks.0",), offload=True)
    offloaded = replace(plan, levers=replace(plan.levers, regions=(region,)), host_budget_bytes=2**30)
    states = replace(plan, levers=replace(plan.levers, optimizer_state="offloaded"), host_budget_bytes=2**30)
    runs = [trained(p, language_model(), tmp_path / str(n)) for n, p in enumerate((plan, offloaded, states))]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


def test_offloaded_states_that_come_in_the_backward_pass_leave_the_same_training(kind: str, tmp_path: Path) -> None:
    make = functools.partial(language_model, max_grad_norm=None)
    plan = memfit.plan(make(), budget="1GiB", device=kind, numerics="exact", precisions=["32-true"], points=1)
    both = replace(plan.levers, update="in-backward", optimizer_state="offloaded")
    both_plan = replace(plan, levers=both, host_budget_bytes=2**30, frontier=[])
    assert same(trained(plan, make(), tmp_path / "plain"), trained(both_plan, make(), tmp_path / "both"))


def test_the_ledger_has_the_bytes_that_the_allocator_counted(kind: str, place: torch.device) -> None:
    """PT#25247, PT#29554: opaque memory."""
    plan, workload = frontier_plan(kind), language_model()
    gc.collect()
    with memfit.apply(plan, workload) as step:
        step(workload.batch)
        hardware.accelerators.reset_peaks(place)
        step(workload.batch)
        found = step.memory_summary()
    peaks = hardware.accelerators.peaks(place)
    assert peaks is not None and found.peak_bytes == peaks.allocated_bytes
    assert found.reserved_bytes == peaks.reserved_bytes and found.allocation_retries is not None
    assert sum(found.measured_bytes.values()) == found.peak_bytes
    parameters = sum(p.nbytes for p in workload.model.parameters())
    assert found.measured_bytes["parameters"] == parameters and found.measured_bytes["in the step"] > parameters


def test_an_accelerator_that_is_first_used_meanwhile_is_seeded_as_it_would_have_been(
    kind: str, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(4, device=place)
    torch.manual_seed(7)
    kinds = iter([None])
    monkeypatch.setattr(hardware.accelerators, "used_kind", lambda: next(kinds, kind))
    with rng_preserved():
        torch.manual_seed(0)
        torch.rand(3, device=place)
    assert torch.equal(torch.rand(4, device=place), expected)


def test_building_a_recipe_leaves_the_random_states_of_accelerators_alone(place: torch.device) -> None:
    torch.manual_seed(7)
    before = hardware.accelerators.rng_states(place.type)
    language_model()
    assert all(torch.equal(a, b) for a, b in zip(before, hardware.accelerators.rng_states(place.type), strict=True))


def test_random_numbers_drawn_there_go_on_after_a_resume(kind: str, place: torch.device, tmp_path: Path) -> None:
    """Dropout's masks are drawn by the accelerator's generator, whose state a checkpoint must hold."""
    plan = frontier_plan(kind)
    expected = trained(plan, language_model(), tmp_path / "whole")
    trained(plan, language_model(), tmp_path / "parts", steps=2)
    torch.empty(100, device=place).uniform_()  # the generator moves on meanwhile
    assert same(trained(plan, language_model(), tmp_path / "parts", resume=True), expected)
    saved = json.loads((tmp_path / "parts" / "checkpoint-2" / "training.json").read_text())
    assert kind in json.dumps(saved["rng"])


_MINE = """
import torch
from tests.accelerators.steps import slow

def workload():
    torch.manual_seed(1)  # of the masks that the training draws
    return slow()
"""


def ran(*line: str | Path, folder: Path) -> None:
    """Run a command to its good end."""
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.ci)], ids=["SIGKILL", "SIGTERM"]
)
def test_a_run_that_is_killed_goes_on_and_ends_bitwise_as_one_that_is_not(
    how: signal.Signals, kind: str, command: list[str], tmp_path: Path
) -> None:
    """plan → verify → train → kill → resume → report, by the command line."""
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    (tmp_path / "mine.py").write_text(_MINE)
    frontier_plan(kind).save(plan)
    slow_plan = memfit.Plan.load(plan)
    expected = trained(slow_plan, slow(), tmp_path / "plain")
    ran(*command, "verify", "mine.py:workload", "--plan", plan, folder=tmp_path)
    line = [*command, "train", "mine.py:workload", "--plan", str(plan), "--out", str(run)]
    line += ["--steps", str(STEPS), "--checkpoint-every", "1"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (run / "checkpoint-1" / "checkpoint.json").exists():
            time.sleep(0.01)
        os.kill(process.pid, how)
        process.wait()
    last = max(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*") if path.is_dir())
    assert process.returncode in (-how, 75) and last < STEPS
    ran(*line, "--resume", folder=tmp_path)
    found = weights(run, STEPS)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    ran(*command, "report", run, folder=tmp_path)
    assert (run / "report.html").stat().st_size > 10_000
