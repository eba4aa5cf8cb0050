"""Inductor's fusion of a graph's operators into kernels, as far as memory and time depend on it.

A pointwise operator or reduction is fused with the producers of its inputs, where no other kernel must run in between.
An output that only its own kernel reads is never written to memory. Readers of a reduction over leading dimensions are
not fused with it, since their loops run over other dimensions. Inductor also weighs the gain of fusing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from memfit._torch import OpOverload, default_op_list
from memfit.ir import REDUCTIONS, operator_class

T = TypeVar("T")

INLINED = "memfit_inlined"
"""Metadata key of a copied node, which runs in the kernel that it was copied for."""

COMPUTED_FOR_EACH = "memfit_computed_for_each"
"""Metadata key of a node that its kernel computes in each loop that reads it."""

_SLOW = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""Functions that Inductor never computes twice on a CPU (`TensorBox.should_realize_on_reuse`, torch 2.13)."""


_LOOKED_UP = frozenset({torch.ops.aten._unsafe_index.Tensor, torch.ops.aten._unsafe_masked_index.default})
"""Look-ups by indices within bounds, as interpolation takes; PyTorch lists `index.Tensor` alone."""

_SCATTERS = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten._unsafe_masked_index_put_accumulate.default,
    }
)
"""Operators that write values to places of a tensor that indices tell: a loop over the values, which computes these."""


def is_fusible(node: fx.Node) -> bool:
    """Tell whether Inductor can fuse a node."""
    if not isinstance(node.target, OpOverload):
        return False
    known = node.target in _LOOKED_UP or node.target in _SCATTERS
    return known or bool(default_op_list().is_fusible(node)) or puts_into(node)


def puts_into(node: fx.Node) -> bool:
    """Tell whether a node writes one tensor into a part of another, in a loop over all of that one."""
    return node.target in (
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.constant_pad_nd.default,
    )


def is_written_between(node: fx.Node, kernel: Set[fx.Node]) -> bool:
    """Tell whether a kernel writes a node's output to memory, since a reduction's loop and another loop read it.

    A fast node that reads one tensor is computed in each loop instead.
    """
    if len(node.users) < 2 or not any(map(reduces, node.users)):
        return False
    computed = computed_of(node, kernel)
    read = {given for reader in computed for given in reader.all_input_nodes} - computed
    return is_slow(computed) or len(read) > 1


def reduces(node: fx.Node) -> bool:
    return operator_class(str(node.target)) == REDUCTIONS


def is_slow(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether one of the nodes is a function that Inductor never computes twice."""
    return any(str(node.target).split(".")[1:2] == [name] for node in nodes for name in _SLOW)


def computed_of(node: fx.Node, kernel: Set[fx.Node]) -> set[fx.Node]:
    """Return a node and the nodes of its kernel that the same loop computes for it."""
    return reached([node], lambda other: [g for g in other.all_input_nodes if g in kernel and not reduces(g)])


def reached(starts: Iterable[T], leads_to: Callable[[T], Iterable[T]]) -> set[T]:
    """Return some items and all that they lead to, directly or through others."""
    found, waiting = set[T](), list(starts)
    while waiting:
        item = waiting.pop()
        if item not in found:
            found.add(item)
            waiting += leads_to(item)
    return found


def kernels(
    nodes: Sequence[fx.Node], sources: Mapping[fx.Node, fx.Node], place: Callable[[fx.Node], Hashable]
) -> list[tuple[fx.Node, ...]]:
    """Return the nodes of one pass of a graph, grouped by kernel, in an order in which the kernels can run.

    Copies that are marked as inlined are fused with their first reader, where possible.

    Args:
        nodes: The pass, in order.
        sources: For each view, and each part of an operator's outputs, the node that it views.
        place: Returns a node's place; nodes of different places are not fused, unless one is None.
    """
    fusion = _Fusion(nodes, sources)
    for index, node in enumerate(nodes):
        fusion.add(index, node, place)
    return fusion.ordered()


@dataclass
class _Kernel:
    """The nodes of a kernel, at most one place of which is not None."""

    nodes: list[fx.Node]
    place: Hashable
    waits: bool
    before: int = 0  # bits: the kernels that must run before it
    barred: int = 0  # bits: the kernels that it can't join


class _Fusion:
    def __init__(self, nodes: Sequence[fx.Node], sources: Mapping[fx.Node, fx.Node]) -> None:
        self.sources, self.position = sources, {node: index for index, node in enumerate(nodes)}
        self.of_node: dict[fx.Node, int] = {}
        self.kernels: dict[int, _Kernel] = {}

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the node of this pass that makes a view's storage; the first view, where another pass makes it."""
        while self.sources.get(node) in self.position:
            node = self.sources[node]
        return node

    def _inputs_of(self, node: fx.Node) -> dict[fx.Node, int]:
        """Return the nodes of this pass whose storages a node reads, and their kernels."""
        sources = map(self._source, node.all_input_nodes)
        return {source: self.of_node[source] for source in sources if source in self.of_node}

    def add(self, index: int, node: fx.Node, place: Callable[[fx.Node], Hashable]) -> None:
        """Add the next node of the pass, as a kernel that is fused with others, or to that of what it views."""
        viewed = self.of_node.get(self._source(node))
        if viewed is not None:
            self.of_node[node] = viewed
            self.kernels[viewed].nodes.append(node)
            return
        self.kernels[index] = kernel = _Kernel([node], place(node), INLINED in node.meta)
        self.of_node[node] = index
        taken = self._inputs_of(node)
        for source, other in taken.items():
            kernel.before |= self.kernels[other].before | 1 << other
            apart = _ends_loop(source) or (node.target in _SCATTERS and source is self._source(node.all_input_nodes[0]))
            kernel.barred |= self.kernels[other].barred | (1 << other if apart else 0)
        if not kernel.waits:
            self._join_inputs(index)

    def _join_inputs(self, index: int) -> None:
        """Fuse a kernel with those that it reads from; a waiting one that can't join is fused with its own inputs."""
        waiting, tried = self._kernels_read(index, made=True), {index}
        while waiting := waiting & self.kernels.keys() - tried:  # without those that another one was fused with
            other = max(waiting)
            tried.add(other)
            waited = self.kernels[other].waits
            if self._may_join(other, index):
                waiting |= self._kernels_read(other, made=True) if waited else set()
                self._join(other, index)
            elif waited:
                self.kernels[other].waits = False
                self._join_inputs(other)

    def _kernels_read(self, index: int, made: bool = False) -> set[int]:
        """Return the kernels that a kernel reads from; with `made`, without those of which it reads views only."""
        taken = (item for node in self.kernels[index].nodes for item in self._inputs_of(node).items())
        return {kernel for source, kernel in taken if not (made and source in self.sources)}

    def _may_join(self, first: int, second: int) -> bool:
        producer, reader = self.kernels[first], self.kernels[second]
        if not (is_fusible(producer.nodes[0]) and is_fusible(reader.nodes[0])) or reader.barred >> first & 1:
            return False
        if None not in (producer.place, reader.place) and producer.place != reader.place:
            return False
        between = reader.before & ~(1 << first)
        return not any(between >> k & 1 and other.before >> first & 1 for k, other in self.kernels.items())

    def _join(self, first: int, second: int) -> None:
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

    def ordered(self) -> list[tuple[fx.Node, ...]]:
        """Return the kernels in an order in which they can run, close to the order of their first nodes."""
        for kernel in self.kernels.values():
            kernel.nodes.sort(key=self.position.__getitem__)
        takes = {index: self._kernels_read(index) - {index} for index in self.kernels}
        after: dict[int, list[int]] = {index: [] for index in takes}
        for index, others in takes.items():
            for other in others:
                after[other].append(index)
        ready = [(self.position[self.kernels[index].nodes[0]], index) for index, others in takes.items() if not others]
        heapq.heapify(ready)
        order = []
        while ready:
            index = heapq.heappop(ready)[1]
            order.append(tuple(self.kernels[index].nodes))
            for other in after[index]:
                takes[other].remove(index)
                if not takes[other]:
                    heapq.heappush(ready, (self.position[self.kernels[other].nodes[0]], other))
        return order


def _ends_loop(node: fx.Node) -> bool:
    """Tell whether no row of a node is ready before all are: it reduces other dimensions than the last, or scatters."""
    if node.target in _SCATTERS:
        return True
    if not reduces(node):
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(dims, list | tuple) or not isinstance(value, torch.Tensor):
        return True
    last = {d % value.dim() for d in dims if isinstance(d, int)}
    return last != set(range(value.dim() - len(last), value.dim()))
