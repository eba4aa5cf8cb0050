"""`torch.compile` with a budget in bytes: a solver chooses the recomputations of each compiled graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import msgspec
import torch
from torch import fx

from memfit._torch.compilers import aot_autograd_eager, current_compile_id
from memfit._torch.dispatch import disable_current_modes
from memfit.compiled.channels_last import lay_out_channels_last, show_in_any_layout
from memfit.compiled.dropout_masks import hold_masks_as_bytes
from memfit.compiled.inlining import computed_per_loop, inlined_nodes, mark_for_each, mark_inlined, users_by_call
from memfit.compiled.joint_graph import JointGraph, has_symbols, mark_kept, mark_recomputed, read
from memfit.compiled.rematerialization import KERNEL, GraphRegion, compute_for_each, keep_apart, rematerialize, split
from memfit.errors import BudgetError, InfeasibleError, MemfitError, UsageError
from memfit.hardware.host import find_device
from memfit.ir.device import Device
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.remat import Region, Regions
from memfit.ir.simulate import simulate
from memfit.ir.timeline import Timeline
from memfit.planner.prediction import costs_of
from memfit.solver.candidates import options
from memfit.solver.milp import EXACT, FINE, Choice, Solver
from memfit.solver.problem import build
from memfit.units import format_bytes, parse_budget

_ROUNDS = 6
_SOLVE_SECONDS = 6.0  # of the thread's time, for all rounds together
_LEANEST_SECONDS = (10.0, 30.0)
_LITTLE = 0.02  # share of the limit up to which an excess is solved for again with more time
_CLOSE = 0.01  # share of the limit within which two targets count as equal
_FUSED_ERROR = 0.05
"""Inductor's excess over a prediction, as a share of the bytes that the step adds: it orders kernels by itself. At most
3.5 % was seen, on four models at four budgets each."""
_LARGEST_DEVICE = 1 << 62

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
"""A function that splits a joint graph module, given the number of forward outputs, into the two passes' modules."""


class CompiledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one compiled graph.

    Attributes:
        graph: The compiler's name for the graph.
        budget_bytes: The graph's budget, without `reserved_bytes`.
        peak_bytes: The predicted peak, parameters, inputs and gradients included.
        peak_upper_bytes: The upper end of the interval around it, which is within the budget.
        step_seconds: The predicted time of the forward and backward pass.
        plain_peak_bytes: The predicted peak without recomputation.
        plain_seconds: The predicted time without recomputation.
        bound_seconds: A lower bound on the time of plans within the peak solved for, in the model solved.
        regions: The recomputed regions. Further calls of a module have "@1", "@2" after its FQN.
        recomputed_ops: The number of recomputed operators.
        where: The operator that runs at the peak.
    """

    graph: str
    budget_bytes: int
    peak_bytes: int
    peak_upper_bytes: int
    step_seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    bound_seconds: float
    regions: tuple[Region, ...]
    recomputed_ops: int
    where: str

    @property
    def gap(self) -> float:
        """The share of the time above its lower bound."""
        return max(0.0, 1 - self.bound_seconds / self.step_seconds)


class CompileBackend:
    """A back end of `torch.compile`; see `compile_backend`.

    Attributes:
        plans: The plan of each graph with a backward pass, in the order of compilation.
    """

    def __init__(self, budget: int | float | str, reserved_bytes: int | str, lowering: str) -> None:
        if lowering not in ("inductor", "eager"):
            raise UsageError(f"lowering={lowering!r} is unknown: use 'inductor' or 'eager'")
        parse_budget(budget, _LARGEST_DEVICE)
        self.budget, self.lowering = budget, lowering
        self.reserved_bytes = parse_budget(reserved_bytes, _LARGEST_DEVICE) if reserved_bytes else 0
        self.plans: list[CompiledPlan] = []
        self._frames: set[int] = set()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            if self.lowering == "eager":
                return lower_to_eager(module, inputs, self._partition)
            from memfit.compiled import inductor_partition  # takes seconds; `import memfit` must not

            return inductor_partition.lower(module, inputs, self._partition)
        except Exception as e:
            error = _memfit_error(e)
            if error is None:
                raise
            return _raising(error)  # raised here, the compiler would wrap it

    def _partition(self, module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        if has_symbols(module.graph):
            raise UsageError(
                "memfit.compile_backend plans for fixed shapes, and this graph has dynamic ones: call torch.compile"
                " with dynamic=False"
            )
        self._count_graphs()
        name = str(current_compile_id())
        graphs = _layout_variants(module.graph) if self.lowering == "inductor" else [module.graph]
        planners = [GraphPlanner(graph, forward_outputs, name, self.lowering == "inductor") for graph in graphs]
        planner, plan = _fastest_of(planners, self._budget_bytes(planners[0].device))
        self.plans.append(plan)
        planner.apply(plan.regions)
        module.graph = planner.graph
        return split(module, forward_outputs)

    def _budget_bytes(self, device: Device) -> int:
        total = parse_budget(self.budget, device.usable_bytes)
        if total <= self.reserved_bytes:
            raise BudgetError(
                f"budget={self.budget!r} is {format_bytes(total)}, of which reserved_bytes= takes"
                f" {format_bytes(self.reserved_bytes)}: nothing is left for the step"
            )
        return total - self.reserved_bytes

    def _count_graphs(self) -> None:
        """Warn when a second graph is planned: each is planned without the others."""
        compiled = current_compile_id()
        frame = compiled.frame_id if compiled is not None and compiled.frame_id is not None else 0
        if self._frames and frame not in self._frames:
            warnings.warn(
                f"memfit.compile_backend plans graph {compiled} by itself: the model is compiled in several graphs,"
                f" each within budget={self.budget!r}. Give the bytes that the others hold as reserved_bytes=, or"
                " compile with fullgraph=True to see where the graph breaks",
                stacklevel=2,
            )
        self._frames.add(frame)


def compile_backend(
    budget: int | float | str, *, reserved_bytes: int | str = 0, lowering: str = "inductor"
) -> CompileBackend:
    """Return a back end for `torch.compile` whose graphs train within a budget: `torch.compile(model, backend=...)`.

    For each graph by itself it solves for the fastest recomputation whose peak over the forward and backward pass is
    within the budget. The peak counts parameters, buffers, inputs, gradients, saved tensors and temporaries. Random
    numbers are never drawn again. `backend.plans` has the plans.

    Args:
        budget: Bytes, a string with a unit ("2GiB"), or a share of the device ("90%").
        reserved_bytes: Bytes held beside the graph (the optimizer's state, a loss outside of the model, other graphs),
            a number or a string with a unit.
        lowering: "inductor", or "eager" to run the operators as they are.

    Raises:
        BudgetError: The budget says no number of bytes.
        UsageError: The lowering is unknown.
        InfeasibleError: No plan fits; raised when the compiled model is first called.
    """
    return CompileBackend(budget, reserved_bytes, lowering)


def lower_to_eager(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile a graph to run its operators eagerly, as PyTorch's "aot_eager" does."""

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    return aot_autograd_eager(module, inputs, partition_fn)


def _memfit_error(error: BaseException | None) -> MemfitError | None:
    while error is not None and not isinstance(error, MemfitError):
        error = error.__cause__ or error.__context__
    return error


def _raising(error: MemfitError) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _layout_variants(graph: fx.Graph) -> list[fx.Graph]:
    """Return a graph, and a copy with channels last where it has convolutions."""
    show_in_any_layout(graph)
    hold_masks_as_bytes(graph, mark_kept)
    copied, _ = _copied(graph)
    return [graph, copied] if lay_out_channels_last(copied) else [graph]


@dataclass(frozen=True)
class _Trial:
    """A solver's choice, applied to a copy of the graph, with its prediction."""

    choice: Choice
    regions: tuple[Region, ...]
    timeline: Timeline
    recomputed_ops: int


class GraphPlanner:
    """A planner of the recomputations in the backward pass of a joint graph, which `apply` changes."""

    def __init__(self, graph: fx.Graph, forward_outputs: int, name: str, fused: bool) -> None:
        self.graph, self.forward_outputs, self.name = graph, forward_outputs, name
        self.fused = fused
        self.joint = self._read(graph)
        if fused:
            self._inline()
        with disable_current_modes():  # nothing can be measured under the compiler's fake tensors
            self.device = find_device(self.joint.trace.device)
            alone = _compiled_costs(costs_of([self.joint.operators_alone()], self.device), fused)
        self.costs = _with_kernel_costs(alone, self.joint)
        self.held_bytes = sum(storage.nbytes for storage in self.joint.trace.storages if storage.birth < 0)
        regions = Regions(self.joint.trace)
        self.problem = build(regions, self.costs, options(regions, self.costs))
        self.solver = Solver(self.problem)
        self.trials: list[_Trial] = []

    def _read(self, graph: fx.Graph) -> JointGraph:
        return read(graph, self.forward_outputs, self.name, self.fused)

    def _inline(self) -> None:
        recomputed = inlined_nodes(self.joint)
        parts = [GraphRegion(recomputed, users) for users in users_by_call(self.joint)]
        rematerialize(self.graph, parts, self.joint.storages, list(self.joint.call_of), mark_inlined)
        self.graph.eliminate_dead_code()
        self.joint = self._read(self.graph)
        for node, computed in list(computed_per_loop(self.joint)):
            compute_for_each(node, computed, mark_for_each)
        self.joint = self._read(self.graph)

    def plan(self, budget_bytes: int) -> CompiledPlan:
        """Return the fastest plan within a budget.

        Raises:
            InfeasibleError: No plan fits.
        """
        plain = simulate(self.joint.trace, self.costs)
        trial = self._fastest(self._limit_bytes(budget_bytes))
        if trial is None:
            raise self._infeasible(budget_bytes)
        return CompiledPlan(
            graph=self.name,
            budget_bytes=budget_bytes,
            peak_bytes=trial.timeline.peak_bytes,
            peak_upper_bytes=self._upper_bytes(trial.timeline.peak_bytes),
            step_seconds=trial.timeline.step_seconds,
            plain_peak_bytes=plain.peak_bytes,
            plain_seconds=plain.step_seconds,
            bound_seconds=trial.choice.bound,
            regions=trial.regions,
            recomputed_ops=trial.recomputed_ops,
            where=trial.timeline.where(),
        )

    def _upper_bytes(self, peak_bytes: int) -> int:
        """Return the upper end of the interval around a predicted peak."""
        if not self.fused:
            return math.ceil(peak_bytes * (1 + self.costs.peak_error))
        return math.ceil(peak_bytes + (peak_bytes - self.held_bytes) * _FUSED_ERROR)

    def _limit_bytes(self, budget_bytes: int) -> int:
        """Return the predicted peak whose interval ends at a budget."""
        if not self.fused:
            return int(budget_bytes / (1 + self.costs.peak_error))
        return int((budget_bytes + self.held_bytes * _FUSED_ERROR) / (1 + _FUSED_ERROR))

    def _fastest(self, limit_bytes: int) -> _Trial | None:
        """Return the fastest trial within a limit: the target is corrected by the difference of graph and model."""
        target, bound = limit_bytes, self.problem.plain_seconds
        fitting_bytes, failing_bytes = 0, 0
        deadline = thread_time() + _SOLVE_SECONDS
        for tolerance in (EXACT, *[FINE] * (_ROUNDS - 1)):
            choice = self.solver.fastest(target, tolerance, deadline - thread_time())
            if choice is None:
                break
            if target == limit_bytes:
                bound = choice.bound  # the bound of a lower target does not hold for the limit
            trial = self._try(choice)
            over = trial.timeline.peak_bytes - limit_bytes
            if over > 0:
                failing_bytes = target
            else:
                fitting_bytes = target
                if choice.seconds <= self.problem.plain_seconds:
                    break
            # Bisect once one target fits and another one does not.
            target = (fitting_bytes + failing_bytes) // 2 if fitting_bytes and failing_bytes else target - over
            if abs(target - fitting_bytes) < _CLOSE * limit_bytes or thread_time() > deadline:
                break
        if not fitting_bytes:
            bound = max(bound, self._try_lowest(limit_bytes))
        # Trials for other budgets count too, so that a larger one never takes longer.
        fitting = (trial for trial in self.trials if trial.timeline.peak_bytes <= limit_bytes)
        fastest = min(fitting, key=lambda trial: trial.timeline.step_seconds, default=None)
        return fastest and replace(fastest, choice=replace(fastest.choice, bound=bound))

    def _try_lowest(self, limit_bytes: int) -> float:
        """Try the plans with the lowest peaks; return a lower bound on the time where these are over the limit.

        A recomputation just before its use takes less than the model says: any of these plans may fit. Where the excess
        is small and the lowest peak is not proven, they are solved for again with more time.
        """
        bound = 0.0
        for seconds in _LEANEST_SECONDS:
            leanest, least_kept = self.solver.leanest(seconds), self.solver.least_kept(_SOLVE_SECONDS / 2)
            fastest = self.solver.fastest(leanest.peak_bytes, FINE, _SOLVE_SECONDS / 2)
            trials = [self._try(choice) for choice in (leanest, least_kept, fastest) if choice]
            if fastest and leanest.peak_bytes > limit_bytes:
                bound = fastest.bound
            lowest_bytes = min(trial.timeline.peak_bytes for trial in trials)
            if leanest.status == "optimal" or not limit_bytes < lowest_bytes <= limit_bytes * (1 + _LITTLE):
                break
        return bound

    def _try(self, choice: Choice) -> _Trial:
        regions = self.problem.regions(choice.x)
        copied, nodes = _copied(self.graph)
        self._rewrite(copied, regions, nodes)
        copied.eliminate_dead_code()
        joint = self._read(copied)
        recomputed_ops = sum(op.phase == "recompute" for op in joint.trace.ops)
        trial = _Trial(choice, regions, simulate(joint.trace, _with_kernel_costs(self.costs, joint)), recomputed_ops)
        self.trials.append(trial)
        return trial

    def _infeasible(self, budget_bytes: int) -> InfeasibleError:
        lowest = min((trial.timeline for trial in self.trials), key=lambda timeline: timeline.peak_bytes)
        lowest_bytes = self._upper_bytes(lowest.peak_bytes)
        return InfeasibleError(
            f"graph {self.name} does not fit budget= less reserved_bytes=, {format_bytes(budget_bytes)}: the lowest"
            f" peak of any plan tried is at most {format_bytes(lowest_bytes)}, at {lowest.where()}. Give a larger"
            " budget= or smaller batches",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest_bytes,
            where=lowest.where(),
        )

    def apply(self, regions: Sequence[Region]) -> None:
        """Change the graph so that its backward pass recomputes regions."""
        self._rewrite(self.graph, regions, lambda node: node)
        self.graph.eliminate_dead_code()
        joint = self._read(self.graph)
        if self.fused:
            for product in list(_early_products(joint)):
                keep_apart(product)
            joint = self._read(self.graph)
        for index, nodes in enumerate(joint.ops):
            for node in joint.call_of.keys() & nodes:
                node.meta[KERNEL] = index

    def _rewrite(self, graph: fx.Graph, regions: Sequence[Region], nodes: Callable[[fx.Node], fx.Node]) -> None:
        storages = {nodes(node): made for node, made in self.joint.storages.items()}
        backward = [nodes(node) for node in self.joint.call_of]
        rematerialize(graph, _graph_regions(self.joint, regions, nodes), storages, backward, mark_recomputed)


def _fastest_of(planners: Sequence[GraphPlanner], budget_bytes: int) -> tuple[GraphPlanner, CompiledPlan]:
    """Return the fastest plan for any form of a graph, and its planner; where none fits, raise the leanest's error."""
    plans, errors = list[tuple[GraphPlanner, CompiledPlan]](), list[InfeasibleError]()
    for planner in planners:
        try:
            plans.append((planner, planner.plan(budget_bytes)))
        except InfeasibleError as e:
            errors.append(e)
    if not plans:
        raise min(errors, key=lambda e: e.lowest_peak_bytes)
    planner, plan = min(plans, key=lambda pair: pair[1].step_seconds)
    bound_seconds = min(plan.bound_seconds for _, plan in plans)
    return planner, msgspec.structs.replace(plan, bound_seconds=bound_seconds)


def _early_products(joint: JointGraph) -> Iterator[fx.Node]:
    """Yield matrix products to keep apart from the later sums that they go into.

    Inductor would multiply where it adds, and keep the product's inputs until then, which are larger than its output:
    for the weight gradient of a head that shares the embedding's weight, the logits' gradient until the end.
    """
    storages = joint.trace.storages
    position = {node: index for index, nodes in enumerate(joint.ops) for node in nodes}
    for node, index in position.items():
        users = list(node.users)
        if node.target is not torch.ops.aten.mm.default or [u.target for u in users] != [torch.ops.aten.add.Tensor]:
            continue
        taken = {s for given in node.all_input_nodes for s in joint.storages[given]}
        held_bytes = sum(storages[s].nbytes for s in taken if index <= storages[s].death < position[users[0]])
        made_bytes = sum(storages[s].nbytes for s in joint.storages[node])
        if held_bytes > made_bytes and len(users[0].all_input_nodes) == 2 and not users[0].kwargs:
            yield node


def _with_kernel_costs(costs: CostTable, joint: JointGraph) -> CostTable:
    """Return costs with those of fused kernels, each as slow as the slowest of its operators."""
    ops = dict(costs.ops)
    for text, members in joint.parts.items():
        if text not in ops:
            library = len(members) == 1 and '"op":"aten.' in members[0]
            # Inductor's own code has no workspace; bytes written in place count as a workspace below zero.
            workspace = costs.of(members[0]).workspace_bytes if library else 0
            seconds = max((costs.of(member).seconds for member in members), default=0.0)
            ops[text] = OpCost(seconds, workspace - joint.in_place[text], False)
    return msgspec.structs.replace(costs, ops=ops)


def _compiled_costs(costs: CostTable, fused: bool) -> CostTable:
    """Return costs without the overhead of eager checkpointing, and of dispatch where operators are fused."""
    dispatch_seconds = 0.0 if fused else costs.dispatch_seconds
    return msgspec.structs.replace(
        costs, checkpoint_seconds=0.0, selective_op_seconds=0.0, dispatch_seconds=dispatch_seconds
    )


def _copied(graph: fx.Graph) -> tuple[fx.Graph, Callable[[fx.Node], fx.Node]]:
    copied, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, nodes.__getitem__)
    return copied, nodes.__getitem__


def _graph_regions(
    joint: JointGraph, regions: Sequence[Region], nodes: Callable[[fx.Node], fx.Node]
) -> list[GraphRegion]:
    """Return regions as nodes of the graph, smallest first."""
    spans = [(*joint.span(region.modules), region) for region in regions]
    graph_regions = []
    for start, end, region in sorted(spans, key=lambda span: span[1] - span[0]):
        recomputed = frozenset(map(nodes, joint.recomputable(start, end, region.keep)))
        users = frozenset(map(nodes, joint.gradients(start, end)))
        graph_regions.append(GraphRegion(recomputed, users, tuple(region.modules)))
    return graph_regions
