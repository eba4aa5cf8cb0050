"""What memfit relies on of private symbols of Keras."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")
from memfit.keras import internals  # noqa: E402


def test_calls_are_listed_in_their_order() -> None:
    inputs = keras.Input((2,))
    shared = keras.layers.Dense(2, name="shared")
    first = shared(inputs)
    model = keras.Model(inputs, keras.layers.Add(name="add")([shared(first), first]))
    nodes = internals.nodes(model)
    assert [node.operation.name for node in nodes] == ["shared", "shared", "add"]
    assert nodes[0].input_tensors == [inputs] and nodes[0].outputs == [first]
    args, kwargs = nodes[0].arguments.fill_in({id(inputs): "x"})
    assert args == ("x",) and not kwargs
    chain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")])
    assert [node.operation.name for node in internals.nodes(chain)] == ["a", "b"]
    assert internals.functional(model) is model
    assert internals.functional(chain).input is chain.inputs[0]
    assert internals.functional(keras.Sequential([keras.layers.Dense(2)])) is None


def test_weights_are_told_from_other_variables() -> None:
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    inner.build((None, 2))
    names = sorted(variable.name for variable in internals.weights_within(inner))
    assert names == ["beta", "bias", "gamma", "kernel"]
    assert len(inner.variables) > len(names)


def test_losses_of_calls_are_counted() -> None:
    layer = keras.layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2")
    assert internals.losses_added(layer) == 0
    layer(keras.ops.ones((1, 2)))
    assert internals.losses_added(layer) == 1


def test_training_is_given_to_layers_that_take_it() -> None:
    dropout = keras.layers.Dropout(0.5, seed=0)
    x = keras.ops.ones((1, 64))
    assert (internals.caller(dropout, True)(x).numpy() == 0).any()
    assert (internals.caller(dropout, False)(x).numpy() == 1).all()
    assert internals.caller(keras.layers.Dense(2), True)(x).shape == (1, 2)


def test_masks_are_seen() -> None:
    embedding = keras.layers.Embedding(3, 2, mask_zero=True)
    assert internals.mask_of(embedding(keras.Input((4,), dtype="int32"))) is not None
    assert internals.mask_of(keras.Input((4,))) is None
