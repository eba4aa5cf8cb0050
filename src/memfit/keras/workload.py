"""What a plan is made for: a Keras model, a batch, and the loss of one on the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.errors import WorkloadError
from memfit.keras.internals import keras, tf
from memfit.keras.recompute import Graph


@dataclass(frozen=True)
class Workload:
    """A step: the gradients of a loss.

    Attributes:
        model: A built `keras.Sequential`, or a functional model.
        batch: Tensors in any structure; their first dimension is that of the samples.
        loss_fn: Called with a model of the same inputs and outputs, and the batch; returns a scalar. It calls the model
            once, with `training=True`.
        run_eagerly: Whether the step runs eagerly; otherwise in a `tf.function`, as `fit` does.
        name: For reports.
    """

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any]
    run_eagerly: bool = False
    name: str = "workload"

    def step(self, model: Any) -> Callable[[], Any]:
        """Return a function that gives the loss of a model and the gradients of its weights."""

        def run() -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_fn(model, self.batch)
            return loss, tape.gradient(loss, model.trainable_variables)

        return run if self.run_eagerly else tf.function(run)

    @property
    def batch_size(self) -> int:
        """The number of samples.

        Raises:
            WorkloadError: The batch has no tensor with a first dimension.
        """
        shapes = [tuple(t.shape) for t in keras.tree.flatten(self.batch)]
        if not shapes or not shapes[0]:
            raise WorkloadError(f"Workload.batch has no tensor with samples as its first dimension: {shapes}")
        return int(shapes[0][0])


def fingerprint(graph: Graph) -> str:
    """Return a hash of a model's calls and of the shapes of its weights, without values."""
    position = {t: index for index, t in enumerate(graph.tensors)}
    parts = [
        f"{type(u.operation).__qualname__}:{u.name}:{[position[t] for t in (*u.inputs, *u.outputs)]}"
        for u in graph.units
    ]
    for unit in graph.units:
        if unit.is_layer:
            parts += [f"{tuple(v.shape)}:{v.dtype}:{v.trainable}" for v in unit.operation.variables]
    return hashlib.sha256("\n".join(["keras", *parts]).encode()).hexdigest()[:16]
