"""What memfit relies on of storages, versions and parts of tensors."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from memfit import _torch


@pytest.mark.parametrize("mode", [_torch.FakeTensorMode, None])
def test_storage_key_is_that_of_all_tensors_of_a_storage(mode: Callable[[], Any] | None) -> None:
    if mode is None:
        x = torch.ones(4)
    else:
        with mode():
            x = torch.ones(4)
    key = _torch.storage_key(x.untyped_storage())
    assert key == _torch.storage_key_of(x) == _torch.storage_key_of(x[1:]) == _torch.storage_key_of(x.detach())
    assert key != _torch.storage_key_of(x.clone())


def test_version_of_rises_by_changes_in_place_of_any_view() -> None:
    x = torch.ones(4)
    before = _torch.version_of(x)
    x[1:].mul_(2)
    assert _torch.version_of(x) == _torch.version_of(x[:2]) == before + 1
    x + 1
    assert _torch.version_of(x) == before + 1


def test_a_tensor_gets_the_memory_of_another_and_a_fake_one_its_device() -> None:
    """By `set_memory`; a device of another kind of tensor is in `tests/accelerators`."""
    given, values = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.zeros(2)
    _torch.set_memory(given, values)
    assert given.tolist() == [0, 0] and _torch.storage_key_of(given) == _torch.storage_key_of(values)
    with _torch.FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(2, device="cuda"), requires_grad=False)
        _torch.set_memory(fake, torch.empty(2))
        assert fake.device.type == "cpu" and (fake + torch.empty(2)).device.type == "cpu"


def test_what_runs_after_the_backward_pass_runs_once_after_its_last_hook() -> None:
    x, order = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: _torch.after_backward(lambda: order.append("after")))
    x.register_hook(lambda grad: order.append("x"))
    (y * 3).backward()
    assert order == ["x", "after"]
    with pytest.raises(RuntimeError):
        _torch.after_backward(lambda: None)  # outside of one


def test_use_count_rises_by_what_autograd_saves() -> None:
    x = torch.ones(2, requires_grad=True)
    before = _torch.use_count(x)
    out = x.exp() * x
    assert _torch.use_count(x) > before
    del out
    assert _torch.use_count(x) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of 2.11, told though they are asked for
def test_parts_of_sparse_tensors_are_their_own() -> None:
    """By `sparse_indices`, `sparse_values` and `nnz`, uncoalesced too."""
    x = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.ones(3), (4,), check_invariants=True)
    assert _torch.nnz(x) == 3 and not x.is_coalesced()
    assert _torch.sparse_indices(x).tolist() == [[0, 0, 2]]
    _torch.sparse_values(x).mul_(2)
    assert x.to_dense().tolist() == [4, 0, 2, 0]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_sizes_are_a_tensor_of_each_parts_shape() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert _torch.nested_sizes(nested).tolist() == [[2, 3], [1, 3]]


class Refusing(torch.Tensor):
    """A subclass that refuses every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came through")


def test_make_wrapper_subclass_makes_a_tensor_without_memory() -> None:
    made = _torch.make_wrapper_subclass(Refusing, [2, 3], dtype=torch.bfloat16, storage_size=0)
    with _torch.DisableTorchFunctionSubclass():
        assert type(made) is Refusing and made.shape == (2, 3) and made.dtype is torch.bfloat16
        assert made.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("mode", [_torch.FakeTensorMode, None])
def test_is_zerotensor_tells_zeros_that_have_no_memory(mode: Callable[[], Any] | None) -> None:
    with contextlib.nullcontext() if mode is None else mode():
        zeros = torch._efficientzerotensor((2, 3))
        assert _torch.is_zerotensor(zeros) and not _torch.is_zerotensor(torch.zeros(2, 3))


class Pair(torch.Tensor):
    """A tensor that wraps two others."""

    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Pair:
        made: Pair = _torch.make_wrapper_subclass(cls, one.shape, strides=one.stride(), dtype=one.dtype)
        return made

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "other"], "context"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Pair:
        assert context == "context"
        return cls(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came through")


def test_wrappers_are_known_by_their_class_and_taken_apart_and_put_together() -> None:
    pair = Pair(torch.ones(2), torch.zeros(3))
    assert _torch.is_wrapper(Pair) and _torch.dispatches(Pair) and _torch.dispatches(Refusing)
    assert not any(map(_torch.is_wrapper, (torch.Tensor, torch.nn.Parameter, Refusing)))
    with _torch.FakeTensorMode():
        fake = type(torch.ones(1))
    assert not _torch.dispatches(fake) and not _torch.is_wrapper(fake) and not _torch.dispatches(torch.nn.Parameter)
    inner = _torch.inner_tensors(pair)
    assert inner["one"] is pair.one and inner["other"] is pair.other and _torch.context_of(pair) == "context"
    again: Any = _torch.rewrapped(pair, {"one": pair.one, "other": pair.one})
    assert type(again) is Pair and again.other is pair.one


Named = collections.namedtuple("Named", "one other")
TREE = {"a": [1, (2, None)], "b": Named(3, collections.OrderedDict(c=4))}


def test_tree_flatten_and_tree_unflatten_go_there_and_back() -> None:
    leaves, spec = _torch.tree_flatten(TREE)
    assert leaves == [1, 2, None, 3, 4] == _torch.tree_leaves(TREE)
    rebuilt = _torch.tree_unflatten([str(leaf) for leaf in leaves], spec)
    assert rebuilt == {"a": ["1", ("2", "None")], "b": Named("3", collections.OrderedDict(c="4"))}
    assert type(rebuilt["b"]) is Named and type(rebuilt["b"].other) is collections.OrderedDict


def test_tree_map_and_tree_map_only_keep_containers_and_map_leaves() -> None:
    assert _torch.tree_map(str, [1, {"a": 2}]) == ["1", {"a": "2"}]
    assert _torch.tree_map_only(int, lambda number: -number, [1, "a", (2,)]) == [-1, "a", (-2,)]
    assert _torch.tree_map_only(torch.Tensor, lambda _: 0, (torch.ones(1), 1.5)) == (0, 1.5)


def test_tree_is_leaf_of_what_is_no_registered_container() -> None:
    assert _torch.tree_is_leaf(torch.ones(2)) and _torch.tree_is_leaf(object()) and _torch.tree_is_leaf({1, 2})
    assert not _torch.tree_is_leaf([]) and not _torch.tree_is_leaf(Named(1, 2))


def test_current_graph_task_id_is_minus_one_outside_of_a_backward_pass() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(_torch.current_graph_task_id()))
    assert _torch.current_graph_task_id() == -1
    x.sum().backward()
    assert seen[0] >= 0 and _torch.current_graph_task_id() == -1


def test_current_autograd_node_is_the_one_whose_function_runs() -> None:
    nodes: list[Any] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nodes.append(_torch.current_autograd_node())
            return gradient

    out: torch.Tensor = Noted.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
    assert _torch.current_autograd_node() is None
    out.sum().backward()
    assert [type(node).__name__ for node in nodes] == ["NotedBackward"]


def test_get_sequence_nr_is_the_next_nodes() -> None:
    x = torch.ones(2, requires_grad=True)
    following = _torch.get_sequence_nr()
    node: Any = (x * 2).grad_fn
    assert _torch.sequence_nr_of(node) == following and _torch.get_sequence_nr() == following + 1


def test_profiler_enabled_tells_whether_one_runs() -> None:
    assert not _torch.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert _torch.profiler_enabled()
    assert not _torch.profiler_enabled()


def test_storage_use_count_rises_by_a_view() -> None:
    x = torch.ones(2)
    storage = x.untyped_storage()
    before = _torch.storage_use_count(storage._cdata)
    view = x[:1]
    assert _torch.storage_use_count(storage._cdata) == before + 1
    del view
    assert _torch.storage_use_count(storage._cdata) == before


def test_hooks_of_saved_tensors_are_a_stack() -> None:
    """By `top_`, `pop_` and `push_saved_tensors_default_hooks`."""

    def same(value: Any) -> Any:
        return value

    assert _torch.top_saved_tensors_default_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert _torch.top_saved_tensors_default_hooks(False) == (same, same)
        _torch.pop_saved_tensors_default_hooks()
        assert _torch.top_saved_tensors_default_hooks(False) is None
        _torch.push_saved_tensors_default_hooks(same, same)
    assert _torch.top_saved_tensors_default_hooks(False) is None


def test_forward_ad_level_is_minus_one_outside_of_forward_derivatives() -> None:
    assert _torch.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert _torch.forward_ad_level() == 0


def test_tensor_hooks_are_those_that_were_registered_and_add_tensor_hooks_registers_them() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    called: list[str] = []
    one.register_hook(lambda gradient: called.append("seen"))
    one.register_post_accumulate_grad_hook(lambda tensor: called.append("there"))
    assert not any(_torch.tensor_hooks(other))
    for _ in range(2):  # the second time there are some
        _torch.add_tensor_hooks(other, _torch.tensor_hooks(one))
    assert _torch.tensor_hooks(other) == _torch.tensor_hooks(one)
    other.sum().backward()
    assert called == ["seen", "there"]


def test_answer_for_one_device_is_what_torch_cuda_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_cuda_getDeviceCount", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, None, raising=False)  # put back afterwards
    _torch.answer_for_one_device()
    assert torch._C._cuda_getDeviceCount() == 1


@pytest.mark.gpu
def test_take_snapshot_has_segments_and_traces() -> None:
    held = torch.ones(2**20, device="cuda")
    taken = _torch.take_snapshot(held.device)
    assert {"segments", "device_traces"} <= taken.keys() and taken["segments"]


def test_settings_of_the_allocator_are_read_and_changed_while_a_process_runs() -> None:
    before = _torch.allocator_settings()
    _torch.set_allocator_settings("expandable_segments:True")
    assert "expandable_segments:True" in _torch.allocator_settings()
    _torch.set_allocator_settings("expandable_segments:False")
    assert "expandable_segments:True" not in _torch.allocator_settings() and "expandable_segments:True" not in before


@pytest.mark.gpu
def test_is_initialized_once_a_device_was_used() -> None:
    torch.ones(1, device="cuda")
    assert _torch.is_initialized("cuda")


def test_is_initialized_tells_of_accelerators_that_are_not_here() -> None:
    assert _torch.is_initialized("cuda") is torch.cuda.is_initialized()
