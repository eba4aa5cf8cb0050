"""Small Keras models with branches and without, and their steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memfit.keras as mk

layers = keras.layers


def mlp(depth: int = 12, width: int = 128) -> Any:
    """Return a chain."""
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(width, activation="gelu") for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *dense])


def resnet(blocks: int = 3, width: int = 16, size: int = 32, dropout: float = 0.2) -> Any:
    """Return blocks of convolutions with BatchNorm, dropout and residual additions; the first has a projection."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((size, size, 3))
    x = inputs
    for block in range(blocks):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))
        y = layers.Conv2D(width, 3, padding="same")(layers.Dropout(dropout, seed=block)(y))
        x = y + (layers.Conv2D(width, 1)(x) if block == 0 else x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def unet(base: int = 16, size: int = 32, levels: int = 2) -> Any:
    """Return a U-Net: what is concatenated on the way up was made on the way down."""
    keras.utils.set_random_seed(0)

    def convolved(x: Any, width: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))

    inputs = keras.Input((size, size, 3))
    x, skips = inputs, []
    for level in range(levels):
        x = convolved(x, base * 2**level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, base * 2**levels)
    for level in reversed(range(levels)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips[level]])
        x = convolved(x, base * 2**level)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x))


def squares(model: Any, batch: Any) -> Any:
    """Return the mean square of a model's results."""
    return tf.reduce_mean(tf.cast(model(batch, training=True), "float32") ** 2)


def workload(model: Any, samples: int, *, run_eagerly: bool = False) -> mk.Workload:
    """Return a step of a model on random samples."""
    x = np.random.RandomState(0).randn(samples, *model.input_shape[1:]).astype("float32")
    return mk.Workload(model, tf.constant(x), squares, run_eagerly=run_eagerly)


def values_after_step(make: Any, change: Any, samples: int, *, run_eagerly: bool = False) -> list[Any]:
    """Return the loss, the gradients and the statistics of a model that is made anew and changed."""
    model = make()
    mine = workload(model, samples, run_eagerly=run_eagerly)
    loss, gradients = mine.step(change(model))()
    return [v.numpy() for v in (loss, *gradients)] + [v.numpy() for v in model.non_trainable_variables]


def difference(one: list[Any], other: list[Any]) -> float:
    """Return the largest difference of two lists of arrays, relative to the largest value of each array."""
    assert len(one) == len(other)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(one, other, strict=True)]
    return max(float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-30)) for a, b in pairs if a.size)
