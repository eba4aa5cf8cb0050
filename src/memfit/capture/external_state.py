"""Modules and tensors outside the model that a step's code refers to, and copies of code that refer to copies of them.

`copy.deepcopy` shares functions with the original, and so their closures and globals: a teacher in the closure of a
loss function, the object whose method the loss is. A copied step needs copies of these: they take memory, move to a
device, and memfit must not write to the user's own.

State that code reaches in another way, such as by a function that the model's `forward` calls, is shared.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch.replacement import replaced
from memfit.batch import parts_of
from memfit.held_state import ATOMS, MOST_ITEMS, cells_of, globals_of, is_followed, is_object
from memfit.workload import Workload

_DEEPEST = 3  # levels of objects that hold objects
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_LEAVES = (*ATOMS, types.ModuleType, types.BuiltinFunctionType, type)
_Held = nn.Module | torch.Tensor
_models: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Modules and parameters of the user's models that a rebound loss function still refers to."""


class Rebinding:
    """Copies of functions and objects that refer to the copies of one copied workload.

    Args:
        memo: The memo of `copy.deepcopy`: the copies of the model's, optimizer's and batch's objects, by `id`.
        copied: Returns the copy of a module or a tensor from outside.
    """

    def __init__(self, memo: dict[int, Any], copied: Callable[[Any], Any]) -> None:
        self._memo, self._copied = memo, copied
        self._own = frozenset(memo)
        self._copies = set(map(id, memo.values()))
        # External originals and their stand-ins, by `id`: the originals are held, so that no `id` is reused.
        self._stand_ins: dict[int, tuple[Any, Any]] = {}
        self._keeps_model = False

    def model(self, model: nn.Module) -> None:
        """Rebind the functions, methods and weak references of a copied model's modules."""
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if name not in _REGISTERED:
                    rebound = self._within(value)
                    if rebound is not value:
                        module.__dict__[name] = rebound
            self._forward(module)

    def _forward(self, module: nn.Module) -> None:
        """Rebind a module's `forward`, where it names modules or tensors."""
        code = vars(module).get("forward", inspect.getattr_static(type(module), "forward", None))
        function = code.__func__ if isinstance(code, types.MethodType) and code.__self__ is module else code
        if not isinstance(function, types.FunctionType) or not is_followed(function):
            return
        named = (*globals_of(function).values(), *cells_of(function).values())
        if any(isinstance(value, _Held) for value in named) and (rebound := self._of(function)) is not function:
            module.__dict__["forward"] = types.MethodType(rebound, module)

    def loss(self, loss_fn: Any) -> Any:
        """Return a loss function that refers to copies of external modules and tensors, and to the original model.

        The copied model reaches it as an argument.
        """
        with replaced(self, "_keeps_model", True):
            return self._of(loss_fn)

    def _within(self, value: Any) -> Any:
        """Return a rebound value of a copy's attribute; its lists and dictionaries change in place."""
        if isinstance(value, weakref.ref):
            target = self._of(value()) if isinstance(value(), _Held) else None
            return value if target is None or target is value() else weakref.ref(target)
        if isinstance(value, dict):
            for key, inner in list(value.items()):
                if (rebound := self._within(inner)) is not inner:
                    value[key] = rebound
        elif isinstance(value, list):
            for position, inner in enumerate(value):
                if (rebound := self._within(inner)) is not inner:
                    value[position] = rebound
        elif type(value) is tuple:
            items = tuple(self._within(inner) for inner in value)
            return value if _are_same(items, value) else items
        elif isinstance(value, (types.FunctionType, functools.partial)):
            return self._of(value)
        return value

    def _of(self, value: Any, depth: int = 0) -> Any:
        """Return the stand-in for a value that code refers to; the value itself, where nothing in it is copied."""
        if isinstance(value, _LEAVES) or (id(value) in self._copies and id(value) not in self._own):
            return value
        if id(value) in self._own:
            if isinstance(value, nn.Module | nn.Parameter) and self._keeps_model:
                _models[value] = None
                return value
            return self._memo[id(value)]
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = value, value  # ends the recursion of code that refers to itself
            self._stand_ins[id(value)] = value, self._copy(value, depth)
        return self._stand_ins[id(value)][1]

    def _copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, _Held):
            copied = self._copied(value)
            self._copies.update(map(id, self._memo.values()))
            return copied
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            owner = self._of(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            given = [self._of(a, depth) for a in (value.func, *value.args)]
            named = {key: self._of(a, depth) for key, a in value.keywords.items()}
            is_same = _are_same([*given, *named.values()], [value.func, *value.args, *value.keywords.values()])
            return value if is_same else functools.partial(given[0], *given[1:], **named)
        if type(value) in (list, tuple) and len(value) <= MOST_ITEMS:
            items = [inner if isinstance(inner, torch.Tensor) else self._of(inner, depth) for inner in value]
            return value if _are_same(items, value) else type(value)(items)
        if type(value) is dict and len(value) <= MOST_ITEMS:
            entries = {k: v if isinstance(v, torch.Tensor) else self._of(v, depth) for k, v in value.items()}
            return value if _are_same(entries.values(), value.values()) else entries
        return self._object(value, depth + 1) if depth < _DEEPEST and _is_looked_into(value) else value

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """Return a function with rebound cells, default arguments and globals; itself, where none changes."""
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        cells = function.__closure__ or ()
        new_cells = [self._cell(cell, depth) for cell in cells]
        new_defaults = [self._of(value, depth) for value in defaults]
        new_named = {key: self._of(value, depth) for key, value in named.items()}
        known = globals_of(function) if is_followed(function) else {}
        changed = {key: new for key, value in known.items() if (new := self._of(value, depth)) is not value}
        old = [*cells, *defaults, *named.values()]
        if not changed and _are_same([*new_cells, *new_defaults, *new_named.values()], old):
            return function
        around = {**function.__globals__, **changed} if changed else function.__globals__
        rebound = types.FunctionType(
            function.__code__, around, function.__name__, tuple(new_defaults) or None, tuple(new_cells) or None
        )
        rebound.__kwdefaults__, rebound.__qualname__ = new_named or None, function.__qualname__
        rebound.__module__ = function.__module__
        rebound.__dict__.update(function.__dict__)
        return rebound

    def _cell(self, cell: types.CellType, depth: int) -> types.CellType:
        try:
            content = self._of(cell.cell_contents, depth)
        except ValueError:  # empty yet
            return cell
        return cell if content is cell.cell_contents else types.CellType(content)

    def _object(self, value: Any, depth: int) -> Any:
        """Return a shallow copy of an object, with rebound attributes; the object, where none changes."""
        new = {name: self._of(held, depth) for name, held in vars(value).items()}
        if _are_same(new.values(), vars(value).values()):
            return value
        rebound = copy.copy(value)
        rebound.__dict__.update(new)  # frozen dataclasses refuse `setattr`
        return rebound


def external_tensors(workload: Workload) -> list[torch.Tensor]:
    """Return the dense tensors that a step's code refers to beside parameters, buffers and the batch.

    They are of modules and tensors outside the model, and of plain attributes of its modules: in lists, in objects, in
    modules that are not registered. The user's own model is left out: its copy takes its place.
    """
    external: list[Any] = []

    def seen(value: Any) -> Any:
        external.append(value)
        return value

    modules = list(workload.model.modules())
    own = [*modules, *workload.model.parameters(), *workload.model.buffers()]
    code = Rebinding({id(value): value for value in own}, seen)
    code.model(workload.model)
    code.loss(workload.loss_fn)
    known = set(map(id, own))
    attributes = [v for module in modules for name, v in vars(module).items() if name not in _REGISTERED]
    tensors = [t for value in (*attributes, *external) for t in _tensors_in(value, known)]
    return [part for tensor in tensors for part in parts_of(tensor)]


def _tensors_in(value: Any, known: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors within a value, its modules' included; known values are left out."""
    if isinstance(value, _LEAVES) or id(value) in known or (isinstance(value, _Held) and value in _models):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (nn.Module, list, tuple, dict)) or (depth < _DEEPEST and _is_looked_into(value)):
        known.add(id(value))
        is_container = isinstance(value, (list, tuple, dict))
        inside = value if is_container else vars(value)
        for inner in inside.values() if isinstance(inside, dict) else inside:
            yield from _tensors_in(inner, known, depth + (not is_container))


def _is_looked_into(value: Any) -> bool:
    """Tell whether a value's attributes are searched: objects of the user's classes or of memfit's."""
    if isinstance(value, nn.Module):
        return False
    return is_object(value) or (hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] == "memfit")


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
