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

from memfit.capture.values import KnownValues
from memfit.errors import WorkloadError
from memfit.rng import rng_preserved
from memfit.workload import Workload, tensors_of

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
            optimizer = _copy_of_optimizer(workload.optimizer, memo)
            batch = copy.deepcopy(workload.batch, memo)
        except Exception as e:
            raise WorkloadError(
                f"the workload can't be copied ({type(e).__name__}: {e}): memfit runs a copy, so that yours stays"
                " as it is; make Workload.model, .optimizer and .batch work with copy.deepcopy"
            ) from e
    return dataclasses.replace(workload, model=model, optimizer=optimizer, batch=batch, scheduler=None)


def _copy_of_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a deep copy, with the attributes of its class that `torch.optim.Optimizer` leaves out of copies.

    Not with functions: those that learning-rate schedulers put there are bound to the original.
    """
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and not callable(value):
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied


def real_copy(workload: Workload, device: torch.device | None = None) -> Workload:
    """Return an independent copy of a workload, with storages that were shared still shared.

    Args:
        workload: With data.
        device: Where the copy's tensors are, scalars without gradients aside (step counters stay where they
            were); None for where they were.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        counter = tensor.dim() == 0 and not tensor.requires_grad
        place = tensor.device if device is None or counter else device
        if tensor.layout is not torch.strided:
            return tensor.detach().to(place, copy=True)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage._cdata] = source.to(place, copy=True).untyped_storage()
        clone = torch.empty(0, dtype=tensor.dtype, device=place)
        clone.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        return clone.requires_grad_(tensor.requires_grad)

    return _convert_workload(workload, convert)


class _Faker:
    """Makes fake tensors of tensors: real, on the meta device or fake; storages that are shared stay shared."""

    def __init__(self, values: KnownValues, device: torch.device | None, scalars: set[int]) -> None:
        self.mode, self.values, self.device, self.scalars = values.fake, values, device, scalars
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor)
        if id(tensor) in self.scalars and tensor.device.type == "cpu":
            return self._scalar(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        shape = torch.empty(0, dtype=tensor.dtype, device="meta")
        shape.set_(self.storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        fake = FakeTensor(self.mode, shape, self.device or _device_of(tensor))
        self.values.know(fake, tensor)
        return fake.requires_grad_(tensor.requires_grad)

    def _scalar(self, tensor: torch.Tensor) -> torch.Tensor:
        """Step counters and tensor learning rates are read by optimizers: a constant keeps its value, on the CPU."""
        real = self.values.value_of(tensor)
        if real is None:
            return tensor
        value = real.item()
        with self.mode:
            return torch.tensor(value, dtype=tensor.dtype)


def _device_of(tensor: torch.Tensor) -> torch.device:
    """A model may be built on the meta device, which takes no memory: it stands for the CPU."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def mode_of(workload: Workload) -> FakeTensorMode:
    """Return the mode of the fake tensors that a workload is made of, or a new one."""
    for tensor in [*workload.model.parameters(), *tensors_of(workload.batch)]:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(workload: Workload, values: KnownValues, device: torch.device | None = None) -> Workload:
    """Return a copy of a workload under a fake tensor mode; it allocates nothing.

    Args:
        workload: With tensors that are real, fake, or on the meta device.
        values: Takes over the values of its integers; its mode is the copy's.
        device: Where the copy's tensors are; None for where they were.
    """
    held = tensors_of([list(workload.optimizer.state.values()), workload.optimizer.param_groups])
    scalars = {id(t) for t in held if t.dim() == 0 and not t.requires_grad}
    return _convert_workload(workload, _Faker(values, device, scalars))


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
