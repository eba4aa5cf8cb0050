"""`torch.compile` with a budget in bytes: a solver chooses the recomputations of each compiled graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import msgspec
from torch import fx

from memfit._torch.compilers import current_compile_id
from memfit._torch.dispatch import disable_current_modes
from memfit.compiled.joint_graph import has_symbols
from memfit.compiled.joint_rewriter import FUSED_ERROR, JointRewriter, copied, layout_variants
from memfit.compiled.lowering import lower_to_eager, lower_to_inductor, raising_own
from memfit.compiled.rematerialization import split
from memfit.errors import BudgetError, InfeasibleError, UsageError
from memfit.hardware.host import find_device
from memfit.ir.device import Device
from memfit.ir.operator_costs import CostTable
from memfit.ir.remat import Region, Regions
from memfit.ir.simulate import simulate
from memfit.ir.timeline import Timeline
from memfit.planner.prediction import costs_of
from memfit.report.verdict import infeasible_verdict
from memfit.solver.candidates import options
from memfit.solver.milp import EXACT, FINE, Choice, Solver
from memfit.solver.problem import build
from memfit.units import format_bytes, parse_budget

_ROUNDS = 6
_SOLVE_SECONDS = 6.0  # of the thread's time, for all rounds together
_LEANEST_SECONDS = (10.0, 30.0)
_LITTLE = 0.02  # share of the limit up to which an excess is solved for again with more time
_CLOSE = 0.01  # share of the limit within which two targets count as equal
_LARGEST_DEVICE = 1 << 62


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
        lower = lower_to_eager if self.lowering == "eager" else lower_to_inductor
        return raising_own(lambda: lower(module, inputs, self._partition))

    def _partition(self, module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        if has_symbols(module.graph):
            raise UsageError(
                "compile_backend plans for fixed shapes, and this graph has dynamic ones: call torch.compile"
                " with dynamic=False"
            )
        self._count_graphs()
        name = str(current_compile_id())
        graphs = layout_variants(module.graph) if self.lowering == "inductor" else [module.graph]
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
                f"budget={self.budget!r} is {format_bytes(total)}, and reserved_bytes= is"
                f" {format_bytes(self.reserved_bytes)}: nothing is left for the step"
            )
        return total - self.reserved_bytes

    def _count_graphs(self) -> None:
        """Warn when a second graph is planned: each is planned without the others."""
        compiled = current_compile_id()
        frame = compiled.frame_id if compiled is not None and compiled.frame_id is not None else 0
        if self._frames and frame not in self._frames:
            warnings.warn(
                f"compile_backend plans graph {compiled} by itself: the model is compiled in several graphs,"
                f" each within budget={self.budget!r}. Give the bytes of the other graphs as reserved_bytes=,"
                " or compile with fullgraph=True to see where the graph breaks",
                stacklevel=2,
            )
        self._frames.add(frame)


def compile_backend(
    budget: int | float | str, *, reserved_bytes: int | str = 0, lowering: str = "inductor"
) -> CompileBackend:
    """Return a back end that keeps training within a budget: `torch.compile(model, backend=...)`.

    For each graph by itself it solves for the fastest recomputation whose peak over the forward and backward pass is
    within the budget. The peak counts parameters, buffers, inputs, gradients, saved tensors and temporaries. Random
    numbers are never drawn again. `backend.plans` has the plans.

    Args:
        budget: Bytes, a string with a unit ("2GiB"), or a share of the device ("90%").
        reserved_bytes: Bytes held beside the graph (the optimizer's state, a loss outside of the model, other graphs),
            a number or a string with a unit.
        lowering: "inductor", or "eager" to run the operators as they are.

    Raises:
        BudgetError: `budget` can't be parsed.
        UsageError: The lowering is unknown.
        InfeasibleError: No plan fits; raised when the compiled model is first called.
    """
    return CompileBackend(budget, reserved_bytes, lowering)


@dataclass(frozen=True)
class _Trial:
    """A solver's choice, applied to a copy of the graph, with its prediction."""

    choice: Choice
    regions: tuple[Region, ...]
    timeline: Timeline
    recomputed_ops: int


class GraphPlanner(JointRewriter):
    """A planner of the recomputations in the backward pass of a joint graph."""

    def __init__(self, graph: fx.Graph, forward_outputs: int, name: str, fused: bool) -> None:
        super().__init__(graph, forward_outputs, name, fused)
        with disable_current_modes():  # nothing can be measured under the compiler's fake tensors
            self.device = find_device(self.joint.trace.device)
            self.costs = _compiled_costs(costs_of([self.joint.operators_alone()], self.device), fused)
        self.held_bytes = sum(storage.nbytes for storage in self.joint.trace.storages if storage.birth < 0)
        regions = Regions(self.joint.trace)
        self.problem = build(regions, self.costs, options(regions, self.costs))
        self.solver = Solver(self.problem)
        self.trials: list[_Trial] = []

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
        return math.ceil(peak_bytes + (peak_bytes - self.held_bytes) * FUSED_ERROR)

    def _limit_bytes(self, budget_bytes: int) -> int:
        """Return the predicted peak whose interval ends at a budget."""
        if not self.fused:
            return int(budget_bytes / (1 + self.costs.peak_error))
        return int((budget_bytes + self.held_bytes * FUSED_ERROR) / (1 + FUSED_ERROR))

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
        copy, nodes = copied(self.graph)
        self.rewrite(copy, regions, nodes)
        copy.eliminate_dead_code()
        joint = self.ordered(copy)
        recomputed_ops = sum(op.phase == "recompute" for op in joint.trace.ops)
        trial = _Trial(choice, regions, simulate(joint.trace, self.costs), recomputed_ops)
        self.trials.append(trial)
        return trial

    def _infeasible(self, budget_bytes: int) -> InfeasibleError:
        lowest = min((trial.timeline for trial in self.trials), key=lambda timeline: timeline.peak_bytes)
        lowest_bytes = self._upper_bytes(lowest.peak_bytes)
        return InfeasibleError(
            f"{infeasible_verdict(budget_bytes, lowest_bytes)}\nThe budget of graph {self.name} is budget="
            f" minus reserved_bytes=. Its lowest peak is at the {lowest.where()}. Give a larger budget= or"
            " smaller batches",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest_bytes,
            where=lowest.where(),
        )


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


def _compiled_costs(costs: CostTable, fused: bool) -> CostTable:
    """Return costs without the overhead of eager checkpointing, and of dispatch where operators are fused."""
    dispatch_seconds = 0.0 if fused else costs.dispatch_seconds
    return msgspec.structs.replace(
        costs, checkpoint_seconds=0.0, selective_op_seconds=0.0, dispatch_seconds=dispatch_seconds
    )
