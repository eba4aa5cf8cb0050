"""Modules and tensors that a step's code holds outside the model, and code that refers to copies of them.

`copy.deepcopy` shares functions with the original, and so what they hold: a teacher or a discriminator in the closure
of a loss function, a global of the script, the object whose method the loss is, what a hook refers to. A copy of a step
has to run on copies of these: they take memory as the model does, they move to a device with it, and a step that runs
for memfit's sake may write to none of the user's own.

What code reaches in another way, such as by a function that the model's `forward` calls, is shared with the original.
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

from memfit.batch import parts_of
from memfit.held_state import ATOMS, MOST_ITEMS, cells_of, globals_of, is_followed, is_object
from memfit.workload import Workload

_DEEPEST = 3  # objects that hold objects
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_LEAVES = (*ATOMS, types.ModuleType, types.BuiltinFunctionType, type)
_Held = nn.Module | torch.Tensor


class Rebinding:
    """Makes code that refers to copies, of code that refers to originals. One is for a copy of a workload.

    Args:
        memo: As `copy.deepcopy` left it: by the identity of each original of the model, optimizer and batch, its copy.
        copied: Returns the copy of a module or a tensor from outside.
    """

    def __init__(self, memo: dict[int, Any], copied: Callable[[Any], Any]) -> None:
        self._memo, self._copied = memo, copied
        self._own = frozenset(memo)
        self._copies = set(map(id, memo.values()))  # which refer to copies already
        self._made: dict[int, tuple[Any, Any]] = {}  # of originals from outside, which are held so that none is reused
        self._keeps_model = False

    def model(self, model: nn.Module) -> None:
        """Have the functions, methods and weak references of a copied model's modules refer to copies."""
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if name not in _REGISTERED:
                    rebound = self._within(value)
                    if rebound is not value:
                        module.__dict__[name] = rebound
            self._forward(module)

    def _forward(self, module: nn.Module) -> None:
        """Have a module's own code refer to copies of the modules and tensors that it names."""
        code = vars(module).get("forward", inspect.getattr_static(type(module), "forward", None))
        function = code.__func__ if isinstance(code, types.MethodType) and code.__self__ is module else code
        if not isinstance(function, types.FunctionType) or not is_followed(function):
            return
        named = (*globals_of(function).values(), *cells_of(function).values())
        if any(isinstance(value, _Held) for value in named) and (made := self._of(function)) is not function:
            module.__dict__["forward"] = types.MethodType(made, module)

    def loss(self, loss_fn: Any) -> Any:
        """Return a loss function that refers to copies of the modules and tensors outside the model.

        The model itself it has to reach by its argument.
        """
        self._keeps_model = True
        try:
            return self._of(loss_fn)
        finally:
            self._keeps_model = False

    def _within(self, value: Any) -> Any:
        """Return a value that a copy holds, referring to copies; its containers are the copy's, and change in place."""
        if isinstance(value, weakref.ref):
            made = self._of(value()) if isinstance(value(), _Held) else None
            return value if made is None or made is value() else weakref.ref(made)
        if isinstance(value, dict):
            for key, inner in list(value.items()):
                if (rebound := self._within(inner)) is not inner:
                    value[key] = rebound
        elif isinstance(value, list):
            for position, inner in enumerate(value):
                if (rebound := self._within(inner)) is not inner:
                    value[position] = rebound
        elif type(value) is tuple:
            made = tuple(self._within(inner) for inner in value)
            return value if _are_same(made, value) else made
        elif isinstance(value, (types.FunctionType, functools.partial)):
            return self._of(value)
        return value

    def _of(self, value: Any, depth: int = 0) -> Any:
        """Return the stand-in for a value that code refers to: the value itself, where nothing in it is copied."""
        if isinstance(value, _LEAVES) or (id(value) in self._copies and id(value) not in self._own):
            return value
        if id(value) in self._own:
            is_models = isinstance(value, nn.Module | nn.Parameter)
            return value if is_models and self._keeps_model else self._memo[id(value)]
        if id(value) not in self._made:
            self._made[id(value)] = value, value  # for code that refers to itself
            self._made[id(value)] = value, self._copy(value, depth)
        return self._made[id(value)][1]

    def _copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, _Held):
            made = self._copied(value)
            self._copies.update(map(id, self._memo.values()))
            return made
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            made = self._of(value.__self__, depth)
            return value if made is value.__self__ else types.MethodType(value.__func__, made)
        if isinstance(value, functools.partial):
            given = [self._of(a, depth) for a in (value.func, *value.args)]
            named = {key: self._of(a, depth) for key, a in value.keywords.items()}
            is_same = _are_same([*given, *named.values()], [value.func, *value.args, *value.keywords.values()])
            return value if is_same else functools.partial(given[0], *given[1:], **named)
        if type(value) in (list, tuple) and len(value) <= MOST_ITEMS:
            items = [inner if isinstance(inner, torch.Tensor) else self._of(inner, depth) for inner in value]
            return value if _are_same(items, value) else type(value)(items)
        if type(value) is dict and len(value) <= MOST_ITEMS:
            found = {k: v if isinstance(v, torch.Tensor) else self._of(v, depth) for k, v in value.items()}
            return value if _are_same(found.values(), value.values()) else found
        return self._object(value, depth + 1) if depth < _DEEPEST and _is_looked_into(value) else value

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """Return a function whose cells, default arguments and globals refer to copies; itself, where none does."""
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        cells = function.__closure__ or ()
        new_cells = [self._cell(cell, depth) for cell in cells]
        new_defaults = [self._of(value, depth) for value in defaults]
        new_named = {key: self._of(value, depth) for key, value in named.items()}
        known = globals_of(function) if is_followed(function) else {}
        changed = {key: made for key, value in known.items() if (made := self._of(value, depth)) is not value}
        old = [*cells, *defaults, *named.values()]
        if not changed and _are_same([*new_cells, *new_defaults, *new_named.values()], old):
            return function
        around = {**function.__globals__, **changed} if changed else function.__globals__
        made = types.FunctionType(
            function.__code__, around, function.__name__, tuple(new_defaults) or None, tuple(new_cells) or None
        )
        made.__kwdefaults__, made.__qualname__ = new_named or None, function.__qualname__
        made.__module__ = function.__module__
        made.__dict__.update(function.__dict__)
        return made

    def _cell(self, cell: types.CellType, depth: int) -> types.CellType:
        try:
            made = self._of(cell.cell_contents, depth)
        except ValueError:  # empty yet
            return cell
        return cell if made is cell.cell_contents else types.CellType(made)

    def _object(self, value: Any, depth: int) -> Any:
        """Return an object whose attributes refer to copies, and that shares the others; itself, where none does."""
        new = {name: self._of(held, depth) for name, held in vars(value).items()}
        if _are_same(new.values(), vars(value).values()):
            return value
        made = copy.copy(value)
        made.__dict__.update(new)  # and not by names, which frozen dataclasses refuse
        return made


def held_besides(workload: Workload) -> list[torch.Tensor]:
    """Return the dense tensors that a step's code holds and finds by itself: not parameters, buffers or the batch.

    They are those of modules and tensors outside the model, and those that modules have as plain attributes: in lists,
    in objects, or as modules that are not registered.
    """
    found: list[Any] = []

    def seen(value: Any) -> Any:
        found.append(value)
        return value

    modules = list(workload.model.modules())
    own = [*modules, *workload.model.parameters(), *workload.model.buffers()]
    code = Rebinding({id(value): value for value in own}, seen)
    code.model(workload.model)
    code.loss(workload.loss_fn)
    known = set(map(id, own))
    attributes = [v for module in modules for name, v in vars(module).items() if name not in _REGISTERED]
    tensors = [t for value in (*attributes, *found) for t in _tensors_in(value, known)]
    return [part for tensor in tensors for part in parts_of(tensor)]


def _tensors_in(value: Any, known: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors within a value, of modules too; known values are left out."""
    if isinstance(value, _LEAVES) or id(value) in known:
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
    """Tell whether something is an object whose attributes count: of someone's own class, or of memfit's."""
    if isinstance(value, nn.Module):
        return False
    return is_object(value) or (hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] == "memfit")


def _are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))
