"""What can be reached from some objects, whatever holds it: containers, attributes, code, hooks, weak references.

`copy.deepcopy` shares functions with the original, and so their closures and globals, and classes may leave things out
of copies. Here nothing is left out: of a function it is the closure, the default arguments, and the globals that its
code names; of a method also the object; of an object the attributes, and the methods of the user's classes that other
code names; of a tensor its attributes and hooks. Nothing is run, and there is no limit to sizes or depths.

Not looked into are data loaders, whose data are not held by the step; Python modules and classes beyond what code names
in them; the globals of PyTorch's, NumPy's and Python's own functions.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import io
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    TorchFunctionMode,
    inner_tensors,
    is_wrapper,
    tensor_hooks,
)
from memfit.workload import ATOMS, globals_of, is_followed, names_in

_ATOMIC = frozenset({bool, *ATOMS, torch.Size, type(Ellipsis), type(NotImplemented), slice, range, bytearray})
OPAQUE = (
    *ATOMS,
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    type,
    logging.Logger,
    logging.Handler,
    io.IOBase,  # trackers and notebooks patch standard output
    threading.Thread,
    torch.utils.data.DataLoader,
    TorchDispatchMode,  # of a capture under way, whose hooks are on the modules
    TorchFunctionMode,
)
"""Classes of objects that are not looked into."""
_MACHINERY = (
    *("memfit.capture.", "memfit.training.guards.", "memfit.levers.parameter_updates", "memfit.pipeline."),
    "memfit.workload.held_state",  # its reader notes functions, among them those of classes that copies share
    *("_pytest.", "pluggy.", "xdist.", "execnet.", "IPython.", "ipykernel.", "traitlets."),
    *("asyncio.", "_asyncio", "mlflow.", "sqlalchemy.", "tensorboard.", "torch.utils.tensorboard."),
    *("trackio.", "wandb."),
    "torch.distributed.device_mesh",
)
"""Modules of classes that no step holds: memfit's own, whose hooks are on the user's objects meanwhile; test runners
and notebooks, which lead to all; experiment trackers, which lead to threads and sockets; and meshes, whose tensors
number the ranks that share a step."""
MARK = "_memfit_makes_subclasses"
"""An attribute of fake tensors that stand for those of a subclass."""
_CALLED = ("forward", "__call__", "step", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__")
ITEMS = (list, tuple, set, frozenset, collections.deque)
"""Containers of items."""
MAPPINGS = (dict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, WeakIdKeyDictionary)
"""Containers of keys and values."""


_THEMSELVES = frozenset(
    {
        *(*ITEMS, *MAPPINGS, collections.OrderedDict, collections.defaultdict, functools.partial, weakref.ref),
        *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CellType),
    }
)
"""Classes that read attributes in their own way, and stand for no other."""


class ObjectGraph:
    """The objects that can be reached from some roots, with what each refers to.

    Args:
        ends: Tells whether an object is not looked into.

    Attributes:
        nodes: The objects by their `id`, in the order in which they were reached.
        children: What each refers to.
        methods: For classes, the functions of theirs that code may call, by name.
    """

    def __init__(self, roots: Iterable[Any], ends: Callable[[Any], bool] = lambda _: False) -> None:
        self.nodes: dict[int, Any] = {}
        self.children: dict[int, list[Any]] = {}
        self.methods: dict[type, dict[str, types.FunctionType]] = {}
        self._ends = ends
        self._members: dict[type, dict[str, types.FunctionType]] = {}
        self._names = set[str](_CALLED)
        self._ways: dict[type, Callable[[Any], Iterable[Any]] | None] = {}
        self._proxies: set[type] = set()
        self._shared: dict[type, list[tuple[str, Any]] | None] = {}  # what users' classes hold
        self._overridden: dict[type, set[str]] = {}  # names that all objects of a class so far have for themselves
        self.add(roots)

    def add(self, roots: Iterable[Any]) -> None:
        """Add what can be reached from more roots."""
        try:
            self._add(roots)
        finally:
            self._ways.clear()  # they refer to the graph, which would hold all that it reached until a collection

    def _add(self, roots: Iterable[Any]) -> None:
        waiting = collections.deque(roots)
        while waiting:
            while waiting:
                value = waiting.popleft()
                if type(value) in _ATOMIC or id(value) in self.nodes or (within := self._way(value)) is None:
                    continue
                self.nodes[id(value)] = value
                self.children[id(value)] = found = [] if self._ends(value) else list(within(value))
                waiting += found
            # Then the methods that code names, of the classes that were reached meanwhile.
            for kind, known in self.methods.items():
                if kind not in self._members:
                    named = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
                    bare = {name: m.fget if isinstance(m, property) else _bare(m) for name, m in named.items()}
                    followed = {n: m for n, m in bare.items() if isinstance(m, types.FunctionType) and is_followed(m)}
                    self._members[kind] = followed
                own, members = self._overridden[kind], self._members[kind]
                new = {name: members[name] for name in members.keys() & self._names - known.keys() - own}
                known |= new
                waiting += new.values()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors, in the order in which they were reached."""
        return [value for value in self.nodes.values() if isinstance(value, torch.Tensor)]

    def reaching(self, targets: Iterable[int], is_cut: Callable[[int, int], bool]) -> set[int]:
        """Return the `id`s of all objects from which some can be reached, those included.

        Args:
            targets: Their `id`s.
            is_cut: Tells whether one object, by its `id`, is not followed to another one.
        """
        parents: dict[int, list[int]] = {}
        for own, children in self.children.items():
            for child in children:
                if not is_cut(own, id(child)):
                    parents.setdefault(id(child), []).append(own)
        instances: dict[type, list[int]] = {}
        for own, value in self.nodes.items():
            if type(value) in self.methods:
                instances.setdefault(type(value), []).append(own)
        for kind, functions in self.methods.items():
            for function in functions.values():
                parents.setdefault(id(function), []).extend(instances.get(kind, ()))
        found, waiting = set[int](), list(targets)
        while waiting:
            at = waiting.pop()
            if at not in found:
                found.add(at)
                waiting += parents.get(at, ())
        return found

    def _way(self, value: Any) -> Callable[[Any], Iterable[Any]] | None:
        """Return the function that yields the references of an object; None for one that is not looked into."""
        kind = type(value)
        if kind in self._proxies:
            return self._found_way(value)
        if kind not in self._ways:
            self._ways[kind] = self._found_way(value)
            if not _is_itself(kind):  # another object of the class may stand for an object of another class
                self._proxies.add(kind)
        return self._ways[kind]

    def _found_way(self, value: Any) -> Callable[[Any], Iterable[Any]] | None:
        if isinstance(value, OPAQUE):
            return None
        if type(value).__module__.startswith(_MACHINERY) and not isinstance(value, nn.Module):
            return None
        ways: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
            (torch.Tensor, _of_tensor),
            (types.FunctionType, self._of_function),
            (types.MethodType, lambda method: (method.__self__, method.__func__)),
            (functools.partial, lambda part: (part.func, *part.args, *part.keywords.values())),
            (types.CellType, contents_of),
            (types.BuiltinFunctionType, lambda function: (function.__self__,)),
            (weakref.ref, lambda reference: (reference(),)),
            (MAPPINGS, self._of_mapping),
            (ITEMS, self._of_items),
            (np.ndarray, lambda array: array.flat if array.dtype == object else ()),
        )
        for kinds, way in ways:
            if isinstance(value, kinds):
                return way
        if is_variable(value):
            return lambda node: (node.variable,)
        is_object = hasattr(value, "__dict__") or any("__slots__" in vars(kind) for kind in type(value).__mro__)
        if is_object and not isinstance(value, functools._lru_cache_wrapper):
            return self._of_object
        return gc.get_referents  # iterators, caches of functions, and others that are written in C

    def _of_mapping(self, value: Any) -> Iterator[Any]:
        base: Any = next(kind for kind in MAPPINGS if isinstance(value, kind))
        yield from _worth_a_look(list(base.keys(value)))
        yield from _worth_a_look(list(base.values(value)))
        yield from self._of_object(value)

    def _of_items(self, value: Any) -> Iterator[Any]:
        base: Any = next(kind for kind in ITEMS if isinstance(value, kind))
        yield from _worth_a_look(list(base.__iter__(value)))  # a class may have an `__iter__` of its own
        yield from self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from vars(function).values()
        if not is_followed(function):
            return
        names = names_in(function)
        self._names |= names
        owners = list(globals_of(function).values())
        yield from owners
        while owners:  # what is named in the modules and classes that it names
            owner = owners.pop()
            if isinstance(owner, (type, types.ModuleType)) and is_followed(owner):
                named = [vars(owner)[name] for name in names & vars(owner).keys()]
                owners += [inner for inner in named if inner is not owner]
                yield from map(_bare, named)

    def _of_object(self, value: Any) -> Iterator[Any]:
        held, kind = attributes(value), type(value)
        yield from held.values()
        if kind not in self._shared:
            bases = [vars(base).items() for base in kind.__mro__ if is_followed(base)] if is_followed(kind) else None
            looked = (torch.Tensor, nn.Module, *ITEMS, *MAPPINGS)
            self._shared[kind] = (
                None
                if bases is None
                else [(name, value) for items in bases for name, value in items if isinstance(value, looked)]
            )
        if (shared := self._shared[kind]) is not None:
            self.methods.setdefault(kind, {})
            self._overridden[kind] = self._overridden.get(kind, held.keys()) & held.keys()
            # What a user's class holds for all its objects.
            yield from (value for name, value in shared if name not in held)


def _of_tensor(tensor: torch.Tensor) -> Iterator[Any]:
    yield from attributes(tensor).values()
    yield from (hook for hooks in tensor_hooks(tensor) for hook in hooks)


def _is_itself(kind: type) -> bool:
    """Tell whether objects of a class are of no other class: a proxy's `__class__` is that of what it stands for."""
    return kind in _THEMSELVES or (
        vars(object)["__getattribute__"] is inspect.getattr_static(kind, "__getattribute__")
        and not any("__class__" in vars(base) for base in kind.__mro__ if base is not object)
    )


def _bare(value: Any) -> Any:
    """Return the function of a method; any other value as it is, whose `__getattr__` may raise anything."""
    return value.__func__ if isinstance(value, (classmethod, staticmethod, types.MethodType)) else value


def base_of(kind: type) -> type:
    """Return the first base of a class that is not written in Python, which makes its objects."""
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))


def _worth_a_look(items: list[Any]) -> list[Any]:
    """Return the items of a container that are looked into: quick for a long list of numbers, or of tuples of them."""
    if _ATOMIC.issuperset(set(map(type, items))):
        return []
    return [item for item in items if type(item) is not tuple or not _ATOMIC.issuperset(map(type, item))]


def contents_of(cell: types.CellType) -> list[Any]:
    """Return the contents of a cell: none before its variable has a value."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def is_variable(value: Any) -> bool:
    """Tell whether an object is the autograd node that adds up a tensor's gradient."""
    return type(value).__name__ == "AccumulateGrad" and isinstance(value, torch.autograd.graph.Node)


_without_slots: weakref.WeakSet[type] = weakref.WeakSet()


def slots_of(kind: type) -> dict[str, Any]:
    """Return the descriptors of a class's slots: `__x` in `__slots__` has the name `_Class__x`."""
    found: dict[str, Any] = {}
    if kind in _without_slots:
        return found
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                found.setdefault(name, member)
    if not found:
        _without_slots.add(kind)
    return found


def in_slots(value: Any) -> dict[str, Any]:
    """Return the values in an object's slots, by name."""
    found: dict[str, Any] = {}
    for name, member in slots_of(type(value)).items():
        with contextlib.suppress(AttributeError):  # it is empty; a `__getattr__` is not to fill it
            found[name] = member.__get__(value)
    return found


@functools.cache
def _names_of_fake() -> frozenset[str]:
    """Return the attributes that fake tensors have. The first mode imports Dynamo, which takes seconds."""
    made = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
    return frozenset(vars(made)) | {"_is_param", MARK}


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its dict and its slots; of a tensor those that code gave it."""
    if isinstance(value, torch.Tensor):
        own: Any = _names_of_fake() if isinstance(value, FakeTensor) else ("_is_param",)
        inner = inner_tensors(value) if is_wrapper(type(value)) else ()
        return {name: held for name, held in vars(value).items() if name not in own and name not in inner}
    found: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__") or {}
    return found | in_slots(value)
