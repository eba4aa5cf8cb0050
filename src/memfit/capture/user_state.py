"""State of the user's process that a step's code can write, set back after memfit ran the step on a copy.

Copies share functions with the original, and so what these reach: globals, closures, classes, caches. Code that fills
a table at its first call would leave one of fake tensors there, and code that counts its calls would count memfit's.
The containers that the step's code reaches are noted before it runs, and get their contents back afterwards.

Note [What is noted]
From the workload's objects on, references are followed: attributes, items, closures, default arguments, the globals of
functions, modules named in code. What the user's own modules lead to gets all its contents back. What only the
workload's closures and objects lead to, as a list of what a caller watches, loses no more than fake tensors. So does an
installed package whose functions or classes the code names: the rest is its own affair. And so do the user's modules
where another thread ran meanwhile, since what changed may be that thread's.
PyTorch, NumPy, Python's library and memfit are not looked through. Contents of tensors and arrays are not noted.

A bounded `functools.lru_cache` can't be edited: one that got a tensor is cleared, and fills again when it is called.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import gc
import operator
import os
import random
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch

from memfit._torch import FakeTensor, supported_types
from memfit.capture.object_graph import contents_of, in_slots, slots_of
from memfit.workload import ATOMS, ForeignGenerator, foreign_generator, same_states

_P = ParamSpec("_P")

_LARGEST = 10_000  # items of a container up to which they are followed; its own contents come back at any size
_MOST_HELD = 4096  # objects of a new value that are looked through for fake tensors
_CLOSED = {*sys.stdlib_module_names, "torch", "torchgen", "numpy", "memfit", "sympy"}
_CLOSED |= {"_pytest", "hypothesis", "pluggy", "pytest"}  # which run the code, and are not part of it
_OPEN = {"_collections", "collections", "weakref", "functools", "types", "dataclasses", "_thread", "threading"}
"""Modules of Python's library whose objects hold what users put in them."""
_OPEN_TORCH = ("torch.nn.", "torch.optim.", "torch.distributions.")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NO_STATE = (
    *ATOMS,
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.CodeType,
    types.FrameType,
    np.ndarray,
    range,
    slice,
)
_OWN_NAMES = {"__dict__", "__weakref__", "__doc__", "_abc_impl", "__abstractmethods__", "__annotations__"}


class _ContainerKind(NamedTuple):
    """How a kind of container is read and written: its contents are a dictionary or a list."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _dict_contents(held: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary's items, in its order, without running methods of a class: lazy ones import models."""
    if not isinstance(held, collections.OrderedDict):
        return dict.copy(held)
    return {key: dict.__getitem__(held, key) for key in collections.OrderedDict.__iter__(held)}


def _write_dict(held: Any, contents: dict[Any, Any]) -> None:
    kind = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
    kind.clear(held)
    kind.update(held, contents)


def _items(base: Any, fill: Callable[[Any, list[Any]], None]) -> _ContainerKind:
    def write(held: Any, contents: list[Any]) -> None:
        base.clear(held)
        fill(held, contents)

    return _ContainerKind(lambda held: list(base.__iter__(held)), write)


def _class_contents(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if name not in _OWN_NAMES}


def _write_class(kind: type, contents: dict[str, Any]) -> None:
    for name in _class_contents(kind).keys() - contents.keys():
        type.__delattr__(kind, name)
    for name, value in contents.items():
        if vars(kind).get(name, _ContainerKind) is not value:
            type.__setattr__(kind, name, value)


def _write_cell(cell: types.CellType, contents: list[Any]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    else:
        del cell.cell_contents


def _write_slots(held: Any, contents: dict[str, Any]) -> None:
    filled = in_slots(held)
    for name, member in slots_of(type(held)).items():
        if name in contents:
            member.__set__(held, contents[name])
        elif name in filled:
            member.__delete__(held)


def _entries_of(cache: Any) -> dict[Any, Any]:
    """Return the dictionary in a `functools.lru_cache`, whose values are results if it is not bounded."""
    found = (held for held in gc.get_referents(cache) if type(held) is dict and held is not vars(cache))
    return next(found, {})


def _write_lru(cache: Any, contents: dict[Any, Any]) -> None:
    if contents and cache.cache_parameters()["maxsize"] is None:
        _write_dict(_entries_of(cache), contents)
    elif not contents or _holds(gc.get_referents(cache), torch.Tensor):
        cache.cache_clear()


_DICT = _ContainerKind(_dict_contents, _write_dict)
_CLASS = _ContainerKind(_class_contents, _write_class)
_SLOTS = _ContainerKind(in_slots, _write_slots)
_LRU = _ContainerKind(lambda cache: dict(_entries_of(cache)), _write_lru)
_CONTAINERS: dict[type, _ContainerKind] = {
    dict: _DICT,
    list: _items(list, list.extend),
    set: _items(set, set.update),
    collections.deque: _items(collections.deque, collections.deque.extend),
    types.CellType: _ContainerKind(contents_of, _write_cell),
}


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two contents of a container are the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(map(operator.is_, one.values(), other.values())) and all(map(operator.is_, one, other))
    return all(map(operator.is_, one, other))


def _holds(values: Iterable[Any], kind: type) -> bool:
    """Tell whether an object of a kind is among values or within them."""
    waiting, seen = list(values), set[int]()
    while waiting and len(seen) < _MOST_HELD:
        value = waiting.pop()
        if isinstance(value, kind):
            return True
        if isinstance(value, _NO_STATE) or id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        else:
            waiting += gc.get_referents(value)
    return False


@functools.lru_cache(maxsize=4096)
def _origin(name: str) -> str:
    """Return whose a module is: "user", the name of the installed package that it is in, or "" for what is closed."""
    top = name.partition(".")[0]
    if top in _CLOSED and name != "__main__":
        return ""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    installed = tuple(sysconfig.get_paths()[each] for each in ("purelib", "platlib"))
    return top if file.startswith(installed) or "site-packages" in file or "dist-packages" in file else "user"


def _origin_of(value: Any) -> str:
    """Return whose a module, class or function is."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return _origin(name) if isinstance(name, str) else ""


@functools.lru_cache(maxsize=4096)
def _is_open(module: str, top: str) -> bool:
    """Tell whether objects of a module's classes are looked through."""
    if module in _OPEN or f"{module}.".startswith(_OPEN_TORCH):
        return True
    return top not in _CLOSED or module == "__main__"


class _Walk:
    """The containers that are reached from some objects.

    Args:
        package: The package whose modules are not left; None to follow the user's modules, and to name the packages
            that their code names.
    """

    def __init__(self, roots: Iterable[Any], package: str | None = None) -> None:
        self.package = package
        self.containers: list[tuple[_ContainerKind, Any]] = []
        self.generators: list[Any] = []
        self.modules: list[Any] = []  # the contents of the user's modules, and classes
        self.packages: set[str] = set()
        # Those of each module's globals, and the lists that captures themselves add to, and set back.
        self._seen = {id(vars(builtins)), *map(id, supported_types)}
        self._waiting = list(roots)
        self._kinds: dict[type, _ContainerKind | None] = {}
        stateless: dict[type, bool] = {}
        while self._waiting:
            value = self._waiting.pop()
            if (kind := type(value)) not in stateless:
                stateless[kind] = issubclass(kind, _NO_STATE)
            if not stateless[kind] and id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit(value, kind)

    def _note(self, kind: _ContainerKind, held: Any) -> None:
        """Note a container, and follow what is in it."""
        self.containers.append((kind, held))
        if len(contents := kind.read(held)) <= _LARGEST:
            self._waiting += contents.values() if isinstance(contents, dict) else contents
            if isinstance(held, dict):
                self._waiting += [key for key in contents if type(key) not in ATOMS]

    def _visit(self, value: Any, kind: type) -> None:
        if kind not in self._kinds:
            self._kinds[kind] = next((_CONTAINERS[base] for base in _CONTAINERS if issubclass(kind, base)), None)
        if (container := self._kinds[kind]) is not None:
            self._note(container, value)
        elif issubclass(kind, (tuple, frozenset)):  # by their own methods, whatever a class makes of them
            base = tuple if issubclass(kind, tuple) else frozenset
            self._waiting += base.__iter__(value) if base.__len__(value) <= _LARGEST else ()
        elif issubclass(kind, types.FunctionType):
            self._function(value)
        elif issubclass(kind, types.ModuleType):
            if self._is_within(value):
                self.modules.append(vars(value))
                self._waiting.append(vars(value))
        elif issubclass(kind, type):
            if self._is_within(value):
                self.modules.append(value)
                self._note(_CLASS, value)
        elif issubclass(kind, functools._lru_cache_wrapper):
            if self._is_within(value):
                self._note(_LRU, value)
                self._waiting += [value.__wrapped__, vars(value)]
        elif issubclass(kind, _GENERATORS):
            self.generators.append(value)
        elif issubclass(kind, (torch.Tensor, threading.local)):
            self._waiting.append(vars(value))
        elif issubclass(kind, (types.MethodType, functools.partial, property, staticmethod, classmethod)):
            self._waiting += gc.get_referents(value)
        elif _is_open(module := str(getattr(kind, "__module__", "")), module.partition(".")[0]):
            # An object, by its own attributes, whatever its class makes of reading them.
            self._waiting.append(kind)
            with contextlib.suppress(AttributeError):  # it has no dictionary
                self._waiting.append(object.__getattribute__(value, "__dict__"))
            if slots_of(kind):
                self._note(_SLOTS, value)

    def _is_within(self, value: Any) -> bool:
        """Tell whether a module's, class's or function's contents are followed; note the package that it is of."""
        origin = _origin_of(value)
        if self.package is None and origin not in ("", "user"):
            self.packages.add(origin)
        return origin == (self.package or "user")

    def _function(self, function: types.FunctionType) -> None:
        self._waiting += [function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)]
        if self._is_within(function):
            around = function.__globals__
            self.modules.append(around)
            if id(around) not in self._seen:
                self._seen.add(id(around))
                self._note(_DICT, around)
            if self.package is None:
                package = around.get("__package__") or ""
                codes = [function.__code__]
                for code in codes:  # the loaded modules that it names, as where a function imports them
                    full = [name for own in code.co_names for name in (own, f"{package}.{own}")]
                    self._waiting += [sys.modules[name] for name in full if sys.modules.get(name) is not None]
                    codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


_Noted = tuple[_ContainerKind, Any, Any, bool]
"""A container with its kind, its contents, and whether all of them come back."""

_known_packages: dict[str, tuple[int, list[tuple[_ContainerKind, Any]]]] = {}
"""Of a package its count of loaded modules, and the containers that these reach."""


class UserState:
    """The state that code reaches from some objects, as it is now; see Note [What is noted].

    Args:
        roots: The objects, such as a model and a loss function.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = list(roots)
        self._note()

    def _note(self) -> None:
        walk = _Walk(self._roots)
        whole = {id(held) for _, held in _Walk(walk.modules).containers}
        packaged: list[tuple[_ContainerKind, Any]] = []
        for name in sorted(walk.packages):
            modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == name and _origin(n) == name]
            if name not in _known_packages or _known_packages[name][0] != len(modules):
                _known_packages[name] = len(modules), _Walk(modules, name).containers
            packaged += _known_packages[name][1]
        noted = (*walk.containers, *packaged)
        self._noted: list[_Noted] = [(kind, held, kind.read(held), id(held) in whole) for kind, held in noted]
        sources = [foreign_generator(generator) for generator in walk.generators]
        self._generators: list[tuple[ForeignGenerator, Any]] = [(source, source.read()) for source in sources]
        self._settings = [read() for read, _ in _SETTINGS]
        self._modules = set(sys.modules)
        self._threads = _others()

    def set_back(self) -> list[Callable[[], object]]:
        """Give all containers their contents as noted; return what would undo that."""
        for name in sys.modules.keys() - self._modules:
            module = sys.modules[name]
            if _origin(name) and _holds(vars(module).values(), FakeTensor):  # it is to be imported anew
                del sys.modules[name]
                home, _, own = name.rpartition(".")
                vars(sys.modules.get(home, module)).pop(own, None)
        is_ours = all(_others().get(thread, place) == place for thread, place in self._threads.items())
        undo: list[Callable[[], object]] = []
        for noted in self._noted:
            if (found := _changed(noted, is_ours)) is not None:
                kind, held, *_ = noted
                kind.write(held, found[1])
                undo.append(functools.partial(kind.write, held, found[0]))
        for source, state in self._generators if is_ours else ():
            if not same_states(now := source.read(), state):
                undo.append(functools.partial(source.write, now))
                source.write(state)
        for (read, write), value in zip(_SETTINGS, self._settings, strict=True):
            if (now := read()) != value:
                undo.append(functools.partial(write, now))
                write(value)
        return undo

    def is_written(self) -> bool:
        """Tell whether code has changed something that is set back."""
        return any(_changed(noted, True) is not None for noted in self._noted)

    def outside(self, function: Callable[_P, None]) -> Callable[_P, None]:
        """Return a function of the user's for calls while the step's code runs: it finds the state as it is noted."""
        if not _origin_of(function) and not isinstance(function, (types.MethodType, functools.partial)):
            return function

        def called(*args: _P.args, **kwargs: _P.kwargs) -> None:
            undo = self.set_back()
            try:
                function(*args, **kwargs)
            finally:
                self._note()
                for write in undo:
                    write()

        return called


def _changed(noted: _Noted, is_ours: bool) -> tuple[Any, Any] | None:
    """Return the present contents of a container, and those to write to it; None where these are the same.

    Modules that were imported meanwhile stay, and so do the globals of Python and Dynamo. Where the contents are not
    wholly the user's own, only changes that brought fake tensors are taken back.
    """
    kind, held, before, is_whole = noted
    now = kind.read(held)
    if _is_same(now, before):
        return None
    after = before
    if not (is_whole and is_ours):
        if kind is _LRU and held.cache_parameters()["maxsize"] is not None:
            after = before if _holds(gc.get_referents(held), FakeTensor) else now
        elif not isinstance(now, dict):
            known = set(map(id, before))
            after = before if _holds([value for value in now if id(value) not in known], FakeTensor) else now
        else:
            fakes = {
                key
                for key, value in now.items()
                if not (before.get(key, _ContainerKind) is value or _is_reserved(key))
                and _holds([key, value], FakeTensor)
            }
            after = {k: before[k] if k in fakes else v for k, v in now.items() if k not in fakes or k in before}
    elif isinstance(now, dict):
        new = {k: v for k, v in now.items() if k not in before and (isinstance(v, types.ModuleType) or _is_reserved(k))}
        if "__warningregistry__" in now:
            new["__warningregistry__"] = now["__warningregistry__"]
        after = {**before, **new} if new else before
    return None if _is_same(now, after) else (now, after)


def _is_reserved(key: Any) -> bool:
    """Tell whether a global is of Python's or Dynamo's: compiled code finds its parts there, as `__compiled_fn_1`."""
    return isinstance(key, str) and key.startswith("__")


def _others() -> dict[int, tuple[int, int]]:
    """Return where the other threads are."""
    frames = sys._current_frames().items()
    return {thread: (id(at), at.f_lasti) for thread, at in frames if thread != threading.get_ident()}


def _write_environment(contents: dict[str, str]) -> None:
    for name in os.environ.keys() - contents.keys():
        del os.environ[name]
    os.environ.update(contents)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: torch.backends.cudnn.benchmark, functools.partial(setattr, torch.backends.cudnn, "benchmark")),
    (lambda: dict(os.environ), _write_environment),
)
"""Settings of the process that a step's code may change."""
