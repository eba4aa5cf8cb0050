"""Estimates and plans for a GPU, in a process of their own where fake CUDA tensors work.

The workload travels as its program and the shapes of its tensors: no values but small integers, no
memory. Functions of modules that can be imported travel by name, others as they are (cloudpickle).
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence

from memfit.capture.courses import Readings
from memfit.capture.values import KnownValues, is_followed
from memfit.devices import fake_cuda
from memfit.errors import CaptureError, MemfitError, WorkloadError
from memfit.frames import frames_text
from memfit.pipeline.reading import receive
from memfit.sparse import assembled, parts
from memfit.workload import Workload

Progress = Callable[[str, int, int], None]


def call(
    function: Callable[..., Any],
    workload: Workload,
    options: dict[str, Any],
    progress: Progress,
    readings: dict[int, Readings] | None = None,
) -> Any:
    """Return what `function(workload, **options, progress=...)` returns in a process with fake CUDA.

    Args:
        function: Of a module of memfit, by whose name the process finds it.
        workload: The user's workload; its data and its scheduler stay here.
        options: What can be pickled.
        progress: Told how far it is.
        readings: What the step reads with data, by microbatch size.

    Raises:
        WorkloadError: The workload can't be sent.
        MemfitError: As the function raises.
        CaptureError: The process ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        request.write_bytes(_request(function, workload, options, readings or {}))
        reading, writing = os.pipe()
        line = fake_cuda.command("memfit.pipeline.worker", str(request), str(reply), str(writing))
        with subprocess.Popen(line, pass_fds=(writing,), stdout=2) as process:
            os.close(writing)
            with open(reading) as told:
                for stage in told:
                    progress(*json.loads(stage))
        if not reply.exists():
            raise CaptureError(
                f"the process that predicts for a GPU ended without an answer, status {process.returncode}"
            )
        found = pickle.loads(reply.read_bytes())  # from our own process, in our own folder
    if isinstance(found, BaseException):
        raise found
    return found


def _settings() -> list[tuple[Callable[..., Any], Any]]:
    """Return how PyTorch is set here, as calls that set it so elsewhere."""
    kernels = torch.backends.cuda
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (kernels.enable_flash_sdp, kernels.flash_sdp_enabled()),
        (kernels.enable_mem_efficient_sdp, kernels.mem_efficient_sdp_enabled()),
        (kernels.enable_cudnn_sdp, kernels.cudnn_sdp_enabled()),
        (kernels.enable_math_sdp, kernels.math_sdp_enabled()),
        (torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled()),
    ]


def _request(
    function: Callable[..., Any], workload: Workload, options: dict[str, Any], readings: dict[int, Readings]
) -> bytes:
    """Return what the process needs: where modules are, and the call."""
    here = dataclasses.replace(workload, batches=None, evaluate=None, scheduler=None)
    body = io.BytesIO()
    loaded = [m for name, m in list(sys.modules.items()) if name.startswith("memfit_workload_")]
    for module in loaded:  # loaded from a file: no other process can import it by name
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(body).dump((function, here, options))
    except Exception as e:
        raise WorkloadError(
            f"the workload can't be sent to the process that predicts for a GPU ({type(e).__name__}: {e}): make"
            " Workload.model, .loss_fn and .optimizer work with pickle, or name the workload on the command line"
        ) from e
    finally:
        for module in loaded:
            cloudpickle.unregister_pickle_by_value(module)
    return pickle.dumps((sys.path, pickle.dumps([*_settings(), (receive, readings)]), body.getvalue()))


class _Storage:
    """Stands for a storage in the stream; tensors that share one share this."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.meta: torch.UntypedStorage | None = None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors as their shapes."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[int, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            if type(value) is not types.ModuleType:  # such as `torch.backends`, which cloudpickle takes apart
                return importlib.import_module, (value.__name__,)
        if isinstance(value, PackedSequence):
            return _receive_packed, (value.data, value.batch_sizes.tolist(), *value[2:])
        if not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if value.layout is torch.sparse_coo:
            return assembled, (*parts(value), value.shape, value.is_coalesced())
        if value.layout is not torch.strided:
            raise TypeError(f"a tensor with layout {value.layout}")
        storage = value.untyped_storage()
        stands = self.storages.setdefault(storage._cdata, _Storage(storage.nbytes()))
        form = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        return _receive, (stands, form, isinstance(value, nn.Parameter), value.requires_grad, _values(value))


def _values(tensor: torch.Tensor) -> Any:
    """Return the values that travel: of integers, and of scalars such as step counters."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return None
    if tensor.dim() == 0 and not tensor.requires_grad:
        return tensor.item()
    return tensor.detach().cpu().numpy() if is_followed(tensor) else None


_receiving: KnownValues | None = None


def _receive(stands: _Storage, form: Any, is_parameter: bool, requires_grad: bool, values: Any) -> torch.Tensor:
    """Return a fake tensor of the form that was sent."""
    assert _receiving is not None
    dtype, shape, stride, offset = form
    if values is not None and not shape:
        return torch.tensor(values, dtype=dtype)
    if stands.meta is None:
        stands.meta = torch.UntypedStorage(stands.nbytes, device="meta")
    meta = torch.empty(0, dtype=dtype, device="meta").set_(stands.meta, offset, shape, stride)
    fake = FakeTensor(_receiving.fake, meta, torch.device("cpu"))
    if values is not None:
        _receiving.know(fake, torch.from_numpy(values))
    return nn.Parameter(fake, requires_grad) if is_parameter else fake.requires_grad_(requires_grad)


def _receive_packed(data: Any, lengths: list[int], *indices: Any) -> PackedSequence:
    """Return a packed sequence, with lengths that PyTorch's C++ can read."""
    return PackedSequence(data, torch.tensor(lengths), *indices)


def main(request: str, reply: str, told: str) -> None:
    """Answer one call."""
    global _receiving
    paths, settings, body = pickle.loads(Path(request).read_bytes())
    sys.path[:] = [*paths, *(p for p in sys.path if p not in paths)]
    found: Any
    with open(int(told), "w", buffering=1) as out:

        def progress(stage: str, done: int, total: int) -> None:
            print(json.dumps([stage, done, total]), file=out)

        try:
            for apply, value in pickle.loads(settings):
                apply(value)
            _receiving = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
            function, workload, options = pickle.loads(body)
            found = function(workload, **options, progress=progress)
        except MemfitError as e:
            e.frames = frames_text(e)
            found = e
        except Exception as e:
            frames = frames_text(e)
            found = CaptureError(f"{type(e).__name__}: {e}" + ("" if frames else f"\n{traceback.format_exc()}"))
            found.frames = frames
    Path(reply).write_bytes(pickle.dumps(found))
