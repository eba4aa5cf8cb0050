"""The joint graph of a compiled function, rewritten so that its backward pass recomputes regions.

Three more changes are made to it, for memory: values inside fused kernels are computed again rather than read,
backward kernels run where they let go of an activation early, and some products are kept apart from later sums.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit._torch import OpOverload, schema_of
from memfit.compiled.fusion import (
    COMPUTED_FOR_EACH,
    INLINED,
    computed_of,
    is_fusible,
    is_slow,
    is_written_between,
    reached,
)
from memfit.compiled.joint_graph import JointGraph, mark_recomputed
from memfit.ir import COPIES, ELEMENTWISE, VIEWS, Region, operator_class

KERNEL = "memfit_kernel"
"""Metadata key of the number of a node's kernel in the plan."""

Mark = Callable[[fx.Node, fx.Node, tuple[str, ...]], None]


FUSED_ERROR = 0.05
"""Inductor's excess over a prediction, as a share of the bytes that the step adds: it orders kernels by itself. At most
3.5 % was seen, on four models at four budgets each."""

_SMALL = 8
_WORTH = 1.25
_FEW = 24


@dataclass(frozen=True, eq=False)
class GraphRegion:
    """A part of the forward pass that the backward pass recomputes.

    Attributes:
        recomputed: The forward nodes that are recomputed where their values are needed.
        users: The backward nodes that read the copies.
        modules: The FQNs of its modules.
    """

    recomputed: frozenset[fx.Node]
    users: frozenset[fx.Node]
    modules: tuple[str, ...] = ()


def rematerialize(
    graph: fx.Graph,
    regions: Sequence[GraphRegion],
    storages: Mapping[fx.Node, tuple[Hashable, ...]],
    backward: Sequence[fx.Node],
    mark: Mark,
) -> None:
    """Make the backward nodes of a joint graph recompute regions of its forward pass.

    Each copy of a forward node comes before the first backward node that needs it.

    1. A backward node of a region reads copies of the region's recomputed nodes, and originals of all others. Copies of
       a region within another read copies of the outer one.
    2. An original that another node keeps alive anyway is read, not recomputed.
    3. Later backward nodes of the region read the same copy.

    Args:
        regions: The regions, innermost first.
        mark: Called with each copy, the backward node that it is made for, and the modules of its region.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    around = {node: tuple(i for i, region in enumerate(regions) if node in region.users) for node in backward}
    kept: set[Hashable] = set()
    copies: dict[tuple[int, fx.Node], fx.Node] = {}

    def source(node: fx.Node, chain: tuple[int, ...]) -> int | None:
        """Return the innermost region around that recomputes a node, or None for the original."""
        if storages[node] and kept.issuperset(storages[node]):
            return None
        if node.target is operator.getitem and source(node.args[0], chain) is None:  # type: ignore[arg-type]
            return None  # outputs are saved one by one, and not all at once to be taken apart later
        return next((region for region in chain if node in regions[region].recomputed), None)

    def resolved(node: fx.Node, chain: tuple[int, ...]) -> fx.Node:
        region = source(node, chain)
        return node if region is None else copies[region, node]

    def needed(node: fx.Node, chain: tuple[int, ...]) -> Iterator[tuple[int, fx.Node]]:
        """Yield the copies that a node in nested regions reads, and that are not there yet."""
        for given in node.all_input_nodes:
            region = source(given, chain)
            if region is not None and (region, given) not in copies:
                yield region, given

    for node, chain in around.items():  # the storages whose originals are needed may spare copies and their inputs
        for given in node.all_input_nodes:
            if source(given, chain) is None and given in position and given not in around:
                kept.update(storages[given])
    for node, chain in around.items():
        if not chain:
            continue
        missing = reached(
            needed(node, chain),
            lambda item, chain=chain: needed(item[1], chain[chain.index(item[0]) :]),  # type: ignore[misc]
        )
        for region, original in sorted(missing, key=lambda item: position[item[1]]):
            inner = chain[chain.index(region) :]
            with graph.inserting_before(node):
                copy = graph.node_copy(original, lambda given, inner=inner: resolved(given, inner))  # type: ignore[misc]
            copy.meta = {**original.meta, "partitioner_tag": "is_backward"}
            mark(copy, node, regions[region].modules)
            copies[region, original] = copy
        given_to: Any = (node.args, node.kwargs)
        node.args, node.kwargs = fx.map_arg(given_to, lambda n, chain=chain: resolved(n, chain))  # type: ignore[misc]


def compute_for_each(node: fx.Node, computed: Set[fx.Node]) -> None:
    """Give each user of a node but the first its own copy of the node and of the nodes that it is computed from."""
    graph = node.graph
    ordered = [original for original in graph.nodes if original in computed]
    for user in list(node.users)[1:]:
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(user):
            for original in ordered:
                copy = graph.node_copy(original, lambda given, copies=copies: copies.get(given, given))  # type: ignore[misc]
                copy.meta = {**original.meta, COMPUTED_FOR_EACH: True}
                copies[original] = copy
        user.replace_input_with(node, copies[node])


def keep_apart(product: fx.Node) -> None:
    """Keep Inductor from fusing a matrix product with the later sum that it goes into.

    The sum a + b becomes a - (-b), equal bit for bit, which Inductor does not fuse.
    """
    (total,) = product.users
    if total.target is not torch.ops.aten.add.Tensor:
        return  # of two products, as of a weight that two layers share, and kept apart for the other one
    (addend,) = [given for given in total.args if isinstance(given, fx.Node) and given is not product]
    with total.graph.inserting_before(total):
        negative = total.graph.call_function(torch.ops.aten.neg.default, (addend,))
    negative.meta = {**total.meta, "val": torch.ops.aten.neg.default(addend.meta["val"])}
    total.target, total.args = torch.ops.aten.sub.Tensor, (product, negative)


def recompute_regions(
    graph: fx.Graph, forward_outputs: int, name: str, regions: Sequence[Region], called: Counter[str]
) -> tuple[JointGraph, list[str]]:
    """Change a joint graph so that its backward pass recomputes those of some regions whose modules it calls.

    Args:
        forward_outputs: The number of outputs that the forward pass returns.
        name: The trace's name.
        called: How often each module was called in the graphs before of the same function, which is changed.

    Returns:
        The graph as it is then, and the names of the module calls in it.
    """

    def reading() -> JointGraph:
        return JointGraph(graph, forward_outputs, name, called.copy())

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
    names = [module.fqn for module in joint.trace.modules]
    here = [region for region in regions if set(region.modules) <= set(names)]
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
    called.update(fqn.partition("@")[0] for fqn in names)
    return joint, names


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
    inputs = _inputs_of(joint, storage)
    return reached(inputs, lambda given: _inputs_of(joint, given) if given in inside else ()) - inside


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
    storages = joint.trace.storages
    first = sum(1 for op in joint.trace.ops if op.phase == "forward")
    order = list(range(first, len(joint.ops)))
    needs: list[set[int]] = []  # of each kernel, those that make what it reads, views of it too
    reads: list[set[int]] = []
    readers: dict[int, set[int]] = defaultdict(set)
    kernel_of = {node: kernel for kernel, nodes in enumerate(joint.ops) for node in nodes}
    for kernel, nodes in enumerate(joint.ops):
        given = {g for node in nodes for g in node.all_input_nodes}.difference(nodes)
        needs.append({kernel_of[g] for g in given if g in kernel_of})
        reads.append({s for g in given for s in joint.storages[g]})
        for storage in reads[kernel]:
            readers[storage].add(kernel)
    made = [{s for node in nodes for s in joint.storages[node]} for nodes in joint.ops]
    shows = {kernel for kernel in range(len(joint.ops)) if made[kernel] <= reads[kernel]}
    barrier = 0  # place in the order that no kernel passes
    for kernel in list(order):
        if any(isinstance(n.target, OpOverload) and schema_of(n.target).is_mutable for n in joint.ops[kernel]):
            barrier = order.index(kernel) + 1
            continue
        if kernel in shows or any(map(_is_generated, joint.ops[kernel])):
            continue
        # It moves to just after its inputs are made, with the views that it reads them through, where it frees more
        # than it makes there.
        place = {other: index for index, other in enumerate(order)}
        views, needed, waiting = set[int](), set[int](), [kernel]
        while waiting:
            for other in needs[waiting.pop()] - views:
                (views if other in shows else needed).add(other)
                waiting += [other] if other in shows else []
        to = max([barrier, *(place.get(other, -1) + 1 for other in needed)])
        freed = (
            storages[s].nbytes
            for s in reads[kernel]
            if storages[s].birth >= 0
            and s not in joint.returned
            and all(place.get(other, -1) < to or other in views for other in readers[s] - {kernel})
        )
        if to < place[kernel] and sum(freed) > sum(storages[s].nbytes for s in made[kernel] - reads[kernel]):
            moved = [other for other in [*sorted(views), kernel] if place.get(other, -1) >= to]
            for other in moved:
                order.remove(other)
            order[to:to] = moved
    if order == sorted(order):
        return
    output = graph.output_node()
    for kernel in order:
        for node in joint.ops[kernel]:
            output.prepend(node)


def _is_generated(node: fx.Node) -> bool:
    """Tell whether the compiler generates code for a node, other than for a view."""
    return is_fusible(node) and operator_class(str(node.target)) != VIEWS
