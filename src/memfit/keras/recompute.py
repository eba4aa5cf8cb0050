"""A Keras model as the calls of its layers in their order, and recomputation of runs of them in the backward pass.

`tf.recompute_grad` runs a function again without restoring any state: a layer that draws random numbers draws others,
so that the gradient is wrong, and a layer that updates statistics updates them twice. Here the second run has the
state that the first one found (`keras.StatelessScope`), and what it would update is dropped.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.errors import UsageError, WorkloadError
from memfit.keras import internals
from memfit.keras.internals import check_backend, keras, tf

Run = tuple[int, int]
"""A run of units: the first, and one past the last."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One call of a layer, or of an operation such as `a + b`.

    Attributes:
        name: Of the layer; its second call is "name#2". Names that Keras made ("dense_1") are counted anew in each
            model, so that they are the same in every process.
        operation: The layer.
        arguments: Its arguments, which Keras fills in from values.
        inputs: The symbolic tensors that it takes, by `id`, each once.
        outputs: Those that it gives.
        refused: Why it must not be called again in the backward pass; "" where it may.
    """

    name: str
    operation: Any
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    refused: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, which may have variables."""
        return isinstance(self.operation, keras.Layer)

    def call(self, values: dict[int, Any], training: bool | None) -> list[Any]:
        """Return what it gives for the values of symbolic tensors."""
        args, kwargs = self.arguments.fill_in(values)
        return list(keras.tree.flatten(internals.caller(self.operation, training)(*args, **kwargs)))


@dataclass(frozen=True, eq=False)
class Graph:
    """The calls of a model.

    A run of calls that follow one another in this order can be recomputed together, whatever branches it holds: each
    path from one of them to another stays among them.

    Attributes:
        tensors: The symbolic tensors, by `id`.
        inputs: Those that the model takes.
        outputs: Those that it gives.
    """

    name: str
    units: list[Unit]
    tensors: dict[int, Any]
    inputs: list[int]
    outputs: list[int]

    def taken(self, start: int, stop: int) -> list[int]:
        """Return the tensors that a run of units takes from outside."""
        made = {t for unit in self.units[start:stop] for t in unit.outputs}
        return list(dict.fromkeys(t for unit in self.units[start:stop] for t in unit.inputs if t not in made))

    def given(self, start: int, stop: int) -> list[int]:
        """Return the tensors that a run of units gives to others, those first whose gradients are complete last."""
        first: dict[int, int] = {t: len(self.units) for t in self.outputs}
        for index in range(len(self.units) - 1, stop - 1, -1):
            first |= dict.fromkeys(self.units[index].inputs, index)
        made = [t for unit in self.units[start:stop] for t in unit.outputs if t in first]
        return sorted(made, key=lambda t: first[t])


def graph_of(model: Any) -> Graph:
    """Return the calls of a model's layers.

    Raises:
        UsageError: Keras runs on another backend than TensorFlow.
        WorkloadError: The model is not built, or is written as a class: its calls are not known.
    """
    check_backend()
    if internals.functional(model) is None or not getattr(model, "inputs", None):
        raise WorkloadError(
            f"memfit can't see the layer calls of the model {getattr(model, 'name', model)!r}: give a built"
            " keras.Sequential or a functional model, keras.Model(inputs, outputs)"
        )
    units: list[Unit] = []
    tensors = {id(t): t for t in model.inputs}
    made: dict[int, str] = {}
    counts: Counter[str] = Counter()

    def counted(name: str, mark: str, first: int) -> str:
        counts[name] += 1
        count = counts[name] - 1 + first
        return name if count == first else f"{name}{mark}{count}"

    for node in internals.nodes(model):
        layer = node.operation
        if id(layer) not in made:
            stem = re.sub(r"_\d+$", "", layer.name)
            is_made = stem.replace("_", "") == type(layer).__name__.lower()
            name = counted(f"{stem} of Keras", "_", 0).replace(" of Keras", "") if is_made else str(layer.name)
            made[id(layer)] = name
        refused = ""
        if getattr(layer, "activity_regularizer", None) is not None:
            refused = "adds a loss in its call (activity_regularizer=)"
        elif any(internals.mask_of(t) is not None for t in (*node.input_tensors, *node.outputs)):
            refused = "uses or returns a mask"
        elif not all("float" in t.dtype for t in node.outputs):
            refused = "returns values that are not floats"
        inputs, outputs = tuple(dict.fromkeys(map(id, node.input_tensors))), tuple(map(id, node.outputs))
        units.append(Unit(counted(made[id(layer)], "#", 1), layer, node.arguments, inputs, outputs, refused))
        tensors |= {id(t): t for t in node.outputs}
    return Graph(model.name, units, tensors, [id(t) for t in model.inputs], [id(t) for t in model.outputs])


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
