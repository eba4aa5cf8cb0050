"""From a graph that Dynamo captured to compiled code, with memfit's partition of its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfit._torch.compilers import aot_autograd_eager
from memfit.errors import MemfitError

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
"""A function that splits a joint graph module, given the number of forward outputs, into the two passes' modules."""


def lower_to_eager(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph to run its operators eagerly, as PyTorch's "aot_eager" does."""

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    return aot_autograd_eager(module, inputs, partition_fn)


def lower_to_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Partition, compile_pass: Any = None
) -> Callable[..., Any]:
    """Compile a graph with Inductor; see `inductor_partition.lower`."""
    from memfit.compiled import inductor_partition  # takes seconds; `import memfit` must not

    return inductor_partition.lower(module, inputs, partition, compile_pass)


def raising_own(compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return compiled code; where memfit's own part failed, code that raises its error.

    Raised while it compiles, the compiler would wrap it.
    """
    try:
        return compile()
    except Exception as e:
        error = _memfit_error(e)
        if error is None:
            raise
        return _raising(error)


def _memfit_error(error: BaseException | None) -> MemfitError | None:
    """Return the error of memfit's own that a compiler's error was caused by; None for another cause."""
    while error is not None and not isinstance(error, MemfitError):
        error = error.__cause__ or error.__context__
    return error


def _raising(error: MemfitError) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail
