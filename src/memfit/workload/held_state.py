"""The state that a module's code can read besides its arguments: attributes, classes, globals and closures.

A recomputation runs the code of a module again, in the backward pass. Values that it reads may have changed by then: a
counter, an attribute of the class that the parent sets before each call, a global. They are found without running the
code: its bytecode names attributes and globals, and so does the bytecode of the functions that these lead to.

Replaced tensors and objects count as changed; in-place writes to tensors don't, since a trace shows the operators that
write. Code of PyTorch, NumPy and Python's own library is not followed.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from memfit._torch import forward_hooks, forward_pre_hooks, own_buffers, own_modules, own_parameters

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NOT_FOLLOWED = {*sys.stdlib_module_names, "torch", "numpy", "memfit"}
ATOMS = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, np.generic)
"""Types of values without inner values."""
MOST_ITEMS = 256
"""Most items of a container that is inspected."""
_DEEPEST = 3  # nesting depth of inspected objects
_MOST_FUNCTIONS = 512  # most functions followed from one module's code
_INTERNAL = frozenset(vars(nn.Module()))  # `training` among them, which a region sets back as it runs again
_MISSING = "nothing"
_AROUND = (
    (types.MethodType, "__func__"),
    ((staticmethod, classmethod), "__func__"),
    (property, "fget"),
    ((functools.partial, functools.cached_property), "func"),
    (functools._lru_cache_wrapper, "__wrapped__"),
)


class Place(NamedTuple):
    """A holder of plain values.

    Attributes:
        values: Returns the present values by name.
        names: Names of the values that are read; None for all.
    """

    owner: str
    values: Callable[[], Mapping[str, Any]]
    names: tuple[str, ...] | None

    def read(self) -> dict[str, Any]:
        """Return a frozen copy of the values, to compare with later ones."""
        held = self.values()
        names = list(held) if self.names is None else self.names
        return {name: _frozen(held[name]) if name in held else _MISSING for name in names}


class _Identity:
    """A weak stand-in for an object that is compared by identity."""

    def __init__(self, value: Any) -> None:
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = functools.partial(type, value)  # only its type can be compared

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        mine = self._value()
        return mine is not None and mine is other._value()

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return a frozen value to compare with later ones; containers are copied."""
    kind = type(value)
    if isinstance(value, ATOMS):
        return kind, value
    if isinstance(value, _GENERATORS):
        return kind  # recomputations restore generators
    if isinstance(value, np.ndarray) and value.size <= MOST_ITEMS and value.dtype != object:
        return kind, value.shape, value.tobytes()
    if depth < _DEEPEST and isinstance(value, (list, tuple, dict)):
        # By Python's own methods: a class may have a `__len__` or an `__iter__` of its own, which raise.
        base: Any = next(base for base in (dict, list, tuple) if isinstance(value, base))
        if base.__len__(value) <= MOST_ITEMS:
            items = itertools.chain(*dict.items(value)) if isinstance(value, dict) else base.__iter__(value)
            return kind, [_frozen(item, depth + 1) for item in items]
    if isinstance(value, (set, frozenset)) and all(isinstance(item, ATOMS) for item in value):
        return kind, frozenset(value)
    return _Identity(value)


class _Accesses(NamedTuple):
    """The names in a function's code.

    Attributes:
        attributes: Names of attributes that it reads from any object.
        assigned: Attributes of its first argument that it always sets before it reads them.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    assigned: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _accesses(code: types.CodeType) -> _Accesses:
    outside: set[str] = set()
    read: set[str] = set()
    assigned: set[str] = set()
    own = code.co_varnames[: min(1, code.co_argcount)]
    is_straight, loaded = True, None
    for at in dis.get_instructions(code):
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            outside.add(at.argval)
        elif at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(at.argval)
        elif at.opname == "STORE_ATTR" and is_straight and at.argval not in read and loaded in own:
            assigned.add(at.argval)
        elif "JUMP" in at.opname or at.opname == "FOR_ITER":
            is_straight = False
        loaded = at.argval if at.opname.startswith("LOAD_FAST") else None
        loaded = loaded[-1] if isinstance(loaded, tuple) else loaded
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        inner_accesses = _accesses(inner)
        outside |= inner_accesses.globals
        read |= inner_accesses.attributes
    # The name of an attribute may also be a text, as in getattr(self, "scale").
    read |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    return _Accesses(frozenset(outside), frozenset(read), frozenset(assigned))


def is_followed(value: Any) -> bool:
    """Tell whether the references of a function, class or module are followed."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] not in _NOT_FOLLOWED


def is_object(value: Any) -> bool:
    """Tell whether a value is an object of a followed class, whose attributes are inspected."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType, *_GENERATORS)):
        return False
    return hasattr(value, "__dict__") and (is_followed(type(value)) or isinstance(value, types.SimpleNamespace))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the function behind a value, if any: inside decorators, properties, partials and methods."""
    while not isinstance(value, types.FunctionType):
        name = next((name for kind, name in _AROUND if isinstance(value, kind)), None)
        if name is None:
            return
        value = getattr(value, name, None)
    yield value
    if hasattr(value, "__wrapped__"):
        yield from _functions(value.__wrapped__)


class _Reached:
    """The functions that code leads to, and the names in them.

    Args:
        kind: The class whose methods the functions may call.
    """

    def __init__(self, roots: Iterable[Any], kind: type | None) -> None:
        self.functions: dict[types.FunctionType, None] = {}
        self.names: set[str] = set()
        self.held: dict[int, Any] = {}  # classes, modules and objects that the code names
        waiting = list(roots)
        first = [_accesses(function.__code__) for root in waiting for function in _functions(root)]
        self.assigned = frozenset[str]().union(*(accesses.assigned for accesses in first))
        while waiting:
            while waiting:
                for function in _functions(waiting.pop()):
                    if function in self.functions or len(self.functions) >= _MOST_FUNCTIONS:
                        continue
                    self.functions[function] = None
                    fresh = _accesses(function.__code__).attributes - self.names
                    self.names |= fresh
                    if kind is not None:
                        waiting += [inspect.getattr_static(kind, name, None) for name in fresh]
                    if is_followed(function):
                        named = [*globals_of(function).values(), *cells_of(function).values()]
                        for value in named:
                            if isinstance(value, (type, types.ModuleType)) and is_followed(value) or is_object(value):
                                self.held[id(value)] = value
                        waiting += [value for value in named if not isinstance(value, type)]
            if len(self.functions) >= _MOST_FUNCTIONS:
                break  # no more are taken, so that members would wait for ever
            for value in self.held.values():  # the named functions of classes, modules and objects
                members = vars(value if isinstance(value, (type, types.ModuleType)) else type(value))
                for name in self.names & members.keys():
                    found = set(_functions(members[name]))
                    if all(map(is_followed, found)) and not self.functions.keys() >= found:
                        waiting.append(members[name])


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the global values named in a function."""
    held = function.__globals__
    return {name: held[name] for name in _accesses(function.__code__).globals if name in held}


def names_in(function: types.FunctionType) -> frozenset[str]:
    """Return the names of attributes in a function's code, of functions within it too."""
    return _accesses(function.__code__).attributes


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of a function's closure, and of its default arguments."""
    defaults = [*(function.__kwdefaults__ or {}).values(), *(function.__defaults__ or ())]
    cells = {f"default {i}": value for i, value in enumerate(defaults) if not isinstance(value, ATOMS)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the name has no value yet
            cells[name] = cell.cell_contents
    return cells


class Reader:
    """A finder of the values that modules' code can read; results for classes are cached, so use one for a model."""

    def __init__(self) -> None:
        self._of_classes: dict[tuple[type, tuple[int, ...]], tuple[_Reached, list[Place]]] = {}
        self._of_objects: dict[int, Place] = {}

    def places(self, fqn: str, module: nn.Module) -> list[Place]:
        """Return the places that a module's own code reads, without its submodules'."""
        own = [value for value in vars(module).values() if any(map(is_followed, _functions(value)))]
        kind = type(module)
        key = kind, tuple(map(id, own))
        if key not in self._of_classes:
            reached = _Reached([inspect.getattr_static(kind, "forward", None), *own], kind)
            bases = [base for base in kind.__mro__ if base is not nn.Module and is_followed(base)]
            places = [*(_of_type(base, reached.names) for base in bases), *self._places(reached)]
            self._of_classes[key] = reached, places
        reached, class_places = self._of_classes[key]
        apart = {*own_modules(module), *own_parameters(module), *own_buffers(module)}
        names = [
            n
            for n in reached.names - reached.assigned - apart - _INTERNAL
            if not _is_code(inspect.getattr_static(kind, n, None))
        ]
        held = Place(fqn or "the model", lambda: module.__dict__, tuple(sorted(names)))
        read = tuple(sorted(own_buffers(module).keys() & (reached.names - reached.assigned)))
        buffers = [Place(held.owner, lambda: own_buffers(module), read)] if read else []
        objects = [module.__dict__[name] for name in names if name in module.__dict__]
        return [held, *buffers, *class_places, *self._objects(objects)]

    def hooks(self, module: nn.Module) -> list[Place]:
        """Return the places that a module's forward hooks read; they run with the call of the module around it."""
        hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
        hooks = [hook for hook in hooks if any(map(is_followed, _functions(hook)))]
        return self._places(_Reached(hooks, None)) if hooks else []

    def _places(self, reached: _Reached) -> list[Place]:
        places: list[Place] = []
        for function in reached.functions:
            if is_followed(function):
                if names := tuple(sorted(n for n, v in globals_of(function).items() if _is_value(v))):
                    places.append(
                        Place(function.__module__, functools.partial(getattr, function, "__globals__"), names)
                    )
                if inside := tuple(sorted(n for n, v in cells_of(function).items() if _is_value(v))):
                    places.append(Place(function.__qualname__, functools.partial(cells_of, function), inside))
        named = [value for value in reached.held.values() if isinstance(value, (type, types.ModuleType))]
        places += [_of_type(value, reached.names) for value in named]
        return [*places, *self._objects(reached.held.values())]

    def _objects(self, values: Iterable[Any]) -> list[Place]:
        """Return the places of objects' attributes, and of their inner objects'."""
        places: dict[int, Place] = {}
        level = [value for value in values if is_object(value)]
        for _ in range(_DEEPEST):
            level = [value for value in level if id(value) not in places]
            for value in level:
                place = Place(type(value).__name__, functools.partial(vars, value), None)
                places[id(value)] = self._of_objects.setdefault(id(value), place)
            level = [inner for value in level for inner in vars(value).values() if is_object(inner)]
        return list(places.values())


def _of_type(value: type | types.ModuleType, names: set[str]) -> Place:
    mine = tuple(sorted(n for n in names & vars(value).keys() if _is_value(vars(value)[n])))
    return Place(value.__name__, functools.partial(vars, value), mine)


def _is_value(value: Any) -> bool:
    """Tell whether a value is neither code nor a module of a model, which is called instead of read."""
    is_code = isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, nn.Module))
    return not is_code and not _is_code(value)


def _is_code(value: Any) -> bool:
    return next(_functions(value), None) is not None


def generators_of(modules: Iterable[nn.Module], reader: Reader | None = None) -> list[Any]:
    """Return the random generators that the code of modules, inner ones included, can reach, except the global ones."""
    reader = reader or Reader()
    generators: dict[int, Any] = {}
    for module in modules:
        for place in (*reader.places("", module), *reader.hooks(module)):
            held = place.values()
            for name in held if place.names is None else place.names:
                generators |= {id(generator): generator for generator in _generators_in(held.get(name))}
    return list(generators.values())


def attribute_generators(module: nn.Module) -> list[Any]:
    """Return the random generators in a module's attributes."""
    return [value for value in vars(module).values() if isinstance(value, _GENERATORS)]


def _generators_in(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, _GENERATORS):
        yield value
    elif depth < _DEEPEST and isinstance(value, (list, tuple, dict)) and len(value) <= MOST_ITEMS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _generators_in(item, depth + 1)
