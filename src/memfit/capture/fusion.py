"""Which operators of a graph Inductor makes one kernel of, as far as memory and time go.

Pointwise operators and reductions are one kernel with those that they take something of, where no other kernel has
to run in between. What is used within its kernel only is never written to memory. A reduction over leading
dimensions ends its kernel for those who take its result, since their loops run over other dimensions. This is coarser
than Inductor, which also weighs what fusing gains.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfit.ir.operators import REDUCTIONS, operator_class

INLINED = "memfit_inlined"
"""The key of a node's meta data that says that it is a copy to run in the kernel that it is made for."""


COMPUTED_FOR_EACH = "memfit_computed_for_each"
"""The key of a node's meta data that says that its kernel computes it once for each loop that takes it."""

_SLOW = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""What Inductor never computes twice on a CPU (`TensorBox.should_realize_on_reuse`, torch 2.13)."""


@functools.cache
def _types() -> Any:
    from torch._functorch.partitioners import get_default_op_list  # takes seconds

    return get_default_op_list()


def is_fusible(node: fx.Node) -> bool:
    """Tell whether Inductor generates code for a node that can be fused."""
    return isinstance(node.target, torch._ops.OpOverload) and (bool(_types().is_fusible(node)) or puts_into(node))


def puts_into(node: fx.Node) -> bool:
    """Tell whether a node puts one tensor into a part of another, which Inductor does in a loop over all of it."""
    return node.target in (
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.constant_pad_nd.default,
    )


def is_written_between(node: fx.Node, kernel: Set[fx.Node]) -> bool:
    """Tell whether a kernel writes down what a node makes: a loop that reduces takes it, and another one.

    What reads one tensor only, and is computed fast, is computed in each loop instead.
    """
    if len(node.users) < 2 or not any(map(reduces, node.users)):
        return False
    return is_slow(computed_of(node, kernel)) or len(_read(node, kernel)) > 1


def reduces(node: fx.Node) -> bool:
    """Tell whether a node is a reduction."""
    return operator_class(str(node.target)) == REDUCTIONS


def is_slow(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether one of some nodes is a function that Inductor doesn't compute twice."""
    return any(str(node.target).split(".")[1:2] == [name] for node in nodes for name in _SLOW)


def computed_of(node: fx.Node, kernel: Set[fx.Node]) -> set[fx.Node]:
    """Return a node and those of its kernel that are computed in the same loop for it."""
    found, waiting = {node}, [node]
    while waiting:
        near = {g for g in waiting.pop().all_input_nodes if g in kernel and not reduces(g)} - found
        found |= near
        waiting += near
    return found


def _read(node: fx.Node, kernel: Set[fx.Node]) -> set[fx.Node]:
    """Return what the loop that computes a node reads."""
    computed = computed_of(node, kernel)
    return {given for one in computed for given in one.all_input_nodes} - computed


def kernels(
    nodes: Sequence[fx.Node],
    sources: Mapping[fx.Node, fx.Node],
    place: Callable[[fx.Node], Hashable],
    waits: Callable[[fx.Node], bool] = lambda node: False,
) -> list[tuple[fx.Node, ...]]:
    """Return the nodes of one pass of a graph by kernel, in an order that they can run in.

    Args:
        nodes: The pass, in order.
        sources: For each view, and each part of an operator's outputs, the node that it is of.
        place: Nodes of different places are not fused; those of None are with any.
        waits: Nodes for which this holds are fused with what takes them first, where that can be.
    """
    return _Fusion(sources, place, waits).of(nodes)


@dataclass
class _Kernel:
    """Some nodes, at most one place of which is not None.

    `before` and `barred` are bits: the kernels that must run before it, and those that it can't join.
    """

    nodes: list[fx.Node]
    place: Hashable
    waits: bool
    before: int = 0
    barred: int = 0


@dataclass
class _Fusion:
    sources: Mapping[fx.Node, fx.Node]
    place: Callable[[fx.Node], Hashable]
    waits: Callable[[fx.Node], bool]
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    kernels: dict[int, _Kernel] = field(default_factory=dict)

    def of(self, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
        position = {node: index for index, node in enumerate(nodes)}
        self.inside = position.keys()
        for index, node in enumerate(nodes):
            kernel = self.of_node.get(self._source(node))
            if kernel is None:
                self._add(index, node)
            else:
                self.of_node[node] = kernel
                self.kernels[kernel].nodes.append(node)
        for found in self.kernels.values():
            found.nodes.sort(key=position.__getitem__)
        return [tuple(self.kernels[index].nodes) for index in self._order(position)]

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the node of this pass that makes what a view shows; the first view, where another pass makes it."""
        while self.sources.get(node) in self.inside:
            node = self.sources[node]
        return node

    def _taken(self, node: fx.Node) -> dict[fx.Node, int]:
        """Return the nodes of this pass that a node takes something of, and their kernels."""
        sources = map(self._source, node.all_input_nodes)
        return {source: self.of_node[source] for source in sources if source in self.of_node}

    def _add(self, index: int, node: fx.Node) -> None:
        kernel = self.kernels[index] = _Kernel([node], self.place(node), self.waits(node))
        self.of_node[node] = index
        taken = self._taken(node)
        for source, other in taken.items():
            kernel.before |= self.kernels[other].before | 1 << other
            kernel.barred |= self.kernels[other].barred | (1 << other if _ends_loop(source) else 0)
        if not kernel.waits:
            self._join_taken(index)

    def _join_taken(self, index: int) -> None:
        """Fuse a kernel with those that it takes something of; one that waited and can't be is fused by itself."""
        waiting, tried = self._kernels_taken(index, made=True), {index}
        while waiting := waiting - tried:
            other = max(waiting)
            tried.add(other)
            waited = self.kernels[other].waits
            if self._may_join(other, index):
                waiting |= self._kernels_taken(other, made=True) if waited else set()
                self._join(other, index)
            elif waited:
                self.kernels[other].waits = False
                self._join_taken(other)

    def _kernels_taken(self, index: int, made: bool = False) -> set[int]:
        """Return the kernels that a kernel takes something of; those of which it takes more than a view, if `made`."""
        taken = (item for node in self.kernels[index].nodes for item in self._taken(node).items())
        return {kernel for source, kernel in taken if not (made and source in self.sources)}

    def _may_join(self, first: int, second: int) -> bool:
        one, two = self.kernels[first], self.kernels[second]
        if not (is_fusible(one.nodes[0]) and is_fusible(two.nodes[0])) or two.barred >> first & 1:
            return False
        if None not in (one.place, two.place) and one.place != two.place:
            return False
        between = two.before & ~(1 << first)
        return not any(between >> k & 1 and other.before >> first & 1 for k, other in self.kernels.items())

    def _join(self, first: int, second: int) -> None:
        """Put the nodes of a kernel into a later one."""
        gone, kernel = self.kernels.pop(first), self.kernels[second]
        kernel.nodes += gone.nodes
        kernel.place = gone.place if kernel.place is None else kernel.place
        self.of_node.update(dict.fromkeys(gone.nodes, second))
        kernel.before = (kernel.before | gone.before) & ~(1 << first)
        kernel.barred |= gone.barred
        for other in self.kernels.values():
            if other.before >> first & 1:
                other.before = other.before & ~(1 << first) | kernel.before | 1 << second
            if other.barred >> first & 1:
                other.barred |= 1 << second

    def _order(self, position: Mapping[fx.Node, int]) -> list[int]:
        """Return the kernels in an order that they can run in, near that of their first nodes."""
        first = {index: position[kernel.nodes[0]] for index, kernel in self.kernels.items()}
        takes = {index: self._kernels_taken(index) - {index} for index in self.kernels}
        after: dict[int, list[int]] = {index: [] for index in takes}
        for index, others in takes.items():
            for other in others:
                after[other].append(index)
        waiting = {index: len(others) for index, others in takes.items()}
        ready = [(first[index], index) for index, count in waiting.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            index = heapq.heappop(ready)[1]
            order.append(index)
            for other in after[index]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, (first[other], other))
        return order


def _ends_loop(node: fx.Node) -> bool:
    """Tell whether a node reduces other dimensions than the last ones: no row of its result is ready before all are."""
    if not reduces(node):
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(dims, list | tuple) or not isinstance(value, torch.Tensor):
        return True
    last = {d % value.dim() for d in dims if isinstance(d, int)}
    return last != set(range(value.dim() - len(last), value.dim()))
