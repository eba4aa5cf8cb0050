"""Workloads that travel to another process."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.transport import packed
from memfit.errors import WorkloadError
from memfit.fake_gpu import process, shim
from memfit.workload import Workload, tensors_of
from tests.models import cross_entropy, tied, transformer

pytestmark = pytest.mark.skipif(shim.has_gpu(), reason="a GPU is here: nothing is sent")


def silent(stage: str, done: int, total: int) -> None:
    """Hear nothing."""


def of(model: nn.Module, loss: Any = cross_entropy) -> Workload:
    batch = {"x": torch.randn(4, 16), "y": torch.tensor([0, 2, 1, 0])}
    return Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1))


def described(workload: Workload, progress: Any, **options: Any) -> dict[str, Any]:
    """Describe the workload, in the process that received it."""
    model, optimizer = workload.model, workload.optimizer
    return {
        "parameters": [(type(p).__name__, str(p.device), tuple(p.shape)) for p in model.parameters()],
        "held": [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()],
        "storages": len({t.untyped_storage()._cdata for t in [*model.parameters(), *tensors_of(workload.batch)]}),
        "steps": [float(s["step"]) for s in optimizer.state.values()],
        "dtype": str(torch.get_default_dtype()),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "options": options,
        "loaded": shim.is_loaded(),
    }


def received(workload: Workload, **options: Any) -> dict[str, Any]:
    """Return the description of a workload by the process that it was sent to."""
    found: dict[str, Any] = process.run(packed(described, workload, options), silent)
    return found


def test_what_is_received() -> None:
    workload = transformer()
    cross_entropy(workload.model, workload.batch).backward()
    workload.optimizer.step()
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        found = received(workload, some=[1, Path("a")])
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
    assert len(packed(described, large, {})) < 50_000


def test_tied_weights_and_views_arrive_as_one() -> None:
    workload = tied()
    both = torch.arange(104).view(4, 26)
    workload = dataclasses.replace(workload, batch={"x": both[:, :12], "y": both[:, 13:25]})
    found = received(workload)
    assert found["storages"] == len(list(workload.model.parameters())) + 1


def test_what_can_not_be_sent_is_named() -> None:
    lock = threading.Lock()
    workload = of(nn.Linear(16, 3), lambda model, batch: lock)
    with pytest.raises(WorkloadError, match=r"can't be sent.*cannot pickle '_thread.lock'"):
        packed(described, workload, {})


def where(workload: Workload, progress: Any) -> list[str]:
    """Return the files that the received loss and the functions within it name."""
    code = workload.loss_fn.__code__
    return [code.co_filename, *(c.co_filename for c in code.co_consts if isinstance(c, type(code)))]


def test_functions_that_no_module_has_keep_the_names_of_their_files() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        def inner() -> torch.Tensor:
            return cross_entropy(model, batch)

        return inner()

    found = process.run(packed(where, of(nn.Linear(16, 4), loss), {}), silent)
    assert found == [__file__, __file__]
