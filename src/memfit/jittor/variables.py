"""Variables in nested batches, arguments and modules, and in Jittor's present graph."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.jittor.internals import jt

_VARIABLE = re.compile(r"Var\((\d+):.*?:s\d:n\d:g(\d),(\w+),(.*),([0-9a-f]+)\)\[([\d,-]*)\]", re.DOTALL)
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Slot(int):
    """A placeholder for a variable in nested dicts, lists and tuples."""


def variables_of(tree: Any) -> list[Any]:
    """Return the variables of nested dicts, lists and tuples, in order."""
    variables: list[Any] = []
    mapped(tree, variables.append)
    return variables


def emptied(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with their variables replaced by slots."""
    numbers = itertools.count()
    return mapped(tree, lambda _: Slot(next(numbers)))


def filled(tree: Any, variables: Sequence[Any]) -> Any:
    """Return nested dicts, lists and tuples with their slots replaced by variables."""
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
    """Replace attributes of all variables, inside this context.

    Args:
        names: The attributes; names that Jittor's variables lack are ignored.
        replacement: Returns the new attribute, given a name and the original.
    """
    originals = {name: vars(jt.Var)[name] for name in names if name in vars(jt.Var)}
    for name, original in originals.items():
        setattr(jt.Var, name, replacement(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(jt.Var, name, original)


def modules_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model by FQN, the model itself as ""."""
    modules: dict[str, Any] = {}
    path: list[str] = []

    def enter(parents: list[Any], key: Any, module: Any, children: int) -> None:
        path.append(str(key))
        modules[".".join(path[1:])] = module

    def leave(parents: list[Any], key: Any, module: Any, children: int) -> None:
        path.pop()

    model.dfs([], None, enter, leave)
    return modules


def slots_of(model: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the FQN of each variable of a model, with the dictionary that holds it and its name there."""
    for fqn, module in modules_of(model).items():
        place = module.params if isinstance(module, jt.nn.ParameterList) else vars(module)
        for name, value in place.items():
            if isinstance(value, jt.Var):
                yield f"{fqn}.{name}" if fqn else str(name), place, name


def buffers_of(model: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the slots of the variables that are not trained."""
    return [(place, name) for _, place, name in slots_of(model) if not is_trainable(place[name])]


@contextlib.contextmanager
def put_back(slots: Iterable[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Put the variables that stand in slots back on leaving."""
    before = [(place, name, place[name]) for place, name in slots]
    try:
        yield
    finally:
        for place, name, value in before:
            place[name] = value


@contextlib.contextmanager
def executing(module: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a module run another function, inside this context."""
    own, before = "execute" in vars(module), module.execute
    module.execute = function
    try:
        yield
    finally:
        if own:
            module.execute = before
        else:
            del module.execute


def is_chain(module: Any) -> bool:
    """Return whether a module calls its layers one after the other, and does nothing else."""
    return isinstance(module, jt.nn.Sequential) and type(module).execute is jt.nn.Sequential.execute


def layers_of(fqn: str, chain: Any) -> list[str]:
    """Return the FQNs of a chain's layers."""
    return [f"{fqn}.{name}" if fqn else name for name in chain.layers]


def named_variables(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a model by FQN; shared ones appear once."""
    variables: dict[str, Any] = {}
    seen: set[int] = set()
    for fqn, place, name in slots_of(model):
        if id(place[name]) not in seen:
            seen.add(id(place[name]))
            variables[fqn] = place[name]
    return variables


def is_trainable(variable: Any) -> bool:
    """Return whether gradients reach a variable: its dtype is a float, and they were not stopped."""
    return str(variable.dtype) in FLOATS and not variable.is_stop_grad()


@dataclass(frozen=True)
class Node:
    """A variable or an operator of the graph.

    Attributes:
        inputs: Indices of its input nodes.
        id: Identity of a variable, larger for later ones; -1 for operators.
        trainable: Whether gradients reach it.
        address: Address of its memory; 0 where none is allocated.
    """

    inputs: tuple[int, ...]
    id: int = -1
    trainable: bool = False
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    address: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of a variable."""
        bits = re.sub(r"\D", "", self.dtype)  # none in "bool"
        return math.prod(self.shape) * (int(bits or 8) // 8) if self.id >= 0 else 0


def nodes() -> list[Node]:
    """Return all nodes that are connected to variables that Python holds."""
    dumped, found = jt.dump_all_graphs(), []
    for text, inputs in zip(dumped.nodes_info, dumped.inputs, strict=True):
        match = _VARIABLE.match(text)
        if match is None:
            found.append(Node(tuple(inputs)))
            continue
        identity, has_gradient, dtype, name, address, sizes = match.groups()
        shape = tuple(int(n) for n in sizes.split(",") if n)
        found.append(Node(tuple(inputs), int(identity), has_gradient == "1", name, dtype, shape, int(address, 16)))
    return found


def allocated_bytes(owners: Mapping[int, str] | None = None) -> Counter[str]:
    """Return the bytes of all variables that have memory, by their owners; those that share it count once.

    Args:
        owners: The owner of a variable, by its id; "other variables" for all others.
    """
    sizes: dict[int, tuple[int, str]] = {}
    for node in nodes():
        if node.address:
            owner = (owners or {}).get(node.id, "other variables")
            sizes[node.address] = max(sizes.get(node.address, (0, "")), (node.nbytes, owner))
    found: Counter[str] = Counter()
    for nbytes, owner in sizes.values():
        found[owner] += nbytes
    return found


def reached(graph: list[Node], identities: Iterable[int], beyond: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield variables and their ancestors, by ids; `beyond` tells whether to go on to a node's inputs."""
    wanted = set(identities)
    pending = [i for i, node in enumerate(graph) if node.id in wanted]
    seen = set(pending)
    while pending:
        node = graph[pending.pop()]
        yield node
        new = [i for i in node.inputs if i not in seen] if beyond(node) else []
        seen.update(new)
        pending += new
