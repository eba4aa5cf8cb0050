"""A Keras model as the calls of its layers, in their order, with the tensors between them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from memfit.errors import WorkloadError
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.internals import check_backend, keras


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
