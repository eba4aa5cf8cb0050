"""Compilation by Inductor with memfit's partition. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memfit._torch import (
    CustomPartitionerFn,
    InductorChoices,
    V,
    compile_fx,
    functorch_config,
    get_hash_for_files,
    inductor_config,
)
from memfit.foundations import __version__
from memfit.recomputation.joint_rewriter import KERNEL

_SETTINGS: dict[str, Any] = {
    # Inductor keeps buffers for later ones of the same size, each by an estimate of the peak that does not count the
    # others: 12 MiB of 128 above the prediction (CPU, torch 2.13).
    "allow_buffer_reuse": False,
    # Inductor inlines values that read up to 4 tensors into each reader, which keeps all of these alive instead of one
    # result: 0.5 MiB of 5 in a residual network.
    "realize_reads_threshold": 1,
    "reorder_for_peak_memory": False,  # the graph itself has the order (`recomputation.joint_rewriter`)
    "layout_optimization": False,  # the graph itself has the layouts (`recomputation.joint_rewriter`)
    # Nothing outside of CUDA graphs has the memory of their pool, so that a step would reserve its activations and the
    # optimizer's temporaries side by side; and the next microbatch writes over the gradients of the one before.
    "triton.cudagraphs": False,
}
"""Settings that differ from Inductor's own, so that the step takes the planned memory."""


class Partitioner(CustomPartitionerFn):
    """A partition in Inductor's interface; pickled for cache keys, it is empty."""

    def __init__(self, partition: Callable[[fx.GraphModule, int], Any] | None = None) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        assert self.partition is not None
        return self.partition(gm, kwargs["num_fwd_outputs"])

    def __reduce__(self) -> tuple[type[Partitioner], tuple[()]]:
        return Partitioner, ()

    def uuid(self) -> bytes:
        """Return the partition's part of cache keys; the graphs themselves are another part."""
        return get_hash_for_files((__file__,), __version__)


class Choices(InductorChoices):
    """Inductor's choices, except that the backward pass fuses within the plan's kernels only.

    Otherwise a bias's sum could wait for a later kernel, which keeps its input, an activation, alive.
    """

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Tell whether two kernels may be fused."""

        def planned(node: Any) -> set[int]:
            """Return the plan's kernels of a node's parts: of each the last, since earlier ones may be inlined."""
            origins = ([o for o in getattr(part.node, "origins", ()) if KERNEL in o.meta] for part in node.get_nodes())
            return {max(origin.meta[KERNEL] for origin in part) for part in origins if part}

        first, second = planned(node1), planned(node2)
        apart = bool(first and second) and first.isdisjoint(second)
        return not apart and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def lower(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[[fx.GraphModule, int], Any],
    compile_pass: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Compile a graph, with its backward pass at once, so that the settings hold for both.

    Inductor's cache of kernels is used; its cache of whole graphs is not, since their partition is planned.

    Args:
        compile_pass: Makes the code of one pass in Inductor's place, given the graph module that it would make it of,
            its inputs and, by name, whether `is_backward`.
    """
    options: dict[str, Any] = {} if compile_pass is None else {"inner_compile": compile_pass}
    on_paper = compile_pass is not None and any(t.device.type != "cpu" for t in inputs if isinstance(t, torch.Tensor))
    # Of a device that is not here, constants are not folded: they are computed where they are.
    settings = {**_SETTINGS, **({"joint_graph_constant_folding": False} if on_paper else {})}
    with (
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        inductor_config.patch(custom_partitioner_fn=Partitioner(partition), **settings),
        V.set_choices_handler(Choices()),
    ):
        compiled: Any = compile_fx(module, inputs, **options)
    return compiled  # type: ignore[no-any-return]
