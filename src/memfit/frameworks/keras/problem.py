"""The peak of a Keras step as a linear function of which runs of units are recomputed.

The axis is the forward pass, a place for each unit, and then the backward pass, two for each: where a recomputation may
run, and the unit's own. A tensor is alive from its unit to its last taker, and on while the backward pass of a unit
that needs it is to come, unless both are recomputed together; what a recomputed run takes lives until its backward
pass is over.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memfit.frameworks.keras.graph import Graph
from memfit.frameworks.keras.profile import Cost
from memfit.frameworks.keras.recompute import Run
from memfit.ir.remat import Region
from memfit.solver.activities import ALWAYS, Activity, Tightening
from memfit.solver.candidates import Option
from memfit.solver.problem import Problem, Row

_MOST_CUTS = 40


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


def problem_of(graph: Graph, costs: Sequence[Cost], is_eager: bool) -> Problem:
    """Return the linear model of a step's peak, with an option for each run of units worth recomputing.

    Args:
        is_eager: Whether the step runs eagerly, where a recomputation's results live until its gradients are there. In
            a `tf.function` it copies what it takes.
    """
    return _Builder(graph, costs, is_eager).build()


class _Builder:
    def __init__(self, graph: Graph, costs: Sequence[Cost], is_eager: bool) -> None:
        self.graph, self.costs, self.is_eager, self.count = graph, costs, is_eager, len(costs)
        self.length = 3 * self.count
        self.tensors = self._tensors()
        self.runs = self._runs()
        self.base = np.zeros(self.length + 1, np.int64)
        self.x = np.zeros((len(self.runs), self.length + 1), np.int64)
        self.z: dict[frozenset[Activity], npt.NDArray[np.int64]] = {}
        self.conflicts = self._conflicts()
        self.tightened = Tightening(self.conflicts)

    def _backward(self, unit: int) -> int:
        return 3 * self.count - 1 - 2 * unit

    def _gap(self, unit: int) -> int:
        return self._backward(unit) - 1

    def _tensors(self) -> list[_Tensor]:
        """Return the tensors that take memory; a view counts as what it is a view of."""
        known: dict[int, _Tensor] = {}
        found: list[_Tensor] = []
        for index, (unit, cost) in enumerate(zip(self.graph.units, self.costs, strict=True)):
            for t, needed in zip(unit.inputs, cost.needs_inputs, strict=True):
                if t in known:
                    known[t].takers.add(index)
                    if needed:
                        known[t].needers.add(index)
            for t, nbytes, needed in zip(unit.outputs, cost.output_bytes, cost.needs_outputs, strict=True):
                source = next((known[i] for i in unit.inputs if i in known), None)
                if nbytes == 0 and source is not None:
                    known[t] = source
                    continue
                known[t] = _Tensor(nbytes, index)
                found.append(known[t])
                if needed:
                    known[t].needers.add(index)
        for t in self.graph.outputs:
            if t in known:
                known[t].takers.add(self.count)  # the loss
        return found

    def _crossing_bytes(self, cut: int) -> int:
        return sum(t.nbytes for t in self.tensors if t.made < cut <= max(t.takers, default=0))

    def _runs(self) -> list[Run]:
        """Return the runs between cuts; of many places to cut, those where few bytes pass."""
        window = -(-self.count // _MOST_CUTS)
        inner = range(1, self.count, window)
        cuts = [min(range(w, min(w + window, self.count)), key=self._crossing_bytes) for w in inner]
        cuts = sorted({0, *cuts, self.count})
        refused = {i for i, c in enumerate(self.costs) if c.refused}
        refused_cuts = {cut for i in refused for cut in (i, i + 1)}
        cuts = sorted({*cuts, *refused_cuts})
        runs = [(a, b) for n, a in enumerate(cuts) for b in cuts[n + 1 :] if not refused.intersection(range(a, b))]
        return [run for run in runs if self._dropped_bytes(run) > 0]

    def _dropped_bytes(self, run: Run) -> int:
        """Return what a run does not keep when it is recomputed: all that only its own backward pass needs."""
        start, stop = run
        inner = sum(
            t.nbytes
            for t in self.tensors
            if t.needers and all(start <= u < stop for u in (t.made, *t.takers, *t.needers))
        )
        shared = sum(
            t.nbytes
            for t in self.tensors
            if start <= t.made < stop and t.needers and all(start <= u < stop for u in t.needers)
        )
        return max(inner, shared) + sum(c.saved_bytes for c in self.costs[start:stop])

    def _conflicts(self) -> list[frozenset[int]]:
        members = (
            frozenset(j for j, (start, stop) in enumerate(self.runs) if start <= unit < stop)
            for unit in range(self.count)
        )
        return list(dict.fromkeys(m for m in members if len(m) > 1))

    def build(self) -> Problem:
        for tensor in self.tensors:
            self._add_tensor(tensor)
            self._add_gradient(tensor)
        transient = np.zeros(self.length, np.int64)
        for index, cost in enumerate(self.costs):
            self._add_saved(index, cost)
            self._mark(self.base, self._backward(index) + 1, self.length - 1, cost.weight_bytes)
            transient[index] = cost.forward_bytes
            transient[self._backward(index)] = self._allocated_backward(index)
        rows = [Row(axis) for axis in range(self.length)]
        options = []
        for j, run in enumerate(self.runs):
            rows.append(Row(self._gap(run[1] - 1), j, self._add_recomputation(j, run)))
            names = tuple(unit.name for unit in self.graph.units[run[0] : run[1]])
            options.append(
                Option((Region(names),), {}, (), sum(c.forward_seconds for c in self.costs[run[0] : run[1]]))
            )
        columns = np.array([np.cumsum(line[: self.length]) for line in (*self.x, *self.z.values())], np.int64)
        return Problem(
            options=options,
            reasons=list(self.z),
            conflicts=self.conflicts,
            base=np.cumsum(self.base)[: self.length] + transient,
            columns=columns.reshape(-1, self.length),
            rows=rows,
            plain_seconds=sum(c.forward_seconds + c.backward_seconds for c in self.costs),
        )

    def _allocated_backward(self, index: int) -> int:
        """Return what a unit's backward pass allocates, without gradients that are counted as alive there."""
        fresh = sum(t.nbytes for t in self.tensors if max(t.takers, default=-1) == index)
        return max(0, self.costs[index].backward_bytes - fresh)

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
            self._mark_active(active, before + 1, end, tensor.nbytes)

    def _mark_active(self, active: set[Activity], first: int, last: int, nbytes: int) -> None:
        reasons = self.tightened(active)
        if ALWAYS in reasons:
            self._mark(self.base, first, last, nbytes)
        else:
            self._mark(self.z.setdefault(reasons, np.zeros(self.length + 1, np.int64)), first, last, nbytes)

    def _add_gradient(self, tensor: _Tensor) -> None:
        """Add the bytes of a tensor's gradient: from its last taker's backward pass to that of its own unit."""
        first = self._backward(max((t for t in tensor.takers if t < self.count), default=self.count - 1))
        self._mark(self.base, min(first, self._backward(tensor.made)), self._backward(tensor.made), tensor.nbytes)

    def _add_saved(self, index: int, cost: Cost) -> None:
        """Add what a unit saves for its backward pass, unless it is recomputed."""
        self._mark(self.base, index, self._backward(index), cost.saved_bytes)
        for j, (start, stop) in enumerate(self.runs):
            if start <= index < stop:
                self._mark(self.x[j], index + 1, self._backward(index), -cost.saved_bytes)

    def _add_recomputation(self, j: int, run: Run) -> int:
        """Add what a run's recomputation leaves for its backward pass; return what it holds at its peak."""
        start, stop = run
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
