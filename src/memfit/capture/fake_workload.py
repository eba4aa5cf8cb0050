"""Copies of the user's workload, with data or with fake tensors."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memfit._torch import (
    Apply,
    CachedFakeTensorMode,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    apply_as_its_class,
    converted_by,
    dispatches,
    inner_tensors,
    is_wrapper,
    own_buffers,
    own_parameters,
    replaced_here,
    rewrapped,
    storage_key_of,
)
from memfit.capture.external_state import Rebinding, graph_of
from memfit.capture.known_values import KnownValues
from memfit.capture.operator_calls import device_of
from memfit.capture.subclasses import as_class_of, parameter_of
from memfit.capture.user_state import UserState
from memfit.errors import MemfitError, WorkloadError
from memfit.foundations import held_back, turn
from memfit.workload import (
    Workload,
    assembled,
    generators_of_turn,
    is_uncut,
    packed_in,
    parts,
    rng_preserved,
    tensors_of,
)

Convert = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")


class _ConvertTensors(TorchFunctionMode):
    """A function mode under which `copy.deepcopy` converts tensors instead of cloning them."""

    def __init__(self, convert: Convert) -> None:
        super().__init__()
        self.convert = convert

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return _converted(tensor, memo, self.convert)


def _convert_workload(workload: Workload, convert: Convert) -> Workload:
    """Return a copy with converted tensors; references to one tensor stay references to one."""
    try:
        model, optimizer, batch, loss_fn = _copied(lambda: _converted_parts(workload, convert))
    except MemfitError:
        raise
    except Exception as e:
        raise WorkloadError(
            f"the workload can't be copied ({type(e).__name__}: {e}). memfit runs a copy, so that yours does not"
            " change: make Workload.model, .optimizer and .batch work with copy.deepcopy"
        ) from e
    return dataclasses.replace(workload, model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn, scheduler=None)


def _converted_parts(
    workload: Workload, convert: Convert
) -> tuple[nn.Module, torch.optim.Optimizer, Any, Callable[..., Any]]:
    memo: dict[int, Any] = {}
    for packed in packed_in(workload.batch):  # PyTorch's C++ reads its lengths, on the CPU
        memo[id(packed.batch_sizes)] = packed.batch_sizes.clone()

    def deep_copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return _converted(parameter, memo, convert)  # type: ignore[return-value]

    def attempt(value: Any) -> None:
        """Copy an object; an attempt that fails, at a lock, leaves nothing half-made for the next one."""
        made = dict(memo)
        copy.deepcopy(value, made)
        memo.setdefault(id(memo), []).extend(made.pop(id(made), ()))  # what `copy` keeps alive as long as its memo
        memo.update(made)

    graph, apart = graph_of(workload)
    for tensor in graph.tensors():  # whatever their classes make of `copy.deepcopy`
        _converted(tensor, memo, convert)
    # Parameters that were made meanwhile are converted too, whose cloning no mode sees.
    with _ConvertTensors(convert), replaced_here(nn.Parameter, "__deepcopy__", deep_copied):
        batch = copy.deepcopy(workload.batch, memo)
        for value in graph.nodes.values():
            if isinstance(value, nn.Module | torch.optim.Optimizer) and id(value) not in memo:
                _copied(functools.partial(attempt, value))
        rebinding = Rebinding(graph, memo, apart, workload.model)
        rebinding.complete()
        model, optimizer = rebinding.of(workload.model, False), rebinding.of(workload.optimizer, False)
        rebinding.bind_hooks_of_all(optimizer)
        loss_fn = rebinding.of(workload.loss_fn)
    return model, optimizer, batch, loss_fn


def _converted(tensor: torch.Tensor, memo: dict[int, Any], convert: Convert) -> torch.Tensor:
    """Return the converted tensor that stands for a tensor: of its class, a parameter where that is one."""
    if id(tensor) in memo:
        made: torch.Tensor = memo[id(tensor)]
        return made
    kind = type(tensor)
    if is_wrapper(kind) and not is_uncut(tensor):
        inner = {name: _converted(part, {}, convert) for name, part in inner_tensors(tensor).items()}
        new = rewrapped(tensor, inner).requires_grad_(tensor.requires_grad)
    elif dispatches(kind) and not is_uncut(tensor):
        raise WorkloadError(
            f"Workload holds a tensor of the class {kind.__qualname__}, which has no __tensor_flatten__ and"
            " __tensor_unflatten__, so memfit can't see its memory: give plain tensors, or add the two methods to the"
            " class"
        )
    else:
        new = convert(tensor.detach() if isinstance(tensor, nn.Parameter) or not tensor.is_leaf else tensor)
    if isinstance(tensor, nn.Parameter):
        memo[id(tensor)] = parameter_of(kind, new, tensor.requires_grad)
    else:
        memo[id(tensor)] = as_class_of(new, tensor, memo)
    made = memo[id(tensor)]
    return made


def _of_parts(tensor: torch.Tensor, convert: Convert) -> torch.Tensor:
    """Return a sparse tensor whose indices and values are converted; fake tensors have the COO layout only."""
    if tensor.layout is not torch.sparse_coo:
        shape = "of its own" if tensor.is_nested else tuple(tensor.shape)
        raise WorkloadError(
            f"Workload holds a tensor of shape {shape} with the layout {tensor.layout}, which can't be captured: give a"
            " dense tensor (a nested one padded), or tensor.to_sparse_coo()"
        )
    indices, values = (convert(part) for part in parts(tensor))
    return assembled(indices, values, tensor.shape, tensor.is_coalesced()).requires_grad_(tensor.requires_grad)


def real_copy(workload: Workload, device: torch.device | None = None) -> Workload:
    """Return an independent copy of a workload with data, with storages that were shared still shared.

    On another device, scalars without gradients stay on their own, such as step counters.
    """
    return _convert_workload(workload, _Copier(device))


class _Copier:
    """A function that copies tensors with their data; aliases stay aliases.

    An object and not a closure that refers to itself, which would hold the storages until a garbage collection.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_uncut(tensor):
            return _of_parts(tensor, self)
        counter = tensor.dim() == 0 and not tensor.requires_grad
        place = tensor.device if self.device is None or counter else self.device
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key not in self.storages:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.storages[key] = source.to(place, copy=True).untyped_storage()
        clone = torch.empty(0, dtype=tensor.dtype, device=place)
        clone.set_(self.storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        return clone.requires_grad_(tensor.requires_grad)


class _Faker:
    """A function that makes fake tensors of tensors (real, meta or fake); aliases stay aliases."""

    def __init__(self, values: KnownValues, device: torch.device | None, scalars: set[int]) -> None:
        self.mode, self.values, self.device, self.scalars = values.fake, values, device, scalars
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_uncut(tensor):
            with self.mode:
                return _of_parts(tensor, self)
        if id(tensor) in self.scalars and tensor.device.type == "cpu":
            real = self.values.value_of(tensor)  # of a step counter or tensor learning rate, which optimizers read
            if real is None:
                return tensor
            value = real.item()
            with self.mode:
                return torch.tensor(value, dtype=tensor.dtype)
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key not in self.storages:
            self.storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        shape = torch.empty(0, dtype=tensor.dtype, device="meta")
        shape.set_(self.storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        # On the meta device a model may be built without memory.
        own = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        fake = FakeTensor(self.mode, shape, self.device or own)
        self.values.know(fake, tensor)
        return fake.requires_grad_(tensor.requires_grad)


def mode_of(workload: Workload) -> FakeTensorMode:
    """Return the fake tensor mode of a workload's tensors, or a new one."""
    for tensor in [*workload.model.parameters(), *tensors_of(workload.batch)]:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return CachedFakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(workload: Workload, values: KnownValues, device: torch.device | None = None) -> Workload:
    """Return a copy of a workload under a fake tensor mode; it allocates nothing.

    Args:
        workload: The workload; its tensors are real, fake, or on the meta device.
        values: Receives the values of its integers; its mode is the copy's.
        device: The device of the copy's tensors; None for the tensors' own devices.
    """
    graph, _ = graph_of(workload)
    optimizers = [value for value in graph.nodes.values() if isinstance(value, torch.optim.Optimizer)]
    held = tensors_of([[list(each.state.values()), each.param_groups] for each in (workload.optimizer, *optimizers)])
    scalars = {id(t) for t in held if t.dim() == 0 and not t.requires_grad}
    return _convert_workload(workload, _Faker(values, device, scalars))


@contextlib.contextmanager
def nothing_changes(workload: Workload) -> Iterator[UserState]:
    """Set back all random generators and what the step's code can reach; refuse a step that put gradients elsewhere.

    This thread has the turn meanwhile, and what a signal's handler raises waits for a safe point.

    Raises:
        WorkloadError: The loss function used the original model rather than the one it was given.
    """
    with held_back(ends_steps=True), turn(), generators_of_turn():
        parameters = list(workload.model.parameters())
        gradients = [p.grad for p in parameters]
        state = UserState(vars(workload).values())
        try:
            with rng_preserved():
                yield state
        finally:
            touched = [p for p, g in zip(parameters, gradients, strict=True) if p.grad is not g]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            state.set_back()
    if touched:
        raise WorkloadError(
            f"Workload.loss_fn computed gradients of {len(touched)} parameters of your own model, not of the copy that"
            " it got: use the model that loss_fn gets as its first argument"
        )


# Deep copies of objects that hold generators, locks or other parts that `copy.deepcopy` refuses


def _copied(make: Callable[[], T]) -> T:
    """Return the result of a function that calls `copy.deepcopy`, sharing the parts that can't be copied.

    Random generators are copied with their states. Locks, open files and the like are shared with the original: objects
    that no protocol copies, that hold no tensors, and that are not used up by reading.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reduced_by(torch.Generator, lambda generator: (_clone, (_AsIs(generator),))))
        while True:
            try:
                return make()
            except Exception as e:
                failed = _failed(e)
                if failed is None or type(failed) in copyreg.dispatch_table or not _may_be_shared(failed):
                    raise
                stack.enter_context(_reduced_by(type(failed), _shared))


@contextlib.contextmanager
def _reduced_by(kind: type, reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Register a function that reduces objects of a class for `copy.deepcopy`, until the context is left."""
    before = copyreg.dispatch_table.get(kind)
    copyreg.pickle(kind, reduce)
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[kind]
        else:
            copyreg.dispatch_table[kind] = before


class _AsIs:
    """A holder that `copy.deepcopy` passes on without copying its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _AsIs:
        return self


def _clone(held: _AsIs) -> torch.Generator:
    with DisableTorchFunction():
        clone: torch.Generator = held.value.clone_state()
    return clone


def _shared(value: Any) -> str:
    """Return a string, which tells `copy.deepcopy` to share the object."""
    if not _may_be_shared(value):
        raise TypeError(f"a {type(value).__name__} that holds tensors can't be copied")
    return "shared"


def _failed(error: Exception) -> Any:
    """Return the object whose innermost `copy.deepcopy` call failed; None without such a call."""
    failed, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            failed = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return failed


def _may_be_shared(value: Any) -> bool:
    is_used_up = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    return not is_used_up and not isinstance(value, nn.Module | torch.optim.Optimizer) and not tensors_of(value)


# Conversions of modules within a step (`module.to(device)`, `.float()`) replace the data of a parameter by the
# converted tensor. Of a fake parameter `nn.Module._apply` swaps the whole tensor: that loses its hooks, and fails where
# a weak reference exists.


@contextlib.contextmanager
def in_place_conversions() -> Iterator[None]:
    """Convert modules with fake parameters as modules with data, until the context is left."""
    with converted_by(_applied_in_place):
        yield


def _applied_in_place(original: Apply) -> Apply:
    def apply(self: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                apply_as_its_class(child, fn)
        fakes = all(isinstance(p, FakeTensor) for p in own_parameters(self).values() if p is not None)
        if not fakes or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(self, fn, recurse=False)
        for parameter in own_parameters(self).values():
            if parameter is not None:
                _convert_in_place(parameter, fn)
                if parameter.grad is not None:
                    _convert_in_place(parameter.grad, fn)
        own_buffers(self).update({name: t if t is None else fn(t) for name, t in own_buffers(self).items()})
        return self

    return apply


def _convert_in_place(tensor: torch.Tensor, fn: Convert) -> None:
    """Replace a tensor's data by its conversion, which must be on the same device: a fake tensor can't be moved."""
    with torch.no_grad():
        converted = fn(tensor)
    if converted is tensor:
        return
    if device_of(converted) != device_of(tensor):
        raise RuntimeError(f"a module was moved from {device_of(tensor)} to {device_of(converted)} within the step")
    tensor.data = converted
