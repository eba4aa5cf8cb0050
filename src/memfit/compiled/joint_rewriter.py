"""The joint graph of a compiled function, rewritten so that its backward pass recomputes regions.

Three more changes are made to it, for memory: values inside fused kernels are computed again rather than read,
backward kernels run where they let go of an activation early, and some products are kept apart from later sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from memfit._torch.dispatch import OpOverload
from memfit._torch.operators import schema_of
from memfit.compiled.fusion import INLINED, computed_of, is_fusible, is_slow, is_written_between
from memfit.compiled.joint_graph import CallNames, JointGraph, mark_recomputed, read
from memfit.compiled.rematerialization import KERNEL, GraphRegion, compute_for_each, keep_apart, rematerialize
from memfit.ir.operator_classes import COPIES, ELEMENTWISE, VIEWS, operator_class
from memfit.ir.remat import Region

FUSED_ERROR = 0.05
"""Inductor's excess over a prediction, as a share of the bytes that the step adds: it orders kernels by itself. At most
3.5 % was seen, on four models at four budgets each."""

_SMALL = 8
_WORTH = 1.25
_FEW = 24


def recompute_regions(
    graph: fx.Graph, forward_outputs: int, name: str, regions: Sequence[Region], names: CallNames
) -> tuple[JointGraph, list[str]]:
    """Change a joint graph so that its backward pass recomputes those of some regions whose modules it calls.

    Args:
        forward_outputs: The number of outputs that the forward pass returns.
        name: The trace's name.
        names: The names of module calls in graphs before of the same function.

    Returns:
        The graph as it is then, and the names of the module calls in it.
    """

    def reading() -> JointGraph:
        return read(graph, forward_outputs, name, names.copy())

    def ordered() -> JointGraph:
        _release_early(graph, reading())
        return reading()

    joint = reading()
    inlined, by_call = inlined_nodes(joint), defaultdict[int, list[fx.Node]](list)
    for node, call in joint.call_of.items():
        by_call[call].append(node)
    parts = [GraphRegion(inlined, frozenset(nodes)) for nodes in by_call.values()]
    rematerialize(graph, parts, joint.storages, list(joint.call_of), _mark_inlined)
    graph.eliminate_dead_code()
    for node, computed in list(_computed_per_loop(reading())):
        compute_for_each(node, computed)

    joint = ordered()
    called = [module.fqn for module in joint.trace.modules]
    here = [region for region in regions if set(region.modules) <= set(called)]
    spans = [(*joint.span(region.modules), region) for region in here]
    parts = [
        GraphRegion(
            frozenset(joint.recomputable(start, end, region.keep)),
            frozenset(joint.gradients(start, end)),
            tuple(region.modules),
        )
        for start, end, region in sorted(spans, key=lambda span: span[1] - span[0])  # smallest first
    ]
    rematerialize(graph, parts, joint.storages, list(joint.call_of), mark_recomputed)
    graph.eliminate_dead_code()
    for product in list(_early_products(reading())):
        keep_apart(product)
    joint = ordered()
    for index, nodes in enumerate(joint.ops):
        for node in joint.call_of.keys() & nodes:
            node.meta[KERNEL] = index
    return joint, called


def _early_products(joint: JointGraph) -> Iterator[fx.Node]:
    """Yield matrix products to keep apart from the later sums that they go into.

    Inductor would multiply where it adds, and keep the product's inputs until then, which are larger than its output:
    for the weight gradient of a head that shares the embedding's weight, the logits' gradient until the end.
    """
    storages = joint.trace.storages
    position = {node: index for index, nodes in enumerate(joint.ops) for node in nodes}
    for node, index in position.items():
        users = list(node.users)
        if node.target is not torch.ops.aten.mm.default or [u.target for u in users] != [torch.ops.aten.add.Tensor]:
            continue
        taken = {s for given in node.all_input_nodes for s in joint.storages[given]}
        held_bytes = sum(storages[s].nbytes for s in taken if index <= storages[s].death < position[users[0]])
        made_bytes = sum(storages[s].nbytes for s in joint.storages[node])
        if held_bytes > made_bytes and len(users[0].all_input_nodes) == 2 and not users[0].kwargs:
            yield node


def inlined_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the forward nodes inside kernels whose values the backward pass computes again where it needs them.

    Saving them would take memory and time, and backward kernels can compute them from tensors in memory. Values far
    smaller than their inputs (statistics) are saved all the same, and so are values that need much larger inputs saved.
    """
    size, births = joint.nbytes, [storage.birth for storage in joint.trace.storages]
    crossing = {save.storage for save in joint.trace.saves}
    inside = {
        s for s in _unwritten(joint) if _SMALL * size[s] > max(map(size.__getitem__, _inputs_of(joint, s)), default=0)
    }
    taken = crossing - inside
    for storage in sorted(crossing & inside):
        needed = {s for s in _boundary(joint, storage, inside) if births[s] >= 0}
        if sum(size[s] for s in needed - taken) > _WORTH * size[storage]:
            inside.discard(storage)
            needed = {storage}
        taken |= needed
    forward = (node for nodes in joint.ops for node in nodes if node not in joint.call_of)
    return frozenset(n for n in forward if joint.storages[n] and inside.issuperset(joint.storages[n]))


def _computed_per_loop(joint: JointGraph) -> Iterator[tuple[fx.Node, frozenset[fx.Node]]]:
    """Yield backward nodes that are fast to compute in each loop that reads them, rather than written to memory.

    With each come the nodes of its kernel that it is computed from. The gradient of logits, for one, has such a node as
    large as the logits.
    """
    for index, nodes in enumerate(joint.ops):
        kernel = frozenset(nodes)
        for node in nodes:
            written = any(joint.trace.storages[s].death > index for s in joint.storages[node])
            if node in joint.call_of and not written and is_written_between(node, kernel):
                computed = frozenset(computed_of(node, kernel))
                if len(computed) <= _FEW and not is_slow(computed) and all(map(_is_copyable, computed)):
                    yield node, computed


def _is_copyable(node: fx.Node) -> bool:
    name = str(node.target)
    return operator_class(name) in (ELEMENTWISE, COPIES, VIEWS) or name.startswith("prims.")


def _unwritten(joint: JointGraph) -> set[int]:
    """Return the storages that only the forward kernel that makes them reads."""
    written, candidates = set(joint.returned), set[int]()
    for index, (op, nodes) in enumerate(zip(joint.trace.ops, joint.ops, strict=True)):
        if op.phase != "forward":
            break
        for node in nodes:
            made = {s for s in joint.storages[node] if joint.trace.storages[s].birth == index}
            candidates |= made if node not in joint.fixed and len(nodes) > 1 else set()
            read = {s for given in node.all_input_nodes for s in joint.storages[given]}
            written |= {s for s in read if joint.trace.storages[s].birth != index}
    return candidates - written


def _inputs_of(joint: JointGraph, storage: int) -> set[int]:
    return {s for given in joint.makers[storage].all_input_nodes for s in joint.storages[given]}


def _boundary(joint: JointGraph, storage: int, inside: set[int]) -> set[int]:
    """Return the storages that a storage is recomputed from and that are not recomputed themselves."""
    needed, waiting = set[int](), [storage]
    while waiting:
        for given in _inputs_of(joint, waiting.pop()) - needed:
            needed.add(given)
            waiting += [given] if given in inside else []
    return needed - inside


def _mark_inlined(node: fx.Node, before: fx.Node, _: tuple[str, ...]) -> None:
    """Assign a copy to the call and the kernel of the backward node that it is made for."""
    node.meta["seq_nr"] = before.meta.get("seq_nr", -1)
    node.meta[INLINED] = True


def _release_early(graph: fx.Graph, joint: JointGraph) -> None:
    """Order the backward pass so that kernels which free more than they make run early.

    The gradient of a weight is the last reader of an activation, and mostly smaller; computed before the gradient of
    the layer's input, it makes room for that. Inductor has a pass that orders kernels so after the plan is made
    (`reorder_for_peak_memory`); here the graph itself has the order, so that the plan counts it.

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
