"""memfit under a loop of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit import integrations
from memfit.capture import real_copy
from memfit.errors import InfeasibleError, UsageError
from memfit.recomputation import is_checkpointed
from memfit.training import Step
from memfit.workload import Workload
from tests.recomputation.steps import Chain

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState

FittedLoop = integrations.accelerate.FittedLoop


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = torch.nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])
    return loss


def workload() -> Workload:
    torch.manual_seed(0)
    model = Chain(dim=32, blocks=2)
    model.eval()  # no dropout, so that microbatches are the batch
    batch = {"x": torch.randn(32, 32), "y": torch.randint(0, 3, (32,))}
    return Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), name="chain")


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.ci)])
def test_a_loop_trains_as_the_whole_batch_does(precision: Any) -> None:
    mine = workload()
    options = {"numerics": "reduced", "precisions": [precision], "points": 1, "time_limit_seconds": 0.5}
    with pytest.raises(InfeasibleError) as caught:
        FittedLoop(mine, budget="1B", **options)
    fitted = FittedLoop(mine, budget=caught.value.lowest_peak_bytes, **options)
    assert is_checkpointed(mine.model) == bool(fitted.plan.levers.regions)
    assert precision != "32-true" or fitted.microbatch_size < 32
    plain = real_copy(workload())
    for _ in range(2):
        Step(plain)(plain.batch)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = fitted.accelerator(cpu=True)
    data = DataLoader(TensorDataset(mine.batch["x"], mine.batch["y"]), batch_size=fitted.microbatch_size)
    model, optimizer, loader = accelerator.prepare(mine.model, mine.optimizer, data)
    updates = 0
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model, {"x": x, "y": y}))
                updates += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
    assert updates == 2 and accelerator.mixed_precision == ("no" if precision == "32-true" else "bf16")
    fitted.close()
    assert not is_checkpointed(mine.model)
    tolerance = 1e-5 if precision == "32-true" else 1e-2
    for mine_p, plain_p in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine_p, plain_p, rtol=tolerance, atol=tolerance)


def forget() -> None:
    for state in (AcceleratorState, PartialState):
        state._reset_state()


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be one of two processes that a launcher has started, of which the other is not there."""
    forget()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    yield
    forget()


def test_processes_that_an_accelerator_would_not_share_the_step_with_are_refused(
    request: pytest.FixtureRequest,
) -> None:
    """Without `cpu=True` accelerate has each process of a CPU train alone, in the arguments of either call."""
    fitted = FittedLoop(workload(), budget="8GiB", numerics="exact", points=1)
    request.getfixturevalue("_launched")
    with pytest.raises(UsageError, match=r"a launcher started 2\. .*FittedLoop\(arguments=\{'cpu': True\}\)"):
        FittedLoop(workload(), budget="8GiB")
    assert not PartialState._shared_state  # so that the next one may be for both
    with pytest.raises(UsageError, match="would train alone"):
        fitted.accelerator()


@pytest.mark.usefixtures("_launched")
def test_a_plan_for_one_process_is_refused_where_a_launcher_started_two(tmp_path: Path) -> None:
    mine = workload()
    made = memfit.plan(mine, budget="8GiB", numerics="exact", points=1, world_size=1)
    for verb in (lambda: memfit.apply(made, mine), lambda: memfit.train(made, mine, steps=1, out=tmp_path / "run")):
        with pytest.raises(UsageError, match=r"the plan is for one process, and a launcher started 2.*world_size=2"):
            verb()
    assert not (tmp_path / "run").exists()
