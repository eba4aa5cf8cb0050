"""Models that were built under `torch.device("meta")`: how they get values, of which each rank keeps its shards.

Note [One process's values]
Modules make their values as the usual recipes ask, after `model.to_empty(device="cpu")`: by `reset_parameters()` of
each module in the order of `model.modules()`; in models of transformers as `model.initialize_weights()` does, by
`_init_weights` for each module after its children. Each rank does that on the CPU, from the random state of the first
one, with the tensors at a time that one call writes, and keeps its shards. So values depend neither on the number of
ranks nor on the plan or the device. Tied weights are those of the first module that has them.

`reset_parameters()` writes its module's own tensors. Whether it writes others is found by a call on the meta device,
where it costs nothing. What `_init_weights` writes is found by a call on the CPU: some of `torch.nn.init` leaves
tensors on the meta device alone. Memory that is not written there is never taken.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit._torch import apply_as_its_class, chunk_of, is_shared, local_part, own_buffers, own_parameters, version_of
from memfit.errors import WorkloadError
from memfit.workload import rng_preserved

Place = tuple[nn.Module, str]
"""A module and the name of one of its own tensors."""

_OWN_RECIPES = ("_init_weights", "init_weights", "initialize_weights")
"""Methods by which models make values otherwise than their modules do by themselves."""


@dataclass(frozen=True)
class _Call:
    """A call that makes values.

    Attributes:
        written: The places of each tensor that it writes.
        kept: Of each of these, whether it is the call's to make: tied weights are the first module's.
    """

    make: Callable[[], object]
    written: list[list[Place]]
    kept: list[bool]


def is_on_meta(model: nn.Module) -> bool:
    """Tell whether a model has parameters without values."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


class Initialisation:
    """The calls that make the values of a model on the meta device; made before the model is sharded.

    Raises:
        WorkloadError: No call makes the values of a tensor, a module has a recipe of its own, or some parameters have
            values.
    """

    def __init__(self, model: nn.Module) -> None:
        with_values = [name for name, p in model.named_parameters() if p.device.type != "meta"]
        if with_values:
            raise WorkloadError(
                f"Workload.model has parameters on the meta device and others with values ({with_values[0]}): build"
                ' all of it under torch.device("meta"), or none'
            )
        first = {id(tensor): place for place, tensor in reversed(_tensors_of(model))}
        with torch.no_grad(), rng_preserved():
            self._calls = [_looked_at(module, make, first) for module, make in _makers(model, set())]
        made = {place for call in self._calls for group in call.written for place in group}
        made |= {first[id(tensor)] for place, tensor in _tensors_of(model) if place in made}
        for name, module in model.named_modules():
            missing = [n for (_, n), t in _own(module) if t.is_meta and first[id(t)] not in made]
            if missing:
                raise WorkloadError(
                    f"Workload.model{'.' * bool(name)}{name}, a {type(module).__name__}, was built under"
                    ' torch.device("meta"), and nothing initialises'
                    f" {', '.join(missing)}: give the module a reset_parameters() (a model of transformers:"
                    " initialize_weights()), or build the model without"
                )

    def run(self) -> None:
        """Make the values, in place: parameters stay the objects that they are.

        Shards are filled where they are; other tensors are made on the CPU.

        Raises:
            WorkloadError: A call makes a part of a tensor only.
        """

        def unmade(tensor: torch.Tensor) -> torch.Tensor:
            """Return a whole tensor on the CPU in which a value that nobody makes is seen."""
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return whole.fill_(torch.nan) if whole.is_floating_point() else whole

        with torch.device("cpu"), torch.no_grad():
            for call in self._calls:
                with _in_place_of(call.written, unmade):
                    call.make()
                    made = [_at(group[0]) for group in call.written]
                for group, value, is_kept in zip(call.written, made, call.kept, strict=True):
                    if not is_kept:
                        continue
                    if value.is_floating_point() and value.isnan().any():
                        module, name = group[0]
                        raise WorkloadError(
                            f"the values of {name} of a {type(module).__name__} are not all initialised by one call of"
                            " reset_parameters(), or of _init_weights: make it write the whole tensor, or build the"
                            " model without torch.device('meta')"
                        )
                    tensor = _at(group[0])
                    if is_shared(type(tensor)):  # this rank's part
                        chunk = zip(*chunk_of(tensor), strict=True)
                        local_part(tensor).copy_(value[tuple(slice(start, start + size) for start, size in chunk)])
                    elif tensor.is_meta:
                        torch.utils.swap_tensors(tensor, value)
                    else:
                        tensor.copy_(value)


def allocate(root: nn.Module, place: torch.device) -> None:
    """Give what `fully_shard` has cut of a model on the meta device memory on a device: this rank's shards."""
    apply_as_its_class(root, lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)


def _makers(module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Yield the calls that may make values of a module and of those in it, each with the module that it is for."""
    if module in seen:
        return
    seen.add(module)
    if hasattr(module, "initialize_weights") and hasattr(module, "_init_weights"):
        yield from _makers_of_transformers(module, module)
        return
    if own := next((name for name in _OWN_RECIPES if callable(getattr(module, name, None))), None):
        raise WorkloadError(
            f'Workload.model was built under torch.device("meta"), and {type(module).__name__}.{own}() initialises the'
            " parameters in its own way, unknown to memfit: initialise them in reset_parameters() of the modules, or"
            " build the model without"
        )
    if callable(reset := getattr(module, "reset_parameters", None)):
        yield module, reset
    for child in module.children():
        yield from _makers(child, seen)


def _makers_of_transformers(module: nn.Module, model: Any) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    model = module if hasattr(module, "_init_weights") else model
    for child in module.children():
        yield from _makers_of_transformers(child, model)
    yield module, functools.partial(model._init_weights, module)


def _looked_at(module: nn.Module, make: Callable[[], object], first: dict[int, Place]) -> _Call:
    """Return a call with what it writes."""
    groups: dict[int, list[Place]] = {}
    for place, tensor in _tensors_of(module):
        if tensor.is_meta:
            groups.setdefault(id(tensor), []).append(place)
    written, kept = [], []
    is_reset = not isinstance(make, functools.partial)
    device = torch.device("meta" if is_reset else "cpu")
    with _in_place_of(list(groups.values()), functools.partial(torch.empty_like, device=device)) as given, device:
        make()
        for (key, group), stand_in in zip(groups.items(), given, strict=True):
            if (is_reset and group[0][0] is module) or _at(group[0]) is not stand_in or version_of(stand_in):
                written.append(group)
                kept.append(first[key] == group[0])
    return _Call(make, written, kept)


@contextlib.contextmanager
def _in_place_of(
    groups: list[list[Place]], stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Put others in the places of some tensors until the context is left; yield them."""
    held = [_at(group[0]) for group in groups]
    others = []
    for group, tensor in zip(groups, held, strict=True):
        other = stand_in(tensor)
        others.append(nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other)
        _put(group, others[-1])
    try:
        yield others
    finally:
        for group, tensor in zip(groups, held, strict=True):
            _put(group, tensor)


def _own(module: nn.Module) -> list[tuple[Place, torch.Tensor]]:
    held = {**own_parameters(module), **own_buffers(module)}
    return [((module, name), tensor) for name, tensor in held.items() if tensor is not None]


def _tensors_of(module: nn.Module) -> list[tuple[Place, torch.Tensor]]:
    return [found for each in module.modules() for found in _own(each)]


def _home_of(place: Place) -> dict[str, Any]:
    module, name = place
    return own_parameters(module) if name in own_parameters(module) else own_buffers(module)


def _at(place: Place) -> torch.Tensor:
    held: torch.Tensor = _home_of(place)[place[1]]
    return held


def _put(places: list[Place], tensor: torch.Tensor) -> None:
    for place in places:
        _home_of(place)[place[1]] = tensor
