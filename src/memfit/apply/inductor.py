"""Graphs compiled by Inductor, with a partition of memfit's. Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.virtualized import V

from memfit.apply.compiled import KERNEL
from memfit.version import __version__

_SETTINGS: dict[str, Any] = {"allow_buffer_reuse": False, "realize_reads_threshold": 1, "layout_optimization": False}


class Partitioner(CustomPartitionerFn):
    """The form in which Inductor takes a partition; pickled into keys of caches, it is empty."""

    def __init__(self, partition: Callable[[fx.GraphModule, int], Any] | None = None) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        assert self.partition is not None
        return self.partition(gm, kwargs["num_fwd_outputs"])

    def __reduce__(self) -> tuple[type[Partitioner], tuple[()]]:
        return Partitioner, ()

    def uuid(self) -> bytes:
        """Return what stands for it in keys of caches; the graphs that it makes are told apart by what is in them."""
        return get_hash_for_files((__file__,), __version__)


class Choices(InductorChoices):
    """Inductor's choices, but for the backward pass: there it fuses what is one kernel of the plan, and no more.

    A sum for a bias would wait for a later kernel otherwise, and what it sums would stay meanwhile: an activation more.
    """

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Tell whether two kernels may be fused."""
        one, two = _planned(node1), _planned(node2)
        apart = bool(one and two) and one.isdisjoint(two)
        return not apart and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def _planned(node: Any) -> set[int]:
    """Return a plan's kernels for what the parts of a node compute, each of which may have inlined earlier ones."""
    origins = ([o for o in getattr(part.node, "origins", ()) if KERNEL in o.meta] for part in node.get_nodes())
    return {max(origin.meta[KERNEL] for origin in found) for found in origins if found}


def lower(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[[fx.GraphModule, int], Any]
) -> Callable[..., Any]:
    """Compile a graph, its backward pass at once, so that what is set here holds for it.

    Inductor's cache of kernels is used, that of whole graphs is not: these are planned.

    Three settings differ from Inductor's own, so that the step takes what was planned (seen on CPU, torch 2.13):

    1. `allow_buffer_reuse`: it keeps buffers for later ones of the same size, by an estimate of the peak that each
       passes but not all together: 12 MiB of 128 above the prediction. The allocator gets memory back at once instead.
    2. `realize_reads_threshold`: what several kernels use is inlined into each where it reads up to 4 tensors, which
       all stay alive instead of one result: 0.5 MiB of 5 in a residual network.
    3. `layout_optimization`: it is the graph that says which convolutions have their channels last (`apply.layouts`).
    """
    with (
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        inductor_config.patch(custom_partitioner_fn=Partitioner(partition), **_SETTINGS),
        V.set_choices_handler(Choices()),
    ):
        compiled: Any = compile_fx(module, inputs)
    return compiled  # type: ignore[no-any-return]
