"""Layouts and masks in joint graphs: the same values in faster layouts, and masks of dropout as bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import default_partition

from memfit.compiled.layouts import hold_masks_as_bytes, lay_out_channels_last, show_in_any_layout
from tests.compiled.splitting import split_by

aten, prims = torch.ops.aten, torch.ops.prims
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports


def convolution(given: int, made: int) -> nn.Module:
    return nn.Conv2d(given, made, 3, padding=1, bias=False)


class Flat(nn.Module):
    """Convolutions, and the last one's result as rows, which a tensor with its channels last can't be shown as."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 8, 8, 8, 8, 8, 4)
        blocks = (nn.Sequential(convolution(a, b), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(sizes))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).flatten(1).tanh()


class Grouped(nn.Module):
    """Groups of channels as rows after each convolution, as in group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolution(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = layer(x).reshape(len(x), 2, -1).softmax(-1).view_as(x)
        return x


def step_of(model: nn.Module, x: torch.Tensor, laid_out: bool) -> tuple[list[torch.Tensor], list[fx.Graph]]:
    """Return a step's loss and gradients, run one operator at a time, and its joint graph if it can be laid out."""
    found: list[fx.Graph] = []

    def partition(joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        show_in_any_layout(joint.graph)
        if not laid_out or lay_out_channels_last(joint.graph):
            found.append(joint.graph)
        joint.recompile()
        return default_partition(joint, None, num_fwd_outputs=num_fwd_outputs)

    torch._dynamo.reset()
    model.zero_grad()
    loss = torch.compile(lambda: model(x).square().sum(), backend=split_by(partition), fullgraph=True)()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], found


def test_values_are_the_same_and_gradients_are_returned_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(2, 3, 12, 12)
    expected, _ = step_of(model, x, False)
    found, (graph,) = step_of(model, x, True)
    assert all((a - b).abs().max() <= 1e-4 * b.abs().max() for a, b in zip(found, expected, strict=True))
    assert [a.stride() for a in found] == [b.stride() for b in expected]
    graph.lint()


def test_convolutions_take_and_make_channels_last() -> None:
    _, (graph,) = step_of(Flat(), torch.randn(2, 3, 12, 12), True)
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    backward = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    taken = [*(n.args[i] for n in convolutions for i in (0, 1)), *(n.args[i] for n in backward for i in (0, 1, 2))]
    assert len(convolutions) == 6 and len(backward) == 6
    assert all(node.meta["val"].is_contiguous(memory_format=torch.channels_last) for node in (*convolutions, *taken))
    copied = [node for node in graph.nodes if node.target is aten.clone.default]
    assert copied and all(len(node.users) >= 1 for node in copied)


def test_the_fake_tensors_of_the_graph_are_what_it_makes() -> None:
    """Each node's fake tensor says the strides that running the graph gives."""
    _, (graph,) = step_of(Flat(), torch.randn(2, 3, 12, 12), True)

    class Checks(fx.Interpreter):
        checked = 0

        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and n.op == "call_function":
                assert value.stride() == n.meta["val"].stride(), n
                self.checked += 1
            return value

    given = [torch.randn(node.meta["val"].shape) for node in graph.find_nodes(op="placeholder")]
    checks = Checks(fx.GraphModule({}, graph))
    with torch.no_grad():
        checks.run(*given)
    assert checks.checked > 20


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 4), (2, 4)),  # without convolutions there is nothing to lay out
        (lambda: nn.Conv3d(1, 2, 3), (1, 1, 5, 5, 5)),
        (Grouped, (2, 4, 12, 12)),  # others make another layout for most
    ],
)
def test_other_steps_are_left_as_they_are(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    _, graphs = step_of(make(), torch.randn(shape), True)
    assert graphs == []


def strided(size: tuple[int, ...], stride: tuple[int, ...], given: torch.Tensor) -> fx.Node:
    """Return what is left of an `as_strided` once it is shown in any layout."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.as_strided.default, (x, list(size), list(stride)))
    x.meta["val"], node.meta["val"] = given, given.as_strided(size, stride)
    graph.output(node)
    show_in_any_layout(graph)
    return node


def test_what_is_read_as_it_lies_is_a_view_where_that_says_the_same() -> None:
    node = strided((4, 6), (6, 1), torch.arange(24.0).view(4, 2, 3))
    assert node.target is aten.view.default and node.args[1] == [4, 6]
    assert strided((2, 6), (6, 1), torch.zeros(24)).target is aten.as_strided.default  # a part of it
    assert strided((4, 6), (1, 4), torch.zeros(24)).target is aten.as_strided.default  # in another order
    assert strided((4, 6), (6, 1), torch.zeros(6, 4).t()).target is aten.as_strided.default


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
