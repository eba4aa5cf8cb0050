"""Masks of dropout as bytes: the same values, a fourth of the memory, and masks of other kinds left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from memfit.compiled.layouts import hold_masks_as_bytes

aten, prims = torch.ops.aten, torch.ops.prims


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def drawn(random: Any = None, dtype: torch.dtype = torch.float32) -> tuple[fx.Graph, fx.Node]:
    """Return a graph that multiplies by a mask of what an operator draws, converts the mask, and the mask."""
    from torch._inductor import inductor_prims

    graph = fx.Graph()
    x, seed = graph.placeholder("x"), graph.placeholder("seed")
    x.meta["val"] = fake(4, 4, dtype=dtype)
    mode = x.meta["val"].fake_mode
    with mode:
        seed.meta["val"] = torch.empty((), dtype=torch.int64)
        numbers = graph.call_function(random or inductor_prims.random, ([4, 4], seed, "rand"))
        numbers.meta["val"] = torch.empty(4, 4)
        mask = graph.call_function(aten.gt.Scalar, (numbers, 0.5))
        mask.meta["val"] = torch.empty(4, 4, dtype=torch.bool)
        product = graph.call_function(aten.mul.Tensor, (mask, x))
        product.meta["val"] = torch.empty(4, 4, dtype=dtype)
        converted = graph.call_function(prims.convert_element_type.default, (mask, dtype))
        converted.meta["val"] = torch.empty(4, 4, dtype=dtype)
    graph.output((product, converted))
    return graph, mask


def value_of(graph: fx.Graph, mask: fx.Node, numbers: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run a graph on given random numbers."""
    source = mask.args[0]
    assert isinstance(source, fx.Node)
    seed = source.args[1]
    source.replace_all_uses_with(seed)  # type: ignore[arg-type]
    graph.erase_node(source)
    found: tuple[torch.Tensor, ...] = fx.GraphModule({}, graph)(x, numbers)
    return found


def test_values_and_types_are_the_same_and_one_mask_in_bytes_is_kept() -> None:
    numbers, x = torch.rand(4, 4), torch.randn(4, 4)
    for dtype in (torch.float32, torch.bfloat16):
        before, expected_mask = drawn(dtype=dtype)
        expected = value_of(before, expected_mask, numbers, x.to(dtype))
        graph, mask = drawn(dtype=dtype)
        hold_masks_as_bytes(graph)
        graph.lint()
        (held,) = [node for node in graph.nodes if "memfit_kept" in node.meta]
        assert held.meta["val"].dtype == torch.uint8 and len(mask.users) == 1
        found = value_of(graph, mask, numbers, x.to(dtype))
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_masks_are_left_alone() -> None:
    graph, mask = drawn(random=aten.rand.default)
    text = str(graph)
    hold_masks_as_bytes(graph)
    assert str(graph) == text
    graph, mask = drawn()
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.logical_not.default, (mask,))
    text = str(graph)
    hold_masks_as_bytes(graph)
    assert str(graph) == text
