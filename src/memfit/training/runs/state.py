"""The state of a training as JSON and tensors, which a checkpoint holds instead of a pickle; and files of tensors.

These are safetensors files of whole tensors, or of a rank's shards as PyTorch's `HuggingFaceStorageWriter` writes them.
A shard has the name of its tensor, and the file's metadata says where it begins in it. So
`torch.distributed.checkpoint` reads these files with `HuggingFaceStorageReader`, and this module reads what it writes.
Both are done here since PyTorch's writer makes all of a rank's shards anew in memory before it writes them, and its
reader checks neither that a tensor is complete nor its dtype.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from memfit._torch import chunk_of, is_first_copy, is_shared, local_part
from memfit.errors import CheckpointError, DamagedCheckpointError
from memfit.training.optimizers import parameters_of
from memfit.training.step import Step
from memfit.workload import rng_state

Tensors = dict[str, torch.Tensor]
_OF_PARAMETER = re.compile(r"optimizer\.state\.([0-9]+)\.")  # the place that `collect` names in `pack`
# JSON objects are tags, since a state dict may have keys other than strings:
#   {"dict": [[key, value], ...]}  {"counter": [[key, count], ...]}  {"tuple": [...]}  {"float": "nan"}
#   {"tensor": key, "order": [1, 0]}  a tensor in the file beside, and its dimensions by descending stride
_DICTS = (dict, OrderedDict, Counter)
SHARD = re.compile(r"(model|optimizer)-shard-([0-9]{5})-of-([0-9]{5})\.safetensors")
_OFFSETS, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_RESERVED = ("format", _OFFSETS, _VERSION)


Files = tuple[dict[str, str], dict[str, Tensors], dict[str, dict[str, str]]]
"""What a rank writes of a checkpoint, by the names of files: JSON, tensors, and metadata of files of tensors."""


def collect(step: Step, position: dict[str, Any]) -> Files:
    """Return this rank's files of a training between two steps. Their tensors are not copies."""
    model, aliases, extras = _model_state(step.workload.model)
    of_optimizer: Tensors = {}
    of_training: Tensors = {}
    scheduler, scaler, ranks = step.workload.scheduler, step.scaler, step.options.ranks
    packed = {
        "scheduler": scheduler and {"kind": type(scheduler).__qualname__, "state": scheduler.state_dict()},
        "scaler": scaler and scaler.state_dict(),
        "position": position,
        "model_extras": extras,
    }
    training = {key: pack(value, of_training, key) for key, value in packed.items()} | {"rng": rng_state()}
    optimizer = {
        "kind": type(step.workload.optimizer).__qualname__,
        "parameters": _parameter_names(step),
        "state": pack(step.workload.optimizer.state_dict(), of_optimizer, "optimizer"),
    }
    texts: dict[str, str] = {}
    tensors: dict[str, Tensors] = {}
    metadata: dict[str, dict[str, str]] = {}
    if ranks.rank == 0:
        texts["optimizer.json"] = json.dumps(optimizer, allow_nan=False)
        texts["training.json"] = json.dumps(training, allow_nan=False)
        tensors["training.safetensors"] = of_training
    in_shards = any(is_shared(type(t)) for t in (*model.values(), *of_optimizer.values()))
    for stem, whole, notes in (("model", model, aliases), ("optimizer", of_optimizer, {})):
        if in_shards:
            name = shard_name(stem, ranks.rank, ranks.size)
            tensors[name], metadata[name] = own_shards(whole, ranks.rank, notes)
        elif ranks.rank == 0:
            tensors[f"{stem}.safetensors"] = whole
            if stem == "model":
                metadata[f"{stem}.safetensors"] = {"format": "pt", **notes}
    return texts, tensors, metadata


@dataclass(frozen=True)
class TrainingState:
    """The state of a training that was read from a checkpoint, as JSON values and files of tensors.

    Attributes:
        model: The model's state dict, without tied duplicates; in its notes, for each of these the name of the tensor
            that is saved.
        optimizer: The optimizer's class, the FQNs of its parameters by group, and its packed state dict.
        training: Scheduler, loss scaler, random states, data position, and extra state of the model that is no tensor.
    """

    model: Stored
    optimizer: dict[str, Any]
    optimizer_tensors: Stored
    training: dict[str, Any]
    training_tensors: Stored

    @property
    def position(self) -> dict[str, Any]:
        """The position in the data."""
        position: dict[str, Any] = unpack(self.training["position"], self.training_tensors.__getitem__)
        return position


def prepare_restore(step: Step, state: TrainingState, *, converts: bool = False) -> Callable[[], None]:
    """Check a state against a training, and return a function that restores it; nothing is changed before its call.

    Args:
        converts: Whether the state has another precision: bf16 weights are then widened, or weights rounded to bf16; a
            loss scaler without a state begins anew, and a state without a loss scaler is dropped.
    """
    workload, scaler = step.workload, step.scaler
    saved_training = {k: unpack(v, state.training_tensors.__getitem__) for k, v in state.training.items() if k != "rng"}
    model_state = _checked_model_state(workload.model, state, saved_training["model_extras"], converts)
    optimizer_state = _checked_optimizer_state(step, state)
    scheduler_state, scaler_state = saved_training["scheduler"], saved_training["scaler"]
    own_kind = None if workload.scheduler is None else type(workload.scheduler).__qualname__
    saved_kind = None if scheduler_state is None else scheduler_state["kind"]
    if own_kind != saved_kind:
        raise CheckpointError(
            f"Workload.scheduler is {own_kind}, and the checkpoint has {saved_kind}: give the same scheduler"
        )
    if workload.scheduler is not None:
        _check_names(f"the {own_kind}", set(workload.scheduler.state_dict()), set(scheduler_state["state"]))
    if not converts and (scaler is None) != (scaler_state is None):
        had, has = ("has no loss scaler", "the step has one") if scaler else ("has a loss scaler", "the step has none")
        raise CheckpointError(f"the checkpoint {had}, and {has}: resume with the checkpoint's precision=")

    def restore() -> None:
        optimizer = workload.optimizer
        optimizer.load_state_dict(optimizer_state)  # which casts state to the parameter's dtype
        indices = [i for group in optimizer_state["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters_of(optimizer), strict=True):
            loaded = optimizer.state.get(parameter)
            for key, value in optimizer_state["state"].get(index, {}).items():
                if loaded is not None and key in loaded:
                    loaded[key] = _on_device_of(loaded[key], value)
        workload.model.load_state_dict(model_state)
        if workload.scheduler is not None:
            workload.scheduler.load_state_dict(scheduler_state["state"])
        if scaler is not None and scaler_state is not None:
            scaler.load_state_dict(scaler_state)

    return restore


# The model


def _model_state(model: nn.Module) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
    """Return the tensors of a state dict, for tied duplicates the name that is kept, and extra state that is none."""
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
    tensors, aliases, own_extras = _model_state(model)
    saved_aliases = state.model.notes
    _check_names("the model", {*tensors, *aliases, *own_extras}, {*state.model, *saved_aliases, *extras})
    if aliases != saved_aliases:
        raise CheckpointError(
            f"the model ties {aliases or 'no weights'}, and the checkpoint ties {saved_aliases or 'none'}"
        )
    found = {}
    for name, tensor in tensors.items():
        saved = found[name] = state.model.like(name, tensor)
        is_converted = converts and {tensor.dtype, saved.dtype} == {torch.float32, torch.bfloat16}
        _check_like(f"the model's {name}", tensor, saved.to(tensor.dtype) if is_converted else saved)
    return {**found, **{name: found[target] for name, target in saved_aliases.items()}, **extras}


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
    tensors, parameters = state.optimizer_tensors, parameters_of(step.workload.optimizer)

    def tensor_of(key: str) -> torch.Tensor:
        """Return a saved tensor as this rank has it: as its parameter is shared, so is it."""
        index = _OF_PARAMETER.match(key)
        if index is None or int(index[1]) >= len(parameters):
            return tensors[key]
        return tensors.like(key, parameters[int(index[1])])

    saved: dict[str, Any] = unpack(state.optimizer["state"], tensor_of)
    for index, values in step.workload.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            saved_value = saved["state"].get(index, {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(saved_value, torch.Tensor):
                _check_like(f"the optimizer's {key} of parameter {index}", value, saved_value)
    return saved


def _on_device_of(loaded: Any, saved: Any) -> Any:
    """Return saved values, each tensor on the device that loading has put it on."""
    if isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if isinstance(loaded, torch.Tensor) else saved
    if isinstance(saved, dict) and isinstance(loaded, Mapping):
        return {key: _on_device_of(loaded.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        return type(saved)(_on_device_of(x, y) for x, y in zip(loaded, saved, strict=True))
    return saved


# Values as JSON and tensors


def pack(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Return a value as JSON values; its tensors go into `tensors`, contiguous, by their place, which is `where`."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor):
        is_dense = is_shared(type(value)) or type(value) in (torch.Tensor, torch.nn.Parameter)
        plain = is_dense and value.layout is torch.strided
        if not plain or value.dtype is torch.complex128 or value.is_quantized:
            raise CheckpointError(
                f"{where} is a {type(value).__qualname__} with dtype={value.dtype} and layout={value.layout}: a"
                " checkpoint can store plain dense tensors only"
            )
        key, n = where, 0
        while key in tensors:
            key, n = f"{where}#{n}", n + 1
        tensor, order = value.detach(), list(range(value.dim()))
        if not is_shared(type(tensor)):  # whose part is contiguous
            strides = tensor.stride()
            by_stride = sorted(order, key=lambda d: (-strides[d], d))
            order = by_stride if tensor.permute(by_stride).is_contiguous() else order
            tensor = tensor.contiguous()
        tensors[key] = tensor
        return {"tensor": key, "order": order}
    if isinstance(value, Mapping) and (type(value) in _DICTS or type(value).__name__ == "defaultdict"):
        for key in value:
            if not (isinstance(key, str) or type(key) is int):
                raise CheckpointError(
                    f"{where} has the key {key!r}, a {type(key).__qualname__}: a checkpoint can store strings and ints"
                    " as keys"
                )
        pairs = [[k, pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if type(value) in (list, tuple):
        items = [pack(v, tensors, f"{where}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}: a checkpoint can store None, bools, numbers, strings and tensors, in"
        " dicts, lists and tuples. Remove it from the state_dict()"
    )


def unpack(node: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that `pack` packed, with new tensors."""
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [unpack(item, tensor_of) for item in node]
    try:
        tag, content = next(iter(node.items()))
        if tag == "tensor":
            tensor, order = tensor_of(content), node["order"]
            if is_shared(type(tensor)):
                return tensor  # as ranks have it
            inverse = sorted(range(len(order)), key=lambda d: order[d])
            return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
        if tag == "float":
            return float(content)
        if tag == "tuple":
            return tuple(unpack(item, tensor_of) for item in content)
        kind = {"dict": dict, "counter": Counter}[tag]
        return kind({key: unpack(item, tensor_of) for key, item in content})
    except (AttributeError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as e:
        raise CheckpointError(f"a checkpoint's state can't have the form {str(node)[:80]!r}") from e


# Files of tensors


def shard_name(stem: str, rank: int, size: int) -> str:
    """Return the name of the file of a rank's shards."""
    return f"{stem}-shard-{rank + 1:05}-of-{size:05}.safetensors"


def own_shards(
    tensors: Mapping[str, torch.Tensor], rank: int, notes: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return this rank's shards and the metadata of their file; what all ranks have alike is the first's."""
    own: dict[str, torch.Tensor] = {}
    offsets: dict[str, Any] = {}
    for key, tensor in tensors.items():
        part, start = local_part(tensor), [0] * tensor.dim()
        if is_shared(type(tensor)):
            start, _ = chunk_of(tensor)
            is_written = is_first_copy(tensor) and (part.numel() > 0 or (tensor.numel() == 0 and rank == 0))
        else:
            is_written = rank == 0
        if is_written:
            own[key], offsets[key] = part, {"saved_offsets": start}
    return own, {"format": "pt", _VERSION: "1.0", _OFFSETS: json.dumps(offsets), **notes}


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file, and where it begins in the tensor."""

    file: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, whole or in shards, which are read when they are asked for, onto the CPU.

    Attributes:
        notes: The metadata of the files that is not about their format.

    Raises:
        DamagedCheckpointError: A file is none of safetensors, or lacks a part of a tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.notes: dict[str, str] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
                metadata = dict(file.metadata() or {})
                offsets = json.loads(metadata.get(_OFFSETS, "{}"))
                self.notes.update((key, value) for key, value in metadata.items() if key not in _RESERVED)
                for key in file.keys():
                    cut = file.get_slice(key)
                    shape = tuple(cut.get_shape())
                    start = tuple(offsets[key]["saved_offsets"]) if offsets else (0,) * len(shape)
                    dtype = (cut[:0] if shape else file.get_tensor(key)).dtype
                    self._pieces.setdefault(key, []).append(_Piece(file, start, shape, dtype))
            except (OSError, SafetensorError, ValueError, KeyError) as e:
                raise DamagedCheckpointError(f"{path} is not a safetensors file of shards: {e}") from e
        for key, pieces in self._pieces.items():
            there = sum(math.prod(piece.shape) for piece in pieces)
            if there != math.prod(self.shape(key)):
                raise DamagedCheckpointError(
                    f"{paths[0].parent} has {there} elements of {key}, and its shape is {self.shape(key)}"
                )

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, key: str) -> torch.Tensor:
        shape = self.shape(key)
        return self._part(key, (0,) * len(shape), shape)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        ends = [[a + b for a, b in zip(piece.start, piece.shape, strict=True)] for piece in self._pieces[key]]
        return tuple(map(max, zip(*ends, strict=True)))

    def bytes(self, key: str) -> int:
        """Return the bytes of a whole tensor."""
        return math.prod(self.shape(key)) * self._pieces[key][0].dtype.itemsize

    def like(self, key: str, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor, with its own dtype, as ranks have another one: this rank's part alone is read of it."""
        if not is_shared(type(own)) or self.shape(key) != tuple(own.shape):
            return self[key]
        read = self._part(key, *chunk_of(own))
        tensor = torch.empty_like(own.detach(), dtype=read.dtype)
        local_part(tensor).copy_(read)
        return tensor

    def _part(self, key: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        pieces = self._pieces[key]
        for piece in pieces:
            if piece.start == tuple(start) and piece.shape == tuple(shape):
                whole: torch.Tensor = piece.file.get_tensor(key)
                return whole
        result = torch.empty(tuple(shape), dtype=pieces[0].dtype)
        for piece in pieces:
            low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
            ends = zip(start, shape, piece.start, piece.shape, strict=True)
            high = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                read = piece.file.get_slice(key)[_between(low, high, piece.start)]
                result[_between(low, high, start)] = read
        return result


def _between(low: Sequence[int], high: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, each contiguous; tensors that share a storage are written separately.

    Raises:
        OSError: The file can't be written.
    """
    seen: set[int] = set()
    separate = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[key] = (tensor.clone() if storage in seen else tensor).contiguous()
        seen.add(storage)
    try:
        safetensors.torch.save_file(separate, path, metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e
