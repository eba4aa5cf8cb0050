"""What memfit relies on of `torch.utils._pytree`."""

from __future__ import annotations

import collections

import torch

from memfit._torch.pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten

Pair = collections.namedtuple("Pair", "one other")
TREE = {"a": [1, (2, None)], "b": Pair(3, collections.OrderedDict(c=4))}


def test_tree_flatten_and_tree_unflatten_go_there_and_back() -> None:
    leaves, spec = tree_flatten(TREE)
    assert leaves == [1, 2, None, 3, 4] == tree_leaves(TREE)
    rebuilt = tree_unflatten([str(leaf) for leaf in leaves], spec)
    assert rebuilt == {"a": ["1", ("2", "None")], "b": Pair("3", collections.OrderedDict(c="4"))}
    assert type(rebuilt["b"]) is Pair and type(rebuilt["b"].other) is collections.OrderedDict


def test_tree_map_and_tree_map_only_keep_containers_and_map_leaves() -> None:
    assert tree_map(str, [1, {"a": 2}]) == ["1", {"a": "2"}]
    assert tree_map_only(int, lambda number: -number, [1, "a", (2,)]) == [-1, "a", (-2,)]
    assert tree_map_only(torch.Tensor, lambda _: 0, (torch.ones(1), 1.5)) == (0, 1.5)


def test_tree_is_leaf_of_what_is_no_registered_container() -> None:
    assert tree_is_leaf(torch.ones(2)) and tree_is_leaf(object()) and tree_is_leaf({1, 2})
    assert not tree_is_leaf([]) and not tree_is_leaf(Pair(1, 2))
