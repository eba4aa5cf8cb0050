"""Predictions for a GPU from a normal process, through the one with fake CUDA."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.devices import fake_cuda
from memfit.errors import CaptureError, InfeasibleError, WorkloadError
from memfit.ir.plan import recomputes
from memfit.pipeline import remote
from memfit.pipeline.remote import call
from memfit.workload import Workload, tensors_of
from tests.models import cross_entropy, tied, transformer

pytestmark = pytest.mark.skipif(fake_cuda.has_gpu(), reason="a GPU is here: nothing is sent")


def silent(stage: str, done: int, total: int) -> None:
    """Hear nothing."""


def of(model: nn.Module, loss: Any = cross_entropy, **options: Any) -> Workload:
    batch = {"x": torch.randn(4, 16), "y": torch.tensor([0, 2, 1, 0])}
    return Workload(model, batch, loss, torch.optim.AdamW(model.parameters(), **options))


def trained(workload: Workload, steps: int = 2) -> Workload:
    for _ in range(steps):
        workload.optimizer.zero_grad()
        cross_entropy(workload.model, workload.batch).backward()
        workload.optimizer.step()
    return workload


def described(workload: Workload, progress: Any, **options: Any) -> dict[str, Any]:
    """What the other process received: run there."""
    model, optimizer = workload.model, workload.optimizer
    return {
        "parameters": [(type(p).__name__, str(p.device), tuple(p.shape)) for p in model.parameters()],
        "held": [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()],
        "storages": len({t.untyped_storage()._cdata for t in [*model.parameters(), *tensors_of(workload.batch)]}),
        "steps": [float(s["step"]) for s in optimizer.state.values()],
        "dtype": str(torch.get_default_dtype()),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "options": options,
        "loaded": fake_cuda.is_loaded(),
    }


def seen_by_user_code(workload: Workload, progress: Any) -> Any:
    """Call the workload's loss function, and tell about it while user code prints."""
    for i in range(3):
        print("the user prints", flush=True)
        sys.stderr.write("and complains\n")
        progress("counting", i, 3)
    return workload.loss_fn(workload.model, workload.batch)


def raises(workload: Workload, progress: Any, kind: str) -> Any:
    """Fail in some way."""
    if kind == "infeasible":
        raise InfeasibleError("no plan", budget_bytes=1, lowest_peak_bytes=2, where="here", proven=True)
    if kind == "bug":
        raise ZeroDivisionError("oops")
    os._exit(9)


def test_what_is_received() -> None:
    workload = trained(transformer(), 1)
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        found = call(described, workload, {"some": [1, Path("a")]}, silent)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(True)
    parameters = list(workload.model.parameters())
    assert [shape for _, _, shape in found["parameters"]] == [tuple(p.shape) for p in parameters]
    assert {device for _, device, _ in found["parameters"]} == {"cpu"} and found["held"]
    assert found["storages"] == len(parameters) + 2 and found["steps"] == [1.0] * len(parameters)
    assert (found["dtype"], found["flash"], found["loaded"]) == ("torch.float64", False, True)
    assert found["options"] == {"some": [1, Path("a")]}


def test_the_request_is_small() -> None:
    large = of(nn.Sequential(nn.Linear(16, 1 << 20), nn.Linear(1 << 20, 3)))
    large = dataclasses.replace(large, batch={**large.batch, "image": torch.zeros(4, 1 << 20)})
    assert len(remote._request(described, large, {}, {})) < 50_000


def test_tied_weights_and_views_arrive_as_one() -> None:
    workload = tied()
    both = torch.arange(104).view(4, 26)
    workload = dataclasses.replace(workload, batch={"x": both[:, :12], "y": both[:, 13:25]})
    found = call(described, workload, {}, silent)
    assert found["storages"] == len(list(workload.model.parameters())) + 1


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


def test_prints_and_progress_do_not_mix(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, int, int]] = []
    loss = lambda model, batch: {"returned": "as it is"}  # noqa: E731
    found = call(seen_by_user_code, of(nn.Linear(16, 3), loss), {}, lambda *stage: told.append(stage))
    assert found == {"returned": "as it is"}
    assert told == [("counting", i, 3) for i in range(3)]
    out, err = capfd.readouterr()
    assert out == "" and err.count("the user prints") == err.count("and complains") == 3


def test_errors_arrive_with_what_they_say() -> None:
    with pytest.raises(InfeasibleError, match="no plan") as caught:
        call(raises, of(nn.Linear(16, 3)), {"kind": "infeasible"}, silent)
    assert (caught.value.budget_bytes, caught.value.lowest_peak_bytes, caught.value.proven) == (1, 2, True)


@pytest.mark.parametrize(
    ("kind", "message"), [("bug", "ZeroDivisionError: oops"), ("death", "ended without an answer, status 9")]
)
def test_other_failures_are_capture_errors(kind: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        call(raises, of(nn.Linear(16, 3)), {"kind": kind}, silent)


def test_a_plan_is_made_for_a_gpu() -> None:
    workload = transformer(batch=64, tokens=64, dropout=0.0)
    budget_bytes = memfit.estimate(workload, device="rtx-3090").peak_upper_bytes - 2 * 2**20
    found = memfit.plan(workload, budget=budget_bytes, device="rtx-3090", numerics="exact")
    assert found.device == "rtx-3090" and recomputes(found.levers)
    assert found.predicted.peak_upper_bytes <= budget_bytes


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: dataclasses.replace(w, loss_fn=_locked()), "can't be sent.*cannot pickle '_thread.lock'"),
    ],
)
def test_what_can_not_be_sent_is_named(spoil: Callable[[Workload], Workload], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        call(described, spoil(of(nn.Linear(16, 3))), {}, silent)


def _locked() -> Callable[..., Any]:
    import threading

    lock = threading.Lock()
    return lambda model, batch: lock


def test_a_script_with_its_own_classes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, memfit, beside\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(16, beside.OUT)\n"
        "    def forward(self, x):\n"
        "        return beside.act(self.layer(x))\n"
        "def loss(model, batch):\n"
        "    assert torch.cuda.is_available()\n"
        "    return model(batch).mean()\n"
        "model = Net()\n"
        "work = memfit.Workload(model, torch.randn(4, 16), loss, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "print(memfit.estimate(work, device='a100-80gb').peak_bytes, torch.cuda.is_available())\n"
    )
    (tmp_path / "beside.py").write_text("import torch\nOUT = 3\ndef act(x):\n    return torch.tanh(x)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, available = done.stdout.split()
    assert int(peak) > 0 and available == "False"
