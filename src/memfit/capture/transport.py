"""A workload's journey to another process, as its program and the shapes of its tensors.

No values travel but small integers, and no memory. Functions of modules that can be imported travel by name, others
as they are (cloudpickle).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TypeVar

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from memfit._torch import (
    FakeTensor,
    FakeTensorMode,
    add_tensor_hooks,
    context_of,
    get_cudnn_enabled,
    inner_tensors,
    is_wrapper,
    set_cudnn_enabled,
    storage_key,
    tensor_hooks,
)
from memfit.capture.fake_workload import parameter_of
from memfit.capture.known_values import KnownValues, is_followed
from memfit.capture.object_graph import attributes
from memfit.capture.step_capture import warn_if_untested
from memfit.capture.value_reads import Array
from memfit.errors import WorkloadError
from memfit.foundations import Progress
from memfit.workload import Workload, assembled, parts

T = TypeVar("T")
Setter = tuple[Callable[[Any], Any], Any]
"""A function that sets something in a process, and its value."""


def packed(
    function: Callable[..., T], workload: Workload, options: dict[str, Any], setters: Iterable[Setter] = ()
) -> Callable[[Progress], T]:
    """Return `function(workload, **options, progress=...)` as a function of `progress` that can be pickled.

    Args:
        function: A function of a module, which the other process finds by its name.
        workload: The user's workload; its other batches, its evaluation and its scheduler stay here.
        options: Arguments that can be pickled.
        setters: Run in the other process before the workload is unpickled, after PyTorch's settings.

    Raises:
        WorkloadError: The workload can't be pickled.
    """
    warn_if_untested()
    sent = dataclasses.replace(workload, batches=None, evaluate=None, scheduler=None)
    body = io.BytesIO()
    loaded = [m for name, m in list(sys.modules.items()) if name.startswith("memfit_workload_")]
    for module in loaded:  # loaded from a file: no other process can import it by name
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(body).dump((function, sent, options))
    except Exception as e:
        raise WorkloadError(
            f"the workload can't be sent to the process that predicts for a GPU ({type(e).__name__}: {e}): make"
            " Workload.model, .loss_fn and .optimizer work with pickle, or name the workload on the command line"
        ) from e
    finally:
        for module in loaded:
            cloudpickle.unregister_pickle_by_value(module)
    kernels = torch.backends.cuda
    settings: list[Setter] = [  # of PyTorch in this process, which change a step's results or its kernels
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (kernels.enable_flash_sdp, kernels.flash_sdp_enabled()),
        (kernels.enable_mem_efficient_sdp, kernels.mem_efficient_sdp_enabled()),
        (kernels.enable_cudnn_sdp, kernels.cudnn_sdp_enabled()),
        (kernels.enable_math_sdp, kernels.math_sdp_enabled()),
        (set_cudnn_enabled, get_cudnn_enabled()),
    ]
    return functools.partial(_unpack_and_call, [*settings, *setters], body.getvalue())


def _unpack_and_call(setters: list[Setter], body: bytes, progress: Progress) -> Any:
    global _receiving
    for apply, value in setters:
        apply(value)
    _receiving = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    function, workload, options = pickle.loads(body)
    return function(workload, **options, progress=progress)


class _SentStorage:
    """A storage in the stream; tensors that alias it refer to the same one."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.meta: torch.UntypedStorage | None = None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that writes tensors as their shapes."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[int, _SentStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            if type(value) is not types.ModuleType:  # such as `torch.backends`, which cloudpickle takes apart
                return importlib.import_module, (value.__name__,)
        if isinstance(value, PackedSequence):
            return _receive_packed, (value.data, value.batch_sizes.tolist(), *value[2:])
        if isinstance(value, types.CodeType):
            make, arguments, *_ = self.dispatch_table[types.CodeType](value)
            return _receive_code, (value.co_filename, make, *arguments)
        if isinstance(value, torch.optim.Optimizer) and type(value).__reduce_ex__ is object.__reduce_ex__:
            # `Optimizer.__getstate__` leaves its hooks and other attributes out.
            return object.__new__, (type(value),), vars(value), None, None, _set_optimizer
        if type(value) is weakref.ref:  # as a scheduler holds its optimizer
            return _receive_reference, (value(),)
        if not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if value.layout is torch.sparse_coo:
            return assembled, (*parts(value), value.shape, value.is_coalesced())
        if value.layout is not torch.strided:
            raise TypeError(f"a tensor with layout {value.layout}")
        if value.is_quantized:
            raise TypeError(f"a quantised tensor of {value.dtype}, which can't be captured")
        parameter = type(value) if isinstance(value, nn.Parameter) else None
        if is_wrapper(type(value)):
            form = (type(value), inner_tensors(value), context_of(value), tuple(value.shape), value.stride())
            wrapped = (form, parameter is not None, value.requires_grad)
            return _receive_wrapper, wrapped, _kept_by(value), None, None, _set_attributes
        storage = value.untyped_storage()
        sent = self.storages.setdefault(storage_key(storage), _SentStorage(storage.nbytes()))
        geometry = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        values = None  # only small integers and few other numbers travel
        if not isinstance(value, FakeTensor) and value.device.type != "meta" and is_followed(value):
            with contextlib.suppress(NotImplementedError):  # dtypes that no operator computes with, such as int4
                values = Array.of(value.detach().to("cpu", copy=True).resolve_conj().resolve_neg())
        arguments = (sent, geometry, parameter, value.requires_grad, values)
        return _receive, arguments, _kept_by(value), None, None, _set_attributes


def _receive_code(filename: str, make: Callable[..., types.CodeType], *arguments: Any) -> types.CodeType:
    """Return code with its file's name, which later cloudpickles leave out: readings and errors are placed by it."""
    return make(*arguments).replace(co_filename=filename)


_receiving: KnownValues | None = None


def _receive(
    sent: _SentStorage, geometry: Any, parameter: type | None, requires_grad: bool, values: Array | None
) -> torch.Tensor:
    """Return a fake tensor with the dtype, shape and strides of the one that was sent: of a parameter's class."""
    assert _receiving is not None
    dtype, shape, stride, offset = geometry
    if values is not None and not shape and not requires_grad:
        return values.tensor()
    if sent.meta is None:
        sent.meta = torch.UntypedStorage(sent.nbytes, device="meta")
    meta = torch.empty(0, dtype=dtype, device="meta").set_(sent.meta, offset, shape, stride)
    fake = FakeTensor(_receiving.fake, meta, torch.device("cpu"))
    if values is not None and values.content:
        _receiving.know(fake, values.tensor())
    return fake.requires_grad_(requires_grad) if parameter is None else parameter_of(parameter, fake, requires_grad)


def _receive_wrapper(form: Any, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    kind, *rest = form
    made: torch.Tensor = kind.__tensor_unflatten__(*rest)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _kept_by(tensor: torch.Tensor) -> tuple[dict[str, Any], tuple[list[Any], list[Any]]] | None:
    """Return the attributes and the hooks that code gave to a tensor; None where there are none."""
    given, hooks = attributes(tensor), tensor_hooks(tensor)
    return (given, hooks) if given or any(hooks) else None


def _set_attributes(tensor: torch.Tensor, kept: tuple[dict[str, Any], tuple[list[Any], list[Any]]]) -> None:
    given, hooks = kept
    for name, value in given.items():
        vars(tensor).setdefault(name, value)
    if tensor.requires_grad:
        add_tensor_hooks(tensor, hooks)


def _set_optimizer(optimizer: torch.optim.Optimizer, attributes: dict[str, Any]) -> None:
    optimizer.__setstate__(attributes)  # which has the class's steps run hooks
    vars(optimizer).update(attributes)


def _receive_reference(target: Any) -> Any:
    return weakref.ref(nn.Module() if target is None else target)  # what nobody holds is gone at once


def _receive_packed(data: Any, lengths: list[int], *indices: Any) -> PackedSequence:
    return PackedSequence(data, torch.tensor(lengths), *indices)  # which PyTorch's C++ can read
