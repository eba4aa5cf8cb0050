"""The joint graph of a compiled function, rewritten so that its backward pass recomputes regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from memfit.compiled.channels_last import show_in_any_layout
from memfit.compiled.dropout_masks import hold_masks_as_bytes
from memfit.compiled.early_releases import release_early
from memfit.compiled.graph_module_calls import CallNames
from memfit.compiled.inlining import computed_per_loop, inlined_nodes, mark_for_each, mark_inlined, users_by_call
from memfit.compiled.joint_graph import JointGraph, mark_kept, mark_recomputed, read
from memfit.compiled.rematerialization import KERNEL, GraphRegion, compute_for_each, keep_apart, rematerialize
from memfit.ir.remat import Region

FUSED_ERROR = 0.05
"""Inductor's excess over a prediction, as a share of the bytes that the step adds: it orders kernels by itself. At most
3.5 % was seen, on four models at four budgets each."""


class JointRewriter:
    """A joint graph, and its trace.

    Args:
        fused: Whether Inductor runs it.
        names: The names of module calls in other graphs of the same function; None where there are none.

    Attributes:
        graph: The graph, which `apply` changes.
        joint: The graph as it was read last.
    """

    def __init__(
        self, graph: fx.Graph, forward_outputs: int, name: str, fused: bool, names: CallNames | None = None
    ) -> None:
        self.graph, self.forward_outputs, self.name = graph, forward_outputs, name
        self.fused = fused
        self._names = names or CallNames()
        self.joint = self.read(graph)
        if fused:
            self._inline()

    def read(self, graph: fx.Graph) -> JointGraph:
        """Return this graph, or a copy of it, as a trace."""
        return read(graph, self.forward_outputs, self.name, self.fused, self._names.copy())

    def _inline(self) -> None:
        recomputed = inlined_nodes(self.joint)
        parts = [GraphRegion(recomputed, users) for users in users_by_call(self.joint)]
        rematerialize(self.graph, parts, self.joint.storages, list(self.joint.call_of), mark_inlined)
        self.graph.eliminate_dead_code()
        self.joint = self.read(self.graph)
        for node, computed in list(computed_per_loop(self.joint)):
            compute_for_each(node, computed, mark_for_each)
        self.joint = self.ordered(self.graph)

    def ordered(self, graph: fx.Graph) -> JointGraph:
        """Order the kernels of this graph, or of a copy, and return it as a trace."""
        joint = self.read(graph)
        if not self.fused:
            return joint
        release_early(graph, joint)
        return self.read(graph)

    def regions_here(self, regions: Sequence[Region]) -> list[Region]:
        """Return those of some regions whose modules this graph calls."""
        called = {module.fqn for module in self.joint.trace.modules}
        return [region for region in regions if called.issuperset(region.modules)]

    def apply(self, regions: Sequence[Region]) -> JointGraph:
        """Change the graph so that its backward pass recomputes regions, and return it as it is then."""
        parts = _graph_regions(self.joint, regions)
        rematerialize(self.graph, parts, self.joint.storages, list(self.joint.call_of), mark_recomputed)
        self.graph.eliminate_dead_code()
        joint = self.read(self.graph)
        if self.fused:
            for product in list(_early_products(joint)):
                keep_apart(product)
            joint = self.ordered(self.graph)
        for index, nodes in enumerate(joint.ops):
            for node in joint.call_of.keys() & nodes:
                node.meta[KERNEL] = index
        return joint


def prepare(graph: fx.Graph) -> None:
    """Make a joint graph ready for Inductor: masks held as bytes, and views that are right in any layout."""
    show_in_any_layout(graph)
    hold_masks_as_bytes(graph, mark_kept)


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


def _graph_regions(joint: JointGraph, regions: Sequence[Region]) -> list[GraphRegion]:
    """Return regions as nodes of the graph, smallest first."""
    spans = [(*joint.span(region.modules), region) for region in regions]
    graph_regions = []
    for start, end, region in sorted(spans, key=lambda span: span[1] - span[0]):
        recomputed = frozenset(joint.recomputable(start, end, region.keep))
        users = frozenset(joint.gradients(start, end))
        graph_regions.append(GraphRegion(recomputed, users, tuple(region.modules)))
    return graph_regions
