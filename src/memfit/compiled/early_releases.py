"""Backward kernels moved to where they let go of an activation as early as they can.

The gradient of a weight is the last reader of an activation, and mostly smaller; computed before the gradient of the
layer's input, it makes room for that. Inductor has a pass that orders kernels so after the plan is made
(`reorder_for_peak_memory`); here the graph itself has the order, so that the plan counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from memfit._torch.dispatch import OpOverload
from memfit._torch.operators import schema_of
from memfit.compiled.fusion import is_fusible
from memfit.compiled.joint_graph import JointGraph
from memfit.ir.operator_classes import VIEWS, operator_class


def release_early(graph: fx.Graph, joint: JointGraph) -> None:
    """Order the backward pass of a joint graph so that kernels which free more than they make run early.

    Only a library's kernels move, with the views that they read: what the compiler fuses stays together.
    """
    first = sum(1 for op in joint.trace.ops if op.phase == "forward")
    order = _Order(joint, first).order
    if order == sorted(order):
        return
    output = graph.output_node()
    for kernel in order:
        for node in joint.ops[kernel]:
            output.prepend(node)


class _Order:
    """An order of the backward kernels of a joint graph.

    Attributes:
        order: The kernels, numbered as in the graph.
    """

    def __init__(self, joint: JointGraph, first: int) -> None:
        self._joint, self._storages = joint, joint.trace.storages
        self.order = list(range(first, len(joint.ops)))
        self._needs: list[set[int]] = []  # of each kernel, those that make what it reads, views of it too
        self._reads: list[set[int]] = []
        self._readers: dict[int, set[int]] = defaultdict(set)
        kernel_of = {node: kernel for kernel, nodes in enumerate(joint.ops) for node in nodes}
        for kernel, nodes in enumerate(joint.ops):
            given = {g for node in nodes for g in node.all_input_nodes}.difference(nodes)
            self._needs.append({kernel_of[g] for g in given if g in kernel_of})
            self._reads.append({s for g in given for s in joint.storages[g]})
            for storage in self._reads[kernel]:
                self._readers[storage].add(kernel)
        self._views = {
            kernel
            for kernel, nodes in enumerate(joint.ops)
            if {s for node in nodes for s in joint.storages[node]} <= self._reads[kernel]
        }
        barrier = 0  # place in the order that no kernel passes
        for kernel in list(self.order):
            nodes = joint.ops[kernel]
            if _writes(nodes):
                barrier = self.order.index(kernel) + 1
            elif kernel not in self._views and not any(map(_is_generated, nodes)):
                self._move(kernel, barrier)

    def _move(self, kernel: int, barrier: int) -> None:
        """Move a kernel to just after its inputs are made, where it frees more than it makes there."""
        place = {other: index for index, other in enumerate(self.order)}
        views, needed = self._needed(kernel)
        to = max([barrier, *(place.get(other, -1) + 1 for other in needed)])
        moved = [other for other in [*sorted(views), kernel] if place.get(other, -1) >= to]
        made = {s for node in self._joint.ops[kernel] for s in self._joint.storages[node]} - self._reads[kernel]
        freed = (
            self._storages[s].nbytes
            for s in self._reads[kernel]
            if self._storages[s].birth >= 0
            and s not in self._joint.returned
            and all(place.get(other, -1) < to or other in views for other in self._readers[s] - {kernel})
        )
        if to < place[kernel] and sum(freed) > sum(self._storages[s].nbytes for s in made):
            for other in moved:
                self.order.remove(other)
            self.order[to:to] = moved

    def _needed(self, kernel: int) -> tuple[set[int], set[int]]:
        """Return the kernels of views that a kernel reads through, and the kernels that make its inputs."""
        views, needed, waiting = set[int](), set[int](), [kernel]
        while waiting:
            for other in self._needs[waiting.pop()] - views:
                if other in self._views:
                    views.add(other)
                    waiting.append(other)
                else:
                    needed.add(other)
        return views, needed


def _is_generated(node: fx.Node) -> bool:
    """Tell whether the compiler generates code for a node, other than for a view."""
    return is_fusible(node) and operator_class(str(node.target)) != VIEWS


def _writes(nodes: Sequence[fx.Node]) -> bool:
    """Tell whether a kernel writes into its inputs, so that none may pass it."""
    return any(isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable for node in nodes)
