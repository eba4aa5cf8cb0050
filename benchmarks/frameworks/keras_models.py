"""The U-Net in two dimensions and the Transformer of `torch_models`, in Keras: layer by layer, or in blocks that
`tf.recompute_grad` recomputes, as people write them by hand."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.frameworks.subject import TransformerSizes, UNetSizes

layers: Any = keras.layers


class ByHand(layers.Layer):  # type: ignore[misc]
    """Layers one after the other in `tf.recompute_grad`."""

    def __init__(self, stack: list[Any]) -> None:
        super().__init__(autocast=False)
        self.stack = stack

    def build(self, shape: Any) -> None:
        for layer in self.stack:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x: Any, training: bool | None = None) -> Any:
        @tf.recompute_grad  # type: ignore[untyped-decorator]
        def run(value: Any) -> Any:
            for layer in self.stack:
                takes = isinstance(layer, layers.BatchNormalization)
                value = layer(value, training=training) if takes else layer(value)
            return value

        return run(x)


def unet(sizes: UNetSizes, shape: tuple[int, ...], by_hand: bool) -> Any:
    """Return a U-Net for images of a shape (height, width, channels)."""

    def convolved(x: Any, width: int) -> Any:
        stack: list[Any] = []
        for _ in range(2):
            stack += [
                layers.Conv2D(width, 3, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        if by_hand:
            return ByHand(stack)(x)
        for layer in stack:
            x = layer(x)
        return x

    inputs = keras.Input(shape)
    x, skips = inputs, []
    for width in sizes.widths[:-1]:
        x = convolved(x, width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, sizes.widths[-1])
    for width, skip in zip(sizes.widths[-2::-1], skips[::-1], strict=True):
        x = convolved(layers.Concatenate()([layers.UpSampling2D()(x), skip]), width)
    return keras.Model(inputs, layers.Conv2D(sizes.outputs, 1, dtype="float32")(x))


class Block(layers.Layer):  # type: ignore[misc]
    """A pre-norm Transformer block in `tf.recompute_grad`."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__(autocast=False)
        self.parts = _parts(sizes)

    def build(self, shape: Any) -> None:
        norm1, attention, norm2, up, down = self.parts
        norm1.build(shape)
        attention.build(shape, shape)
        norm2.build(shape)
        up.build(shape)
        down.build(up.compute_output_shape(shape))

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda value: _block(self.parts, value))(x)


def _parts(sizes: TransformerSizes) -> list[Any]:
    return [
        layers.LayerNormalization(),
        layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads),
        layers.LayerNormalization(),
        layers.Dense(4 * sizes.width, activation="gelu"),
        layers.Dense(sizes.width),
    ]


def _block(parts: list[Any], x: Any) -> Any:
    norm1, attention, norm2, up, down = parts
    y = norm1(x)
    x = keras.ops.add(x, attention(y, y))
    return keras.ops.add(x, down(up(norm2(x))))


def transformer(sizes: TransformerSizes, shape: tuple[int, ...], by_hand: bool) -> Any:
    """Return a Transformer for sequences of a shape (length, width)."""
    inputs = keras.Input(shape)
    x = inputs
    for _ in range(sizes.blocks):
        x = Block(sizes)(x) if by_hand else _block(_parts(sizes), x)
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(x))
