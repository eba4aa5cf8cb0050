"""Joint graphs as traces: storages, calls, what is kept, and what Inductor fuses, drawn by hand and of models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import default_partition

from memfit.ir import Region
from memfit.recomputation import JointGraph
from memfit.recomputation.joint_rewriter import recompute_regions
from tests.recomputation.splitting import Drawn, split_by

aten = torch.ops.aten
INLINED, RECOMPUTED = "memfit_inlined", "memfit_recomputed"


def reused_bytes(signature: str) -> int:
    """Return what a kernel writes over its dying inputs, less what it writes between two of its loops."""
    return int(re.match(r"-?\d+", signature.rpartition("\n")[2])[0])  # type: ignore[index]


@pytest.mark.parametrize("places", [("one", "two"), (None, None)])
def test_nodes_of_two_regions_are_never_fused_and_those_of_none_are_with_either(places: tuple[Any, Any]) -> None:
    drawn = Drawn()
    mask = drawn.call(aten.neg.default, drawn.given("x", 8, 8))
    one = drawn.marked(RECOMPUTED, places[0], aten.exp.default, mask)
    two = drawn.marked(RECOMPUTED, places[1], aten.sin.default, mask)
    both = drawn.call(aten.mul.Tensor, one, two)
    found = drawn.kernels()
    assert len(found) == len(set(places)) and sum(both.name in names for names in found) == 1
    assert places[0] is None or all(not {one.name, two.name} <= names for names in found)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_waits_runs_with_what_takes_it_first(waits: bool) -> None:
    drawn = Drawn()
    x, weight = drawn.given("x", 8, 8), drawn.given("weight", 8, 8)
    early = drawn.call(aten.neg.default, x)
    copy = drawn.call(aten.exp.default, early)
    again = drawn.call(aten.sin.default, copy)
    for node in (copy, again) if waits else ():
        node.meta[INLINED] = True
    product = drawn.call(aten.mm.default, early, weight)
    user = drawn.call(aten.mul.Tensor, again, product)
    home = next(names for names in drawn.kernels() if copy.name in names)
    assert again.name in home
    assert (user.name in home) == waits and (early.name in home) == (not waits)


def test_a_copy_that_no_loop_takes_runs_with_what_it_takes() -> None:
    drawn = Drawn()
    early = drawn.call(aten.neg.default, drawn.given("x", 8, 8))
    copy = drawn.marked(INLINED, True, aten.exp.default, early)
    drawn.call(aten.mm.default, copy, drawn.given("weight", 8, 8))
    assert {early.name, copy.name} in drawn.kernels()


PUTS: dict[str, Callable[[Drawn, fx.Node, fx.Node], fx.Node]] = {
    "slice": lambda drawn, x, y: drawn.call(aten.slice_scatter.default, x, y, 1, 0, 8),
    "row": lambda drawn, x, y: drawn.call(aten.select_scatter.default, x, drawn.given("row", 8), 0, 1),
    "padding": lambda drawn, x, y: drawn.call(aten.constant_pad_nd.default, x, [0, 0]),
}


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_padding_and_what_is_put_into_a_part_are_loops_that_write_over_nothing(put: Any) -> None:
    for func in (put, lambda drawn, x, y: drawn.call(aten.add.Tensor, x, y)):
        drawn = Drawn()
        x = drawn.call(aten.mm.default, drawn.given("a", 8, 8), drawn.given("b", 8, 8))
        found = func(drawn, x, drawn.given("y", 8, 8))
        reader = drawn.call(aten.sin.default, found)
        joint = drawn.joint()
        assert [{node.name for node in nodes} for nodes in joint.ops] == [{x.name}, {found.name, reader.name}]
        assert reused_bytes(joint.trace.signatures[-1]) == (0 if func is put else 256)


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
    pairs = []
    for _ in range(2):
        looked_up = drawn.call(aten._unsafe_index.Tensor, drawn.given(f"x{len(drawn.nodes)}", 8, 8), [places])
        pairs.append({looked_up.name, drawn.call(aten.sin.default, looked_up).name})
    assert drawn.kernels() == pairs


def test_waiting_copies_of_which_one_is_fused_with_another_first() -> None:
    """The later one can't join its reader, and takes the earlier one with it, which the reader takes too."""
    drawn = Drawn()
    x, weight = drawn.given("x", 8, 8), drawn.given("weight", 8, 8)
    first = drawn.marked(INLINED, True, aten.neg.default, x)
    second = drawn.marked(INLINED, True, aten.exp.default, first)
    reader = drawn.marked(RECOMPUTED, "two", aten.add.Tensor, first, second)
    second.meta[RECOMPUTED] = "one"
    drawn.call(aten.mm.default, reader, weight)
    found = drawn.kernels()
    assert {first.name, second.name} in found and {reader.name} in found


@pytest.mark.parametrize(
    ("make", "taken_again", "written"),
    [
        (lambda drawn, x, y: drawn.call(aten.mul.Tensor, x, y), True, True),
        (lambda drawn, x, y: drawn.call(aten.exp.default, drawn.call(aten.neg.default, x)), True, True),
        (lambda drawn, x, y: drawn.call(aten.neg.default, x), True, False),
        (lambda drawn, x, y: drawn.call(aten.mul.Tensor, x, y), False, False),
    ],
    ids=["of two", "slow", "fast, of one", "read once"],
)
def test_what_is_reduced_and_taken_again_is_written_unless_it_is_fast_and_reads_one_tensor(
    make: Callable[[Drawn, fx.Node, fx.Node], fx.Node], taken_again: bool, written: bool
) -> None:
    drawn = Drawn()
    node = make(drawn, drawn.given("x", 8, 8), drawn.given("y", 8, 8))
    total = drawn.call(aten.sum.dim_IntList, node, [1], True)
    if taken_again:
        drawn.call(aten.sum.dim_IntList, drawn.call(aten.sub.Tensor, node, total), [1])
    (signature,) = drawn.joint().trace.signatures
    assert reused_bytes(signature) == (-256 if written else 0)


def test_operators_of_other_libraries_may_run_again_unless_they_mutate_or_draw_random_numbers() -> None:
    drawn, val = Drawn(), torch.empty(3, device="meta")
    with torch.library._scoped_library("memfit_tests", "DEF") as library:
        for name, tags in (("twice", ()), ("drawn", (torch.Tag.nondeterministic_seeded,))):
            library.define(f"{name}(Tensor x) -> Tensor", tags=tags)
            library.impl(name, torch.Tensor.clone, "CPU")
            library.impl(name, torch.Tensor.clone, "Meta")
        library.define("counted(Tensor(a!) x) -> ()")
        x = drawn.given("x", 3)
        for name in ("twice", "drawn", "counted"):
            drawn.call(getattr(torch.ops.memfit_tests, name).default, x, val=None if name == "counted" else val)
        reduced = drawn.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", "0", val=val.clone())
        for node in drawn.nodes:
            node.meta["partitioner_tag"] = "is_forward"
        assert {node.name for node in drawn.joint(1).fixed} == {"drawn_default", "counted_default", reduced.name}


# Graphs of models


class Block(nn.Module):
    """Views, an operator of several outputs, a chain that fuses, and randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 64), nn.LayerNorm(32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.linear(self.norm(x)).chunk(2, -1)
        return x + self.drop(left * torch.sigmoid(right))


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(x * 2).exp() + x)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 96), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


class Sums(nn.Module):
    """Sums over rows, and what reads them: loops that are not fused, before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp() + x.exp().sum(0)
        x = x.sin() - x.sin().sum(0)
        return self.linear(x)


def joint_of(
    model: nn.Module, change: Callable[[fx.Graph], None] = lambda graph: None, regions: list[Region] | None = None
) -> JointGraph:
    """Return the joint graph of a model's sum over 16 rows of 32, rewritten where regions are given."""
    found: list[JointGraph] = []

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        change(joint.graph)
        if regions is None:
            found.append(JointGraph(joint.graph, num_fwd_outputs, "graph", Counter()))
        else:
            found.append(recompute_regions(joint.graph, num_fwd_outputs, "graph", regions, Counter())[0])
        return default_partition(joint, None, num_fwd_outputs=num_fwd_outputs)

    torch._dynamo.reset()
    torch.compile(lambda x: model(x).sum(), backend=split_by(partition))(torch.ones(16, 32))
    return found[0]


def test_views_share_their_storage_and_parts_have_their_own() -> None:
    joint = joint_of(nn.Sequential(Block(), Block()))
    for node in (node for nodes in joint.ops for node in nodes):
        if str(node.target).startswith(("aten.view", "aten.t.", "aten.split")):
            assert set(joint.storages[node]) <= {s for given in node.all_input_nodes for s in joint.storages[given]}
        if str(node.target) == "aten.native_layer_norm.default":
            assert len(set(joint.storages[node])) == 3


def test_lives_are_within_the_step_and_saves_within_lives() -> None:
    trace = joint_of(nn.Sequential(Block(), Block())).trace
    for storage in trace.storages:
        assert -1 <= storage.birth <= storage.release <= storage.death <= len(trace.ops)
    for save in trace.saves:
        storage = trace.storages[save.storage]
        assert storage.birth < save.at <= save.unpacked <= save.death <= storage.death
    for call in trace.calls:
        assert call.start < call.end and all(trace.storages[s].birth < call.start for s in call.inputs)


def test_calls_are_named_by_module_and_a_module_called_again_has_another_name() -> None:
    shared = Block()
    trace = joint_of(nn.Sequential(shared, nn.Tanh(), shared)).trace
    names = [module.fqn for module in trace.modules]
    assert {"0", "0.norm", "0.linear", "1"} <= set(names) and len(names) == len(set(names))
    assert any(name.startswith("0") and "@1" in name or name == "2" for name in names)
    assert all(op.call >= 0 for op in trace.ops if op.phase == "forward" and "native_layer_norm" in op.name)


def test_what_draws_random_numbers_is_fixed_with_its_parts() -> None:
    targets = {str(node.target) for node in joint_of(Block()).fixed}
    assert any("dropout" in target or "bernoulli" in target for target in targets)
    assert not any("layer_norm" in target or "addmm" in target for target in targets)
    assert joint_of(Attention(0.5)).fixed and not joint_of(Attention(0.0)).fixed


def test_what_is_used_in_one_kernel_only_is_never_written() -> None:
    fused = joint_of(Block())
    assert len(fused.ops) < len({node for nodes in fused.ops for node in nodes})
    assert sum(s.nbytes for s in fused.trace.storages) < sum(fused.nbytes)
    positions = {node: index for index, nodes in enumerate(fused.ops) for node in nodes}
    for index, nodes in enumerate(fused.ops):  # an order that they can run in
        assert all(positions.get(given, -1) <= index for node in nodes for given in node.all_input_nodes)


def test_the_backward_pass_computes_what_the_forward_pass_does_not_write() -> None:
    joint = joint_of(nn.Sequential(nn.Linear(32, 32), Chain(), nn.Linear(32, 32)), regions=[])
    copies = {str(node.target) for node in joint.call_of if INLINED in node.meta}
    assert copies >= {"aten.tanh.default", "aten.exp.default"} and "aten.addmm.default" not in copies


def test_kernels_between_two_of_a_library_hold_together_what_any_of_them_holds() -> None:
    trace = joint_of(Sums()).trace
    live = [
        sum(s.nbytes for s in trace.storages if s.birth <= at <= s.death) - reused_bytes(trace.signatures[op.signature])
        for at, op in enumerate(trace.ops)
    ]
    first = next(at for at, op in enumerate(trace.ops) if op.name.startswith(("aten.mm", "aten.addmm")))
    assert first >= 3 and len(set(live[:first])) == 1
    assert live[0] > sum(s.nbytes for s in trace.storages if s.birth <= 0)  # what later ones make


def test_every_operator_of_a_kernel_says_whose_gradient_it_is() -> None:
    joint = joint_of(nn.Sequential(Block(), Block()))
    of_modules = {joint.trace.modules[joint.trace.calls[c].module].fqn for c in joint.call_of.values() if c >= 0}
    assert {"0.norm", "1.norm", "0.linear", "1.linear"} <= of_modules
    norms = [node for node in joint.call_of if "1.norm" in str(node.meta.get("fwd_nn_module_stack", ""))]
    assert norms and all(joint.call_of[node] >= 0 for node in norms)


def test_what_is_computed_again_counts_for_its_module_in_the_region() -> None:
    """Both modules take one mask: fused, the second one's output would wait."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), Chain()) for _ in range(2)))
    joint = joint_of(model, regions=[Region(("0", "1"))])
    of_kernels = [{node.meta[RECOMPUTED] for node in nodes if RECOMPUTED in node.meta} for nodes in joint.ops]
    assert all(len(found) <= 1 for found in of_kernels)
    assert set().union(*of_kernels) == {(("0", "1"), "0"), (("0", "1"), "1")}


def test_what_is_kept_is_fixed_and_never_released() -> None:
    def released(joint: JointGraph) -> list[tuple[bool, bool]]:
        nodes = [node for nodes in joint.ops for node in nodes if node.target is aten.sigmoid.default]
        storages = [joint.trace.storages[s] for node in nodes for s in joint.storages[node]]
        return [(node in joint.fixed, s.release == s.death) for node, s in zip(nodes, storages, strict=True)]

    def keep(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.sigmoid.default):
            node.meta["memfit_kept"] = True

    assert released(joint_of(Block())) == [(False, False)]
    assert released(joint_of(Block(), change=keep)) == [(True, True)]
