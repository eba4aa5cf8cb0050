"""Facts of an operator's call: its tensors, what it writes, whether it draws, its work and its signature."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit._torch import FakeTensor, packet_of, ranks_of, schema_of, storage_key_of
from memfit.ir import Collective, Work, is_collective
from memfit.workload import is_dense, parts, signature


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or outputs; faster than a pytree's `tree_leaves`."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | dict):
            tensors += tensors_in(value)
    return tensors


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operator writes in place."""
    written = traits_of(func).written
    if not written:
        return []
    return tensors_in([args[place] if place < len(args) else kwargs.get(name) for place, name in written])


@dataclasses.dataclass(frozen=True, slots=True)
class _Traits:
    """Traits of an operator, from its schema and tags: they take longer to ask than to look up.

    Attributes:
        draws: It draws random numbers.
        reads: It returns a number that depends on values.
        written: The places and names of the arguments that it writes.
        is_elementwise_in_place: It writes element by element into its first argument.
    """

    draws: bool
    reads: bool
    written: tuple[tuple[int, str], ...]
    is_elementwise_in_place: bool


@functools.lru_cache(maxsize=4096)
def traits_of(func: Any) -> _Traits:
    schema, tags = schema_of(func), func.tags
    arguments = enumerate(schema.arguments if schema.is_mutable else ())
    return _Traits(
        draws=torch.Tag.nondeterministic_seeded in tags,
        reads=torch.Tag.data_dependent_output in tags,
        written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        is_elementwise_in_place=torch.Tag.pointwise in tags and schema.name.endswith("_"),
    )


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device, without a dispatched query where it is fake."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def dense_in(tensors: Any) -> list[torch.Tensor]:
    """Return the dense tensors among an operator's arguments or outputs, and the parts of sparse ones."""
    flat = tensors_in(tensors)
    return flat if all(map(is_dense, flat)) else [part for t in flat for part in parts(t)]


def text_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the signature of a call; of a collective by its bytes and ranks."""
    if not is_collective(str(func)):
        return signature(func, args, kwargs)
    nbytes = max((t.numel() * t.itemsize for t in tensors_in((args, kwargs))), default=0)
    return Collective(str(func), nbytes, ranks_of((args, kwargs))).text


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call advances the generator; attention operators do so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, device_type: str) -> Work:
    """Return the operations and bytes of a call on the device; counted once for each signature."""
    given, made = (
        [t for t in dense_in(tensors) if device_of(t).type == device_type] for tensors in ((args, kwargs), out)
    )
    held = {storage_key_of(t) for t in given}
    written = [
        *(t for t in made if storage_key_of(t) not in held),
        *(t for t in dense_in(written_by(func, args, kwargs)) if device_of(t).type == device_type),
    ]
    floating = [t for t in (*given, *made) if t.is_floating_point()]
    dtype = str((floating or given or made)[0].dtype)[6:] if given or made else ""
    dtype = "float8" if dtype.startswith("float8") else dtype
    count, flops = flop_registry.get(packet_of(func)), 0
    if count is not None:
        with contextlib.suppress(
            AssertionError
        ):  # grouped queries before torch 2.12; `ir.costs` counts attention itself
            flops = int(count(*args, **kwargs, out_val=out))
    write_bytes = sum(map(_covered_bytes, written))
    read_bytes = sum(map(_covered_bytes, given)) if written else 0
    return Work(flops, read_bytes, write_bytes, dtype, bool(written))


def _covered_bytes(tensor: torch.Tensor) -> int:
    """Return the distinct bytes that a tensor covers: fewer than its elements where it is expanded."""
    if tensor.numel() == 0:
        return 0
    elements = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return elements * tensor.itemsize
