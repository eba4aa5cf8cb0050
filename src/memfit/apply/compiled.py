"""Recomputation in a joint graph: copies of forward operators, each placed just before the backward pass needs it.

1. A backward operator of a region takes copies of what the region computes again, and originals of all else. Where
   regions lie inside one another, a copy of the inner one takes copies of the outer one.
2. What another operator keeps alive anyway is taken, not computed again.
3. A copy is placed before the first operator that needs it, and kept for later ones of the same region.

PyTorch's compilers are imported when they are used: they take seconds, and this module is part of `import memfit`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

KERNEL = "memfit_kernel"
"""The key of a node's meta data that says which kernel of the plan it is in."""

Mark = Callable[[fx.Node, fx.Node, tuple[str, ...]], None]


@dataclass(frozen=True, eq=False)
class GraphRegion:
    """A part of the forward pass that the backward pass computes again.

    Attributes:
        again: The forward nodes that are computed again where their values are needed.
        users: The backward nodes that take the copies.
        modules: The FQNs of its modules.
    """

    again: frozenset[fx.Node]
    users: frozenset[fx.Node]
    modules: tuple[str, ...] = ()


def rematerialize(
    graph: fx.Graph,
    regions: Sequence[GraphRegion],
    storages: Mapping[fx.Node, tuple[Hashable, ...]],
    backward: Sequence[fx.Node],
    mark: Mark,
) -> None:
    """Make the backward nodes of a joint graph compute regions of its forward pass again.

    Args:
        graph: The graph, which is changed.
        regions: The regions, innermost first.
        storages: The storages of each node's outputs.
        backward: The backward nodes, in order.
        mark: Called with each copy, the backward node that it is made for, and the modules of its region.
    """
    _Rewriter(graph, regions, storages, backward, mark).rewrite()


def split(module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph module of a joint one, as the nodes are tagged.

    Args:
        module: The joint graph module.
        forward_outputs: How many of its outputs the forward pass returns.
    """
    from torch._functorch.partitioners import default_partition

    module.graph.eliminate_dead_code()
    module.recompile()
    parts: tuple[fx.GraphModule, fx.GraphModule] = default_partition(module, None, num_fwd_outputs=forward_outputs)
    return parts


def compute_for_each(node: fx.Node, computed: Set[fx.Node], mark: Callable[[fx.Node], None]) -> None:
    """Give each user of a node but the first a copy of it, and of what it is computed of.

    Args:
        node: The node.
        computed: What is copied, the node itself included.
        mark: Called with each copy.
    """
    graph = node.graph
    ordered = [one for one in graph.nodes if one in computed]
    for user in list(node.users)[1:]:
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(user):
            for one in ordered:
                copies[one] = graph.node_copy(one, lambda given, copies=copies: copies.get(given, given))  # type: ignore[misc]
                copies[one].meta = dict(one.meta)
                mark(copies[one])
        user.replace_input_with(node, copies[node])


def keep_apart(product: fx.Node) -> None:
    """Keep Inductor from making one operator of a matrix product and the sum that it goes into, where that comes late.

    a - (-b) is a + b, bit for bit, and is left alone.
    """
    (total,) = product.users
    (other,) = [given for given in total.args if isinstance(given, fx.Node) and given is not product]
    with total.graph.inserting_before(total):
        negative = total.graph.call_function(torch.ops.aten.neg.default, (other,))
    negative.meta = {**total.meta, "val": torch.ops.aten.neg.default(other.meta["val"])}
    total.target, total.args = torch.ops.aten.sub.Tensor, (product, negative)


Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
"""From a joint graph module, and how many of its outputs the forward pass returns, to the two passes."""


def lower_to_eager(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph to one that runs its operators one by one, as PyTorch's "aot_eager" does."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as functorch_config

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=boxed_nop, partition_fn=partition_fn, keep_inference_input_mutations=True
        )(module, inputs)
    return compiled


def lower_to_inductor(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph with Inductor."""
    from memfit.apply import inductor

    return inductor.lower(module, inputs, partition)


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
            _map_inputs(node, lambda given, chain=chain: self._resolved(given, chain))  # type: ignore[misc]

    def _find_kept(self, around: Mapping[fx.Node, tuple[int, ...]]) -> None:
        """Find the storages of which originals are needed; each may spare copies, and what these would need."""
        for node, chain in around.items():
            for given in node.all_input_nodes:
                if self._source(given, chain) is None and given in self.position and given not in around:
                    self.kept.update(self.storages[given])

    def _source(self, node: fx.Node, chain: tuple[int, ...]) -> int | None:
        """Return the innermost region around that computes a node again, or None for the original."""
        if self.storages[node] and self.kept.issuperset(self.storages[node]):
            return None
        return next((region for region in chain if node in self.regions[region].again), None)

    def _resolved(self, node: fx.Node, chain: tuple[int, ...]) -> fx.Node:
        region = self._source(node, chain)
        return node if region is None else self.copies[region, node]

    def _needed(self, node: fx.Node, chain: tuple[int, ...]) -> Iterator[tuple[int, fx.Node]]:
        """Yield the copies that a node of some regions takes."""
        for given in node.all_input_nodes:
            region = self._source(given, chain)
            if region is not None:
                yield region, given

    def _missing(self, node: fx.Node, chain: tuple[int, ...]) -> list[tuple[int, fx.Node]]:
        """Return the copies to be made for a backward node, in the order of the forward pass."""
        found: set[tuple[int, fx.Node]] = set()
        waiting = list(self._needed(node, chain))
        while waiting:
            item = waiting.pop()
            if item not in found and item not in self.copies:
                found.add(item)
                region, original = item
                waiting += self._needed(original, chain[chain.index(region) :])
        return sorted(found, key=lambda item: self.position[item[1]])

    def _copy(self, region: int, original: fx.Node, before: fx.Node, chain: tuple[int, ...]) -> None:
        with self.graph.inserting_before(before):
            copy = self.graph.node_copy(original, lambda given: self._resolved(given, chain))
        copy.meta = dict(original.meta)
        copy.meta["partitioner_tag"] = "is_backward"
        self.mark(copy, before, self.regions[region].modules)
        self.copies[region, original] = copy


def _map_inputs(node: fx.Node, change: Callable[[fx.Node], fx.Node]) -> None:
    args: Any = fx.map_arg(node.args, change)
    kwargs: Any = fx.map_arg(node.kwargs, change)
    node.args, node.kwargs = args, kwargs
