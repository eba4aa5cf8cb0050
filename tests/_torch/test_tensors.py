"""What memfit relies on of storages, versions and parts of tensors."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfit._torch import tensors
from memfit._torch.dispatch import DisableTorchFunctionSubclass
from memfit._torch.fake import FakeTensorMode
from memfit._torch.tensors import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten


@pytest.mark.parametrize("mode", [FakeTensorMode, None])
def test_storage_key_is_that_of_all_tensors_of_a_storage(mode: Callable[[], Any] | None) -> None:
    if mode is None:
        x = torch.ones(4)
    else:
        with mode():
            x = torch.ones(4)
    key = tensors.storage_key(x.untyped_storage())
    assert key == tensors.storage_key_of(x) == tensors.storage_key_of(x[1:]) == tensors.storage_key_of(x.detach())
    assert key != tensors.storage_key_of(x.clone())


def test_version_of_rises_by_changes_in_place_of_any_view() -> None:
    x = torch.ones(4)
    before = tensors.version_of(x)
    x[1:].mul_(2)
    assert tensors.version_of(x) == tensors.version_of(x[:2]) == before + 1
    x + 1
    assert tensors.version_of(x) == before + 1


def test_use_count_rises_by_what_autograd_saves() -> None:
    x = torch.ones(2, requires_grad=True)
    before = tensors.use_count(x)
    out = x.exp() * x
    assert tensors.use_count(x) > before
    del out
    assert tensors.use_count(x) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of 2.11, told though they are asked for
def test_parts_of_sparse_tensors_are_their_own() -> None:
    """By `sparse_indices`, `sparse_values` and `nnz`, uncoalesced too."""
    x = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.ones(3), (4,), check_invariants=True)
    assert tensors.nnz(x) == 3 and not x.is_coalesced()
    assert tensors.sparse_indices(x).tolist() == [[0, 0, 2]]
    tensors.sparse_values(x).mul_(2)
    assert x.to_dense().tolist() == [4, 0, 2, 0]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_sizes_are_a_tensor_of_each_parts_shape() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert tensors.nested_sizes(nested).tolist() == [[2, 3], [1, 3]]


class Refusing(torch.Tensor):
    """A subclass that refuses every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came through")


def test_make_wrapper_subclass_makes_a_tensor_without_memory() -> None:
    made = tensors.make_wrapper_subclass(Refusing, [2, 3], dtype=torch.bfloat16, storage_size=0)
    with DisableTorchFunctionSubclass():
        assert type(made) is Refusing and made.shape == (2, 3) and made.dtype is torch.bfloat16
        assert made.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("mode", [FakeTensorMode, None])
def test_is_zerotensor_tells_zeros_that_have_no_memory(mode: Callable[[], Any] | None) -> None:
    with contextlib.nullcontext() if mode is None else mode():
        zeros = torch._efficientzerotensor((2, 3))
        assert tensors.is_zerotensor(zeros) and not tensors.is_zerotensor(torch.zeros(2, 3))


class Pair(torch.Tensor):
    """A tensor that wraps two others."""

    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Pair:
        made: Pair = tensors.make_wrapper_subclass(cls, one.shape, strides=one.stride(), dtype=one.dtype)
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
    assert tensors.is_wrapper(Pair) and tensors.dispatches(Pair) and tensors.dispatches(Refusing)
    assert not any(map(tensors.is_wrapper, (torch.Tensor, torch.nn.Parameter, Refusing)))
    with FakeTensorMode():
        fake = type(torch.ones(1))
    assert not tensors.dispatches(fake) and not tensors.is_wrapper(fake) and not tensors.dispatches(torch.nn.Parameter)
    inner = tensors.inner_tensors(pair)
    assert inner["one"] is pair.one and inner["other"] is pair.other and tensors.context_of(pair) == "context"
    again: Any = tensors.rewrapped(pair, {"one": pair.one, "other": pair.one})
    assert type(again) is Pair and again.other is pair.one


Named = collections.namedtuple("Named", "one other")
TREE = {"a": [1, (2, None)], "b": Named(3, collections.OrderedDict(c=4))}


def test_tree_flatten_and_tree_unflatten_go_there_and_back() -> None:
    leaves, spec = tree_flatten(TREE)
    assert leaves == [1, 2, None, 3, 4] == tree_leaves(TREE)
    rebuilt = tree_unflatten([str(leaf) for leaf in leaves], spec)
    assert rebuilt == {"a": ["1", ("2", "None")], "b": Named("3", collections.OrderedDict(c="4"))}
    assert type(rebuilt["b"]) is Named and type(rebuilt["b"].other) is collections.OrderedDict


def test_tree_map_and_tree_map_only_keep_containers_and_map_leaves() -> None:
    assert tree_map(str, [1, {"a": 2}]) == ["1", {"a": "2"}]
    assert tree_map_only(int, lambda number: -number, [1, "a", (2,)]) == [-1, "a", (-2,)]
    assert tree_map_only(torch.Tensor, lambda _: 0, (torch.ones(1), 1.5)) == (0, 1.5)


def test_tree_is_leaf_of_what_is_no_registered_container() -> None:
    assert tree_is_leaf(torch.ones(2)) and tree_is_leaf(object()) and tree_is_leaf({1, 2})
    assert not tree_is_leaf([]) and not tree_is_leaf(Named(1, 2))
