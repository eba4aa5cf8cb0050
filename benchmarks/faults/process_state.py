"""What a process is between two calls of memfit: everything that a verb may change by mistake."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit._torch import (
    FakeTensor,
    current_mode_stack,
    get_current_function_mode_stack,
    top_saved_tensors_default_hooks,
)
from memfit.workload import Workload

_PATCHED: tuple[Any, ...] = (
    torch,
    torch.random,
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.graph,
    torch.optim.Optimizer,
    nn.Module,
    nn.Parameter,
    FakeTensor,
    random,
    np.random,
    threading.Thread,
)


def process_state() -> dict[str, Any]:
    """Return the state of the process, by name; values of two states are compared by `==`."""
    numpy_state: Any = np.random.get_state()
    loggers = [logging.getLogger(), *(log for log in logging.root.manager.loggerDict.values())]
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "modes": (len(current_mode_stack()), len(get_current_function_mode_stack())),
        "hooks of saved tensors": top_saved_tensors_default_hooks(True),
        "anomaly": torch.is_anomaly_enabled(),
        "backends": (torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()),
        "classes": {
            (owner.__name__, name): id(value)
            for owner in _PATCHED
            for name, value in vars(owner).items()
            if callable(value) or isinstance(value, classmethod | staticmethod | property)
        },
        "generator of PyTorch": torch.default_generator.get_state().tolist(),
        "generator of Python": random.getstate(),
        "generator of NumPy": (numpy_state[1].tolist(), *numpy_state[2:]),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "garbage collector": (gc.isenabled(), gc.get_freeze_count() > 0),
        "warnings": [repr(each) for each in warnings.filters],
        "logging": [(log.name, log.level, log.disabled) for log in loggers if isinstance(log, logging.Logger)],
        "interpreter": (
            list(sys.argv),
            list(sys.path),
            sys.excepthook,
            sys.stdout,
            sys.stderr,
            sys.getrecursionlimit(),
        ),
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "umask": _umask(),
    }


def workload_state(workload: Workload) -> dict[str, Any]:
    """Return the state of a workload's model and optimizer, by name."""
    model, optimizer = workload.model, workload.optimizer
    return {
        "values": digest([*model.parameters(), *model.buffers()]),
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        "their gradients": [None if p.grad is None else digest([p.grad]) for p in model.parameters()],
        "optimizer": digest(_tensors(optimizer.state_dict()["state"])),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "modules": [(name, id(type(m)), m.training, sorted(_attributes(m))) for name, m in model.named_modules()],
        "hooks": [
            {name: len(value) for name, value in vars(each).items() if name.endswith("_hooks") and value}
            for each in (*model.modules(), optimizer)
        ],
    }


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a hash of tensors, bit by bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return found.hexdigest()


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what differs, with what it was and is where that is short."""
    found = []
    for name in before:
        if before[name] == after[name]:
            continue
        was, now = before[name], after[name]
        if isinstance(was, dict) and isinstance(now, dict):
            keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            found.append(f"{name}: {keys[:4]}")
        else:
            text = f"{was!r} -> {now!r}"
            found.append(f"{name}: {text}" if len(text) < 200 else name)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def _attributes(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, types.FunctionType | types.MethodType)]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
