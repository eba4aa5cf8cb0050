"""Recomputation of runs of layers in the backward pass.

`tf.recompute_grad` runs a function again without restoring any state: a layer that draws random numbers draws others,
so that the gradient is wrong, and a layer that updates statistics updates them twice. Here the second run has the
state that the first one found (`keras.StatelessScope`), and what it would update is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from memfit.errors import UsageError, WorkloadError
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.graph import Graph, Unit, graph_of
from memfit.frameworks.keras.internals import keras, tf

Run = tuple[int, int]
"""A run of units: the first, and one past the last."""


def checkpoint_every(model: Any, k: int) -> Any:
    """Return a model of the same layers and weights, recomputed k layers at a time in the backward pass.

    Args:
        model: A built `keras.Sequential` or a functional model, on the TensorFlow backend; its layers may branch.
        k: Layers that are recomputed together (> 0). Layers that can't be recomputed end a run.

    Raises:
        UsageError: `k` is not positive, or Keras runs on another backend.
        WorkloadError: memfit can't see the layer calls of the model.
    """
    if k < 1:
        raise UsageError(f"k={k} is not above 0: give a number of layers")
    graph = graph_of(model)
    runs: list[Run] = []
    for index, unit in enumerate(graph.units):
        if unit.refused:
            continue
        if runs and runs[-1][1] == index and index - runs[-1][0] < k:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return recomputed(model, graph, runs, f"{model.name}_every_{k}")


def recomputed(model: Any, graph: Graph, runs: Sequence[Run], name: str) -> Any:
    """Return a model of the same layers and weights that recomputes some runs of its units."""
    pieces: list[Stretch | Recomputed] = []
    start = 0
    for first, stop in [*sorted(runs), (len(graph.units), len(graph.units))]:
        if start < first:
            pieces.append(Stretch(graph, start, first))
        if first < stop:
            pieces.append(Recomputed(graph, first, stop))
        start = stop
    return joined(model, graph, pieces, name)


def joined(model: Any, graph: Graph, pieces: Sequence[Any], name: str) -> Any:
    """Return a model that calls pieces of another one after the other."""
    known = internals.functional(model)
    inputs = keras.tree.map_structure(
        lambda t: keras.Input(batch_shape=t.shape, dtype=t.dtype, name=t.name), known.input
    )
    values = dict(zip(graph.inputs, keras.tree.flatten(inputs), strict=True))
    for piece in pieces:
        values |= zip(piece.given, piece([values[t] for t in piece.taken]), strict=True)
    outputs = keras.tree.map_structure(lambda t: values[id(t)], known.output)
    return keras.Model(inputs, outputs, name=name)


class Stretch(keras.layers.Layer):  # type: ignore[misc]
    """Units called one after the other; what none of them needs any more is dropped.

    Attributes:
        taken: The tensors that it takes, by `id`.
        given: Those that it gives.
    """

    def __init__(self, graph: Graph, start: int, stop: int, **kwargs: Any) -> None:
        super().__init__(dtype="float32", autocast=False, **kwargs)  # its layers have their own dtypes
        self.graph, self.units = graph, tuple(graph.units[start:stop])
        self.taken, self.given = tuple(graph.taken(start, stop)), tuple(graph.given(start, stop))
        self.layers = [unit.operation for unit in self.units if unit.is_layer]
        last = {t: index for index, unit in enumerate(self.units) for t in (*unit.outputs, *unit.inputs)}
        self.dropped = tuple(
            tuple(t for t, index in last.items() if index == place and t not in self.given)
            for place in range(len(self.units))
        )
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        values = dict(zip(self.taken, inputs, strict=True))
        del inputs
        for unit, dropped in zip(self.units, self.dropped, strict=True):
            values |= zip(unit.outputs, self.value(unit, values, training), strict=True)
            for tensor in dropped:
                del values[tensor]
        return [values[t] for t in self.given]

    def value(self, unit: Unit, values: dict[int, Any], training: bool | None) -> list[Any]:
        """Return what a unit gives."""
        return unit.call(values, training)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the shapes and dtypes that the model's own tensors have."""
        tensors = (self.graph.tensors[t] for t in self.given)
        return [keras.KerasTensor(t.shape, t.dtype, name=t.name) for t in tensors]


class Recomputed(keras.layers.Layer):  # type: ignore[misc]
    """Units called one after the other, and called again in the backward pass, from the state of the first call."""

    def __init__(self, graph: Graph, start: int, stop: int, **kwargs: Any) -> None:
        super().__init__(dtype="float32", autocast=False, **kwargs)
        self.body = Stretch(graph, start, stop)
        self.taken, self.given = self.body.taken, self.body.given
        self.state = tuple(variable for layer in self.body.layers for variable in states_of(layer))
        self.built = True

    @property
    def layers(self) -> list[Any]:
        """The layers that are recomputed."""
        return list(self.body.layers)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        state = [(variable, tf.convert_to_tensor(variable.value)) for variable in self.state]
        differentiable = [index for index, value in enumerate(inputs) if value.dtype.is_floating]
        others = {index: value for index, value in enumerate(inputs) if not value.dtype.is_floating}
        calls = 0

        def run(*values: Any) -> Any:
            nonlocal calls
            calls += 1
            given = others | dict(zip(differentiable, values, strict=True))
            scope = contextlib.nullcontext() if calls == 1 else keras.StatelessScope(state)
            with scope:
                return self.body([given[index] for index in sorted(given)], training=training)

        losses = internals.losses_added(self.body)
        results = tf.recompute_grad(run)(*(inputs[index] for index in differentiable))
        if internals.losses_added(self.body) > losses:
            raise WorkloadError(
                f"one of the layers {[layer.name for layer in self.layers]} adds a loss in its call, and a recomputed"
                " layer's loss gets no gradient: plan with memfit.keras.plan, which does not recompute such a layer"
            )
        return results

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the shapes and dtypes that the model's own tensors have."""
        return self.body.compute_output_spec(inputs)


def states_of(layer: Any) -> list[Any]:
    """Return the variables of a layer beside its weights, as a generator's state or running statistics."""
    weights = {id(variable) for variable in internals.weights_within(layer)}
    return [variable for variable in layer.variables if id(variable) not in weights]
