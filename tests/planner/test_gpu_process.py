"""Predictions for a GPU from a normal process, through the one with fake CUDA."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import hardware, planner
from memfit.errors import BudgetError
from memfit.levers import recomputes
from memfit.workload import Workload
from tests.models import cross_entropy, transformer
from tests.planner.fleet_searches import counted, mlp

pytestmark = pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here: nothing is sent")


def of(model: nn.Module, loss: Any) -> Workload:
    batch = {"x": torch.randn(4, 16), "y": torch.tensor([0, 2, 1, 0])}
    return Workload(model, batch, loss, torch.optim.AdamW(model.parameters()))


def trained(workload: Workload) -> Workload:
    for _ in range(2):
        workload.optimizer.zero_grad()
        cross_entropy(workload.model, workload.batch).backward()
        workload.optimizer.step()
    return workload


def test_user_code_of_many_kinds_runs() -> None:
    factor = 3

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 3)
            self.register_buffer("scale", torch.tensor(2.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.scale.item() == 2.5 and torch.backends.cudnn.enabled
            out: torch.Tensor = self.layer(x) * factor
            return out

    model = Local()
    model.register_forward_hook(lambda module, args, out: out * 2)
    module = types.ModuleType("memfit_workload_of_a_test")
    exec("def double(x):\n    return 2 * x\n", vars(module))
    sys.modules[module.__name__] = module
    workload = of(model, lambda model, batch: module.double(F.cross_entropy(model(batch["x"]), batch["y"])) * factor)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(workload.optimizer, 0.1, total_steps=10)
    told: list[tuple[str, int, int]] = []
    try:
        found = memfit.estimate(
            dataclasses.replace(trained(workload), scheduler=scheduler),
            device="rtx-3090",
            progress=lambda *stage: told.append(stage),
        )
    finally:
        del sys.modules[module.__name__]
    assert found.peak_bytes > 0 and found.peak_reserved_bytes is not None
    assert told and told[0] == ("capture", 0, 1)
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


@pytest.mark.ci  # `make test` has one of the command line: `cli/test_gpus.py`
def test_a_plan_is_made_for_a_gpu() -> None:
    workload = transformer(batch=64, tokens=64, dropout=0.0)
    budget_bytes = memfit.estimate(workload, device="rtx-3090").peak_upper_bytes - 2 * 2**20
    found = memfit.plan(workload, budget=budget_bytes, device="rtx-3090", numerics="exact", points=1)
    assert found.device == "rtx-3090" and recomputes(found.levers)
    assert found.predicted.peak_upper_bytes <= budget_bytes


@pytest.mark.ci
def test_a_script_with_its_own_classes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import torch, memfit, beside
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, beside.OUT)
    def forward(self, x):
        return beside.act(self.layer(x))
def loss(model, batch):
    assert torch.cuda.is_available()
    return model(batch).mean()
model = Net()
work = memfit.Workload(model, torch.randn(4, 16), loss, torch.optim.SGD(model.parameters(), lr=0.1))
print(memfit.estimate(work, device='a100-80gb').peak_bytes, torch.cuda.is_available())
""")
    (tmp_path / "beside.py").write_text("import torch\nOUT = 3\ndef act(x):\n    return torch.tanh(x)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, available = done.stdout.split()
    assert int(peak) > 0 and available == "False"


def call(*calls: dict[str, Any], told: Any = lambda *_: None) -> list[int]:
    return planner.call_elsewhere(counted, mlp(2), calls, told, sizes=[])


def test_calls_at_once_reply_in_their_order_and_tell_their_progress_as_one() -> None:
    told: list[tuple[str, int, int]] = []
    calls = [{"steps": 3, "fails": False}, {"steps": 5, "fails": False}]
    assert call(*calls, told=lambda *stage: told.append(stage)) == [3, 5]
    done = [count for _, count, _ in told]
    assert {stage for stage, _, _ in told} == {"count"} and done == sorted(done) and told[-1] == ("count", 8, 8)
    with pytest.raises(BudgetError, match="steps=5"):  # one fails among others
        call(calls[0], {"steps": 5, "fails": True})
