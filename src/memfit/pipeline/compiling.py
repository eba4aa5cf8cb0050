"""`torch.compile` with a budget in bytes: what a compiled graph keeps for its backward pass is solved for."""

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
from torch.utils._python_dispatch import _disable_current_modes

from memfit.apply.compiled import (
    KERNEL,
    GraphRegion,
    compute_for_each,
    keep_apart,
    lower_to_eager,
    lower_to_inductor,
    rematerialize,
    split,
)
from memfit.apply.layouts import lay_out_channels_last, show_in_any_layout
from memfit.apply.masks import hold_masks_as_bytes
from memfit.capture.inlining import inlined, mark_for_each, mark_inlined, reduced_too, users_by_call
from memfit.capture.joint import Joint, has_symbols, mark_kept, mark_recomputed, read
from memfit.devices.host import find_device
from memfit.errors import BudgetError, InfeasibleError, MemfitError, UsageError
from memfit.ir.cost import CostTable, OpCost
from memfit.ir.device import Device
from memfit.ir.remat import Region, Regions
from memfit.ir.simulate import simulate
from memfit.ir.timeline import Timeline
from memfit.pipeline.predicting import costs_of
from memfit.solve.candidates import options
from memfit.solve.milp import EXACT, FINE, Choice, Solver
from memfit.solve.problem import build
from memfit.units import format_bytes, parse_budget

_ROUNDS = 6
_SOLVE_SECONDS = 6.0
"""Of the thread's time, for all rounds together."""
_LEANEST_SECONDS = (10.0, 30.0)
_LITTLE = 0.02
"""What may be missing, as a share of the limit, for the lowest peak to be looked for again with more time."""
_CLOSE = 0.01
"""Targets as near to each other as that, as a share of the limit, are not told apart."""
_FUSED_ERROR = 0.05
"""What Inductor may take beyond a prediction, as a share of what the step adds to what it starts with: it orders
kernels by itself. At most 3.5 % was seen, on four models at four budgets each."""
_LARGEST_DEVICE = 1 << 62


class CompiledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen for one compiled graph.

    Attributes:
        graph: The compiler's name for it.
        budget_bytes: What it may take, `reserved_bytes` taken off.
        peak_bytes: Its predicted peak, parameters, inputs and gradients included.
        peak_upper_bytes: Upper end of the interval around it, which is held against the budget.
        step_seconds: The predicted time of its forward and backward pass.
        plain_peak_bytes: The peak, were nothing computed again.
        plain_seconds: The time, were nothing computed again.
        bound_seconds: A lower bound on the time of plans within the peak solved for, in the model solved.
        regions: What is computed again. A module that is called again has "@1", "@2" after its FQN.
        recomputed_ops: How many operators run again.
        where: What runs at the peak.
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
        """Share of the time that lies above the bound."""
        return max(0.0, 1 - self.bound_seconds / self.step_seconds)


class CompileBackend:
    """A back end of `torch.compile`; see `compile_backend`.

    Attributes:
        plans: What was chosen for each graph with a backward pass, in the order of compilation.
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
        lower = lower_to_inductor if self.lowering == "inductor" else lower_to_eager
        try:
            return lower(module, inputs, self._partition)
        except Exception as e:
            error = _memfit_error(e)
            if error is None:
                raise
            return _failing(error)  # raised here, it would come out as the compiler's

    def _partition(self, module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        if has_symbols(module.graph):
            raise UsageError(
                "memfit.compile_backend plans for one set of shapes, and this graph has dynamic ones:"
                " call torch.compile with dynamic=False"
            )
        self._count_graphs()
        name = str(torch._guards.CompileContext.current_compile_id())
        graphs = _in_layouts(module.graph) if self.lowering == "inductor" else [module.graph]
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
        """Warn when a second graph is planned: they don't know of one another."""
        compiled = torch._guards.CompileContext.current_compile_id()
        frame = compiled.frame_id if compiled is not None and compiled.frame_id is not None else 0
        if self._frames and frame not in self._frames:
            warnings.warn(
                f"memfit.compile_backend plans graph {compiled} by itself: the model is compiled in several graphs,"
                f" each within budget={self.budget!r}. Give what the others hold meanwhile as reserved_bytes=, or"
                " compile with fullgraph=True to see where the graph breaks",
                stacklevel=2,
            )
        self._frames.add(frame)


def compile_backend(
    budget: int | float | str, *, reserved_bytes: int | str = 0, lowering: str = "inductor"
) -> CompileBackend:
    """Return a back end for `torch.compile` whose graphs train within a budget: `torch.compile(model, backend=...)`.

    For each graph it solves for the fastest recomputation whose peak over the forward and backward pass is within
    the budget. All that the graph sees counts: parameters, buffers, inputs, gradients, what is saved, temporaries. Each
    graph is planned by itself. Random numbers are never drawn again. `backend.plans` says what was chosen.

    Args:
        budget: Bytes, a string with a unit ("2GiB"), or a share of the device ("90%").
        reserved_bytes: What is held beside the graph (the optimizer's state, what a loss outside of the model holds,
            other graphs), in bytes or with a unit.
        lowering: "inductor", or "eager" to run the operators as they are.

    Raises:
        BudgetError: The budget says no number of bytes.
        UsageError: There is no such lowering.
        InfeasibleError: When the compiled model is first called: nothing fits.
    """
    return CompileBackend(budget, reserved_bytes, lowering)


def _memfit_error(error: BaseException | None) -> MemfitError | None:
    while error is not None and not isinstance(error, MemfitError):
        error = error.__cause__ or error.__context__
    return error


def _failing(error: MemfitError) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _in_layouts(graph: fx.Graph) -> list[fx.Graph]:
    """Return a graph as it is, and where it has convolutions, with their channels last."""
    show_in_any_layout(graph)
    hold_masks_as_bytes(graph, mark_kept)
    copied, _ = _copied(graph)
    return [graph, copied] if lay_out_channels_last(copied) else [graph]


@dataclass(frozen=True)
class _Tried:
    """A choice, applied to a copy of the graph and predicted."""

    choice: Choice
    regions: tuple[Region, ...]
    timeline: Timeline
    recomputed_ops: int


class GraphPlanner:
    """Chooses what the backward pass of a joint graph computes again.

    Args:
        graph: The joint graph, which `apply` changes.
        forward_outputs: How many of its outputs the forward pass returns.
        name: What to call it.
        fused: Whether Inductor compiles it.
    """

    def __init__(self, graph: fx.Graph, forward_outputs: int, name: str, fused: bool) -> None:
        self.graph, self.forward_outputs, self.name = graph, forward_outputs, name
        self.fused = fused
        self.joint = self._read(graph)
        if fused:
            self._inline()
        with _disable_current_modes():  # the compiler's fake tensors, under which nothing can be measured
            self.device = find_device(self.joint.trace.device)
            alone = _compiled_costs(costs_of([self.joint.operators_alone()], self.device), fused)
        self.costs = _with_kernels(alone, self.joint)
        self.held_bytes = sum(storage.nbytes for storage in self.joint.trace.storages if storage.birth < 0)
        regions = Regions(self.joint.trace)
        self.problem = build(regions, self.costs, options(regions, self.costs))
        self.solver = Solver(self.problem)
        self.tried: list[_Tried] = []

    def _read(self, graph: fx.Graph) -> Joint:
        return read(graph, self.forward_outputs, self.name, self.fused)

    def _inline(self) -> None:
        again = inlined(self.joint)
        parts = [GraphRegion(again, users) for users in users_by_call(self.joint)]
        rematerialize(self.graph, parts, self.joint.storages, list(self.joint.call_of), mark_inlined)
        self.graph.eliminate_dead_code()
        self.joint = self._read(self.graph)
        for node, computed in list(reduced_too(self.joint)):
            compute_for_each(node, computed, mark_for_each)
        self.joint = self._read(self.graph)

    def plan(self, budget_bytes: int) -> CompiledPlan:
        """Return the fastest plan within a budget.

        Raises:
            InfeasibleError: Nothing fits.
        """
        plain = simulate(self.joint.trace, self.costs)
        found = self._fastest(self._limit_bytes(budget_bytes))
        if found is None:
            raise self._infeasible(budget_bytes)
        return CompiledPlan(
            graph=self.name,
            budget_bytes=budget_bytes,
            peak_bytes=found.timeline.peak_bytes,
            peak_upper_bytes=self._upper_bytes(found.timeline.peak_bytes),
            step_seconds=found.timeline.step_seconds,
            plain_peak_bytes=plain.peak_bytes,
            plain_seconds=plain.step_seconds,
            bound_seconds=found.choice.bound,
            regions=found.regions,
            recomputed_ops=found.recomputed_ops,
            where=found.timeline.where(),
        )

    def _upper_bytes(self, peak_bytes: int) -> int:
        """Return the upper end of the interval around a predicted peak, which is held against the budget."""
        if not self.fused:
            return math.ceil(peak_bytes * (1 + self.costs.peak_error))
        return math.ceil(peak_bytes + (peak_bytes - self.held_bytes) * _FUSED_ERROR)

    def _limit_bytes(self, budget_bytes: int) -> int:
        """Return the predicted peak whose interval ends at a budget."""
        if not self.fused:
            return int(budget_bytes / (1 + self.costs.peak_error))
        return int((budget_bytes + self.held_bytes * _FUSED_ERROR) / (1 + _FUSED_ERROR))

    def _fastest(self, limit_bytes: int) -> _Tried | None:
        """Solve for the limit, and again for less or more where the graph takes more or less than the model says.

        Once one target was too much and another one was not, those between are halved.
        """
        target, bound = limit_bytes, self.problem.plain_seconds
        fitting_bytes, failing_bytes = 0, 0
        deadline = thread_time() + _SOLVE_SECONDS
        for tolerance in (EXACT, *[FINE] * (_ROUNDS - 1)):
            choice = self.solver.fastest(target, tolerance, deadline - thread_time())
            if choice is None:
                break
            if target == limit_bytes:
                bound = choice.bound  # those of lower targets are bounds of less
            tried = self._try(choice)
            over = tried.timeline.peak_bytes - limit_bytes
            if over > 0:
                failing_bytes = target
            else:
                fitting_bytes = target
                if choice.seconds <= self.problem.plain_seconds:
                    break
            target = (fitting_bytes + failing_bytes) // 2 if fitting_bytes and failing_bytes else target - over
            if abs(target - fitting_bytes) < _CLOSE * limit_bytes or thread_time() > deadline:
                break
        if not fitting_bytes:
            bound = max(bound, self._try_lowest(limit_bytes))
        # What was tried for other budgets counts too, so that a larger one never takes longer.
        fitting = (tried for tried in self.tried if tried.timeline.peak_bytes <= limit_bytes)
        found = min(fitting, key=lambda tried: tried.timeline.step_seconds, default=None)
        return found and replace(found, choice=replace(found.choice, bound=bound))

    def _try_lowest(self, limit_bytes: int) -> float:
        """Try what has the lowest peak solved for, and return a lower bound on its time where that is over the limit.

        What is computed again just before use takes less than was solved for: any of these may fit. Where little is
        missing, and the lowest peak is not proven, it is solved for again with more time.
        """
        bound = 0.0
        for seconds in _LEANEST_SECONDS:
            leanest, least_kept = self.solver.leanest(seconds), self.solver.least_kept(_SOLVE_SECONDS / 2)
            fastest = self.solver.fastest(leanest.peak_bytes, FINE, _SOLVE_SECONDS / 2)
            found = [self._try(choice) for choice in (leanest, least_kept, fastest) if choice]
            if fastest and leanest.peak_bytes > limit_bytes:
                bound = fastest.bound
            lowest_bytes = min(tried.timeline.peak_bytes for tried in found)
            if leanest.status == "optimal" or not limit_bytes < lowest_bytes <= limit_bytes * (1 + _LITTLE):
                break
        return bound

    def _try(self, choice: Choice) -> _Tried:
        regions = self.problem.regions(choice.x)
        copied, nodes = _copied(self.graph)
        self._rewrite(copied, regions, nodes)
        copied.eliminate_dead_code()
        joint = self._read(copied)
        again = sum(op.phase == "recompute" for op in joint.trace.ops)
        found = _Tried(choice, regions, simulate(joint.trace, _with_kernels(self.costs, joint)), again)
        self.tried.append(found)
        return found

    def _infeasible(self, budget_bytes: int) -> InfeasibleError:
        lowest = min((tried.timeline for tried in self.tried), key=lambda timeline: timeline.peak_bytes)
        lowest_bytes = self._upper_bytes(lowest.peak_bytes)
        return InfeasibleError(
            f"graph {self.name} does not fit budget= less reserved_bytes=, {format_bytes(budget_bytes)}: the lowest"
            f" peak found is at most {format_bytes(lowest_bytes)}, at {lowest.where()}. Give a larger budget= or"
            " smaller batches",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest_bytes,
            where=lowest.where(),
        )

    def apply(self, regions: Sequence[Region]) -> None:
        """Change the graph so that its backward pass computes regions again."""
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
        storages = {nodes(node): found for node, found in self.joint.storages.items()}
        backward = [nodes(node) for node in self.joint.call_of]
        rematerialize(graph, _graph_regions(self.joint, regions, nodes), storages, backward, mark_recomputed)


def _fastest_of(planners: Sequence[GraphPlanner], budget_bytes: int) -> tuple[GraphPlanner, CompiledPlan]:
    """Return the fastest plan of those for several forms of a graph, and its planner.

    Raises:
        InfeasibleError: Nothing fits; the error of the form whose lowest peak is lowest.
    """
    found, errors = list[tuple[GraphPlanner, CompiledPlan]](), list[InfeasibleError]()
    for planner in planners:
        try:
            found.append((planner, planner.plan(budget_bytes)))
        except InfeasibleError as e:
            errors.append(e)
    if not found:
        raise min(errors, key=lambda e: e.lowest_peak_bytes)
    planner, plan = min(found, key=lambda one: one[1].step_seconds)
    bound_seconds = min(one.bound_seconds for _, one in found)
    return planner, msgspec.structs.replace(plan, bound_seconds=bound_seconds)


def _early_products(joint: Joint) -> Iterator[fx.Node]:
    """Yield matrix products that take more that ends before something is added to them than they make.

    Inductor would multiply where it adds, and what the product takes would stay until then: for the gradient of a
    head's weight that the embedding shares, all of the logits' gradient, until the end.
    """
    storages = joint.trace.storages
    position = {node: index for index, nodes in enumerate(joint.ops) for node in nodes}
    for node, index in position.items():
        users = list(node.users)
        if node.target is not torch.ops.aten.mm.default or [u.target for u in users] != [torch.ops.aten.add.Tensor]:
            continue
        taken = {s for given in node.all_input_nodes for s in joint.storages[given]}
        longer = sum(storages[s].nbytes for s in taken if index <= storages[s].death < position[users[0]])
        made = sum(storages[s].nbytes for s in joint.storages[node])
        if longer > made and len(users[0].all_input_nodes) == 2 and not users[0].kwargs:
            yield node


def _with_kernels(costs: CostTable, joint: Joint) -> CostTable:
    """Add the costs of kernels to those of the operators in them: one takes as long as the slowest of these.

    The workspace of PyTorch's own operators was measured; for others Inductor generates code. What a kernel writes in
    place takes no memory beside what it replaces: a workspace below zero.
    """
    ops = dict(costs.ops)
    for text, members in joint.parts.items():
        if text not in ops:
            library = len(members) == 1 and '"op":"aten.' in members[0]
            workspace = costs.of(members[0]).workspace_bytes if library else 0
            seconds = max((costs.of(member).seconds for member in members), default=0.0)
            ops[text] = OpCost(seconds, workspace - joint.in_place[text], False)
    return msgspec.structs.replace(costs, ops=ops)


def _compiled_costs(costs: CostTable, fused: bool) -> CostTable:
    """Leave out what only eager programs take: for checkpointing, and for the dispatch of fused operators."""
    dispatch_seconds = 0.0 if fused else costs.dispatch_seconds
    return msgspec.structs.replace(
        costs, checkpoint_seconds=0.0, selective_op_seconds=0.0, dispatch_seconds=dispatch_seconds
    )


def _copied(graph: fx.Graph) -> tuple[fx.Graph, Callable[[fx.Node], fx.Node]]:
    copied, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, nodes.__getitem__)
    return copied, nodes.__getitem__


def _graph_regions(joint: Joint, regions: Sequence[Region], nodes: Callable[[fx.Node], fx.Node]) -> list[GraphRegion]:
    """Return regions as nodes of the graph, the smallest first."""
    spans = [(*joint.span(region.modules), region) for region in regions]
    found = []
    for start, end, region in sorted(spans, key=lambda span: span[1] - span[0]):
        again = frozenset(map(nodes, joint.again(start, end, region.keep)))
        users = frozenset(map(nodes, joint.gradients(start, end)))
        found.append(GraphRegion(again, users, tuple(region.modules)))
    return found
