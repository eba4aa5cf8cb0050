"""Recomputation in a joint graph: copies of forward nodes, each before the first backward node that needs it.

1. A backward node of a region reads copies of the region's recomputed nodes, and originals of all others. Copies of a
   region within another read copies of the outer one.
2. An original that another node keeps alive anyway is read, not recomputed.
3. Later backward nodes of the region read the same copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfit.compiled.fusion import COMPUTED_FOR_EACH

KERNEL = "memfit_kernel"
"""Metadata key of the number of a node's kernel in the plan."""

Mark = Callable[[fx.Node, fx.Node, tuple[str, ...]], None]


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

    Args:
        regions: The regions, innermost first.
        mark: Called with each copy, the backward node that it is made for, and the modules of its region.
    """
    _Rewriter(graph, regions, storages, backward, mark).rewrite()


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


@dataclass
class _Rewriter:
    graph: fx.Graph
    regions: Sequence[GraphRegion]
    storages: Mapping[fx.Node, tuple[Hashable, ...]]
    backward: Sequence[fx.Node]
    mark: Mark
    kept: set[Hashable] = field(default_factory=set)
    copies: dict[tuple[int, fx.Node], fx.Node] = field(default_factory=dict)

    def rewrite(self) -> None:
        self.position = {node: index for index, node in enumerate(self.graph.nodes)}
        around = {node: tuple(i for i, r in enumerate(self.regions) if node in r.users) for node in self.backward}
        self._find_kept(around)
        for node in self.backward:
            chain = around[node]
            if not chain:
                continue
            for region, original in self._missing(node, chain):
                self._copy(region, original, node, chain[chain.index(region) :])
            given: Any = (node.args, node.kwargs)
            node.args, node.kwargs = fx.map_arg(given, lambda n, chain=chain: self._resolved(n, chain))  # type: ignore[misc]

    def _find_kept(self, around: Mapping[fx.Node, tuple[int, ...]]) -> None:
        """Find the storages whose originals are needed, which may spare copies and the inputs of these."""
        for node, chain in around.items():
            for given in node.all_input_nodes:
                if self._source(given, chain) is None and given in self.position and given not in around:
                    self.kept.update(self.storages[given])

    def _source(self, node: fx.Node, chain: tuple[int, ...]) -> int | None:
        """Return the innermost region around that recomputes a node, or None for the original."""
        if self.storages[node] and self.kept.issuperset(self.storages[node]):
            return None
        if node.target is operator.getitem and self._source(node.args[0], chain) is None:  # type: ignore[arg-type]
            return None  # outputs are saved one by one, and not all at once to be taken apart later
        return next((region for region in chain if node in self.regions[region].recomputed), None)

    def _resolved(self, node: fx.Node, chain: tuple[int, ...]) -> fx.Node:
        region = self._source(node, chain)
        return node if region is None else self.copies[region, node]

    def _needed(self, node: fx.Node, chain: tuple[int, ...]) -> Iterator[tuple[int, fx.Node]]:
        """Yield the copies that a node in nested regions reads."""
        for given in node.all_input_nodes:
            region = self._source(given, chain)
            if region is not None:
                yield region, given

    def _missing(self, node: fx.Node, chain: tuple[int, ...]) -> list[tuple[int, fx.Node]]:
        """Return the copies to make for a backward node, in the order of the forward pass."""
        missing: set[tuple[int, fx.Node]] = set()
        waiting = list(self._needed(node, chain))
        while waiting:
            item = waiting.pop()
            if item not in missing and item not in self.copies:
                missing.add(item)
                region, original = item
                waiting += self._needed(original, chain[chain.index(region) :])
        return sorted(missing, key=lambda item: self.position[item[1]])

    def _copy(self, region: int, original: fx.Node, before: fx.Node, chain: tuple[int, ...]) -> None:
        with self.graph.inserting_before(before):
            copy = self.graph.node_copy(original, lambda given: self._resolved(given, chain))
        copy.meta = dict(original.meta)
        copy.meta["partitioner_tag"] = "is_backward"
        self.mark(copy, before, self.regions[region].modules)
        self.copies[region, original] = copy
