"""What a process is like, to hold against what it is like after a verb of memfit: one snapshot for all tests."""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from memfit._torch import current_mode_stack
from memfit.workload import Workload

COUNT_FROZEN = gc.get_freeze_count  # before `tests/conftest.py` answers in its place
_PATCHED = (torch.Tensor, nn.Parameter, nn.Module, torch.optim.Optimizer, torch.UntypedStorage, torch.autograd.Function)
_MODULES = (
    torch,
    nn.functional,
    nn.init,
    torch.utils,
    torch.utils.checkpoint,
    torch.autograd,
    torch.cuda,
    torch.nn.utils,
)
_LOGGERS = ("", "torch", "torch._subclasses.fake_tensor", "memfit")


def state_of(workload: Workload) -> dict[str, Any]:
    """Return everything of a workload that a capture could change, and of the process."""
    model = workload.model
    tensors = {f"state {k}": v.clone() for k, v in model.state_dict().items()}
    for index, (parameter, values) in enumerate(workload.optimizer.state.items()):
        tensors |= {f"optimizer {index} {k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
        tensors[f"of {index}"] = torch.tensor(id(parameter))
    hooks = [
        tuple(len(d) for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._state_dict_hooks))
        for m in model.modules()
    ]
    optimizer = workload.optimizer
    return (
        tensors
        | {
            "identities": [(id(p), p.data_ptr(), p.requires_grad, p._version) for p in model.parameters()],
            "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
            "training": [m.training for m in model.modules()],
            "hooks": hooks,
            "attributes": [sorted(m.__dict__) for m in model.modules()],
            "groups": copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
            "optimizer's hooks": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
            "optimizer's attributes": sorted(vars(optimizer)),
            "scheduler": None if workload.scheduler is None else workload.scheduler.state_dict(),
        }
        | process()
    )


def process() -> dict[str, Any]:
    """Return what the process is like beside the workload."""
    backends = torch.backends
    return {
        "random state": torch.get_rng_state(),
        "other random states": [repr(random.getstate()), repr(np.random.get_state(legacy=False))],
        "dtype and device": [torch.get_default_dtype(), torch.get_default_device()],
        "modes": [current_mode_stack(), _get_current_function_mode_stack()],
        "collector": (gc.isenabled(), COUNT_FROZEN() > 0, gc.get_threshold(), list(gc.callbacks)),
        "gradients on": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "threads of operators": torch.get_num_threads(),
        "backends": [
            *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
            *(backends.mkldnn.enabled, backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()),  # type: ignore[attr-defined]
            *(backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()),
            torch.get_float32_matmul_precision(),
        ],
        "arguments": [list(sys.argv), list(sys.path)],
        "environment": dict(os.environ),
        "signals": [signal.getsignal(each) for each in sorted(signal.valid_signals()) if each not in (9, 19)],
        "log levels": [(logging.getLogger(n).level, len(logging.getLogger(n).handlers)) for n in _LOGGERS],
        "filters": [list(warnings.filters), warnings.showwarning],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tracing": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
        "hooks of Python": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "streams": [id(sys.stdout), id(sys.stderr)],
        "PyTorch": [{name: id(value) for name, value in vars(each).items()} for each in _PATCHED],
        "PyTorch's functions": [{n: id(v) for n, v in vars(m).items() if callable(v)} for m in _MODULES],
        "folder": [os.getcwd(), sorted(map(str, Path.cwd().iterdir()))],
    }


def same(one: Any, other: Any) -> bool:
    """Tell whether two values of a snapshot are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what is not the same."""
    return [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
