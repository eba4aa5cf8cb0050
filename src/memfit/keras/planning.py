"""Plans for Keras: layers are measured, the same solver as for PyTorch chooses, and the applied plan is measured."""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.errors import PlanMismatchError
from memfit.foundations import Progress, format_bytes, format_seconds, read_budget, silent
from memfit.ir import Candidate, Levers, Plan, Prediction, Region
from memfit.keras.internals import keras, tf
from memfit.keras.profile import Cost, default_device, measured_peak, peak_of, profile
from memfit.keras.recompute import Graph, Run, graph_of, recomputed
from memfit.keras.workload import Workload, fingerprint
from memfit.planner import MeasuredPlanner
from memfit.solver import ALWAYS, Activity, Columns, Combination, Option, Problem, Row, Tightening, frontier

_OVERESTIMATE = 0.1  # share by which a predicted peak may be over the budget for its plan to be measured all the same
_MEASURED_STEPS = 2
_MOST_CUTS = 40
_TRACES, _ALLOWANCE, _ALLOWANCE_OF_TRACES = 3, 0.03, 0.1  # see `KerasPlanner.allowance`


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
    return KerasPlanner(workload, points, time_limit_seconds, progress).plan(budget)


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
class KerasPlanner(MeasuredPlanner):
    """A workload with its layers measured and its frontier solved: plans for many budgets.

    A larger budget never gets a slower plan, as predicted: the frontier is the same for all of them, and the search
    begins further towards its fast end.
    """

    workload: Workload
    measured: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.framework = f"keras {keras.__version__}, tensorflow {tf.__version__}"
        self.place = default_device()
        self.device = "cuda" if self.place.startswith("GPU") else "cpu"
        self.reorders = not self.workload.run_eagerly  # a function's operators may be fused otherwise where runs end
        self.graph = graph_of(self.workload.model)
        self.fingerprint = fingerprint(self.graph)
        self.costs = profile(
            self.workload, self.graph, self.place, lambda done, total: self.progress("measure layers", done, total)
        )
        self.batch_size = self.workload.batch_size
        refusals = ((unit.name, cost.refused) for unit, cost in zip(self.graph.units, self.costs, strict=True))
        self.left_out = [f"{name} is not recomputed: it {refused}" for name, refused in refusals if refused]
        started = time.monotonic()
        problem = _PeakModel(self.graph, self.costs, self.workload.run_eagerly).problem()
        levers = Levers(microbatch_size=self.batch_size)
        self.frontier = frontier(
            [Combination(levers, problem, self.uses)], self.points, time_limit_seconds=self.time_limit_seconds
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

    def plain_bytes(self) -> int | None:
        return self.upper_bytes(0)

    def tried(self, budget_bytes: int) -> Iterator[tuple[Candidate, Prediction, list[str]]]:
        """Yield the plans of the frontier that may fit, the fastest first."""
        likely = budget_bytes / (1 - _OVERESTIMATE)
        last = len(self.frontier) - 1
        first = next((i for i, c in enumerate(self.frontier) if c.peak_bytes <= likely), last)
        for index in range(first, last + 1):
            self.progress("measure plans", index - first, last + 1 - first)
            upper, candidate = self.upper_bytes(index), self.frontier[index]
            if upper is None:
                continue
            seconds = candidate.step_seconds - self.frontier[0].step_seconds
            notes = [
                f"predicted from its layers: {format_bytes(candidate.peak_bytes)} at the peak, and"
                f" {format_seconds(seconds)} of recomputation",
                f"measured on the applied step: {format_bytes(upper / (1 + self.allowance))} at the peak, added"
                f" to the memory that TensorFlow used before the step; equal steps may differ by {self.allowance:.0%}",
            ]
            yield candidate, self._prediction(index), [*notes, *self.left_out]
        known = [peak for peak in self.measured.values() if peak is not None]
        more = f". {'; '.join(self.left_out[:3])}" if self.left_out else ""
        raise self.infeasible(
            budget_bytes,
            min(known, default=self.frontier[-1].peak_bytes),
            "TensorFlow allocates that much in the step, added to its memory before the step. What to do: raise budget="
            f" to that, give Workload.batch fewer samples, or set Keras's mixed precision{more}",
        )

    def solved(self) -> tuple[Prediction, list[Candidate]]:
        points = [replace(c, peak_upper_bytes=self.measured.get(i)) for i, c in enumerate(self.frontier)]
        return self._prediction(0), points

    def _prediction(self, index: int) -> Prediction:
        """Return what a plan of the frontier is predicted to take, at a peak that is measured where it was."""
        candidate, upper = self.frontier[index], self.measured.get(index)
        if upper is None:
            peak = candidate.peak_bytes
            return self.prediction(peak, peak, candidate.step_seconds, "predicted from its layers")
        return self.prediction(int(upper / (1 + self.allowance)), upper, candidate.step_seconds)

    def upper_bytes(self, index: int) -> int | None:
        """Return the measured peak of a plan of the frontier, with an allowance; None where memory ran out."""
        if index not in self.measured:
            model = _applied(self.workload.model, self.graph, self.frontier[index].levers)
            before = [(v, tf.convert_to_tensor(v.value)) for v in self.workload.model.non_trainable_variables]
            gc.collect()  # what is left of other models would be between free blocks
            try:
                peaks = []
                for _ in range(1 if self.workload.run_eagerly else _TRACES):
                    step = self.workload.step(model)  # a function is traced anew
                    peaks.append(measured_peak(step, self.place))
                    peaks += [peak_of(step, self.place) for _ in range(_MEASURED_STEPS)]
                self.measured[index] = int(max(peaks) * (1 + self.allowance))
            except tf.errors.ResourceExhaustedError:
                self.measured[index] = None
            for variable, value in before:
                variable.assign(value)
        return self.measured[index]


@dataclass
class _Tensor:
    """A tensor between units.

    Attributes:
        made: The unit that gives it.
        takers: The units that take it, or a view of it.
        needers: The units whose backward pass needs it.
    """

    nbytes: int
    made: int
    takers: set[int] = field(default_factory=set)
    needers: set[int] = field(default_factory=set)


class _PeakModel:
    """The peak of a step as a linear function of which runs of units are recomputed.

    The axis is the forward pass, a place for each unit, and then the backward pass, two for each: where a recomputation
    may run, and the unit's own. A tensor is alive from its unit to its last taker, and on while the backward pass of a
    unit that needs it is to come, unless both are recomputed together; what a recomputed run takes lives until its
    backward pass is over.

    Args:
        is_eager: Whether the step runs eagerly, where a recomputation's results live until its gradients are there. In
            a `tf.function` it copies what it takes.
    """

    def __init__(self, graph: Graph, costs: Sequence[Cost], is_eager: bool) -> None:
        self.graph, self.costs, self.is_eager, self.count = graph, costs, is_eager, len(costs)
        self.length = 3 * self.count
        self.tensors = self._tensors()
        self.runs = self._runs()
        self.base = np.zeros(self.length + 1, np.int64)
        self.x = np.zeros((len(self.runs), self.length + 1), np.int64)
        self.z: dict[frozenset[Activity], npt.NDArray[np.int64]] = {}
        self.conflicts = MeasuredPlanner.conflicts(self.runs, self.count)
        self.tightened = Tightening(self.conflicts)

    def _backward(self, unit: int) -> int:
        return self.length - 1 - 2 * unit

    def _tensors(self) -> list[_Tensor]:
        """Return the tensors that take memory; a view counts as what it is a view of."""
        known: dict[int, _Tensor] = {}
        found: list[_Tensor] = []
        for index, (unit, cost) in enumerate(zip(self.graph.units, self.costs, strict=True)):
            for t, needed in zip(unit.inputs, cost.needs_inputs, strict=True):
                if t in known:
                    known[t].takers.add(index)
                    known[t].needers |= {index} if needed else set()
            for t, nbytes, needed in zip(unit.outputs, cost.output_bytes, cost.needs_outputs, strict=True):
                source = next((known[i] for i in unit.inputs if i in known), None)
                if nbytes == 0 and source is not None:
                    known[t] = source
                    continue
                known[t] = _Tensor(nbytes, index, needers={index} if needed else set())
                found.append(known[t])
        for t in self.graph.outputs:
            if t in known:
                known[t].takers.add(self.count)  # the loss
        return found

    def _runs(self) -> list[Run]:
        """Return the runs between cuts; of many places to cut, those where few bytes pass."""

        def crossing_bytes(cut: int) -> int:
            return sum(t.nbytes for t in self.tensors if t.made < cut <= max(t.takers, default=0))

        def dropped_bytes(start: int, stop: int) -> int:
            """Return what a run does not keep when it is recomputed: all that only its own backward pass needs."""
            own = (
                t.nbytes
                for t in self.tensors
                if t.needers and start <= t.made < stop and all(start <= unit < stop for unit in t.needers)
            )
            return sum(own) + sum(c.saved_bytes for c in self.costs[start:stop])

        window = -(-self.count // _MOST_CUTS)
        inner = (range(w, min(w + window, self.count)) for w in range(1, self.count, window))
        refused = {i for i, c in enumerate(self.costs) if c.refused}
        places = {0, self.count, *(min(cuts, key=crossing_bytes) for cuts in inner)}
        cuts = sorted(places.union(*((i, i + 1) for i in refused)))
        return [
            (a, b)
            for a, b in itertools.combinations(cuts, 2)
            if not refused.intersection(range(a, b)) and dropped_bytes(a, b) > 0
        ]

    def problem(self) -> Problem:
        """Return the model, with an option for each run of units worth recomputing."""
        for tensor in self.tensors:
            self._add_tensor(tensor)
            first = self._backward(max((t for t in tensor.takers if t < self.count), default=self.count - 1))
            own = self._backward(tensor.made)
            self._mark(self.base, min(first, own), own, tensor.nbytes)  # its gradient
        transient = np.zeros(self.length, np.int64)
        for index, cost in enumerate(self.costs):
            backward = self._backward(index)
            self._mark(self.base, index, backward, cost.saved_bytes)
            for j, (start, stop) in enumerate(self.runs):
                if start <= index < stop:
                    self._mark(self.x[j], index + 1, backward, -cost.saved_bytes)
            self._mark(self.base, backward + 1, self.length - 1, cost.weight_bytes)
            transient[index] = cost.forward_bytes
            counted = sum(t.nbytes for t in self.tensors if max(t.takers, default=-1) == index)  # gradients alive there
            transient[backward] = max(0, cost.backward_bytes - counted)
        rows = [Row(axis) for axis in range(self.length)]
        options = []
        for j, (start, stop) in enumerate(self.runs):
            rows.append(Row(self._backward(stop - 1) - 1, j, self._add_recomputation(j, start, stop)))
            names = tuple(unit.name for unit in self.graph.units[start:stop])
            options.append(Option((Region(names),), {}, (), sum(c.forward_seconds for c in self.costs[start:stop])))
        columns = np.array([np.cumsum(line[: self.length]) for line in (*self.x, *self.z.values())], np.int64)
        return Problem(
            options=options,
            reasons=list(self.z),
            conflicts=self.conflicts,
            base=np.cumsum(self.base)[: self.length] + transient,
            columns=Columns.of_matrix(columns.reshape(-1, self.length)),
            rows=rows,
            plain_seconds=sum(c.forward_seconds + c.backward_seconds for c in self.costs),
        )

    def _mark(self, line: npt.NDArray[np.int64], first: int, last: int, nbytes: int) -> None:
        if last >= first:
            line[first] += nbytes
            line[last + 1] -= nbytes

    def _add_tensor(self, tensor: _Tensor) -> None:
        """Add the bytes of a tensor that the forward pass makes."""
        released = min(max(tensor.takers, default=tensor.made), self.count - 1)
        self._mark(self.base, tensor.made, released, tensor.nbytes)
        ends: dict[int, set[Activity]] = defaultdict(set)
        for unit in tensor.needers:
            both = (j for j, (a, b) in enumerate(self.runs) if a <= unit < b and a <= tensor.made < b)
            ends[self._backward(unit)].add((True, frozenset(both)))
        by_start: dict[int, set[int]] = defaultdict(set)
        for j, (start, stop) in enumerate(self.runs):
            if start > tensor.made and any(start <= unit < stop for unit in tensor.takers):
                by_start[start].add(j)
        for start, members in by_start.items():
            ends[self._backward(start)].add((False, frozenset(members)))
        active: set[Activity] = set()
        later = sorted((end for end in ends if end > released), reverse=True)
        for end, before in itertools.pairwise([*later, released]):
            active |= ends[end]
            reasons = self.tightened(active)
            known = self.base if ALWAYS in reasons else self.z.setdefault(reasons, np.zeros(self.length + 1, np.int64))
            self._mark(known, before + 1, end, tensor.nbytes)

    def _add_recomputation(self, j: int, start: int, stop: int) -> int:
        """Add what a run's recomputation leaves for its backward pass; return what it holds at its peak."""
        first, over = self._backward(stop - 1), self._backward(start)
        change = np.zeros(stop - start + 1, np.int64)
        for tensor in self.tensors:
            if tensor.made < start and any(start <= unit < stop for unit in tensor.takers) and not self.is_eager:
                self._mark(self.x[j], first, over, tensor.nbytes)
                change[0] += tensor.nbytes
            if not start <= tensor.made < stop:
                continue
            is_given = any(not start <= unit < stop for unit in tensor.takers)
            needers = [unit for unit in tensor.needers if start <= unit < stop]
            lives = needers or (is_given and self.is_eager)
            last = max((unit for unit in tensor.takers if start <= unit < stop), default=tensor.made)
            change[tensor.made - start] += tensor.nbytes
            if lives:
                end = over if is_given and self.is_eager else self._backward(min(needers))
                self._mark(self.x[j], first, end, tensor.nbytes)
            else:
                change[last - start + 1] -= tensor.nbytes
            if is_given and self.is_eager:  # its gradient is an argument of the run's backward pass
                self._mark(self.x[j], self._backward(tensor.made) + 1, over, tensor.nbytes)
        for index in range(start, stop):
            self._mark(self.x[j], first, self._backward(index), self.costs[index].saved_bytes)
            change[index - start] += self.costs[index].saved_bytes
        held = np.cumsum(change)[:-1] + np.array([c.forward_bytes for c in self.costs[start:stop]], np.int64)
        return int(held.max(initial=0))
