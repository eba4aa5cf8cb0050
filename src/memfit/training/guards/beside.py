"""Memory that a loop holds beside the step that was planned: a second model, an average of weights, a checkpoint.

No step uses it, so no plan counts it. It takes the memory of the same device all the same.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from memfit._torch.fake import FakeTensor
from memfit._torch.tensors import is_wrapper, storage_key_of
from memfit.frames import is_users
from memfit.tape import Geometry
from memfit.training.guards.growth import namespaces
from memfit.units import format_bytes

_MOST_VALUES = 100_000
_MOST_NAMED = 4
_LIBRARIES = ("torch.", "numpy", "memfit.", "_pytest", "pluggy")
"""Whose objects are not looked through, but for modules, optimizers and data sets."""
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_INSTALLED = "-packages"  # in the paths of what pip or a distribution installed
_LOOKED_THROUGH = ("torch.nn.", "torch.optim.", "torch.utils.data.")


class Held(NamedTuple):
    """A variable of the loop, and the bytes of its tensors that no step of the plan has."""

    name: str
    what: str
    nbytes: int

    def __str__(self) -> str:
        return f"`{self.name}` ({self.what}, {format_bytes(self.nbytes)})"


def held_beside(known: Iterable[torch.Tensor], given: Sequence[torch.Tensor | Geometry], device: str) -> list[Held]:
    """Return the variables of the user's frames and modules that hold other tensors than a step's, the largest first.

    Results with a graph are left out: they are of the step that is under way.

    Args:
        known: The tensors that are counted.
        given: The tensors that the step takes from the loop: those of the next one are like them.
        device: The kind of device whose memory is asked for.
    """
    known = [*known, *(t for t in given if isinstance(t, torch.Tensor))]
    seen = {storage_key_of(t) for t in known if _has_storage(t)}
    alike = {(g.dtype, g.size) for t in given if (g := Geometry.of(t)) is not None}
    visited: set[int] = set()
    found = []
    for space in namespaces({}):
        for name, value in list(space.values.items()):
            if not isinstance(name, str) or name.startswith("__"):
                continue
            nbytes = 0
            for tensor in _tensors_of(value, visited):
                if _has_storage(tensor) and tensor.device.type == device and tensor.grad_fn is None:
                    key = storage_key_of(tensor)
                    if value is tensor and (tensor.dtype, tuple(tensor.shape)) in alike:
                        continue
                    nbytes += 0 if key in seen else tensor.untyped_storage().nbytes()
                    seen.add(key)
            if nbytes:
                found.append(Held(name, type(value).__name__, nbytes))
    return sorted(found, key=lambda held: -held.nbytes)


def beside_text(held: Sequence[Held], peak_bytes: int, budget_bytes: int) -> str:
    """Return the variables beside a plan in words, and whether the budget holds them too."""
    total = sum(each.nbytes for each in held)
    named = ", ".join(map(str, held[:_MOST_NAMED]))
    more = f", and {len(held) - _MOST_NAMED} more" if len(held) > _MOST_NAMED else ""
    fits = "within" if peak_bytes + total <= budget_bytes else "over"
    return (
        f"your loop keeps {format_bytes(total)} outside the step, not in the prediction: {named}{more}. The step's peak"
        f" and these tensors need {format_bytes(peak_bytes + total)}, {fits} the budget of {format_bytes(budget_bytes)}"
    )


def _has_storage(tensor: torch.Tensor) -> bool:
    is_plain = not (isinstance(tensor, FakeTensor) or is_wrapper(type(tensor)))
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested


def _tensors_of(value: Any, visited: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value leads to: of containers, objects, closures and classes."""
    waiting = deque([value])
    while waiting and len(visited) < _MOST_VALUES:
        held = waiting.popleft()
        if isinstance(held, torch.Tensor):
            yield held
            if held.is_leaf and held.grad is not None:
                yield held.grad
            continue
        if id(held) in visited or isinstance(held, (str, bytes, int, float, types.ModuleType, types.FrameType)):
            continue
        visited.add(id(held))
        waiting += _inner(held)


def _inner(held: Any) -> list[Any]:
    """Return an object's parts, without its own methods: a lazy mapping of transformers would import all its models."""
    if isinstance(held, dict):
        return list(dict.values(held))
    for kind in _SEQUENCES:
        if isinstance(held, kind):
            return list(kind.__iter__(held))
    if isinstance(held, types.FunctionType):
        cells = [cell.cell_contents for cell in held.__closure__ or () if _is_full(cell)]
        return [*cells, *(held.__defaults__ or ())]
    if isinstance(held, types.MethodType):
        return [held.__self__]
    if isinstance(held, type):
        file = getattr(sys.modules.get(held.__module__), "__file__", None) or ""
        return list(vars(held).values()) if is_users(file) and _INSTALLED not in file else []
    home = f"{type(held).__module__}."
    if home.startswith(_LIBRARIES) and not home.startswith(_LOOKED_THROUGH):
        return []
    try:
        return [*object.__getattribute__(held, "__dict__").values(), type(held)]
    except AttributeError:
        return []


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
