"""Kernels of fused graphs: who runs with whom, and what is written down in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from memfit.compiled.fusion import INLINED, is_fusible, is_written_between, kernels, puts_into

aten = torch.ops.aten


class Drawn:
    """A graph drawn by hand, with tensors on no device as values."""

    def __init__(self) -> None:
        self.graph, self.nodes = fx.Graph(), list[fx.Node]()

    def given(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, func: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(func, args)
        values = fx.map_arg(args, lambda given: given.meta["val"])
        node.meta.update(val=func(*values), **meta)
        self.nodes.append(node)
        return node

    def kernels(self, place: Callable[[fx.Node], Any] = lambda node: node.meta.get("place")) -> list[set[str]]:
        found = kernels(self.nodes, {}, place, lambda node: INLINED in node.meta)
        return [{node.name for node in nodes} for nodes in found]


def test_nodes_of_two_places_are_never_fused_and_those_of_none_are_with_either() -> None:
    drawn = Drawn()
    mask = drawn.call(aten.neg.default, drawn.given("x", 8, 8))
    one = drawn.call(aten.exp.default, mask, place="one")
    two = drawn.call(aten.sin.default, mask, place="two")
    both = drawn.call(aten.mul.Tensor, one, two)
    found = drawn.kernels()
    assert all(not {one.name, two.name} <= names for names in found) and len(found) == 2
    assert sum(both.name in names for names in found) == 1
    assert len(drawn.kernels(lambda node: None)) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_waits_runs_with_what_takes_it_first(waits: bool) -> None:
    drawn = Drawn()
    x, weight = drawn.given("x", 8, 8), drawn.given("weight", 8, 8)
    early = drawn.call(aten.neg.default, x)
    meta = {INLINED: True} if waits else {}
    copy = drawn.call(aten.exp.default, early, **meta)
    again = drawn.call(aten.sin.default, copy, **meta)
    product = drawn.call(aten.mm.default, early, weight)
    user = drawn.call(aten.mul.Tensor, again, product)
    home = next(names for names in drawn.kernels() if copy.name in names)
    assert again.name in home
    assert (user.name in home) == waits and (early.name in home) == (not waits)


def test_a_copy_that_no_loop_takes_runs_with_what_it_takes() -> None:
    drawn = Drawn()
    early = drawn.call(aten.neg.default, drawn.given("x", 8, 8))
    copy = drawn.call(aten.exp.default, early, **{INLINED: True})
    drawn.call(aten.mm.default, copy, drawn.given("weight", 8, 8))
    assert {early.name, copy.name} in drawn.kernels()


def test_padding_and_what_is_put_into_a_part_are_loops() -> None:
    drawn = Drawn()
    x, y = drawn.given("x", 8, 8), drawn.given("y", 8, 4)
    found = [
        drawn.call(aten.slice_scatter.default, x, y, 1, 0, 4),
        drawn.call(aten.select_scatter.default, x, drawn.given("row", 8), 0, 1),
        drawn.call(aten.constant_pad_nd.default, x, [0, 1]),
    ]
    assert all(puts_into(node) and is_fusible(node) for node in found)
    product = drawn.call(aten.mm.default, x, y)
    assert not puts_into(product) and not is_fusible(product)


def test_a_scatter_computes_its_values_and_neither_its_target_nor_its_readers() -> None:
    drawn = Drawn()
    places = torch.zeros(8, dtype=torch.long, device="meta")
    target = drawn.call(aten.neg.default, drawn.given("x", 8, 8))
    values = drawn.call(aten.exp.default, drawn.given("y", 8, 8))
    scattered = drawn.call(aten.index_put.default, target, [places], values, True)
    reader = drawn.call(aten.sin.default, scattered)
    found = drawn.kernels()
    assert {values.name, scattered.name} in found and {target.name} in found and {reader.name} in found


def test_look_ups_within_bounds_run_with_what_reads_them() -> None:
    drawn = Drawn()
    places = torch.zeros(4, dtype=torch.long, device="meta")
    for _ in range(2):
        looked_up = drawn.call(aten._unsafe_index.Tensor, drawn.given(f"x{len(drawn.nodes)}", 8, 8), [places])
        reader = drawn.call(aten.sin.default, looked_up)
        assert {looked_up.name, reader.name} in drawn.kernels()


def test_waiting_copies_of_which_one_is_fused_with_another_first() -> None:
    """The later one can't join its reader, and takes the earlier one with it, which the reader takes too."""
    drawn = Drawn()
    x, weight = drawn.given("x", 8, 8), drawn.given("weight", 8, 8)
    first = drawn.call(aten.neg.default, x, **{INLINED: True})
    second = drawn.call(aten.exp.default, first, **{INLINED: True}, place="one")
    reader = drawn.call(aten.add.Tensor, first, second, place="two")
    drawn.call(aten.mm.default, reader, weight)
    found = drawn.kernels()
    assert {first.name, second.name} in found and {reader.name} in found


def reduced(make: Callable[[Drawn, fx.Node, fx.Node], fx.Node], taken_again: bool = True) -> bool:
    """Tell whether what is made of two tensors, and then summed, is written down in between."""
    drawn = Drawn()
    node = make(drawn, drawn.given("x", 8, 8), drawn.given("y", 8, 8))
    total = drawn.call(aten.sum.dim_IntList, node, [1], True)
    if taken_again:
        drawn.call(aten.sub.Tensor, node, total)
    return is_written_between(node, frozenset(drawn.nodes))


def test_what_is_reduced_and_taken_again_is_written_unless_it_is_fast_and_reads_one_tensor() -> None:
    assert reduced(lambda drawn, x, y: drawn.call(aten.mul.Tensor, x, y))
    assert reduced(lambda drawn, x, y: drawn.call(aten.exp.default, drawn.call(aten.neg.default, x)))
    assert not reduced(lambda drawn, x, y: drawn.call(aten.neg.default, x))
    assert not reduced(lambda drawn, x, y: drawn.call(aten.mul.Tensor, x, y), taken_again=False)
