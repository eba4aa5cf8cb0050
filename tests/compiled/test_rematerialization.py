"""Copies in joint graphs: placed just before their use, of the innermost region, and only where they are needed."""

from __future__ import annotations

import torch
from torch import fx

from memfit.compiled.rematerialization import GraphRegion, compute_for_each, rematerialize


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
    marked: list[fx.Node] = []
    compute_for_each(root, {doubled, root}, marked.append)
    graph.lint()
    assert [len(user.args[0].users) for user in users] == [1, 1, 1]  # type: ignore[union-attr]
    assert len({user.args[0] for user in users}) == 3 and len(marked) == 4
    assert len(doubled.users) == 1
    found = fx.GraphModule({}, graph)(torch.ones(3))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
