"""JointGraph graphs as traces: storages, calls, what is kept, and what Inductor fuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.partitioners import default_partition

from memfit.compiled.joint_graph import _RECOMPUTED, JointGraph, _must_run_once, mark_kept, mark_recomputed
from memfit.compiled.joint_rewriter import inlined_nodes
from tests.compiled.splitting import split_by


class Block(nn.Module):
    """Views, an operator of several outputs, a chain that fuses, and randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 64), nn.LayerNorm(32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.linear(self.norm(x)).chunk(2, -1)
        return x + self.drop(left * torch.sigmoid(right))


def joint_of(model: nn.Module, change: Callable[[fx.Graph], None] | None = None) -> JointGraph:
    """Return the joint graph of a model's sum over 16 rows of 32."""
    found: list[JointGraph] = []

    def partition(joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        if change is not None:
            change(joint.graph)
        found.append(JointGraph(joint.graph, num_fwd_outputs, "graph", Counter()))
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
    joint = joint_of(Block())
    targets = {str(node.target) for node in joint.fixed}
    assert any("dropout" in target or "bernoulli" in target for target in targets)
    assert not any("layer_norm" in target or "addmm" in target for target in targets)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_random_numbers_only_with_dropout(dropout: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.linear(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    joint = joint_of(Attention())
    assert bool(joint.fixed) == (dropout > 0)


def test_what_is_used_in_one_kernel_only_is_never_written() -> None:
    fused = joint_of(Block())
    assert len(fused.ops) < len({node for nodes in fused.ops for node in nodes})
    assert sum(s.nbytes for s in fused.trace.storages) < sum(fused.nbytes)
    positions = {node: index for index, nodes in enumerate(fused.ops) for node in nodes}
    for index, nodes in enumerate(fused.ops):  # an order that they can run in
        assert all(positions.get(given, -1) <= index for node in nodes for given in node.all_input_nodes)


def test_the_backward_pass_computes_what_the_forward_pass_does_not_write() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.tanh(x * 2).exp() + x)

    model = nn.Sequential(nn.Linear(32, 32), Chain(), nn.Linear(32, 32))
    joint = joint_of(model)
    assert {str(node.target) for node in inlined_nodes(joint)} >= {"aten.tanh.default", "aten.exp.default"}
    assert not any("addmm" in str(node.target) for node in inlined_nodes(joint))


class Sums(nn.Module):
    """Sums over rows, and what reads them: loops that are not fused, before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp() + x.exp().sum(0)
        x = x.sin() - x.sin().sum(0)
        return self.linear(x)


def test_kernels_between_two_of_a_library_hold_together_what_any_of_them_holds() -> None:
    joint = joint_of(Sums())
    trace = joint.trace
    live = [
        sum(s.nbytes for s in trace.storages if s.birth <= at <= s.death)
        - int(trace.signatures[op.signature].rpartition("\n")[2].split()[0])
        for at, op in enumerate(trace.ops)
    ]
    is_product = [op.name.startswith(("aten.mm", "aten.addmm")) for op in trace.ops]
    ends = [at for at, product in enumerate(is_product) if product]
    function = range(ends[0])
    assert len(function) >= 3 and len({live[at] for at in function}) == 1
    assert live[0] > sum(s.nbytes for s in trace.storages if s.birth <= 0)  # what later ones make


def test_operators_of_other_libraries_may_run_again_unless_they_mutate_or_draw_random_numbers() -> None:
    with torch.library._scoped_library("memfit_tests", "DEF") as library:
        for name, tags in (("twice", ()), ("drawn", (torch.Tag.nondeterministic_seeded,))):
            library.define(f"{name}(Tensor x) -> Tensor", tags=tags)
            library.impl(name, torch.Tensor.clone, "CPU")
            library.impl(name, torch.Tensor.clone, "Meta")
        library.define("counted(Tensor(a!) x) -> ()")
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(3)
        calls = [
            graph.call_function(getattr(torch.ops.memfit_tests, n).default, (x,)) for n in ("twice", "drawn", "counted")
        ]
        assert [_must_run_once(call, set()) for call in calls] == [False, True, True]
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    assert _must_run_once(reduced, set())


def test_every_operator_of_a_kernel_says_whose_gradient_it_is() -> None:
    joint = joint_of(nn.Sequential(Block(), Block()))
    of_modules = {joint.trace.modules[joint.trace.calls[c].module].fqn for c in joint.call_of.values() if c >= 0}
    assert {"0.norm", "1.norm", "0.linear", "1.linear"} <= of_modules
    norms = [node for node in joint.call_of if "1.norm" in str(node.meta.get("fwd_nn_module_stack", ""))]
    assert norms and all(joint.call_of[node] >= 0 for node in norms)


def test_what_is_computed_again_counts_for_its_module_in_the_region() -> None:
    def marked(path: str, modules: tuple[str, ...]) -> Any:
        node = fx.Graph().placeholder("x")
        node.meta["nn_module_stack"] = {path: (f"L['self'].{path}", nn.Linear)}
        mark_recomputed(node, node, modules)
        return node.meta[_RECOMPUTED]

    run = ("blocks.0", "blocks.1@2")
    assert marked("blocks.0", run) != marked("blocks.1", run)
    assert marked("blocks.1", run) != marked("blocks.1", ("blocks.1",))
    assert marked("blocks.1", run) == marked("blocks.1", run)


def test_what_is_kept_is_fixed_and_never_released() -> None:
    def released(joint: JointGraph) -> list[tuple[bool, bool]]:
        nodes = [node for nodes in joint.ops for node in nodes if node.target is torch.ops.aten.sigmoid.default]
        storages = [joint.trace.storages[s] for node in nodes for s in joint.storages[node]]
        return [(node in joint.fixed, s.release == s.death) for node, s in zip(nodes, storages, strict=True)]

    def keep(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            mark_kept(node)

    assert released(joint_of(Block())) == [(False, False)]
    assert released(joint_of(Block(), change=keep)) == [(True, True)]
