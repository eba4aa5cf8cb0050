"""Compilation of a graph with memfit's partition, by AOTAutograd or by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfit._torch.compilers import aot_autograd_eager

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
"""A function that splits a joint graph module, given the number of forward outputs, into the two passes' modules."""


def lower_to_eager(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph to run its operators eagerly, as PyTorch's "aot_eager" does."""

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    return aot_autograd_eager(module, inputs, partition_fn)


def lower_to_inductor(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph with Inductor."""
    from memfit.compiled import inductor_partition  # takes seconds; `import memfit` must not

    return inductor_partition.lower(module, inputs, partition)
