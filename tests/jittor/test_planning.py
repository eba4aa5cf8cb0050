from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jittor as jt
import numpy as np
import pytest

import memfit
from memfit import jittor as mj
from memfit.errors import InfeasibleError, PlanMismatchError, UsageError, WorkloadError
from memfit.jittor import Step, Workload, apply, load_workload, plan, seed
from memfit.jittor.planning import Profile, ProfiledBlock, StepCost, problem_of
from memfit.jittor.variables import named_variables
from memfit.solver import Solver
from tests.jittor.models import mlp
from tests.jittor.workloads import unet

ROOT = Path(__file__).parents[2]


def measured(step: Step) -> mj.memory.Measurement:
    batch = step.workload.batch
    step(batch)  # compiles
    with mj.memory.measure() as found:
        step(batch)
    return found


def test_plans_of_a_unet_meet_their_budgets_measured() -> None:
    """80 and 50 % of the plain peak; the weights are as they were after planning."""
    workload = unet()
    plain = measured(Step(workload)).peak_bytes
    batch = workload.batch
    for share in (0.8, 0.5):
        before = {name: v.numpy().copy() for name, v in named_variables(workload.model).items()}
        found = plan(workload, budget=int(share * plain), points=2, time_limit_seconds=2.0)
        assert all(np.array_equal(before[n], v.numpy()) for n, v in named_variables(workload.model).items())
        assert found.predicted.peak_bytes <= found.budget_bytes
        step = apply(found, workload)
        # Jittor adds up the losses of 131,072 pixels one by one in float32: microbatches round differently, by 1e-5.
        assert step.gradients(batch)[0] == pytest.approx(Step(workload).gradients(batch)[0], rel=1e-4)
        peak = measured(step).peak_bytes
        levers = f"{len(found.levers.regions)} regions, microbatches of {found.levers.microbatch_size}"
        print(f"{share:.0%} of {plain / 2**20:.0f} MiB: {peak / plain:.1%} measured, {levers}")
        assert peak <= found.budget_bytes


def test_where_microbatches_would_change_the_training_modules_are_recomputed() -> None:
    """BatchNorm normalises over the batch."""
    workload = unet(jt.nn.BatchNorm)
    plain = measured(Step(workload)).peak_bytes
    found = plan(workload, budget=int(0.7 * plain), points=1, time_limit_seconds=2.0)
    peak = measured(apply(found, workload)).peak_bytes
    print(f"70% of {plain / 2**20:.0f} MiB: {peak / plain:.1%} measured, {len(found.levers.regions)} regions")
    assert found.levers.regions and found.levers.microbatch_size == found.batch_size
    assert peak <= found.budget_bytes


def test_what_cannot_fit_says_what_does() -> None:
    with pytest.raises(InfeasibleError, match="raise budget=") as caught:
        plan(unet(size=32), budget="1MiB", points=1, time_limit_seconds=1.0)
    assert caught.value.lowest_peak_bytes > 2**20
    with pytest.raises(InfeasibleError):
        plan(unet(size=32), budget="6MiB", numerics="exact", points=1, time_limit_seconds=1.0)


def test_modules_that_cannot_be_recomputed_are_left_out() -> None:
    class Reading(jt.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(2, 64)

        def execute(self, x: Any) -> Any:
            assert x.shape[0] > 0
            return self.inner(x) * (1.0 if x.sum().item() < 1e30 else 0.0)

    seed(0)
    model = jt.nn.Sequential(Reading(), *mlp(8, 64).layers.values())
    batch = jt.randn(4096, 64).stop_grad()
    workload = Workload(model, batch, lambda m, b: m(b).sqr().mean(), jt.nn.SGD(model.parameters(), 0.1))
    plain = measured(Step(workload)).peak_bytes
    found = plan(workload, budget=int(0.5 * plain), points=1, time_limit_seconds=2.0)
    assert not any("0" in region.modules for region in found.levers.regions)
    assert measured(apply(found, workload)).peak_bytes <= found.budget_bytes


def test_a_plain_step_that_fits_stays_and_its_plan_is_a_file_for_its_workload(tmp_path: Path) -> None:
    found = plan(unet(size=32), budget="2GiB", points=1, time_limit_seconds=1.0)
    assert found.levers.regions == () and found.levers.microbatch_size == found.batch_size
    assert found.numerics == "exact" and found.torch_version.startswith("jittor")
    found.save(tmp_path / "plan.json")
    assert memfit.Plan.load(tmp_path / "plan.json") == found
    with pytest.raises(PlanMismatchError, match="another|not for this"):
        apply(found, unet(size=64))


@pytest.mark.parametrize("wrong", [{"numerics": "loose"}, {"precisions": ("bf16-mixed",)}, {"precisions": ()}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        plan(unet(size=16), budget="1GiB", **wrong)


def test_the_problem_is_that_of_a_chain_by_hand() -> None:
    """Three blocks that keep 10, of which 2 are the result, and a plain peak of 35 at 5 a block."""
    blocks = [ProfiledBlock(name, i, None, 10, 2, 1.0) for i, name in enumerate("abc")]
    profiled = Profile(1, blocks, [[0, 1, 2]])
    problem = problem_of(profiled, 1, 1, StepCost(35.0, 0.0, 9.0, 0.0), [[0], [1], [0, 1]])
    peaks = {tuple(x): int(problem.row_peaks(np.array(x)).max()) for x in ([0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1])}
    assert peaks == {(0, 0, 0): 35, (1, 0, 0): 27, (1, 1, 0): 19, (0, 0, 1): 25}
    assert [set(c) for c in problem.conflicts] in ([{0, 2}, {1, 2}], [{1, 2}, {0, 2}])
    fastest = Solver(problem).fastest(30)
    assert fastest is not None and fastest.x.tolist() in ([1, 0, 0], [0, 1, 0]) and fastest.seconds == 10.0


def test_workloads_are_named_as_for_pytorch() -> None:
    assert load_workload("tests.jittor.workloads:unet").name == "U-Net"
    with pytest.raises(WorkloadError, match="int, not a memfit.jittor.Workload"):
        load_workload("tests.jittor.workloads:wrong")


def test_the_command_line_plans_for_jittor(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = f"-m memfit plan {ROOT}/tests/jittor/workloads.py:unet --framework jittor --budget 100MiB --points 1"
    options = ["-o", str(tmp_path / "plan.json"), "--json"]
    given = [sys.executable, *command.split(), *options]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout[done.stdout.index("{") :])
    assert said["predicted"]["peak_bytes"] <= 100 * 2**20 < said["plain"]["peak_bytes"]
    assert memfit.Plan.load(tmp_path / "plan.json").budget_bytes == 100 * 2**20
