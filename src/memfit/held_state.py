"""What a module's code can read besides its arguments: plain values of its attributes, classes, globals and closures.

A recomputation runs the code of a module again, in the backward pass. What that code reads may have changed by then: a
counter, an attribute of the class that the parent sets before each call, a global. The code is not run to find out what
it reads. Its bytecode names attributes and globals, and of the functions that these lead to the same is asked.

Tensors and objects that something else takes the place of count as changed; what is written to them in place does not:
a trace shows which operators write to tensors. Code of PyTorch, of NumPy and of Python's own library is not followed.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NOT_FOLLOWED = {*sys.stdlib_module_names, "torch", "numpy", "memfit"}
ATOMS = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, np.generic)
"""Types of values that nothing is inside of."""
MOST_ITEMS = 256
"""Of a container that is looked into."""
_DEEPEST = 3  # objects that hold objects
_MOST_FUNCTIONS = 512  # that one module's code leads to
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
    """Where plain values are held.

    Attributes:
        owner: What holds them, as people call it.
        values: Returns them by name, as they are now.
        names: Those that are read; None for all.
    """

    owner: str
    values: Callable[[], Mapping[str, Any]]
    names: tuple[str, ...] | None

    def read(self) -> dict[str, Any]:
        """Return the values, so that what changes later is not seen in them."""
        held = self.values()
        names = list(held) if self.names is None else self.names
        return {name: _frozen(held[name]) if name in held else _MISSING for name in names}


class _Identity:
    """Stands for an object that is compared by identity, and does not keep it alive."""

    def __init__(self, value: Any) -> None:
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = functools.partial(type, value)  # no more is known of it than its type

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        mine = self._value()
        return mine is not None and mine is other._value()

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return a value to compare with later ones; containers are looked into."""
    kind = type(value)
    if isinstance(value, ATOMS):
        return kind, value
    if isinstance(value, _GENERATORS):
        return kind  # recomputations set them back
    if isinstance(value, np.ndarray) and value.size <= MOST_ITEMS and value.dtype != object:
        return kind, value.shape, value.tobytes()
    if depth < _DEEPEST and isinstance(value, (list, tuple, dict)) and len(value) <= MOST_ITEMS:
        items = [item for pair in value.items() for item in pair] if isinstance(value, dict) else value
        return kind, [_frozen(item, depth + 1) for item in items]
    if isinstance(value, (set, frozenset)) and all(isinstance(item, ATOMS) for item in value):
        return kind, frozenset(value)
    return _Identity(value)


class _Accesses(NamedTuple):
    """What a function's code names.

    Attributes:
        globals: Names that it looks up outside of it.
        attributes: Those that it reads of any object.
        assigned: Those of its first argument that it sets before it reads them, whichever way it goes.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    assigned: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _accesses(code: types.CodeType) -> _Accesses:
    outside: set[str] = set()
    read: set[str] = set()
    assigned: set[str] = set()
    is_straight, before = True, None
    for at in dis.get_instructions(code):
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            outside.add(at.argval)
        elif at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(at.argval)
        elif at.opname == "STORE_ATTR" and is_straight and at.argval not in read and _is_first(before, code):
            assigned.add(at.argval)
        elif "JUMP" in at.opname or at.opname == "FOR_ITER":
            is_straight = False
        before = at
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        found = _accesses(inner)
        outside |= found.globals
        read |= found.attributes
    # The name of an attribute may also be a text, as in getattr(self, "scale").
    read |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    return _Accesses(frozenset(outside), frozenset(read), frozenset(assigned))


def _is_first(loaded: dis.Instruction | None, code: types.CodeType) -> bool:
    """Tell whether an instruction loads a function's first argument last."""
    if loaded is None or not code.co_argcount or not loaded.opname.startswith("LOAD_FAST"):
        return False
    last = loaded.argval[-1] if isinstance(loaded.argval, tuple) else loaded.argval
    return bool(last == code.co_varnames[0])


def is_followed(value: Any) -> bool:
    """Tell whether what a function, a class or a module refers to is looked at."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] not in _NOT_FOLLOWED


def is_object(value: Any) -> bool:
    """Tell whether something is an object of someone's own class, whose attributes are looked at."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType, *_GENERATORS)):
        return False
    return hasattr(value, "__dict__") and (is_followed(type(value)) or isinstance(value, types.SimpleNamespace))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the function that something stands for, if any: through decorators, properties, partials and methods."""
    while not isinstance(value, types.FunctionType):
        name = next((name for kind, name in _AROUND if isinstance(value, kind)), None)
        if name is None:
            return
        value = getattr(value, name, None)
    yield value
    if hasattr(value, "__wrapped__"):
        yield from _functions(value.__wrapped__)


class _Reached:
    """The functions that some code leads to, and what they name.

    Args:
        roots: Functions.
        kind: The class whose methods they may call.
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
                    waiting += self._follow(function, kind)
            waiting = [value for value in self._members() if not self.functions.keys() >= set(_functions(value))]

    def _follow(self, function: types.FunctionType, kind: type | None) -> list[Any]:
        """Take up a function; return what it leads to."""
        if function in self.functions or len(self.functions) >= _MOST_FUNCTIONS:
            return []
        self.functions[function] = None
        fresh = _accesses(function.__code__).attributes - self.names
        self.names |= fresh
        methods = [inspect.getattr_static(kind, name, None) for name in fresh] if kind is not None else []
        if not is_followed(function):
            return methods
        named = [*globals_of(function).values(), *cells_of(function).values()]
        for value in named:
            if isinstance(value, (type, types.ModuleType)) and is_followed(value) or is_object(value):
                self.held[id(value)] = value
        return [*methods, *(value for value in named if not isinstance(value, type))]

    def _members(self) -> Iterator[Any]:
        """Yield the functions of what the code names, as far as it names them."""
        for value in self.held.values():
            members = vars(value if isinstance(value, (type, types.ModuleType)) else type(value))
            for name in self.names & members.keys():
                if all(is_followed(function) for function in _functions(members[name])):
                    yield members[name]


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the global values that a function names."""
    held = function.__globals__
    return {name: held[name] for name in _accesses(function.__code__).globals if name in held}


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of a function's closure, and of its default arguments."""
    defaults = [*(function.__kwdefaults__ or {}).values(), *(function.__defaults__ or ())]
    found = {f"default {i}": value for i, value in enumerate(defaults) if not isinstance(value, ATOMS)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a name that has no value yet
            found[name] = cell.cell_contents
    return found


class Reader:
    """Finds what modules' code can read. One is for the modules of a model: what it knows of classes is kept."""

    def __init__(self) -> None:
        self._of_classes: dict[tuple[type, tuple[int, ...]], tuple[_Reached, list[Place]]] = {}
        self._of_objects: dict[int, Place] = {}

    def places(self, fqn: str, module: nn.Module) -> list[Place]:
        """Return where what a module's own code reads is held; not what its submodules read.

        Args:
            fqn: What the module is called.
            module: The module.
        """
        own = [value for value in vars(module).values() if any(map(is_followed, _functions(value)))]
        reached, found = self._of_class(type(module), own)
        apart = {*module._modules, *module._parameters, *module._buffers}
        names = [n for n in reached.names - reached.assigned - apart - _INTERNAL if not _is_code(type(module), n)]
        held = Place(fqn or "the model", lambda: module.__dict__, tuple(sorted(names)))
        read = tuple(sorted(module._buffers.keys() & (reached.names - reached.assigned)))
        buffers = [Place(held.owner, lambda: module._buffers, read)] if read else []
        objects = [module.__dict__[name] for name in names if name in module.__dict__]
        return [held, *buffers, *found, *self._objects(objects)]

    def _of_class(self, kind: type, own: list[Any]) -> tuple[_Reached, list[Place]]:
        key = kind, tuple(map(id, own))
        if key not in self._of_classes:
            forward = inspect.getattr_static(kind, "forward", None)
            reached = _Reached([forward, *own], kind)
            bases = [base for base in kind.__mro__ if base is not nn.Module and is_followed(base)]
            self._of_classes[key] = (
                reached,
                [*(_of_type(base, reached.names) for base in bases), *self._places(reached)],
            )
        return self._of_classes[key]

    def hooks(self, module: nn.Module) -> list[Place]:
        """Return where what the hooks of a module's forward pass read is held; they run where one around it does."""
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks = [hook for hook in hooks if any(map(is_followed, _functions(hook)))]
        return self._places(_Reached(hooks, None)) if hooks else []

    def _places(self, reached: _Reached) -> list[Place]:
        """Return where what some functions name is held."""
        found: list[Place] = []
        for function in reached.functions:
            if is_followed(function):
                names = tuple(sorted(n for n, v in globals_of(function).items() if _is_value(v)))
                inside = tuple(sorted(n for n, v in cells_of(function).items() if _is_value(v)))
                found += [Place(function.__module__, functools.partial(_globals, function), names)] if names else []
                found += [Place(function.__qualname__, functools.partial(cells_of, function), inside)] if inside else []
        named = [value for value in reached.held.values() if isinstance(value, (type, types.ModuleType))]
        found += [_of_type(value, reached.names) for value in named]
        return [*found, *self._objects(reached.held.values())]

    def _objects(self, values: Iterable[Any]) -> list[Place]:
        """Return the places of objects' attributes, and of those of the objects that they hold."""
        found: dict[int, Place] = {}
        level = [value for value in values if is_object(value)]
        for _ in range(_DEEPEST):
            level = [value for value in level if id(value) not in found]
            for value in level:
                place = Place(type(value).__name__, functools.partial(vars, value), None)
                found[id(value)] = self._of_objects.setdefault(id(value), place)
            level = [inner for value in level for inner in vars(value).values() if is_object(inner)]
        return list(found.values())


def _is_code(kind: type, name: str) -> bool:
    """Tell whether a class has a method or property of a name."""
    return next(_functions(inspect.getattr_static(kind, name, None)), None) is not None


def _globals(function: types.FunctionType) -> dict[str, Any]:
    return function.__globals__


def _of_type(value: type | types.ModuleType, names: set[str]) -> Place:
    """Return the place of a class's or a module's values."""
    mine = tuple(sorted(n for n in names & vars(value).keys() if _is_value(vars(value)[n])))
    return Place(value.__name__, functools.partial(vars, value), mine)


def _is_value(value: Any) -> bool:
    """Tell whether something is no code, and no module of a model: the code that calls that does not read it."""
    is_code = isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, nn.Module))
    return not is_code and next(_functions(value), None) is None


def generators_of(modules: Iterable[nn.Module], reader: Reader | None = None) -> list[Any]:
    """Return the generators of random numbers that modules' code can reach, but the global ones.

    Args:
        modules: With those inside them.
        reader: What is known of the modules' classes.
    """
    reader = reader or Reader()
    found: dict[int, Any] = {}
    for module in modules:
        for place in (*reader.places("", module), *reader.hooks(module)):
            held = place.values()
            for name in held if place.names is None else place.names:
                found |= {id(one): one for one in _generators_in(held.get(name))}
    return list(found.values())


def own_generators(module: nn.Module) -> list[Any]:
    """Return the generators of random numbers that a module has as attributes."""
    return [value for value in vars(module).values() if isinstance(value, _GENERATORS)]


def _generators_in(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, _GENERATORS):
        yield value
    elif depth < _DEEPEST and isinstance(value, (list, tuple, dict)) and len(value) <= MOST_ITEMS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _generators_in(item, depth + 1)
