from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memfit.errors import UsageError, WorkloadError
from memfit.keras import checkpoint_every, measured_peak
from memfit.keras.recompute import Recomputed, keras, tf

WIDTH, SAMPLES = 128, 4096


def mlp(*more: Any, layers: int = 24) -> Any:
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(layers)]
    half = len(dense) // 2
    return keras.Sequential([keras.Input((WIDTH,)), *dense[:half], *more, *dense[half:]])


def batch(samples: int = SAMPLES) -> Any:
    return tf.constant(np.random.RandomState(0).randn(samples, WIDTH).astype("float32"))


def gradients(model: Any, x: Any, training: bool = True) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=training) ** 2)
    return [loss.numpy(), *(g.numpy() for g in tape.gradient(loss, model.trainable_variables))]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_peak_halves_and_gradients_stay(compiled: bool) -> None:
    model, x = mlp(), batch()
    lean = checkpoint_every(model, 5)
    assert [id(v) for v in lean.trainable_variables] == [id(v) for v in model.trainable_variables]
    plain, planned = gradients(model, x), gradients(lean, x)
    assert all(np.array_equal(a, b) for a, b in zip(plain, planned, strict=True))

    def step(one: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(one(x, training=True) ** 2)
        return tape.gradient(loss, one.trainable_variables)

    peaks = []
    for one in (model, lean):
        function = tf.function(step) if compiled else step
        peaks.append(measured_peak(lambda function=function, one=one: function(one)))  # type: ignore[misc]
    print(f"{peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB, {peaks[1] / peaks[0]:.2f}")
    assert peaks[1] <= 0.5 * peaks[0]


def test_layers_with_a_state_are_left_out_and_stay_right() -> None:
    x = batch(64)
    results = []
    for k in (None, 3):
        model = mlp(keras.layers.Dropout(0.5, seed=1), keras.layers.BatchNormalization(), layers=6)
        lean = model if k is None else checkpoint_every(model, k)
        results.append([*gradients(lean, x), *(v.numpy() for v in model.non_trainable_variables)])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    recomputed = [layer for layer in lean.layers if isinstance(layer, Recomputed)]
    assert [len(layer.layers) for layer in recomputed] == [3, 3]


def test_a_frozen_layer_is_recomputed() -> None:
    model = mlp(layers=4)
    model.layers[1].trainable = False
    lean = checkpoint_every(model, 4)
    assert [len(layer.layers) for layer in lean.layers if isinstance(layer, Recomputed)] == [4]
    assert len(gradients(lean, batch(8))) == len(gradients(model, batch(8))) == 1 + 6


def test_functional_chains_and_what_is_none() -> None:
    inputs = keras.Input((WIDTH,))
    first = keras.layers.Dense(WIDTH)(inputs)
    chain = keras.Model(inputs, keras.layers.Dense(3)(first))
    x = batch(8)
    assert np.array_equal(chain(x).numpy(), checkpoint_every(chain, 2)(x).numpy())
    residual = keras.Model(inputs, keras.layers.Add()([first, inputs]))
    with pytest.raises(WorkloadError, match="no chain"):
        checkpoint_every(residual, 2)
    with pytest.raises(UsageError, match="k=0"):
        checkpoint_every(chain, 0)


def test_a_device_whose_memory_nothing_counts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> None:
        raise ValueError(f"Cannot reset memory stats for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", refuse)
    with pytest.raises(UsageError, match="TF_ENABLE_ONEDNN_OPTS=1"):
        measured_peak(lambda: None)
