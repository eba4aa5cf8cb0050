"""Copies of the user's workload, with data or with fake tensors."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from memfit._torch import (
    Apply,
    CachedFakeTensorMode,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    apply_as_its_class,
    disabled_torch_function,
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
from memfit.capture.object_graph import MARK, ObjectGraph
from memfit.capture.operator_calls import device_of, tensors_in
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


def _convert_workload(workload: Workload, convert: Convert, reached: tuple[ObjectGraph, int] | None = None) -> Workload:
    """Return a copy with converted tensors; references to one tensor stay references to one.

    Args:
        reached: What `graph_of` returns for the workload, where that is known.
    """

    def made() -> Workload:
        memo: dict[int, Any] = {}
        for packed in packed_in(workload.batch):  # PyTorch's C++ reads its lengths, on the CPU
            memo[id(packed.batch_sizes)] = packed.batch_sizes.clone()

        def deep_copied(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
            return _converted(parameter, memo, convert)

        def attempt(value: Any) -> None:
            """Copy an object; an attempt that fails, at a lock, leaves nothing half-made for the next one."""
            made = dict(memo)
            copy.deepcopy(value, made)
            memo.setdefault(id(memo), []).extend(made.pop(id(made), ()))  # what `copy` keeps as long as its memo
            memo.update(made)

        graph, apart = reached or graph_of(workload)
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
        parts = {"model": model, "optimizer": optimizer, "batch": batch, "loss_fn": loss_fn}
        return dataclasses.replace(workload, **parts, scheduler=None)

    try:
        return _copied(made)
    except MemfitError:
        raise
    except Exception as e:
        raise WorkloadError(
            f"the workload can't be copied ({type(e).__name__}: {e}). memfit runs a copy, so that yours does not"
            " change: make Workload.model, .optimizer and .batch work with copy.deepcopy"
        ) from e


def _converted(tensor: torch.Tensor, memo: dict[int, Any], convert: Convert) -> torch.Tensor:
    """Return the converted tensor that stands for a tensor: of its class, a parameter where that is one."""
    if id(tensor) not in memo:
        kind = type(tensor)
        if is_wrapper(kind) and not is_uncut(tensor):
            inner = {name: _converted(part, {}, convert) for name, part in inner_tensors(tensor).items()}
            new = rewrapped(tensor, inner).requires_grad_(tensor.requires_grad)
        elif dispatches(kind) and not is_uncut(tensor):
            raise WorkloadError(
                f"Workload holds a tensor of the class {kind.__qualname__}, which has no __tensor_flatten__ and"
                " __tensor_unflatten__, so memfit can't see its memory: give plain tensors, or add the two methods to"
                " the class"
            )
        else:
            new = convert(tensor.detach() if isinstance(tensor, nn.Parameter) or not tensor.is_leaf else tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        made = parameter_of(kind, new, tensor.requires_grad) if is_parameter else _as_class_of(new, tensor, memo)
        memo[id(tensor)] = made
    return memo[id(tensor)]  # type: ignore[no-any-return]


# Tensor subclasses, kept where there is data, and imitated by fake tensors
#
# Subclasses of `nn.Parameter` (those of bitsandbytes) keep their class, with the class of fake tensors before it.
# Batches of other subclasses are of plain fake tensors that are marked. `torch.Tensor.__torch_function__` makes each
# result of a function the subclass by `as_subclass`, which is a view. Where an operator then writes in place, as
# `ReLU(inplace=True)` does, autograd keeps the base and copies its gradient (`CopySlices` in
# torch/csrc/autograd/functions/tensor.h): a step takes more memory with MONAI's `MetaTensor` than with plain tensors.


def parameter_of(kind: type, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a tensor as a parameter of a class, made without the class's constructor."""
    made: Any = nn.Parameter(tensor, requires_grad)
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter) or is_wrapper(kind):
        return made  # type: ignore[no-any-return]
    made.__class__ = _fake_kind(kind) if isinstance(made, FakeTensor) and not issubclass(kind, FakeTensor) else kind
    return made  # type: ignore[no-any-return]


@functools.cache
def _fake_kind(kind: type) -> type:
    return type(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _as_class_of(new: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a converted tensor as the subclass of the original, with its attributes; a fake one is marked instead."""
    kind = type(tensor)
    if isinstance(new, FakeTensor):
        if _converts(kind) or hasattr(tensor, MARK):
            setattr(new, MARK, True)
        return new
    if not _converts(kind):
        return new
    made = new.detach().as_subclass(kind).requires_grad_(new.requires_grad)
    vars(made).update(copy.deepcopy(vars(tensor), memo))
    return made


def _converts(kind: Any) -> bool:
    """Tell whether functions of a class of tensors return tensors of that class."""
    plain = kind is torch.Tensor or is_wrapper(kind)
    return not plain and kind.__torch_function__ is not disabled_torch_function


def aliasing(batch: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which functions of marked tensors return aliases, if the batch has such tensors."""
    return _Aliasing() if any(hasattr(tensor, MARK) for tensor in batch) else contextlib.nullcontext()


class _Aliasing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in get_default_nowrap_functions() or not any(hasattr(t, MARK) for t in tensors_in((args, kwargs))):
            return out
        return self._aliased(out)

    def _aliased(self, out: Any) -> Any:
        if type(out) in (list, tuple):
            return type(out)(map(self._aliased, out))
        if not isinstance(out, FakeTensor) or hasattr(out, MARK):  # the latter is written in place
            return out
        alias = torch.ops.aten.alias.default(out)
        setattr(alias, MARK, True)
        return alias


def real_copy(workload: Workload, device: torch.device | None = None) -> Workload:
    """Return an independent copy of a workload with data, with storages that were shared still shared.

    On another device, scalars without gradients stay on their own, such as step counters.
    """
    return _convert_workload(workload, _Copier(device))


class _Converter(ABC):
    """A function that converts tensors; aliases stay aliases, since each storage is converted once.

    An object and not a closure that refers to itself, which would hold the storages until a garbage collection.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.of_parts(tensor) if is_uncut(tensor) else self.of_strided(tensor)

    def of_parts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a sparse tensor whose indices and values are converted; fake tensors have the COO layout only."""
        if tensor.layout is not torch.sparse_coo:
            shape = "of its own" if tensor.is_nested else tuple(tensor.shape)
            raise WorkloadError(
                f"Workload holds a tensor of shape {shape} with the layout {tensor.layout}, which can't be captured:"
                " give a dense tensor (a nested one padded), or tensor.to_sparse_coo()"
            )
        indices, values = map(self, parts(tensor))
        return assembled(indices, values, tensor.shape, tensor.is_coalesced()).requires_grad_(tensor.requires_grad)

    @abstractmethod
    def of_strided(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor's conversion."""


class _Copier(_Converter):
    """A function that copies tensors with their data."""

    def of_strided(self, tensor: torch.Tensor) -> torch.Tensor:
        counter = tensor.dim() == 0 and not tensor.requires_grad
        place = tensor.device if self.device is None or counter else self.device
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key not in self.storages:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.storages[key] = source.to(place, copy=True).untyped_storage()
        clone = torch.empty(0, dtype=tensor.dtype, device=place)
        clone.set_(self.storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        return clone.requires_grad_(tensor.requires_grad)


class Faker(_Converter):
    """A function that makes fake tensors of tensors (real, meta or fake).

    Args:
        values: Receives the values of integers; its mode is that of the fake tensors.
        device: The device of the fake tensors; None for the tensors' own.
        scalars: The `id`s of tensors that stay on the CPU, with their values: step counters, learning rates.
    """

    def __init__(
        self, values: KnownValues, device: torch.device | None = None, scalars: Iterable[int] = frozenset()
    ) -> None:
        super().__init__(device)
        self.values, self.scalars = values, scalars

    def of_parts(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.values.fake:
            return super().of_parts(tensor)

    def of_strided(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.scalars and tensor.device.type == "cpu":
            real = self.values.value_of(tensor)
            if real is None:
                return tensor
            value = real.item()
            with self.values.fake:
                return torch.tensor(value, dtype=tensor.dtype)
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key not in self.storages:
            self.storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        shape = torch.empty(0, dtype=tensor.dtype, device="meta")
        shape.set_(self.storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        # On the meta device a model may be built without memory.
        own = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        fake = FakeTensor(self.values.fake, shape, self.device or own)
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
    graph, apart = graph_of(workload)
    optimizers = [value for value in graph.nodes.values() if isinstance(value, torch.optim.Optimizer)]
    held = tensors_of([[list(each.state.values()), each.param_groups] for each in (workload.optimizer, *optimizers)])
    scalars = {id(t) for t in held if t.dim() == 0 and not t.requires_grad}
    return _convert_workload(workload, Faker(values, device, scalars), (graph, apart))


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

    def cloned(generator: torch.Generator) -> Any:
        def clone() -> torch.Generator:
            with DisableTorchFunction():
                return generator.clone_state()

        return clone, ()

    with contextlib.ExitStack() as stack:
        stack.enter_context(_reduced_by(torch.Generator, cloned))
        while True:
            try:
                return make()
            except Exception as e:
                failed, trace = None, e.__traceback__  # what the innermost call of `copy.deepcopy` got
                while trace is not None:
                    if trace.tb_frame.f_code is copy.deepcopy.__code__:
                        failed = trace.tb_frame.f_locals["x"]
                    trace = trace.tb_next
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
        del copyreg.dispatch_table[kind]
        if before is not None:
            copyreg.dispatch_table[kind] = before


def _shared(value: Any) -> str:
    """Return a string, which tells `copy.deepcopy` to share the object."""
    if not _may_be_shared(value):
        raise TypeError(f"a {type(value).__name__} that holds tensors can't be copied")
    return "shared"


def _may_be_shared(value: Any) -> bool:
    is_used_up = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    return not is_used_up and not isinstance(value, nn.Module | torch.optim.Optimizer) and not tensors_of(value)


# Conversions of modules within a step (`module.to(device)`, `.float()`) replace the data of a parameter by the
# converted tensor. Of a fake parameter `nn.Module._apply` swaps the whole tensor: that loses its hooks, and fails where
# a weak reference exists.


def applied_in_place(original: Apply) -> Apply:
    """Return the conversion of modules with fake parameters that works as on modules with data."""

    def apply(self: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                apply_as_its_class(child, fn)
        parameters = [p for p in own_parameters(self).values() if p is not None]
        fakes = all(isinstance(p, FakeTensor) for p in parameters)
        if not fakes or torch.__future__.get_overwrite_module_params_on_conversion():
            return original(self, fn, recurse=False)
        for tensor in (t for p in parameters for t in (p, p.grad) if t is not None):
            with torch.no_grad():
                converted = fn(tensor)
            here, there = device_of(tensor), device_of(converted)
            if here != there:  # a fake tensor can't be moved
                raise RuntimeError(f"a module was moved from {here} to {there} within the step")
            if converted is not tensor:
                tensor.data = converted
        own_buffers(self).update({name: t if t is None else fn(t) for name, t in own_buffers(self).items()})
        return self

    return apply
