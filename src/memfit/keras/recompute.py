"""Recomputation of runs of layers in the backward pass.

`tf.recompute_grad` runs a function again without restoring any state: a layer that draws random numbers draws others,
so that the gradient is wrong, and a layer that updates statistics updates them twice. Such layers are left out, and end
a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from memfit.errors import MissingExtraError, UsageError, WorkloadError
from memfit.keras.internals import call_count, weights_within

try:
    import keras
    import tensorflow as tf
except ModuleNotFoundError as e:
    raise MissingExtraError("memfit.keras", "keras", str(e.name)) from e


def checkpoint_every(model: Any, k: int) -> Any:
    """Return a model of the same layers and weights that keeps the activations of every k-th layer only.

    Args:
        model: A built `keras.Sequential`, or a functional model whose layers form a chain, on the TensorFlow backend.
        k: Layers that are recomputed together (> 0). Layers with a state (dropout, BatchNormalization) are not
            recomputed, and end a run.

    Raises:
        UsageError: `k` is not positive, or Keras runs on another backend.
        WorkloadError: The model's layers are not a chain.
    """
    if k < 1:
        raise UsageError(f"k={k} is not above 0: give a number of layers")
    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"memfit.keras needs KERAS_BACKEND=tensorflow, not {keras.backend.backend()!r}")
    inputs = keras.Input(batch_shape=model.input_shape, dtype=model.inputs[0].dtype)
    value = inputs
    for run in _runs(_chain(model), k):
        value = run[0](value) if len(run) == 1 and _has_state(run[0]) else Recomputed(run)(value)
    return keras.Model(inputs, value, name=f"{model.name}_every_{k}")


class Recomputed(keras.layers.Layer):  # type: ignore[misc]
    """Layers called one after the other, and recomputed in the backward pass."""

    def __init__(self, layers: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers = list(layers)
        self.built = all(layer.built for layer in layers)

    def call(self, inputs: Any) -> Any:
        @tf.recompute_grad  # type: ignore[untyped-decorator]
        def run(value: Any) -> Any:
            for layer in self.layers:
                value = layer(value)
            return value

        return run(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        for layer in self.layers:
            input_shape = layer.compute_output_shape(input_shape)
        return input_shape


def _chain(model: Any) -> list[Any]:
    """Return a model's layers in order."""
    if not getattr(model, "inputs", None) or len(model.inputs) != 1 or len(model.outputs) != 1:
        raise WorkloadError(
            f"the model {model.name!r} is not built, or has several inputs or outputs: build it, with one input and"
            " one output"
        )
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    tensor = model.inputs[0]
    for layer in [] if isinstance(model, keras.Sequential) else layers:
        if call_count(layer) != 1 or layer.input is not tensor:
            raise WorkloadError(f"the layer {layer.name!r} does not follow the one before it: the model is no chain")
        tensor = layer.output
    return layers


def _runs(layers: Sequence[Any], k: int) -> list[list[Any]]:
    """Return layers in runs of up to k; a layer with a state is a run of its own."""
    runs: list[list[Any]] = []
    for layer in layers:
        has_state = _has_state(layer)
        if runs and not has_state and len(runs[-1]) < k and not _has_state(runs[-1][-1]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _has_state(layer: Any) -> bool:
    """Return whether a layer has variables beside its weights, as a generator's state or running statistics."""
    weights = {id(variable) for variable in weights_within(layer)}
    return any(id(v) not in weights for v in layer.variables)


def measured_peak(run: Callable[[], Any], device: str = "CPU:0") -> int:
    """Return the bytes that TensorFlow allocates at the peak of a run, beyond those held before.

    Args:
        run: The function, run once to trace it and once to measure it.
        device: Name of the device for `tf.config.experimental.get_memory_info`.

    Raises:
        UsageError: TensorFlow does not count the device's memory. It counts a CPU's where oneDNN is on, which it turns
            off by itself for processors without instructions for neural networks (AVX512-VNNI).
    """
    run()
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError as e:
        raise UsageError(
            f"TensorFlow counts no memory of device={device!r} ({e}): for a CPU, set TF_ENABLE_ONEDNN_OPTS=1 in the"
            " environment before TensorFlow is imported"
        ) from e
    before = tf.config.experimental.get_memory_info(device)["current"]
    run()
    return int(tf.config.experimental.get_memory_info(device)["peak"] - before)
