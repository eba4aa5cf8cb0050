"""Compilation by Inductor with memfit's partition. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfit._torch.inductor import (
    CustomPartitionerFn,
    InductorChoices,
    V,
    compile_fx,
    functorch_config,
    get_hash_for_files,
    inductor_config,
)
from memfit.compiled.rematerialization import KERNEL
from memfit.version import __version__

_SETTINGS: dict[str, Any] = {
    # Inductor keeps buffers for later ones of the same size, each by an estimate of the peak that does not count the
    # others: 12 MiB of 128 above the prediction (CPU, torch 2.13).
    "allow_buffer_reuse": False,
    # Inductor inlines values that read up to 4 tensors into each reader, which keeps all of these alive instead of one
    # result: 0.5 MiB of 5 in a residual network.
    "realize_reads_threshold": 1,
    "layout_optimization": False,  # the graph itself has the layouts (`compiled.channels_last`)
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
        first, second = _planned(node1), _planned(node2)
        apart = bool(first and second) and first.isdisjoint(second)
        return not apart and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def _planned(node: Any) -> set[int]:
    """Return the plan's kernels of a node's parts: of each the last, since earlier ones may be inlined."""
    origins = ([o for o in getattr(part.node, "origins", ()) if KERNEL in o.meta] for part in node.get_nodes())
    return {max(origin.meta[KERNEL] for origin in part) for part in origins if part}


def lower(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[[fx.GraphModule, int], Any]
) -> Callable[..., Any]:
    """Compile a graph, with its backward pass at once, so that the settings hold for both.

    Inductor's cache of kernels is used; its cache of whole graphs is not, since their partition is planned.
    """
    with (
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        inductor_config.patch(custom_partitioner_fn=Partitioner(partition), **_SETTINGS),
        V.set_choices_handler(Choices()),
    ):
        compiled: Any = compile_fx(module, inputs)
    return compiled  # type: ignore[no-any-return]
