"""Jittor's present graph of variables and operators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from memfit.frameworks.jittor.internals import jt

_VARIABLE = re.compile(r"Var\((\d+):.*?:s(\d):n\d:g(\d),(\w+),(.*),([0-9a-f]+)\)\[([\d,-]*)\]", re.DOTALL)
_ITEMSIZES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2}
_WIDE = ("int64", "uint64", "float64")


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
        itemsize = _ITEMSIZES.get(self.dtype, 8 if self.dtype in _WIDE else 4)
        return math.prod(self.shape) * itemsize if self.id >= 0 else 0


def nodes() -> list[Node]:
    """Return all nodes that are connected to variables that Python holds."""
    dumped = jt.dump_all_graphs()
    return [_node(text, inputs) for text, inputs in zip(dumped.nodes_info, dumped.inputs, strict=True)]


def _node(text: str, inputs: Iterable[int]) -> Node:
    match = _VARIABLE.match(text)
    if match is None:
        return Node(tuple(inputs))
    identity, _, has_gradient, dtype, name, address, sizes = match.groups()
    shape = tuple(int(n) for n in sizes.split(",") if n)
    return Node(tuple(inputs), int(identity), has_gradient == "1", name, dtype, shape, int(address, 16))


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
