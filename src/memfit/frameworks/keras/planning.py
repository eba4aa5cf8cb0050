"""Plans for Keras: layers are measured, the same solver as for PyTorch chooses, and the applied plan is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from memfit.errors import InfeasibleError, PlanMismatchError
from memfit.frameworks.keras.graph import Graph, graph_of
from memfit.frameworks.keras.memory import default_device, measured_peak, peak_of
from memfit.frameworks.keras.problem import problem_of
from memfit.frameworks.keras.profile import profile
from memfit.frameworks.keras.recompute import Run, recomputed
from memfit.frameworks.keras.tensorflow import keras, tf
from memfit.frameworks.keras.workload import Workload, fingerprint
from memfit.ir.plan import Candidate, Levers, LeverUse, Plan, Prediction, Solution
from memfit.levers import registry
from memfit.report.verdict import infeasible_verdict
from memfit.solver.frontier import Combination, frontier
from memfit.units import format_bytes, format_seconds, read_budget
from memfit.version import __version__

_OVERESTIMATE = 0.1  # share by which a predicted peak may be over the budget for its plan to be measured all the same
_MEASURED_STEPS = 2
_TRACES, _ALLOWANCE, _ALLOWANCE_OF_TRACES = 3, 0.03, 0.1  # see `Planner.allowance`

Progress = Callable[[str, int, int | None], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


def plan(
    workload: Workload,
    *,
    budget: int | float | str,
    points: int = 10,
    time_limit_seconds: float = 6.0,
    progress: Progress = silent,
) -> Plan:
    """Choose the layers to recompute for the fastest step with a measured peak within the budget.

    memfit measures each layer by itself on the batch: the bytes that its backward pass needs, and its times. The solver
    for PyTorch's plans makes the frontier of time and memory from them. memfit applies and measures plans of the
    frontier, the fastest first, until one fits.

    Args:
        workload: The step. Afterwards its weights and statistics are restored.
        budget: Memory that TensorFlow may allocate in the step, added to its memory before (weights, optimizer state,
            batch): bytes, a string with a unit ("200MiB"), or a share of the plain step's peak ("0.5x"), which is
            measured then.
        points: Budgets that the frontier is solved for.
        time_limit_seconds: Approximate time limit of the solver.
        progress: Called with (stage, done, total).

    Raises:
        BudgetError: `budget` can't be parsed.
        InfeasibleError: No plan found fits.
        UsageError: Keras runs on another backend, or TensorFlow does not count the device's memory.
        WorkloadError: memfit can't see the layer calls of the model.
    """
    read_budget(budget, of_device=False)
    return Planner(workload, points, time_limit_seconds, progress).plan(budget)


def apply(plan: Plan, model: Any) -> Any:
    """Return a model of the same layers and weights, with the recomputation of a plan.

    Raises:
        PlanMismatchError: The plan was made for another model, or not for Keras.
        WorkloadError: memfit can't see the layer calls of the model.
    """
    graph = graph_of(model)
    if plan.fingerprint != fingerprint(graph):
        raise PlanMismatchError(
            f"the plan was made for the workload {plan.workload!r} with the fingerprint {plan.fingerprint}, not for the"
            f" model {graph.name!r} with {fingerprint(graph)}: plan again with memfit.keras.plan"
        )
    return _applied(model, graph, plan.levers)


def _applied(model: Any, graph: Graph, levers: Levers) -> Any:
    place = {unit.name: index for index, unit in enumerate(graph.units)}
    runs: list[Run] = [(place[r.modules[0]], place[r.modules[-1]] + 1) for r in levers.regions]
    return recomputed(model, graph, runs, f"{graph.name}_planned") if runs else model


@dataclass
class Planner:
    """A workload with its layers measured and its frontier solved: plans for many budgets.

    A larger budget never gets a slower plan, as predicted: the frontier is the same for all of them, and the search
    begins further towards its fast end.
    """

    workload: Workload
    points: int = 10
    time_limit_seconds: float = 6.0
    progress: Progress = silent
    measured: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = default_device()
        self.graph = graph_of(self.workload.model)
        self.costs = profile(
            self.workload, self.graph, self.device, lambda done, total: self.progress("measure layers", done, total)
        )
        started = time.monotonic()
        problem = problem_of(self.graph, self.costs, self.workload.run_eagerly)
        levers = Levers(microbatch_size=self.workload.batch_size)
        self.frontier = frontier(
            [Combination(levers, problem, self._uses)], self.points, time_limit_seconds=self.time_limit_seconds
        )
        self.solve_seconds = time.monotonic() - started

    @property
    def allowance(self) -> float:
        """The share by which the peaks of equal steps differ.

        TensorFlow's allocator counts the blocks that it gives, which may be larger than what was asked for. It runs the
        operators of a function in an order that differs from trace to trace, and with several threads from step to
        step.
        """
        return _ALLOWANCE if self.workload.run_eagerly else _ALLOWANCE_OF_TRACES

    def plan(self, budget: int | float | str) -> Plan:
        """Return the fastest plan of the frontier whose measured peak fits a budget."""
        read = read_budget(budget, of_device=False)
        plain_bytes = self.upper_bytes(0) if read.of else None
        budget_bytes = read.nbytes(plain_bytes=plain_bytes)
        share = read.share_text("", None, plain_bytes) if plain_bytes is not None else ""
        likely = budget_bytes / (1 - _OVERESTIMATE)
        last = len(self.frontier) - 1
        first = next((i for i, c in enumerate(self.frontier) if c.peak_bytes <= likely), last)
        for index in range(first, last + 1):
            self.progress("measure plans", index - first, last + 1 - first)
            upper = self.upper_bytes(index)
            if upper is not None and upper <= budget_bytes:
                return self._as_plan(index, upper, budget_bytes, share)
        raise self._infeasible(budget_bytes)

    def upper_bytes(self, index: int) -> int | None:
        """Return the measured peak of a plan of the frontier, with an allowance; None where memory ran out."""
        if index not in self.measured:
            model = _applied(self.workload.model, self.graph, self.frontier[index].levers)
            before = [(v, tf.convert_to_tensor(v.value)) for v in self.workload.model.non_trainable_variables]
            gc.collect()  # what is left of other models would be between free blocks
            try:
                peaks = [self._peak_bytes(model) for _ in range(1 if self.workload.run_eagerly else _TRACES)]
                self.measured[index] = int(max(peaks) * (1 + self.allowance))
            except tf.errors.ResourceExhaustedError:
                self.measured[index] = None
            for variable, value in before:
                variable.assign(value)
        return self.measured[index]

    def _peak_bytes(self, model: Any) -> int:
        """Return the largest peak of some steps, in a function that is traced anew."""
        step = self.workload.step(model)
        return max([measured_peak(step, self.device), *(peak_of(step, self.device) for _ in range(_MEASURED_STEPS))])

    def _uses(self, levers: Levers) -> tuple[LeverUse, ...]:
        """Return the levers that are used, in words: a function's operators may be fused otherwise where runs end."""
        uses = registry.uses(levers, self.workload.batch_size, False)
        if self.workload.run_eagerly:
            return uses
        return tuple(replace(u, numerics="reordered") if u.recomputes else u for u in uses)

    def _as_plan(self, index: int, upper_bytes: int, budget_bytes: int, share: str) -> Plan:
        chosen, plain = self.frontier[index], self.frontier[0]
        bound = min(chosen.bound_seconds, chosen.step_seconds)
        return Plan(
            memfit_version=__version__,
            torch_version=f"keras {keras.__version__}, tensorflow {tf.__version__}",
            workload=self.workload.name,
            fingerprint=fingerprint(self.graph),
            device="cuda" if self.device.startswith("GPU") else "cpu",
            batch_size=self.workload.batch_size,
            budget_bytes=budget_bytes,
            budget_share=share,
            levers=chosen.levers,
            uses=chosen.uses,
            numerics=chosen.numerics,
            allowed="reordered",
            plain=self._prediction(plain, self.measured.get(0)),
            predicted=self._prediction(chosen, upper_bytes),
            solution=Solution(
                status=chosen.status,
                bound_seconds=bound,
                gap=max(0.0, 1 - bound / chosen.step_seconds),
                solve_seconds=self.solve_seconds,
            ),
            frontier=[replace(c, peak_upper_bytes=self.measured.get(i)) for i, c in enumerate(self.frontier)],
            notes=[
                f"predicted from its layers: {format_bytes(chosen.peak_bytes)} at the peak, and"
                f" {format_seconds(chosen.step_seconds - plain.step_seconds)} of recomputation",
                f"measured on the applied step: {format_bytes(upper_bytes / (1 + self.allowance))} at the peak, added"
                f" to the memory that TensorFlow used before the step; equal steps may differ by {self.allowance:.0%}",
                *self._left_out(),
            ],
        )

    def _left_out(self) -> list[str]:
        """Return a note on each layer that can't be recomputed."""
        pairs = zip(self.graph.units, self.costs, strict=True)
        return [f"{unit.name} is not recomputed: it {cost.refused}" for unit, cost in pairs if cost.refused]

    def _prediction(self, candidate: Candidate, upper_bytes: int | None) -> Prediction:
        """Return what a plan is predicted to take, at a peak that is measured where it was."""
        peak = candidate.peak_bytes if upper_bytes is None else int(upper_bytes / (1 + self.allowance))
        return Prediction(
            peak_bytes=peak,
            peak_upper_bytes=peak if upper_bytes is None else upper_bytes,
            step_seconds=candidate.step_seconds,
            by_category={},
            where="predicted from its layers" if upper_bytes is None else "measured on the applied step",
        )

    def _infeasible(self, budget_bytes: int) -> InfeasibleError:
        known = [peak for peak in self.measured.values() if peak is not None]
        lowest = min(known, default=self.frontier[-1].peak_bytes)
        left_out = self._left_out()
        more = f". {'; '.join(left_out[:3])}" if left_out else ""
        return InfeasibleError(
            f"{infeasible_verdict(budget_bytes, lowest)}\nTensorFlow allocates that much in the step, added to its"
            " memory before the step. What to do: raise budget= to that, give Workload.batch fewer samples, or set"
            f" Keras's mixed precision{more}",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest,
            where="the applied step, measured",
        )
