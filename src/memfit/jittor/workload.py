"""The description of a training step in Jittor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.errors import WorkloadError
from memfit.jittor.variables import is_trainable, mapped, named_variables, variables_of
from memfit.pipeline import call


@dataclass(frozen=True)
class Workload:
    """One training step in Jittor, unmodified.

    Args:
        model: The model, in training mode.
        batch: One global batch: variables, or dicts, lists and tuples of them. The first dimension of each is the
            sample, and all have the same number of samples.
        loss_fn: `loss_fn(model, batch)` returns a scalar that is a mean over the samples, or `(sum, count)` when the
            loss is normalised by tokens or voxels.
        optimizer: An optimizer of `jittor.optim` over the model's parameters.
        name: Name in reports.
        max_grad_norm: Global gradient norm to clip to (> 0), or None not to clip.
    """

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer: Any
    name: str = "workload"
    max_grad_norm: float | None = None


def load_workload(name: str) -> Workload:
    """Call a function by its name and return its workload.

    Args:
        name: `file.py:function` or `package.module:function`.

    Raises:
        WorkloadError: No such file, module or function, or it does not return a `memfit.jittor.Workload`.
    """
    workload = call(name)
    if not isinstance(workload, Workload):
        raise WorkloadError(f"{name} returned a {type(workload).__name__}, not a memfit.jittor.Workload")
    batch_size_of(workload.batch)
    return workload


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        WorkloadError: Its variables have different first dimensions, or it has none.
    """
    shapes = sorted({tuple(v.shape) for v in variables_of(batch)})
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise WorkloadError(
            "Workload.batch must hold jittor variables with the same number of samples in their first dimension, not"
            f" {type(batch).__name__} with variables of shapes {shapes}"
        )
    return int(sizes.pop())


def split(batch: Any, microbatch_size: int | None) -> list[Any]:
    """Return the microbatches of a batch; the last may be smaller."""
    size = batch_size_of(batch)
    piece = microbatch_size or size
    if piece >= size:
        return [batch]
    return [first(batch, start + piece, start) for start in range(0, size, piece)]


def first(batch: Any, stop: int, start: int = 0) -> Any:
    """Return the samples of a batch from `start` up to `stop`."""
    return mapped(batch, lambda v: v[start:stop].stop_grad() if v.is_stop_grad() else v[start:stop])


def trainables(workload: Workload) -> list[Any]:
    """Return the variables that the optimizer trains, in its order."""
    return [p for group in workload.optimizer.param_groups for p in group["params"] if is_trainable(p)]


def fingerprint(workload: Workload) -> str:
    """Return a hash of a workload's variables, batch shapes and optimizer, without values."""
    named = named_variables(workload.model).items()
    parts = [f"{name}:{tuple(v.shape)}:{v.dtype}:{is_trainable(v)}" for name, v in named]
    parts += [f"batch:{tuple(v.shape)}:{v.dtype}" for v in variables_of(workload.batch)]
    parts += ["jittor", type(workload.model).__qualname__, type(workload.optimizer).__qualname__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
