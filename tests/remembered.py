"""Captures that a session makes once: the same step, captured again by another test, is what it was.

Most tests of plans, of the command line and of the docs capture steps that others captured before, which takes most of
their time. A capture is remembered by all that it depends on: the workload with its tensors' values, the levers, the
device, PyTorch's settings and the states of random number generators. What can't be told from that is captured: steps
that read their data, and those that hold what can't be pickled. Tests of `tests/capture` and those that change
something of memfit with `monkeypatch`, or count captures, capture themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import torch

from memfit import hardware, ir
from memfit.ir import Trace
from memfit.planner import StepVariant, captured_through
from memfit.workload import Workload

_known: dict[str, Trace] = {}


class _Unknown(Exception):
    """Something that a key can't be made of."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors as their forms, and digests of their values."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        if not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise _Unknown
        if value._backward_hooks or value.grad_fn is not None or vars(value):
            raise _Unknown
        form = (str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad)
        if value.device.type == "meta":
            return tuple, ((form, type(value).__name__),)
        if value.device.type != "cpu":
            raise _Unknown
        storage = value.untyped_storage()
        number = self.storages.setdefault(storage.data_ptr(), len(self.storages))
        digest = _digest(storage)
        return tuple, ((form, type(value).__name__, number, digest, value.grad),)


def _digest(storage: torch.UntypedStorage) -> str:
    values = torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return hashlib.sha256(values.numpy()).hexdigest()


def _settings() -> tuple[Any, ...]:
    """Return what captures depend on beside their arguments."""
    kernels = torch.backends.cuda
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        (kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()),
    )


def _key(workload: Workload, other: list[Any]) -> str | None:
    """Return a digest of a workload, of PyTorch's settings and of records; None where it can't be pickled."""
    body = io.BytesIO()
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("memfit_workload_")]
    for module in loaded:
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(body).dump((workload, _settings()))
    except Exception:  # a user's object may raise anything
        return None
    finally:
        for module in loaded:
            cloudpickle.unregister_pickle_by_value(module)
    return hashlib.sha256(body.getvalue() + msgspec.json.encode(other)).hexdigest()


@contextlib.contextmanager
def remembered_captures(folder: Path) -> Iterator[None]:
    """Capture what was not captured before.

    Args:
        folder: Where the processes of a session share what they captured.
    """

    def captured(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        device, data = variant.device, variant.data
        if data.readings or data.policy is not None:
            return capture(variant)
        named = [getattr(variant.build, "__name__", ""), variant.warm, variant.explores]
        sent = dataclasses.replace(data.workload, batches=None, evaluate=None)
        here = msgspec.structs.replace(device, usable_bytes=0) if device.kind == "cpu" else device  # what is free now
        key = _key(sent, [variant.levers, here, named, hardware.shim.is_loaded()])
        if key is None:
            return capture(variant)
        path = folder / f"{key}.json"
        if key not in _known and path.exists():
            _known[key] = ir.codec.read(path, Trace)
        if key not in _known:
            trace = capture(variant)
            if data.readings or data.policy is not None:  # it read what it was given
                return trace
            _known[key] = trace
            made_here = path.with_suffix(f".{os.getpid()}")
            made_here.write_bytes(ir.codec.encode(trace))
            made_here.rename(path)  # another process may read it
        return _known[key]

    with captured_through(captured):
        yield
