"""The user's workload under fake tensors: the same program, without data and without touching the original."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from memfit.errors import WorkloadError
from memfit.rng import rng_preserved
from memfit.workload import Workload

Convert = Callable[[torch.Tensor], torch.Tensor]


class _ConvertTensors(TorchFunctionMode):
    """Makes `copy.deepcopy` convert tensors instead of cloning them."""

    def __init__(self, convert: Convert) -> None:
        super().__init__()
        self.convert = convert

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self.convert(tensor.detach() if not tensor.is_leaf else tensor)
        return memo[id(tensor)]


def _convert_workload(workload: Workload, convert: Convert) -> Workload:
    """Return a copy whose tensors are converted; one tensor stays one tensor, wherever it is referred to."""
    memo: dict[int, Any] = {}
    held = [*workload.model.parameters(), *(p for g in workload.optimizer.param_groups for p in g["params"])]
    for parameter in held:
        if id(parameter) not in memo:
            converted = convert(parameter.detach())
            memo[id(parameter)] = nn.Parameter(converted, requires_grad=parameter.requires_grad)
    with _ConvertTensors(convert):
        try:
            model = copy.deepcopy(workload.model, memo)
            optimizer = copy.deepcopy(workload.optimizer, memo)
            batch = copy.deepcopy(workload.batch, memo)
        except Exception as e:
            raise WorkloadError(
                f"the workload can't be copied ({type(e).__name__}: {e}): memfit runs a copy, so that yours stays"
                " as it is; make Workload.model, .optimizer and .batch work with copy.deepcopy"
            ) from e
    return dataclasses.replace(workload, model=model, optimizer=optimizer, batch=batch, scheduler=None)


def real_copy(workload: Workload) -> Workload:
    """Return an independent copy of a workload, with storages that were shared still shared."""
    storages: dict[int, torch.UntypedStorage] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        return clone.requires_grad_(tensor.requires_grad)

    return _convert_workload(workload, convert)


def fake_copy(workload: Workload, mode: FakeTensorMode) -> Workload:
    """Return a copy of a workload under a fake tensor mode; it allocates nothing."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.numel() == 1 and not tensor.requires_grad and tensor.dim() == 0:
            value = tensor.item()
            with mode:  # step counters are read by optimizers: a constant keeps its value
                return torch.tensor(value, dtype=tensor.dtype)
        return mode.from_tensor(tensor)

    return _convert_workload(workload, convert)


@contextlib.contextmanager
def nothing_changes(workload: Workload) -> Iterator[None]:
    """Set all random generators back on leaving; refuse a step that reached the original parameters.

    Raises:
        WorkloadError: The loss function used the original model rather than the one it was given.
    """
    parameters = list(workload.model.parameters())
    gradients = [p.grad for p in parameters]
    try:
        with rng_preserved():
            yield
    finally:
        touched = [p for p, g in zip(parameters, gradients, strict=True) if p.grad is not g]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
    if touched:
        raise WorkloadError(
            f"Workload.loss_fn put gradients on {len(touched)} parameters of the original model: it must use"
            " the model that it is given as its first argument, not one from outside"
        )
