"""What memfit relies on of private symbols of Keras."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")
from memfit.keras import internals  # noqa: E402


def test_calls_are_counted() -> None:
    layer = keras.layers.Dense(2)
    first = keras.Input((2,))
    assert internals.call_count(layer) == 0
    layer(layer(first))
    assert internals.call_count(layer) == 2


def test_weights_are_told_from_other_variables() -> None:
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    inner.build((None, 2))
    names = sorted(variable.name for variable in internals.weights_within(inner))
    assert names == ["beta", "bias", "gamma", "kernel"]
    assert len(inner.variables) > len(names)
