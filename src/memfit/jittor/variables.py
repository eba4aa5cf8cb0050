"""Variables in nested batches, arguments and modules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jittor as jt

FLOATS = ("float16", "bfloat16", "float32", "float64")


class Slot(int):
    """The place of a variable in nested dicts, lists and tuples without their variables."""


def variables_of(tree: Any) -> list[Any]:
    """Return the variables of nested dicts, lists and tuples, in order."""
    found: list[Any] = []
    mapped(tree, found.append)
    return found


def emptied(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with slots in place of their variables."""
    numbers = itertools.count()
    return mapped(tree, lambda _: Slot(next(numbers)))


def filled(tree: Any, variables: Sequence[Any]) -> Any:
    """Return nested dicts, lists and tuples with variables in place of their slots."""
    return mapped(tree, lambda slot: variables[slot], Slot)


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = jt.Var) -> Any:
    """Return nested dicts, lists and tuples with each variable, or value of another kind, changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change, kind) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, change, kind) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change, kind) for value in tree)
    return tree


@contextlib.contextmanager
def patched(names: Iterable[str], replacement: Callable[[str, Any], Any]) -> Iterator[None]:
    """Put others in the place of attributes of all variables, inside this context.

    Args:
        names: The attributes; those that Jittor's variables lack are passed over.
        replacement: Returns the other one, given a name and what is there.
    """
    found = {name: vars(jt.Var)[name] for name in names if name in vars(jt.Var)}
    for name, original in found.items():
        setattr(jt.Var, name, replacement(name, original))
    try:
        yield
    finally:
        for name, original in found.items():
            setattr(jt.Var, name, original)


def modules_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model by FQN, the model itself as ""."""
    found: dict[str, Any] = {}
    path: list[str] = []

    def enter(parents: list[Any], key: Any, module: Any, children: int) -> None:
        path.append(str(key))
        found[".".join(path[1:])] = module

    def leave(parents: list[Any], key: Any, module: Any, children: int) -> None:
        path.pop()

    model.dfs([], None, enter, leave)
    return found


def slots_of(model: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the FQN of each variable that a model holds, with the dictionary and the name that it is under."""
    for fqn, module in modules_of(model).items():
        place = module.params if isinstance(module, jt.nn.ParameterList) else vars(module)
        for name, value in place.items():
            if isinstance(value, jt.Var):
                yield f"{fqn}.{name}" if fqn else str(name), place, name


def named_variables(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a model by FQN, those that modules share once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for fqn, place, name in slots_of(model):
        if id(place[name]) not in seen:
            seen.add(id(place[name]))
            found[fqn] = place[name]
    return found


def is_trainable(variable: Any) -> bool:
    """Return whether gradients reach a variable: it is of floats, and nobody stopped them."""
    return str(variable.dtype) in FLOATS and not variable.is_stop_grad()
