"""Rewritten joint graphs: copies where they are needed, layouts and masks that are fast, and the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import default_partition

from memfit.recomputation import PlannedBackend
from memfit.recomputation.joint_rewriter import (
    GraphRegion,
    hold_masks_as_bytes,
    lay_out_channels_last,
    rematerialize,
    show_in_any_layout,
)
from tests.recomputation.splitting import Drawn, split_by

aten, prims = torch.ops.aten, torch.ops.prims
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports


def run(graph: fx.Graph, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    graph.lint()
    found: tuple[torch.Tensor, ...] = fx.GraphModule({}, graph)(*values)
    return found


# Copies


def chain(length: int = 6) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """Return a graph of `length` sines, and of as many products that take them in reverse."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    forward = [value := graph.call_function(torch.sin, (value,)) for _ in range(length)]
    backward = [value := graph.call_function(torch.mul, (value, node)) for node in reversed(forward)]
    graph.output((forward[-1], value))
    return graph, forward, backward


def rewritten(regions: list[tuple[range, range]]) -> tuple[fx.Graph, list[fx.Node]]:
    """Compute regions again, each given as its forward nodes and the products that take copies of them."""
    graph, forward, backward = chain()
    last = [*reversed(backward)]
    storages = {node: (index,) for index, node in enumerate(graph.nodes)}
    parts = [GraphRegion(frozenset(forward[i] for i in a), frozenset(last[i] for i in u)) for a, u in regions]
    copies: list[fx.Node] = []
    rematerialize(graph, parts, storages, backward, lambda copy, *_: copies.append(copy))
    x = torch.linspace(0, 1, 7)
    assert torch.equal(run(graph, x)[1], run(chain()[0], x)[1])
    return graph, copies


def test_a_copy_is_made_once_just_before_its_first_use() -> None:
    graph, copies = rewritten([(range(1, 5), range(1, 5))])
    order = {node: index for index, node in enumerate(graph.nodes)}
    assert len(copies) == 4
    assert all(min(order[user] for user in copy.users) <= order[copies[-1]] + 1 for copy in copies)
    assert order[copies[-1]] - order[copies[0]] == 3


def test_what_others_keep_is_taken() -> None:
    """The value of sine 2 is needed outside of the region, so that neither it nor sine 1 runs again."""
    assert len(rewritten([(range(1, 4), range(3, 4))])[1]) == 1


def test_an_inner_region_starts_from_copies_of_the_outer_one() -> None:
    graph, copies = rewritten([(range(3, 5), range(3, 5)), (range(0, 5), range(0, 5))])
    originals = [node for node in graph.nodes if node.target is torch.sin][:6]
    assert len(copies) == 5  # the outer region up to where the inner one starts, and the inner one
    assert not any(user.target is torch.mul for node in originals[:5] for user in node.users)


def test_each_loop_computes_for_itself_what_is_fast() -> None:
    drawn = Drawn()
    root = drawn.call(aten.neg.default, drawn.call(aten.add.Tensor, drawn.given("x", 8, 8), drawn.given("y", 8, 8)))
    total = drawn.call(aten.sum.dim_IntList, root, [1], True)
    users = [total, drawn.call(aten.sub.Tensor, root, total)]
    drawn.rewritten(users[-1])
    marked = [node for node in drawn.graph.nodes if "memfit_computed_for_each" in node.meta]
    assert len(marked) == 2 and len({user.args[0] for user in users}) == 2
    assert [len(user.args[0].users) for user in users] == [1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("products", [1, 2])
def test_products_are_kept_apart_from_their_sum_and_no_bit_changes(products: int) -> None:
    """Of a weight that two layers share, both summands are products."""
    drawn = Drawn()
    x, wide, tall = drawn.given("x", 8, 8), drawn.given("wide", 8, 64), drawn.given("tall", 64, 8)
    summands = []
    for _ in range(products):
        left, right = drawn.call(aten.mm.default, x, wide), drawn.call(aten.mm.default, tall, x)
        summands.append(drawn.call(aten.mm.default, left, right))
    total = drawn.call(aten.add.Tensor, *[*summands, x][:2])
    drawn.rewritten(total)
    assert total.target is aten.sub.Tensor and total.args[0] is summands[0]


# Layouts


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


def step_of(model: nn.Module, x: torch.Tensor, laid_out: bool = True) -> tuple[list[torch.Tensor], fx.Graph, bool]:
    """Return a step's loss and gradients, run one operator at a time, its joint graph, and whether that changed."""
    found: list[tuple[fx.Graph, bool]] = []

    def partition(joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        show_in_any_layout(joint.graph)
        before = str(joint.graph)
        if laid_out:
            lay_out_channels_last(joint.graph)
        found.append((joint.graph, str(joint.graph) != before))
        joint.recompile()
        return default_partition(joint, None, num_fwd_outputs=num_fwd_outputs)

    torch._dynamo.reset()
    model.zero_grad()
    loss = torch.compile(lambda: model(x).square().sum(), backend=split_by(partition), fullgraph=True)()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], *found[0]


def test_convolutions_take_and_make_channels_last_and_gradients_are_returned_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(2, 3, 12, 12)
    expected, *_ = step_of(model, x, False)
    found, graph, _ = step_of(model, x)
    assert all((a - b).abs().max() <= 1e-4 * b.abs().max() for a, b in zip(found, expected, strict=True))
    assert [a.stride() for a in found] == [b.stride() for b in expected]
    graph.lint()
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    backward = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    taken = [*(n.args[i] for n in convolutions for i in (0, 1)), *(n.args[i] for n in backward for i in (0, 1, 2))]
    assert len(convolutions) == 6 and len(backward) == 6
    assert all(node.meta["val"].is_contiguous(memory_format=torch.channels_last) for node in (*convolutions, *taken))
    copied = [node for node in graph.nodes if node.target is aten.clone.default]
    assert copied and all(len(node.users) >= 1 for node in copied)


def test_the_fake_tensors_of_the_graph_are_what_it_makes() -> None:
    """Each node's fake tensor says the strides that running the graph gives."""
    _, graph, _ = step_of(Flat(), torch.randn(2, 3, 12, 12))

    class Checks(fx.Interpreter):
        checked = 0

        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and n.op == "call_function":
                assert value.stride() == n.meta["val"].stride(), n
                self.checked += 1
            return value

    checks = Checks(fx.GraphModule({}, graph))
    with torch.no_grad():
        checks.run(*(torch.randn(node.meta["val"].shape) for node in graph.find_nodes(op="placeholder")))
    assert checks.checked > 20


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: nn.Linear(4, 4), (2, 4)), (lambda: nn.Conv3d(1, 2, 3), (1, 1, 5, 5, 5))]
)
def test_steps_without_2d_convolutions_are_left_as_they_are(make: Callable[[], nn.Module], shape: Any) -> None:
    assert not step_of(make(), torch.randn(shape))[2]


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


# Masks


def masked(random: Any = None, dtype: torch.dtype = torch.float32) -> tuple[fx.Graph, fx.Node]:
    """Return a graph that multiplies by a mask of what an operator draws, converts the mask, and the mask."""
    from torch._inductor import inductor_prims
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = fx.Graph()

    def noted(node: fx.Node, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    with FakeTensorMode():
        x = noted(graph.placeholder("x"), 4, 4, dtype=dtype)
        seed = noted(graph.placeholder("seed"), dtype=torch.int64)
        numbers = noted(graph.call_function(random or inductor_prims.random, ([4, 4], seed, "rand")), 4, 4)
        mask = noted(graph.call_function(aten.gt.Scalar, (numbers, 0.5)), 4, 4, dtype=torch.bool)
        product = noted(graph.call_function(aten.mul.Tensor, (mask, x)), 4, 4, dtype=dtype)
        converted = graph.call_function(prims.convert_element_type.default, (mask, dtype))
        graph.output((product, noted(converted, 4, 4, dtype=dtype)))
    return graph, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_types_are_the_same_and_one_mask_in_bytes_is_kept(dtype: torch.dtype) -> None:
    numbers, x, found = torch.rand(4, 4), torch.randn(4, 4).to(dtype), []
    for is_held in (False, True):
        graph, mask = masked(dtype=dtype)
        if is_held:
            hold_masks_as_bytes(graph)
            (held,) = [node for node in graph.nodes if "memfit_kept" in node.meta]
            assert held.meta["val"].dtype == torch.uint8 and len(mask.users) == 1
        (source,) = mask.all_input_nodes
        source.replace_all_uses_with(source.all_input_nodes[0])  # the numbers are given
        graph.erase_node(source)
        found.append(run(graph, x, numbers))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_masks_are_left_alone() -> None:
    other, _ = masked(random=aten.rand.default)
    negated, mask = masked()
    with negated.inserting_before(negated.output_node()):
        negated.call_function(aten.logical_not.default, (mask,))
    for graph in (other, negated):
        text = str(graph)
        hold_masks_as_bytes(graph)
        assert str(graph) == text


# Settings


class OnPaper(PlannedBackend):
    """Notes of each pass whether CUDA graphs are asked for."""

    def __init__(self) -> None:
        super().__init__([], is_on_paper=True)
        self.with_cuda_graphs: list[bool] = []

    def recorded_pass(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self.with_cuda_graphs.append(options["cudagraphs"].value)
        return super().recorded_pass(module, inputs, **options)


def test_code_runs_without_cuda_graphs_whose_pools_no_plan_counts_whatever_the_user_set() -> None:
    from memfit._torch import boxed, compile_fx, inductor_config

    inductors: list[bool] = []

    def compile_pass(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        inductors.append(options["cudagraphs"].value)
        return boxed(module.forward)

    model, ours = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), OnPaper()
    for backend in (ours, lambda module, inputs: compile_fx(module, inputs, inner_compile=compile_pass)):
        torch._dynamo.reset()
        with inductor_config.patch({"triton.cudagraphs": True}):
            torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()
    assert ours.with_cuda_graphs == [False, False] and all(inductors)
