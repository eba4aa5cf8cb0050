"""A back end of `torch.compile` whose graphs recompute the regions of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfit._torch.compilers import boxed, current_compile_id
from memfit.capture.composites import composites_lifted
from memfit.compiled.channels_last import lay_out_channels_last
from memfit.compiled.graph_module_calls import CallNames
from memfit.compiled.joint_graph import has_symbols, users_of_sparse
from memfit.compiled.joint_rewriter import JointRewriter, prepare
from memfit.compiled.kernel_recording import RecordedGraph
from memfit.compiled.lowering import lower_to_inductor, raising_own
from memfit.compiled.rematerialization import split
from memfit.errors import PlanError
from memfit.ir.remat import Region


class PlannedBackend:
    """Compiles graphs with Inductor, so that their backward passes recompute regions.

    Args:
        regions: Modules' calls, as `CallNames` names them.
        channels_last: Whether convolutions run with their channels last, where a graph has few others.
        is_on_paper: Whether the graphs run under fake tensors, to be recorded, and no code is made.

    Attributes:
        called: The names of the modules' calls in the graphs so far.
    """

    def __init__(self, regions: Sequence[Region], *, channels_last: bool = False, is_on_paper: bool = False) -> None:
        self.regions, self.channels_last, self.is_on_paper = tuple(regions), channels_last, is_on_paper
        self.called: set[str] = set()
        self.graphs = 0
        self.begin()

    def begin(self) -> None:
        """Name calls from the first on: the next graphs are those of another run of the function."""
        self._names = CallNames()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        self._recorded: RecordedGraph | None = None
        compile_pass = self._recording if self.is_on_paper else None
        with composites_lifted():
            return raising_own(lambda: lower_to_inductor(module, inputs, self._partition, compile_pass))

    def _partition(self, module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        if has_symbols(module.graph):
            raise PlanError(
                "levers.compiler is for fixed shapes, and the compiled graph has dynamic ones: mark no dimension as"
                " dynamic, or set levers.compiler to 'none'"
            )
        if users := users_of_sparse(module.graph):
            raise PlanError(
                f"the compiled graph computes with sparse gradients ({users[0]}), and Inductor treats them as dense"
                " ones: call a table with sparse=True once in a step, or set levers.compiler to 'none'"
            )
        prepare(module.graph)
        if self.channels_last:
            lay_out_channels_last(module.graph)
        rewriter = JointRewriter(module.graph, forward_outputs, str(current_compile_id()), True, self._names)
        joint = rewriter.apply(rewriter.regions_here(self.regions))
        for called in rewriter.joint.trace.modules:
            self.called.add(called.fqn)
            self._names.next(called.fqn.partition("@")[0])
        self.graphs += 1
        if self.is_on_paper:
            self._recorded = RecordedGraph(joint)
        return split(module, forward_outputs)

    def _recording(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        if self._recorded is None:  # no backward pass: its operators are recorded one by one
            return boxed(module.forward)
        return self._recorded.code(module, is_backward=bool(options.get("is_backward")))
