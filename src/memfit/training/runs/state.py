"""The state of a training as JSON and tensors, which a checkpoint holds instead of a pickle."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit._torch import is_shared
from memfit.errors import CheckpointError
from memfit.training.optimizers import parameters_of
from memfit.training.runs.tensor_files import Stored
from memfit.training.step import Step
from memfit.workload import RngState, rng_state

Tensors = dict[str, torch.Tensor]
_OF_PARAMETER = re.compile(r"optimizer\.state\.([0-9]+)\.")  # the place that `collect` names in `pack`
# JSON objects are tags, since a state dict may have keys other than strings:
#   {"dict": [[key, value], ...]}  {"counter": [[key, count], ...]}  {"tuple": [...]}  {"float": "nan"}
#   {"tensor": key, "order": [1, 0]}  a tensor in the file beside, and its dimensions by descending stride
_DICTS = (dict, OrderedDict, Counter)


@dataclass(frozen=True)
class TrainingState:
    """The state in a checkpoint, as JSON values and tensors.

    Of a model that ranks share, each has its parts: as DTensors when they are collected, as files when they are read.

    Attributes:
        model: The model's state dict, without tied duplicates.
        aliases: For each tied duplicate, the name of the tensor that is saved.
        optimizer: The optimizer's class, the FQNs of its parameters by group, and its packed state dict.
        training: Scheduler, loss scaler, random states, data position, and extra state of the model that is no tensor.
    """

    model: Tensors | Stored
    aliases: dict[str, str]
    optimizer: dict[str, Any]
    optimizer_tensors: Tensors | Stored
    training: dict[str, Any]
    training_tensors: Tensors

    @property
    def rng(self) -> RngState:
        """The random states at the moment of the checkpoint."""
        state: RngState = self.training["rng"]
        return state

    @property
    def position(self) -> dict[str, Any]:
        """The position in the data."""
        position: dict[str, Any] = unpack(self.training["position"], self.training_tensors)
        return position


def collect(step: Step, position: dict[str, Any]) -> TrainingState:
    """Return the state of a training between two steps. Its tensors are not copies.

    Raises:
        CheckpointError: A part of it is neither JSON nor a tensor.
    """
    model, aliases, extras = _model_state(step.workload.model)
    optimizer_tensors: Tensors = {}
    training_tensors: Tensors = {}
    scheduler, scaler = step.workload.scheduler, step.scaler
    packed = {
        "scheduler": scheduler and {"kind": type(scheduler).__qualname__, "state": scheduler.state_dict()},
        "scaler": scaler and scaler.state_dict(),
        "position": position,
        "model_extras": extras,
    }
    training = {key: pack(value, training_tensors, key) for key, value in packed.items()}
    state = pack(step.workload.optimizer.state_dict(), optimizer_tensors, "optimizer")
    kind = type(step.workload.optimizer).__qualname__
    optimizer = {"kind": kind, "parameters": _parameter_names(step), "state": state}
    return TrainingState(
        model, aliases, optimizer, optimizer_tensors, training | {"rng": rng_state()}, training_tensors
    )


def prepare_restore(step: Step, state: TrainingState, *, converts: bool = False) -> Callable[[], None]:
    """Check a state against a training, and return a function that restores it; nothing is changed before its call.

    Args:
        converts: Whether the state has another precision: bf16 weights are then widened, or weights rounded to bf16; a
            loss scaler without a state begins anew, and a state without a loss scaler is dropped.

    Raises:
        CheckpointError: The state has another model, optimizer, scheduler or loss scaler.
    """
    workload, scaler = step.workload, step.scaler
    saved_training = {k: unpack(v, state.training_tensors) for k, v in state.training.items() if k != "rng"}
    model_state = _checked_model_state(workload.model, state, saved_training["model_extras"], converts)
    optimizer_state = _checked_optimizer_state(step, state)
    scheduler_state, scaler_state = saved_training["scheduler"], saved_training["scaler"]
    _check_scheduler(workload.scheduler, scheduler_state)
    if not converts and (scaler is None) != (scaler_state is None):
        had, has = ("has no loss scaler", "the step has one") if scaler else ("has a loss scaler", "the step has none")
        raise CheckpointError(f"the checkpoint {had}, and {has}: resume with the checkpoint's precision=")

    def restore() -> None:
        _restore_optimizer(workload.optimizer, optimizer_state)
        workload.model.load_state_dict(model_state)
        if workload.scheduler is not None:
            workload.scheduler.load_state_dict(scheduler_state["state"])
        if scaler is not None and scaler_state is not None:
            scaler.load_state_dict(scaler_state)

    return restore


# The model


def _model_state(model: nn.Module) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
    """Return the tensors of a model's state dict, the names of tied duplicates, and extra state that is no tensor."""
    tensors: Tensors = {}
    saved_names: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    extras: dict[str, Any] = {}
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            extras[name] = value
            continue
        place = parameters.get(name, name) if is_shared(type(value)) else value.data_ptr()
        identity = (value.device, place, value.shape, value.stride(), value.dtype)
        if value.numel() and identity in saved_names:
            aliases[name] = saved_names[identity]
        else:
            saved_names[identity] = name
            pack(value, tensors, name)
    return tensors, aliases, extras


def _checked_model_state(
    model: nn.Module, state: TrainingState, extras: dict[str, Any], converts: bool
) -> dict[str, Any]:
    """Return the state dict to load into a model."""
    tensors, aliases, own_extras = _model_state(model)
    _check_names("the model", {*tensors, *aliases, *own_extras}, {*state.model, *state.aliases, *extras})
    if aliases != state.aliases:
        raise CheckpointError(
            f"the model ties {aliases or 'no weights'}, and the checkpoint ties {state.aliases or 'none'}"
        )
    found = {}
    for name, tensor in tensors.items():
        saved = found[name] = _read(state.model, name, tensor)
        is_converted = converts and {tensor.dtype, saved.dtype} == {torch.float32, torch.bfloat16}
        _check_like(f"the model's {name}", tensor, saved.to(tensor.dtype) if is_converted else saved)
    return {**found, **{name: found[target] for name, target in state.aliases.items()}, **extras}


def _read(tensors: Tensors | Stored, key: str, own: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor; of one that ranks share, this rank's part, as its own is."""
    return tensors.like(key, own) if isinstance(tensors, Stored) else tensors[key]


def _check_names(what: str, own: set[str], saved: set[str]) -> None:
    if own != saved:
        missing, foreign = sorted(own - saved)[:3], sorted(saved - own)[:3]
        raise CheckpointError(f"the checkpoint lacks {missing} of {what}, and has {foreign}, not found in {what}")


def _check_like(what: str, own: torch.Tensor, saved: torch.Tensor) -> None:
    if own.shape != saved.shape or own.dtype != saved.dtype:
        raise CheckpointError(
            f"{what} has shape {tuple(own.shape)} and {own.dtype}; in the checkpoint it has shape {tuple(saved.shape)}"
            f" and {saved.dtype}"
        )


# The optimizer


def _parameter_names(step: Step) -> list[list[str]]:
    """Return the FQNs of the optimizer's parameters by group, or their shapes where the model has no such parameter."""
    names = {id(p): name for name, p in step.named_owners()}
    groups = step.workload.optimizer.param_groups
    return [[names.get(id(p), f"parameter of shape {tuple(p.shape)}") for p in group["params"]] for group in groups]


def _checked_optimizer_state(step: Step, state: TrainingState) -> dict[str, Any]:
    """Return the state dict to load into an optimizer."""
    kind = type(step.workload.optimizer).__qualname__
    saved_kind = state.optimizer.get("kind", kind)
    if kind != saved_kind:
        raise CheckpointError(
            f"the checkpoint has the state of {saved_kind}, and the step's optimizer is {kind}: resume with the"
            " levers.optimizer of the checkpoint's plan"
        )
    own, saved_names = _parameter_names(step), state.optimizer["parameters"]
    if own != saved_names:
        pairs = zip(own, saved_names, strict=False)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), (own, saved_names))
        raise CheckpointError(
            f"the optimizer has {len(own)} parameter groups and the checkpoint {len(saved_names)}. First difference:"
            f" {str(differing[0])[:200]}, and {str(differing[1])[:200]} in the checkpoint. Create the optimizer as for"
            " the checkpoint"
        )
    saved: dict[str, Any] = unpack(state.optimizer["state"], _OptimizerTensors(state, step))
    for index, values in step.workload.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            saved_value = saved["state"].get(index, {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(saved_value, torch.Tensor):
                _check_like(f"the optimizer's {key} of parameter {index}", value, saved_value)
    return saved


class _OptimizerTensors(Mapping[str, torch.Tensor]):
    """The saved tensors of an optimizer, as this rank has them: as their parameters are shared, so are they."""

    def __init__(self, state: TrainingState, step: Step) -> None:
        self._saved = state.optimizer_tensors
        self._parameters = parameters_of(step.workload.optimizer)

    def __getitem__(self, key: str) -> torch.Tensor:
        index = _OF_PARAMETER.match(key)
        if index is None or int(index[1]) >= len(self._parameters):
            return self._saved[key]
        return _read(self._saved, key, self._parameters[int(index[1])])

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state dict exactly: `load_state_dict` alone casts state to the parameter's dtype."""
    optimizer.load_state_dict(saved)
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters_of(optimizer), strict=True):
        loaded = optimizer.state.get(parameter)
        for key, value in saved["state"].get(index, {}).items():
            if loaded is not None and key in loaded:
                loaded[key] = _on_device_of(loaded[key], value)


def _on_device_of(loaded: Any, saved: Any) -> Any:
    """Return saved values, each tensor on the device that loading has put it on."""
    if isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if isinstance(loaded, torch.Tensor) else saved
    if isinstance(saved, dict) and isinstance(loaded, Mapping):
        return {key: _on_device_of(loaded.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        return type(saved)(_on_device_of(x, y) for x, y in zip(loaded, saved, strict=True))
    return saved


# The scheduler


def _check_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler | None, saved: dict[str, Any] | None) -> None:
    own_kind = None if scheduler is None else type(scheduler).__qualname__
    saved_kind = None if saved is None else saved["kind"]
    if own_kind != saved_kind:
        raise CheckpointError(
            f"Workload.scheduler is {own_kind}, and the checkpoint has {saved_kind}: give the same scheduler"
        )
    if scheduler is not None and saved is not None:
        _check_names(f"the {own_kind}", set(scheduler.state_dict()), set(saved["state"]))


def pack(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Return a value as JSON values; its tensors go into `tensors`.

    Args:
        value: None, bools, numbers, strings and tensors, in dicts, lists and tuples.
        tensors: Receives the tensors, contiguous, by their place.
        where: The place of the value, for the keys of tensors and for error messages.

    Raises:
        CheckpointError: The value holds an object of another kind, which only a pickle could keep.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, Mapping) and (type(value) in _DICTS or type(value).__name__ == "defaultdict"):
        pairs = [[_key(k, where), pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if type(value) in (list, tuple):
        items = [pack(v, tensors, f"{where}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}: a checkpoint can store None, bools, numbers, strings and tensors, in"
        " dicts, lists and tuples. Remove it from the state_dict()"
    )


def unpack(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `pack` packed, with new tensors.

    Raises:
        CheckpointError: The JSON was not made by `pack`, or names a missing tensor.
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [unpack(item, tensors) for item in node]
    try:
        tag, content = next(iter(node.items()))
        if tag == "tensor":
            return _unpack_tensor(tensors[content], node["order"])
        if tag == "float":
            return float(content)
        if tag == "tuple":
            return tuple(unpack(item, tensors) for item in content)
        kind = {"dict": dict, "counter": Counter}[tag]
        return kind({key: unpack(item, tensors) for key, item in content})
    except (AttributeError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as e:
        raise CheckpointError(f"a checkpoint's state can't have the form {str(node)[:80]!r}") from e


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, str) or type(key) is int:
        return key
    raise CheckpointError(
        f"{where} has the key {key!r}, a {type(key).__qualname__}: a checkpoint can store strings and ints as keys"
    )


def _pack_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> Any:
    is_dense = is_shared(type(tensor)) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    plain = is_dense and tensor.layout is torch.strided
    if not plain or tensor.dtype is torch.complex128 or tensor.is_quantized:
        raise CheckpointError(
            f"{where} is a {type(tensor).__qualname__} with dtype={tensor.dtype} and layout={tensor.layout}: a"
            " checkpoint can store plain dense tensors only"
        )
    key, n = where, 0
    while key in tensors:
        key, n = f"{where}#{n}", n + 1
    tensor = tensor.detach()
    if is_shared(type(tensor)):  # its part is contiguous
        tensors[key] = tensor
        return {"tensor": key, "order": list(range(tensor.dim()))}
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    tensors[key] = tensor.contiguous()
    return {"tensor": key, "order": order}


def _unpack_tensor(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy of a tensor, with its dimensions laid out in the order given; those of ranks as they are."""
    if is_shared(type(tensor)):
        return tensor
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
