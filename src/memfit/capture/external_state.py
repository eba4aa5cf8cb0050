"""What a step's code refers to beside its model, optimizer and batch, and copies that refer to copies of it.

`copy.deepcopy` shares functions with the original, and so their closures and globals: a teacher in the closure of a
loss function, the object whose method the loss is, the average of the weights that a hook of the optimizer keeps. And
classes leave things out of their copies: `torch.optim.Optimizer` its hooks, parameters theirs. A copied step needs
copies of all of these: they take memory, move to a device, and memfit must not write to the user's own. It also has
copies of the containers that the user's code may write to: a memory that the first step fills.

Other objects that hold no tensors, and lead to none, are shared. So are attributes of classes, but for those that a
copy can have of its own, and what only C holds.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch import add_tensor_hooks, hooks_of_all, hooks_of_all_modules, tensor_hooks
from memfit.capture.object_graph import (
    ITEMS,
    MAPPINGS,
    OPAQUE,
    ObjectGraph,
    attributes,
    base_of,
    contents_of,
    is_variable,
    slots_of,
)
from memfit.workload import (
    MOST_ITEMS,
    Workload,
    globals_of,
    is_followed,
    is_object,
    names_in,
    parts_of,
    tensors_of,
)

_IMMUTABLE = (tuple, frozenset, types.MethodType, types.BuiltinFunctionType, weakref.ref, functools.partial)
_CONTAINERS = (list, dict, set, collections.deque)
_INSTALLED = "site-packages"
_BOUND = "_memfit_runs_copies_of_hooks"
_models: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Modules and parameters of the user's models that a rebound loss function still refers to."""


def graph_of(workload: Workload) -> tuple[ObjectGraph, int]:
    """Return what can be reached from a workload's model, optimizer and loss function, and from hooks of all steps.

    The number tells how many objects are reached without the loss function; those after them are the loss's alone.
    """
    own = {id(value) for value in (*workload.model.modules(), *workload.model.parameters())}
    hooks = hooks_of_all_modules()
    if not hasattr(vars(workload.optimizer).get("step"), _BOUND):
        hooks += [hook for each in hooks_of_all() for hook in each.values()]
    graph = ObjectGraph([workload.model, workload.optimizer, *hooks], ends=lambda v: id(v) not in own and _is_kept(v))
    count = len(graph.nodes)
    graph.add([workload.loss_fn])
    return graph, count


def _is_kept(value: Any) -> bool:
    return isinstance(value, nn.Module | torch.Tensor) and value in _models


class Rebinding:
    """Copies of all that a graph's objects refer to, where some have copies.

    Args:
        graph: The originals.
        memo: The memo of `copy.deepcopy`: the copies of modules, tensors, the optimizer and what they hold, by `id`.
        apart: How many of the graph's objects are not the loss function's alone.
        model: The original model. The loss function's own references to it stay: the copied model reaches the loss as
            an argument.
    """

    def __init__(self, graph: ObjectGraph, memo: dict[int, Any], apart: int, model: nn.Module) -> None:
        self._graph, self._memo = graph, memo
        self._of_loss = set(list(graph.nodes)[apart:])
        self._stays = {id(value) for value in (*model.modules(), *model.parameters())}
        for parent in self._of_loss:
            for child in graph.children[parent]:
                if id(child) in self._stays:
                    _models[child] = None
        self._made: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._modules: dict[int, types.ModuleType] = {}
        targets = [own for own in graph.nodes if own in memo] + _written_to(graph)
        self._needed = graph.reaching(targets, lambda parent, child: parent in self._of_loss and child in self._stays)

    def complete(self) -> None:
        """Have all copies refer to copies, and hold what their originals do."""
        needed = [(own, value) for own, value in self._graph.nodes.items() if own in self._needed]
        late = []
        for own, value in needed:
            new = self._copy(value)
            alike = type(value) is type(new) or (isinstance(value, torch.Tensor) and isinstance(new, torch.Tensor))
            if new is value or isinstance(value, _IMMUTABLE) or not alike:
                continue
            if isinstance(value, (*MAPPINGS, set)):  # of keys that have their attributes by then
                late.append((own, value, new))
            else:
                self._fill(value, new, own in self._of_loss)
        for own, value, new in late:
            self._fill(value, new, own in self._of_loss)

    def of(self, value: Any, by_loss: bool = True) -> Any:
        """Return the copy of a value, or the value itself where it needs none.

        Args:
            by_loss: Whether the loss function alone refers to it.
        """
        own = id(value)
        if own not in self._needed:
            return value
        return value if by_loss and own in self._stays else self._copy(value)

    def _copy(self, value: Any) -> Any:
        own = id(value)
        if own not in self._made:
            if isinstance(value, _IMMUTABLE):
                self._made[own] = self._rebuilt(value, own in self._of_loss)
            elif own in self._memo:
                self._made[own] = self._memo[own]
            else:
                self._made[own] = self._empty(value)
        return self._made[own]

    def _rebuilt(self, value: Any, by_loss: bool) -> Any:
        def of(inner: Any) -> Any:
            return self.of(inner, by_loss)

        if isinstance(value, types.MethodType):
            return types.MethodType(of(value.__func__), of(value.__self__))
        if isinstance(value, types.BuiltinFunctionType):
            return getattr(of(value.__self__), value.__name__)
        if isinstance(value, weakref.ref):
            return weakref.ref(of(value())) if type(value) is weakref.ref else value
        if isinstance(value, functools.partial):
            arguments = {name: of(inner) for name, inner in value.keywords.items()}
            return type(value)(of(value.func), *map(of, value.args), **arguments)
        if isinstance(value, frozenset):
            return type(value)(self._item(inner, by_loss) for inner in frozenset.__iter__(value))
        made = tuple.__new__(type(value), [of(inner) for inner in tuple.__iter__(value)])
        for name, inner in attributes(value).items():
            object.__setattr__(made, name, of(inner))
        return made

    def _empty(self, value: Any) -> Any:
        """Return an object of a value's kind that is to be filled; the value itself where none can be made."""
        kind: Any = type(value)
        if isinstance(value, types.FunctionType):
            around = value.__globals__
            if is_followed(value):
                named, names = list(globals_of(value).values()), names_in(value)
                for module in [held for held in named if isinstance(held, types.ModuleType) and is_followed(held)]:
                    named += [vars(module)[name] for name in names & vars(module).keys()]
                stays = self._stays if id(value) in self._of_loss else set()
                if any(id(held) in self._needed and id(held) not in stays for held in named):
                    around = self._globals.setdefault(id(around), dict(around))
            cells = tuple(self.of(cell, False) for cell in value.__closure__ or ())
            made: Any = types.FunctionType(value.__code__, around, value.__name__, None, cells or None)
            made.__qualname__, made.__module__ = value.__qualname__, value.__module__
            made.__annotations__, made.__doc__ = value.__annotations__, value.__doc__
            return made
        if isinstance(value, types.CellType):
            return types.CellType()
        if isinstance(value, functools._lru_cache_wrapper):
            made = functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__, False))
            return functools.update_wrapper(made, value.__wrapped__)
        if is_variable(value):
            return autograd_graph.get_gradient_edge(self.of(value.variable, False)).node
        if isinstance(value, collections.deque):
            made = kind.__new__(kind)
            collections.deque.__init__(made, maxlen=value.maxlen)
            return made
        with contextlib.suppress(Exception):
            if hasattr(kind, "__del__") or not (
                base_of(kind) in (object, dict, list, set) or isinstance(value, MAPPINGS)
            ):
                return value
            base: Any = base_of(kind)
            made = base.__new__(kind)
            if isinstance(value, collections.defaultdict):
                made.default_factory = value.default_factory
            elif isinstance(value, MAPPINGS) and not isinstance(value, dict):
                kind.__init__(made)
            return made
        return value

    # What a copy holds

    def _fill(self, value: Any, new: Any, by_loss: bool) -> None:
        if isinstance(value, types.FunctionType):
            new.__defaults__ = tuple(self.of(v, by_loss) for v in value.__defaults__ or ()) or None
            named = value.__kwdefaults__ or {}
            new.__kwdefaults__ = {name: self.of(v, by_loss) for name, v in named.items()} or None
            vars(new).update({name: self.of(v, by_loss) for name, v in vars(value).items()})
            names, around = names_in(value), new.__globals__
            for name, inner in globals_of(value).items() if around is not value.__globals__ else ():
                made = inner if isinstance(inner, type) else self.of(inner, by_loss)
                if isinstance(inner, types.ModuleType) and is_followed(inner):  # copied, where what code names in it is
                    held = {each: vars(inner)[each] for each in names & vars(inner).keys()}
                    changed = {each: own for each, was in held.items() if (own := self.of(was, by_loss)) is not was}
                    made = self._modules.get(id(inner), types.ModuleType(inner.__name__)) if changed else inner
                    if changed and id(inner) not in self._modules:
                        self._modules[id(inner)] = made
                        vars(made).update(vars(inner))
                    vars(made).update(changed)
                if made is not inner:
                    around[name] = made
        elif isinstance(value, types.CellType):
            for content in contents_of(value):
                new.cell_contents = self.of(content, by_loss)
        elif isinstance(value, torch.Tensor):
            self._fill_attributes(value, new, by_loss)
            if new.requires_grad:
                seen, accumulated = ([self.of(hook, by_loss) for hook in hooks] for hooks in tensor_hooks(value))
                add_tensor_hooks(new, (seen, accumulated))
        else:
            if isinstance(value, (*MAPPINGS, *ITEMS)):
                self._fill_container(value, new, by_loss)
            self._fill_attributes(value, new, by_loss)

    def _fill_container(self, value: Any, new: Any, by_loss: bool) -> None:
        """Have a copied container hold the same: in pairs of a key and a value, or one by one."""
        is_mapping = isinstance(value, MAPPINGS)
        kinds = (collections.OrderedDict, *MAPPINGS) if is_mapping else ITEMS
        base: Any = next(kind for kind in kinds if isinstance(value, kind))

        def rows(held: Any) -> list[tuple[Any, ...]]:
            return list(base.items(held)) if is_mapping else [(item,) for item in base.__iter__(held)]

        held, original = rows(new), rows(value)
        wanted = [(self._item(first, by_loss), *(self.of(v, by_loss) for v in rest)) for first, *rest in original]
        if held and base is not set:
            if len(held) != len(original):
                return  # as the class's own way of copying has it
            wanted = [
                tuple(w if self._is_stale(h, v) else h for h, v, w in zip(*each, strict=True))
                for each in zip(held, original, wanted, strict=True)
            ]
        if not is_mapping:
            base.clear(new)
            (set.update if base is set else base.extend)(new, [item for (item,) in wanted])
        elif len(wanted) != len(held) or not all(
            a is b for each in zip(wanted, held, strict=True) for a, b in zip(*each, strict=True)
        ):
            base.clear(new)
            for key, inner in wanted:
                base.__setitem__(new, key, inner)

    def _fill_attributes(self, value: Any, new: Any, by_loss: bool) -> None:
        held = attributes(new)
        for name, inner in attributes(value).items():
            wanted = self.of(inner, by_loss)
            if name in held and not self._is_stale(held[name], inner):
                continue
            if name not in held and wanted is inner and isinstance(inner, (dict, list, set)):
                wanted = copy.copy(inner)
            if wanted is not held.get(name, self):
                if name in getattr(value, "__dict__", ()):
                    new.__dict__[name] = wanted
                else:
                    slots_of(type(new))[name].__set__(new, wanted)
        kind = type(value)
        if not hasattr(new, "__dict__") or isinstance(value, torch.Tensor) or kind not in self._graph.methods:
            return
        # A copy has its own of its class's values and methods, where these refer to what has copies.
        named = {name for base in kind.__mro__ if is_followed(base) for name in vars(base)}
        for name in named - vars(new).keys():
            held = inspect.getattr_static(kind, name)
            code = held.__func__ if isinstance(held, staticmethod) else held
            if id(code) in self._needed and not name.startswith("__"):
                made = self.of(code, by_loss)
                vars(new)[name] = types.MethodType(made, new) if isinstance(held, types.FunctionType) else made

    def _is_stale(self, held: Any, original: Any) -> bool:
        """Tell whether what a copy holds is to be replaced: the original, an earlier copy, or nothing of something."""
        if held is original or (id(original) in self._memo and held is self._memo[id(original)]):
            return True
        is_nothing = held is None or (isinstance(held, (dict, list, set, tuple)) and not held)
        return is_nothing and original is not None and bool(isinstance(original, (*ITEMS, *MAPPINGS)) and len(original))

    def _item(self, value: Any, by_loss: bool) -> Any:
        """Return the copy of a key or an item; of an object's `id` that of its copy."""
        if type(value) is int and value in self._needed:
            return id(self.of(self._graph.nodes[value], False))
        return self.of(value, by_loss)

    def bind_hooks_of_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Have a copied optimizer's steps run copies of the hooks of all optimizers, where these have any."""
        hooks = [{number: self.of(hook, False) for number, hook in each.items()} for each in hooks_of_all()]
        pairs = list(zip(hooks, hooks_of_all(), strict=True))
        if all(hook is each[number] for made, each in pairs for number, hook in made.items()):
            return
        own: Any = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            before = [dict(each) for each in hooks_of_all()]
            for each, made in zip(hooks_of_all(), hooks, strict=True):
                each.update(made)
            try:
                return own(*args, **kwargs)
            finally:
                for each, was in zip(hooks_of_all(), before, strict=True):
                    each.update(was)

        setattr(step, _BOUND, True)
        optimizer.step = step  # type: ignore[method-assign]


def _written_to(graph: ObjectGraph) -> list[int]:
    """Return the `id`s of containers that a user's code may write to: of closures, arguments, globals and objects."""
    found: dict[int, None] = {}
    for own, children in graph.children.items():
        holder = graph.nodes[own]
        # A method may be of something that has no code, as of a `functools.partial`.
        code = getattr(holder, "__code__", None) if isinstance(holder, (types.FunctionType, types.MethodType)) else None
        is_held = isinstance(holder, (types.CellType, functools.partial, types.BuiltinFunctionType))
        is_users = isinstance(code, types.CodeType) and _INSTALLED not in code.co_filename
        if is_held or is_users or is_object(holder):
            found.update((id(child), None) for child in children if isinstance(child, _CONTAINERS))
    waiting = list(found)
    while waiting:
        inner = graph.children.get(waiting.pop(), [])
        more = [id(child) for child in inner if isinstance(child, _CONTAINERS)] if len(inner) <= MOST_ITEMS else []
        waiting += [own for own in more if own not in found]
        found.update(dict.fromkeys(more))
    return [own for own in found if own in graph.nodes]


def external_modules(workload: Workload) -> list[nn.Module]:
    """Return the modules that only a step's loss function refers to, such as those of a frozen reference."""
    graph, count = graph_of(workload)
    own = {id(module) for module in workload.model.modules()}
    reached = list(graph.nodes.values())[count:]
    return [value for value in reached if isinstance(value, nn.Module) and id(value) not in own]


def external_tensors(workload: Workload) -> list[torch.Tensor]:
    """Return the dense tensors that a step's code refers to beside parameters, buffers, optimizer state and the batch.

    They are of modules and tensors outside the model, of plain attributes of its modules, of hooks: in containers, in
    objects, in modules that are not registered. The user's own model is left out: its copy takes its place.
    """
    graph, _ = graph_of(workload)
    groups = workload.optimizer.param_groups
    own = [*workload.model.parameters(), *workload.model.buffers(), *(p for group in groups for p in group["params"])]
    known = {id(tensor) for tensor in [*own, *tensors_of([workload.batch, workload.batches])]}
    known |= {id(tensor) for tensor in tensors_of([list(workload.optimizer.state.values()), groups])}
    external = [t for t in graph.tensors() if id(t) not in known and not _is_kept(t)]
    return [part for tensor in external for part in parts_of(tensor)]


def differences(workload: Workload, copied: Workload) -> list[str]:
    """Return in what a copy with data is not as its original, by the paths to it: none where it is the same step.

    Both are walked side by side, as `Rebinding` makes them: attributes, items, closures, arguments and hooks.
    """
    found: list[str] = []
    seen = set[int]()
    pairs = [(f"Workload.{at}", getattr(workload, at), getattr(copied, at)) for at in ("model", "optimizer", "loss_fn")]
    waiting = collections.deque[tuple[str, Any, Any]](pairs)
    while waiting:
        path, one, other = waiting.popleft()
        if id(one) in seen or isinstance(one, OPAQUE) or _is_kept(one):
            continue
        seen.add(id(one))
        if one is other:
            if isinstance(one, torch.Tensor | nn.Module):
                found.append(f"{path} is shared with the copy")
            continue
        if type(one).__qualname__ != type(other).__qualname__:
            found.append(f"{path} is of the class {type(other).__qualname__} in the copy")
            continue
        mine, its = _labelled(one), _labelled(other)
        found += [f"{path}{label} is missing in the copy" for label in mine.keys() - its.keys()]
        waiting += [(f"{path}{label}", inner, its[label]) for label, inner in mine.items() if label in its]
    return sorted(found)


def _labelled(value: Any) -> dict[str, Any]:
    """Return what an object holds, by what leads to it."""
    if isinstance(value, types.MethodType):
        return {".__self__": value.__self__, ".__func__": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = [content for cell in value.__closure__ or () for content in contents_of(cell)]
        return {f"<{at}>": inner for at, inner in enumerate([*cells, *(value.__defaults__ or ())])}
    if isinstance(value, functools.partial):
        return {f"({at})": v for at, v in enumerate([value.func, *value.args, *value.keywords.values()])}
    labelled = {f".{name}": inner for name, inner in attributes(value).items()}
    if isinstance(value, torch.Tensor):
        hooks = [hook for each in tensor_hooks(value) for hook in each]
        return {**labelled, **{f".hooks[{at}]": hook for at, hook in enumerate(hooks)}}
    base: Any = next((kind for kind in (*MAPPINGS, list, tuple, collections.deque) if isinstance(value, kind)), None)
    if base is not None:
        items = list(base.values(value) if base in MAPPINGS else base.__iter__(value))
        keys: Any = list(base.keys(value)) if base in MAPPINGS else []
        named = all(type(key) is str for key in keys) and keys
        labelled.update({f"[{key!r}]": inner for key, inner in zip(named or range(len(items)), items, strict=True)})
    return labelled
