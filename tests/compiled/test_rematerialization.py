"""Copies in joint graphs: placed just before their use, of the innermost region, and only where they are needed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from memfit.compiled.fusion import COMPUTED_FOR_EACH
from memfit.compiled.joint_rewriter import GraphRegion, compute_for_each, keep_apart, rematerialize


def chain(length: int = 6) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """Return a graph of `length` sines, and of as many products that take them in reverse."""
    graph = fx.Graph()
    value = first = graph.placeholder("x")
    forward = [value := graph.call_function(torch.sin, (value,)) for _ in range(length)]
    backward = []
    for node in reversed(forward):
        value = graph.call_function(torch.mul, (value, node))
        backward.append(value)
    graph.output((forward[-1], value))
    assert first.op == "placeholder"
    return graph, forward, backward


def value_of(graph: fx.Graph) -> torch.Tensor:
    out: tuple[torch.Tensor, torch.Tensor] = fx.GraphModule({}, graph)(torch.linspace(0, 1, 7))
    return out[1]


def rewritten(regions: list[tuple[range, range]], length: int = 6) -> tuple[fx.Graph, list[fx.Node]]:
    """Compute regions again, each given as its forward nodes and the products that take copies of them."""
    graph, forward, backward = chain(length)
    last = [*reversed(backward)]
    storages = {node: (index,) for index, node in enumerate(graph.nodes)}
    parts = [GraphRegion(frozenset(forward[i] for i in a), frozenset(last[i] for i in u)) for a, u in regions]
    copies: list[fx.Node] = []
    rematerialize(graph, parts, storages, backward, lambda copy, *_: copies.append(copy))
    graph.lint()
    return graph, copies


def test_values_are_those_of_the_graph_before() -> None:
    expected = value_of(chain()[0])
    for regions in ([(range(1, 4), range(1, 4))], [(range(3, 5), range(3, 5)), (range(0, 5), range(0, 5))]):
        graph, copies = rewritten(regions)
        assert copies and torch.equal(value_of(graph), expected)


def test_a_copy_is_made_once_just_before_its_first_use() -> None:
    graph, copies = rewritten([(range(1, 5), range(1, 5))])
    order = {node: index for index, node in enumerate(graph.nodes)}
    assert len(copies) == 4
    for copy in copies:
        assert min(order[user] for user in copy.users) <= order[copies[-1]] + 1
    assert order[copies[-1]] - order[copies[0]] == 3


def test_what_others_keep_is_taken() -> None:
    """The value of sine 2 is needed outside of the region, so that neither it nor sine 1 runs again."""
    _, copies = rewritten([(range(1, 4), range(3, 4))])
    assert len(copies) == 1


def test_an_inner_region_starts_from_copies_of_the_outer_one() -> None:
    graph, copies = rewritten([(range(3, 5), range(3, 5)), (range(0, 5), range(0, 5))])
    originals = [node for node in graph.nodes if node.target is torch.sin][:6]
    assert len(copies) == 5  # the outer region up to where the inner one starts, and the inner one
    assert not any(user.target is torch.mul for node in originals[:5] for user in node.users)


def test_each_user_computes_for_itself() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.add, (x, x))
    root = graph.call_function(torch.sin, (doubled,))
    users = [graph.call_function(func, (root,)) for func in (torch.cos, torch.exp, torch.neg)]
    graph.output(tuple(users))
    expected = fx.GraphModule({}, graph)(torch.ones(3))
    compute_for_each(root, {doubled, root})
    marked = [node for node in graph.nodes if COMPUTED_FOR_EACH in node.meta]
    graph.lint()
    assert [len(user.args[0].users) for user in users] == [1, 1, 1]  # type: ignore[union-attr]
    assert len({user.args[0] for user in users}) == 3 and len(marked) == 4
    assert len(doubled.users) == 1
    found = fx.GraphModule({}, graph)(torch.ones(3))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("products", [1, 2])
def test_products_are_kept_apart_from_their_sum_and_no_bit_changes(products: int) -> None:
    """Of a weight that two layers share, both summands are products."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "y", "z")]
    values = [torch.randn(8, 8) for _ in given]
    for node, value in zip(given, values, strict=True):
        node.meta["val"] = value
    summands = [graph.call_function(torch.ops.aten.mm.default, (given[0], other)) for other in given[1 : 1 + products]]
    for node, other in zip(summands, values[1:], strict=False):
        node.meta["val"] = values[0] @ other
    total = graph.call_function(torch.ops.aten.add.Tensor, tuple([*summands, given[2]][:2]))
    graph.output(total)
    module = fx.GraphModule({}, graph)
    before = module(*values)
    for product in summands:
        keep_apart(product)
    graph.lint()
    module.recompile()
    assert torch.equal(module(*values), before)
    assert total.target is torch.ops.aten.sub.Tensor and total.args[0] is summands[0]
