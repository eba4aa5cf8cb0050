"""Workloads that travel to another process."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit import hardware
from memfit.capture import KnownValues, mode_of, packed
from memfit.errors import WorkloadError
from memfit.workload import Workload, tensors_of
from tests.models import cross_entropy, tied, transformer

pytestmark = pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here: nothing is sent")


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
        "loaded": hardware.shim.is_loaded(),
    }


def received(workload: Workload, **options: Any) -> dict[str, Any]:
    """Return the description of a workload by the process that it was sent to."""
    found: dict[str, Any] = hardware.process.run(packed(described, workload, options), silent)
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
    assert len(pickle.dumps(packed(described, large, {}))) < 50_000


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

    found = hardware.process.run(packed(where, of(nn.Linear(16, 4), loss), {}), silent)
    assert found == [__file__, __file__]


def holding(tensors: dict[str, torch.Tensor]) -> Workload:
    model = nn.Linear(4, 1)
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return of(model)


DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.bool, torch.int8, torch.uint16, torch.bits8),
    torch.int4,
]


def few(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.arange(1, count + 1, dtype=torch.uint8)
    return raw.clamp(max=1).view(dtype).view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


def known_bytes(workload: Workload, progress: Any) -> dict[str, Any]:
    """Return what is known of the buffers, in the process that received them."""
    buffers = dict(workload.model.named_buffers())
    real = {name: KnownValues.of(mode_of(workload)).value_of(b) for name, b in buffers.items()}
    return {
        name: None
        if r is None
        else (str(r.dtype), tuple(buffers[name].shape), bytes(r.reshape(-1).view(torch.uint8).numpy()))
        for name, r in real.items()
    }


def test_few_numbers_of_any_dtype_arrive() -> None:
    """Also those that NumPy does not have, and views that are not their memory."""
    sent = {f"{str(d)[6:]}_{len(shape)}": few(d, shape) for d in DTYPES for shape in ((), (3,), (2, 2))}
    sent["conjugate"] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    sent["negative"] = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    sent["strided"] = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()[1:]
    sent["empty"] = torch.empty(0, dtype=torch.bfloat16)
    warnings.simplefilter("ignore")  # PyTorch's, of complex32; pytest sets the filters back
    found = hardware.process.run(packed(known_bytes, holding(sent), {}), silent)
    assert found["int4_1"] is None  # no operator takes it
    for name, tensor in sent.items():
        if name != "empty" and not name.startswith("int4"):
            whole = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
            assert found[name] == (str(tensor.dtype), tuple(tensor.shape), bytes(whole.numpy())), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_model_in_half_precision_is_sent(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=dtype)))
    found = received(of(model))
    assert len(found["parameters"]) == 7 and found["held"]


def test_a_quantised_tensor_is_refused_by_name() -> None:
    warnings.simplefilter("ignore")  # PyTorch deprecates them; pytest sets the filters back
    workload = holding({"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)})
    with pytest.raises(WorkloadError, match=r"a quantised tensor of torch\.quint8"):
        packed(known_bytes, workload, {})
