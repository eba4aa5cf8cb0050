"""What memfit relies on of autograd's engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from memfit._torch import autograd


def test_current_graph_task_id_is_minus_one_outside_of_a_backward_pass() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(autograd.current_graph_task_id()))
    assert autograd.current_graph_task_id() == -1
    x.sum().backward()
    assert seen[0] >= 0 and autograd.current_graph_task_id() == -1


def test_current_autograd_node_is_the_one_whose_function_runs() -> None:
    nodes: list[Any] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nodes.append(autograd.current_autograd_node())
            return gradient

    out: torch.Tensor = Noted.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
    assert autograd.current_autograd_node() is None
    out.sum().backward()
    assert [type(node).__name__ for node in nodes] == ["NotedBackward"]


def test_get_sequence_nr_is_the_next_nodes() -> None:
    x = torch.ones(2, requires_grad=True)
    following = autograd.get_sequence_nr()
    node: Any = (x * 2).grad_fn
    assert autograd.sequence_nr_of(node) == following and autograd.get_sequence_nr() == following + 1


def test_profiler_enabled_tells_whether_one_runs() -> None:
    assert not autograd.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert autograd.profiler_enabled()
    assert not autograd.profiler_enabled()


def test_storage_use_count_rises_by_a_view() -> None:
    x = torch.ones(2)
    storage = x.untyped_storage()
    before = autograd.storage_use_count(storage._cdata)
    view = x[:1]
    assert autograd.storage_use_count(storage._cdata) == before + 1
    del view
    assert autograd.storage_use_count(storage._cdata) == before


def test_hooks_of_saved_tensors_are_a_stack() -> None:
    """By `top_`, `pop_` and `push_saved_tensors_default_hooks`."""

    def same(value: Any) -> Any:
        return value

    assert autograd.top_saved_tensors_default_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert autograd.top_saved_tensors_default_hooks(False) == (same, same)
        autograd.pop_saved_tensors_default_hooks()
        assert autograd.top_saved_tensors_default_hooks(False) is None
        autograd.push_saved_tensors_default_hooks(same, same)
    assert autograd.top_saved_tensors_default_hooks(False) is None


def test_forward_ad_level_is_minus_one_outside_of_forward_derivatives() -> None:
    assert autograd.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert autograd.forward_ad_level() == 0


def test_tensor_hooks_are_those_that_were_registered_and_add_tensor_hooks_registers_them() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    called: list[str] = []
    one.register_hook(lambda gradient: called.append("seen"))
    one.register_post_accumulate_grad_hook(lambda tensor: called.append("there"))
    assert not any(autograd.tensor_hooks(other))
    for _ in range(2):  # the second time there are some
        autograd.add_tensor_hooks(other, autograd.tensor_hooks(one))
    assert autograd.tensor_hooks(other) == autograd.tensor_hooks(one)
    other.sum().backward()
    assert called == ["seen", "there"]
