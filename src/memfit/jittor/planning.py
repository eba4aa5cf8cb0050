"""Plans for Jittor: modules are measured, the same solver as for PyTorch chooses, and the applied plan is measured."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memfit.errors import PlanMismatchError, RecomputationError, UsageError
from memfit.foundations import Progress, read_budget, silent
from memfit.ir import NUMERICS, Candidate, Levers, Numerics, Plan, Precision, Prediction, Region
from memfit.jittor import memory
from memfit.jittor.checkpointing import Draws, substituted
from memfit.jittor.internals import jt
from memfit.jittor.step import Step, half
from memfit.jittor.variables import (
    allocated_bytes,
    emptied,
    executing,
    filled,
    is_chain,
    is_trainable,
    layers_of,
    modules_of,
    variables_of,
)
from memfit.jittor.workload import Workload, batch_size_of, fingerprint, first
from memfit.levers import Circumstance, LeversOn, check_lever_names, lever_names, microbatch_sizes
from memfit.planner import MeasuredPlanner
from memfit.solver import Columns, Combination, Option, Problem, Row, fastest, frontier

_TIMED = 3
_ATTEMPTS = 8
_LEAST_SHARE = 0.005
_LONGEST_CHAIN = 24
_PROFILED_SHARE = 4
_GRAIN_BYTES = 2**20  # the least that a pool takes from the system: peaks of equal steps differ by as much


def plan(
    workload: Workload,
    *,
    budget: int | float | str,
    numerics: Numerics = "reordered",
    precisions: Sequence[Precision] = ("32-true",),
    points: int = 8,
    time_limit_seconds: float = 8.0,
    progress: Progress = silent,
) -> Plan:
    """Choose the fastest combination of levers with a measured peak within the budget.

    It searches microbatch sizes, precisions, and checkpointing of modules at any depth and of neighbouring layers of a
    container. memfit measures the memory and time of modules on a part of the batch; the solver is PyTorch's. Then it
    applies the chosen plan and measures it on the whole batch. If it is over the budget, memfit chooses again.

    Args:
        workload: The user's workload. Steps run on it; afterwards weights, statistics and optimizer are restored.
        budget: Memory of Jittor's pools: bytes, a string with a unit ("300MiB"), or a share of the memory
            ("90%") or of the plain step's peak ("0.5x").
        numerics: How far the numbers may change. Checkpointing is "reordered" in Jittor: Jittor fuses operators
            differently at the ends of regions.
        precisions: Precisions to search: "32-true" and "16-mixed" (on the CPU correct, but very slow).
        points: Budgets that the frontier is solved for, for each precision and microbatch size.
        time_limit_seconds: Approximate time limit of the solver.
        progress: Called with (stage, done, total).

    Raises:
        BudgetError: `budget` can't be parsed.
        InfeasibleError: No plan that `numerics` allows fits.
        UsageError: `numerics` or `precisions` are unknown.
    """
    read_budget(budget)
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    wrong = [p for p in precisions if p not in ("32-true", "16-mixed")]
    if wrong or not precisions:
        raise UsageError(f"precisions={list(precisions)} are not for Jittor: use '32-true' and '16-mixed'")
    return JittorPlanner(workload, points, time_limit_seconds, progress, numerics, precisions).plan(budget)


def apply(plan: Plan, workload: Workload) -> Step:
    """Return the training step of a plan.

    Raises:
        PlanMismatchError: The plan was made for another workload, or not for Jittor.
    """
    if plan.fingerprint != fingerprint(workload):
        raise PlanMismatchError(
            f"the plan was made for the workload {plan.workload!r} with the fingerprint {plan.fingerprint}, not for"
            f" this one with {fingerprint(workload)}: plan again with memfit.jittor.plan"
        )
    check_lever_names(lever_names(LeversOn(plan.levers, batch_size_of(workload.batch))) | {Circumstance.JITTOR})
    return _step(workload, plan.levers, plan.predicted.peak_bytes)


def _step(workload: Workload, levers: Levers, predicted_peak_bytes: int | None = None) -> Step:
    size = levers.microbatch_size if levers.microbatch_size < batch_size_of(workload.batch) else None
    return Step(
        workload,
        microbatch_size=size,
        precision=levers.precision,
        regions=levers.regions,
        predicted_peak_bytes=predicted_peak_bytes,
    )


@dataclass
class ProfiledBlock:
    """One call of a module in the forward pass.

    Attributes:
        start: Index of the first block inside it, in the order in which they end; its own where there is none.
        kept_bytes: Bytes that it keeps for the backward pass, its result included.
    """

    fqn: str
    start: int
    arguments: Any
    kept_bytes: int = 0
    result_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The blocks of a forward pass in the order in which they end.

    Attributes:
        samples: Samples in the profiled batch; bytes and seconds are proportional to them.
        chains: Runs of blocks that a container calls one after the other, as indices.
    """

    samples: int
    blocks: list[ProfiledBlock]
    chains: list[list[int]]

    def own_bytes(self, index: int) -> int:
        """Return the bytes that a block keeps beyond the blocks inside it."""
        own, child = self.blocks[index].kept_bytes, index - 1
        while child >= self.blocks[index].start:
            own -= self.blocks[child].kept_bytes
            child = self.blocks[child].start - 1
        return max(0, own)

    def dropped_bytes(self, run: Sequence[int]) -> int:
        """Return what checkpointing a run of blocks drops: all that they keep but the last one's result."""
        return sum(self.blocks[i].kept_bytes for i in run) - self.blocks[run[-1]].result_bytes


def profile(model: Any, run: Callable[[], Any], samples: int, progress: Callable[[int, int], None]) -> Profile:
    """Measure the blocks of a model, which `run` runs forward on a batch of as many samples.

    Args:
        progress: Called with the number of blocks measured, and of all.
    """
    modules = modules_of(model)
    with substituted(Draws()), jt.no_grad():
        blocks = _recorded(modules, run)
    measured: dict[Any, tuple[int, int, float]] = {}
    for index, block in enumerate(blocks):
        module, arguments, block.arguments = modules[block.fqn], block.arguments, None
        shapes = [
            tuple((tuple(v.shape), str(v.dtype)) for v in vs) for vs in (module.parameters(), variables_of(arguments))
        ]
        kinds = tuple(type(m).__qualname__ for m in modules_of(module).values())
        key = (kinds, *shapes, repr(emptied(arguments)))  # calls of the same cost share it
        if key not in measured:
            measured[key] = _measured(module, arguments)
        block.kept_bytes, block.result_bytes, block.seconds = measured[key]
        progress(index + 1, len(blocks))
    index_of = {block.fqn: i for i, block in enumerate(blocks)}
    chains = []
    for fqn, module in modules.items():
        if fqn in index_of and is_chain(module):
            for known, names in itertools.groupby(layers_of(fqn, module), index_of.__contains__):
                chain = [index_of[name] for name in names if known]
                chains += [chain] if len(chain) > 1 else []
    return Profile(samples, blocks, chains)


def _recorded(modules: dict[str, Any], run: Callable[[], Any]) -> list[ProfiledBlock]:
    """Return the calls of modules that are called once, in the order in which they end; others can't be told apart."""
    blocks: list[ProfiledBlock] = []
    calls: Counter[str] = Counter()

    def recording(fqn: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls[fqn] += 1
            start = len(blocks)
            result = execute(*args, **kwargs)
            if variables_of(result) and variables_of((args, kwargs)):
                blocks.append(ProfiledBlock(fqn, start, (args, kwargs)))
            return result

        return record

    with contextlib.ExitStack() as stack:
        for fqn, module in modules.items():
            stack.enter_context(executing(module, recording(fqn, module.execute)))
        jt.sync(variables_of(run()))
    before = [0, *itertools.accumulate(calls[block.fqn] == 1 for block in blocks)]
    for block in blocks:
        block.start = before[block.start]
    return [block for block in blocks if calls[block.fqn] == 1]


def _measured(module: Any, arguments: Any) -> tuple[int, int, float]:
    """Return the bytes that a module keeps, those of its result, and the seconds of its forward pass.

    It is run by itself: its gradients are requested, but only its result is computed, so that exactly the result and
    the tensors saved for the backward pass are alive then.
    """
    inputs = [v.detach() for v in variables_of(arguments)]
    jt.sync(inputs)
    args, kwargs = filled(emptied(arguments), inputs)
    with substituted(Draws()):
        before = allocated_bytes().total()
        results = variables_of(module(*args, **kwargs))
        targets = [v for v in (*inputs, *module.parameters()) if is_trainable(v)]
        totals = [v.sum() for v in results if is_trainable(v)]
        gradients = jt.grad(sum(totals[1:], totals[0]), targets) if totals and targets else []
        jt.sync(results, False, False)
        kept_bytes = allocated_bytes().total() - before
        del gradients, totals, results
        seconds = []
        with jt.no_grad():
            for _ in range(_TIMED):
                started = time.perf_counter()
                jt.sync(variables_of(module(*args, **kwargs)), True)
                seconds.append(time.perf_counter() - started)
            results = variables_of(module(*args, **kwargs))
    return max(0, kept_bytes), sum(v.nbytes for v in results), min(seconds)


@dataclass(frozen=True)
class StepCost:
    """The bytes and seconds of a step, affine in the samples of its microbatch."""

    fixed_bytes: float
    sample_bytes: float
    fixed_seconds: float
    sample_seconds: float

    def peak_bytes(self, samples: int) -> int:
        return int(self.fixed_bytes + self.sample_bytes * samples)

    def seconds(self, microbatch_size: int, batch_size: int) -> float:
        return self.fixed_seconds * -(-batch_size // microbatch_size) + self.sample_seconds * batch_size


@dataclass
class JittorPlanner(MeasuredPlanner):
    """A workload with its modules measured in each precision."""

    workload: Workload
    precisions: Sequence[Precision] = ("32-true",)
    left_out: list[str] = field(default_factory=list)
    excluded: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.framework = f"jittor {jt.__version__}"
        self.device = "cuda" if jt.flags.use_cuda else "cpu"
        self.batch_size = batch_size_of(self.workload.batch)
        self.fingerprint = fingerprint(self.workload)
        self.couples_batch = any(
            isinstance(m, jt.nn.BatchNorm) and m.is_train for m in modules_of(self.workload.model).values()
        )
        self.profiles = {p: self._profile(p) for p in self.precisions}
        self.costs = {p: self._cost(p) for p in self.precisions}
        cost = self.costs.get("32-true") or next(iter(self.costs.values()))
        peak_bytes, seconds = cost.peak_bytes(self.batch_size), cost.seconds(self.batch_size, self.batch_size)
        self.plain = self.prediction(peak_bytes, peak_bytes, seconds, "predicted from fewer samples")
        self.device_bytes = memory.device_bytes()

    def plain_bytes(self) -> int:
        return self.plain.peak_bytes

    def tried(self, budget_bytes: int) -> Iterator[tuple[Candidate, Prediction, list[str]]]:
        """Yield the fastest plan that is predicted to fit; where it doesn't, measured, the next is to need less."""
        self.started = time.monotonic()
        self._combine()
        target, lowest = budget_bytes - _GRAIN_BYTES, 2**63
        for attempt in range(_ATTEMPTS):
            allowed = [c for c in self.combinations if NUMERICS.index(c.numerics) <= NUMERICS.index(self.allowed)]
            candidate = fastest(allowed, target, self.time_limit_seconds / 2 ** (attempt + 1))
            is_last = candidate is None
            if candidate is None:
                leanest = [c.candidate(c.leanest(1.0), budget_bytes) for c in allowed]
                candidate = min(leanest, key=lambda one: one.peak_bytes)
            self.progress("measure plans", _ATTEMPTS if is_last else attempt + 1, _ATTEMPTS)
            try:
                measured = self._measure(candidate.levers)
            except RecomputationError as e:
                self._exclude(e)
                continue
            upper = measured.peak_bytes + _GRAIN_BYTES
            notes = ["peaks are bytes of Jittor's pools; the chosen plan's peak is measured", *self.left_out]
            yield candidate, self.prediction(measured.peak_bytes, upper, measured.seconds), notes
            lowest = min(lowest, upper)
            if is_last:
                break
            target -= upper - budget_bytes
        raise self.infeasible(
            budget_bytes,
            lowest,
            f"No plan with numerics={self.allowed!r} needs less. What to do: raise budget=, allow more with numerics=,"
            " or make Workload.batch or the model smaller",
        )

    def solved(self) -> tuple[Prediction, list[Candidate]]:
        found = frontier(self.combinations, self.points, time_limit_seconds=self.time_limit_seconds / 2)
        self.solve_seconds = time.monotonic() - self.started
        return self.plain, found

    def _profile(self, precision: Precision) -> Profile:
        """Measure the modules on a part of the batch."""
        samples = max(1, self.batch_size // _PROFILED_SHARE)
        part, model = first(self.workload.batch, samples), self.workload.model
        with half(model) if precision == "16-mixed" else contextlib.nullcontext(), Step(self.workload).untouched():
            return profile(
                model,
                lambda: self.workload.loss_fn(model, part),
                samples,
                lambda done, total: self.progress("measure modules", done, total),
            )

    def _cost(self, precision: Precision) -> StepCost:
        """Measure the plain step with few samples and with more: what it takes is affine in them."""
        few, more = max(1, self.batch_size // 4), max(1, self.batch_size // 2)
        levers = Levers(precision=precision, microbatch_size=self.batch_size)
        found = []
        for index, samples in enumerate((few, more)):
            found.append(self._measure(levers, samples))
            self.progress("measure steps", index + 1, 2)
        fixed = _step(self.workload, levers).fixed_bytes()
        slope = max(0, found[1].peak_bytes - fixed) / more
        rate = max(0.0, found[1].seconds - found[0].seconds) / max(1, more - few)
        return StepCost(fixed, slope, max(0.0, found[1].seconds - rate * more), rate)

    def _combine(self) -> None:
        """Make the problem of each precision and microbatch size, the simplest first."""
        self.combinations = []
        for precision, profiled in self.profiles.items():
            runs = [] if self.allowed == "exact" else self._regions(profiled)
            for size in microbatch_sizes(self.batch_size):
                problem = problem_of(profiled, size, self.batch_size, self.costs[precision], runs)
                levers = Levers(precision=precision, microbatch_size=size)
                self.combinations.append(Combination(levers, problem, self.uses))

    def _regions(self, profiled: Profile) -> list[list[int]]:
        """Return the blocks, and the runs of blocks, that hold enough to matter."""
        total = max(1, sum(profiled.own_bytes(i) for i in range(len(profiled.blocks))))
        found = [[i] for i, block in enumerate(profiled.blocks) if block.fqn]
        for chain in profiled.chains:
            stride = -(-len(chain) // _LONGEST_CHAIN)
            for length in range(2, len(chain) + 1):
                found += [chain[s : s + length] for s in range(0, len(chain) - length + 1, stride)]
        names = {tuple(profiled.blocks[i].fqn for i in run): run for run in found}
        allowed = {fqns: run for fqns, run in names.items() if fqns not in self.excluded}
        return [run for run in allowed.values() if profiled.dropped_bytes(run) >= _LEAST_SHARE * total]

    def _exclude(self, error: RecomputationError) -> None:
        """Leave out the regions that a module which can't be recomputed is in."""
        culprit = error.modules[0].split(" to ")[0]
        blocks = next(iter(self.profiles.values())).blocks
        self.excluded |= {(b.fqn,) for b in blocks if culprit.startswith(b.fqn) or b.fqn.startswith(culprit)}
        self.excluded |= {
            tuple(blocks[i].fqn for i in run)
            for p in self.profiles.values()
            for run in self._regions(p)
            if any(culprit.startswith(blocks[i].fqn) for i in run)
        }
        self.left_out.append(f"{culprit} is not recomputed: {error.how}")
        self._combine()

    def _measure(self, levers: Levers, samples: int | None = None) -> memory.Measurement:
        """Run a step on the batch, or on some samples of it, and return the larger peak and the less time of two."""
        batch = self.workload.batch if samples is None else first(self.workload.batch, samples)
        step, optimizer = _step(self.workload, levers), self.workload.optimizer
        found = []
        before, count = {name: v.numpy().copy() for name, v in step.state().items()}, optimizer.n_step
        try:
            step(batch)  # compiles
            for _ in range(2):
                with memory.measure() as measured:
                    step(batch)
                found.append(measured)
        finally:
            step.restore(before)
            optimizer.n_step = count
        peak, seconds = max(m.peak_bytes for m in found), min(m.seconds for m in found)
        return memory.Measurement(found[0].before_bytes, peak, seconds)


def problem_of(profiled: Profile, size: int, batch_size: int, cost: StepCost, runs: list[list[int]]) -> Problem:
    """Return the linear model of a step's peak: bytes at the end of each block, going forward and then backward.

    What a region drops is gone from its end until its backward pass, in which it is there again. What the model lacks
    (gradients, buffers inside operators) is the difference between its plain peak and the measured one.
    """
    scale, count = size / profiled.samples, len(profiled.blocks)
    microbatches = -(-batch_size // size)
    kept = np.cumsum([profiled.own_bytes(i) * scale for i in range(count)])
    base = np.concatenate([kept, kept[::-1]]).astype(np.int64)
    base += cost.peak_bytes(size) - int(base.max(initial=0))
    columns = np.zeros((len(runs), 2 * count), np.int64)
    options = []
    spans = [(profiled.blocks[run[0]].start, run[-1] + 1) for run in runs]
    for j, (run, (start, stop)) in enumerate(zip(runs, spans, strict=True)):
        columns[j, stop - 1 : 2 * count - stop] = -int(profiled.dropped_bytes(run) * scale)
        seconds = sum(profiled.blocks[i].seconds for i in run) * scale * microbatches
        options.append(Option((Region(tuple(profiled.blocks[i].fqn for i in run)),), {}, (), seconds))
        columns[j, : start + 1] = 0
    return Problem(
        options=options,
        reasons=[],
        conflicts=MeasuredPlanner.conflicts(spans, count),
        base=base,
        columns=Columns.of_matrix(columns),
        rows=[Row(axis) for axis in range(2 * count)],
        plain_seconds=cost.seconds(size, batch_size),
    )
