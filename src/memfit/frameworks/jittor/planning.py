"""Plans for Jittor: modules are measured, the same solver as for PyTorch chooses, and the applied plan is measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memfit.errors import PlanMismatchError, RecomputationError, UsageError
from memfit.foundations import Progress, read_budget, silent
from memfit.frameworks.jittor import memory
from memfit.frameworks.jittor.half import half
from memfit.frameworks.jittor.internals import jt
from memfit.frameworks.jittor.profile import Profile, profile
from memfit.frameworks.jittor.step import Step
from memfit.frameworks.jittor.variables import modules_of
from memfit.frameworks.jittor.workload import Workload, batch_size_of, fingerprint, first
from memfit.frameworks.measured_layers import MEASURED, Planner, infeasible, prediction
from memfit.ir import NUMERICS, Candidate, Levers, Numerics, Plan, Precision, Prediction, Region
from memfit.levers import Circumstance, LeversOn, check_lever_names, lever_names, microbatch_sizes
from memfit.solver import Combination, Option, Problem, Row, fastest, frontier

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
    asked = read_budget(budget)
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    wrong = [p for p in precisions if p not in ("32-true", "16-mixed")]
    if wrong or not precisions:
        raise UsageError(f"precisions={list(precisions)} are not for Jittor: use '32-true' and '16-mixed'")
    planner = JittorPlanner(workload, numerics, precisions, points, time_limit_seconds, progress)
    device_bytes, plain_bytes = memory.device_bytes(), planner.plain.peak_bytes
    return planner.fitting(
        asked.nbytes(device_bytes=device_bytes, plain_bytes=plain_bytes),
        asked.share_text("the machine", device_bytes, plain_bytes),
    )


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


@dataclass(frozen=True)
class _Cost:
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
class JittorPlanner(Planner):
    """A workload with its modules measured in each precision."""

    workload: Workload
    allowed: Numerics
    precisions: Sequence[Precision]
    points: int
    time_limit_seconds: float
    progress: Progress
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
        self.plain = prediction(peak_bytes, peak_bytes, seconds, "predicted from fewer samples")

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
            yield candidate, prediction(measured.peak_bytes, upper, measured.seconds, MEASURED), notes
            lowest = min(lowest, upper)
            if is_last:
                break
            target -= upper - budget_bytes
        raise infeasible(
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

    def _cost(self, precision: Precision) -> _Cost:
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
        return _Cost(fixed, slope, max(0.0, found[1].seconds - rate * more), rate)

    def _combine(self) -> None:
        """Make the problem of each precision and microbatch size, the simplest first."""
        self.combinations = []
        for precision in self.precisions:
            profiled, cost = self.profiles[precision], self.costs[precision]
            runs = [] if self.allowed == "exact" else self._regions(profiled)
            for size in microbatch_sizes(self.batch_size):
                problem = _problem(profiled, size, self.batch_size, cost, runs)
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
        return [run for run in allowed.values() if _dropped_bytes(profiled, run) >= _LEAST_SHARE * total]

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
        step = _step(self.workload, levers)
        found = []
        with _undone(step):
            step(batch)  # compiles
            for _ in range(2):
                with memory.measure() as measured:
                    step(batch)
                found.append(measured)
        peak, seconds = max(m.peak_bytes for m in found), min(m.seconds for m in found)
        return memory.Measurement(found[0].before_bytes, peak, seconds)


@contextlib.contextmanager
def _undone(step: Step) -> Iterator[None]:
    """Take back what steps do to the weights, the statistics and the optimizer."""
    optimizer = step.workload.optimizer
    before, count = {name: v.numpy().copy() for name, v in step.state().items()}, optimizer.n_step
    try:
        yield
    finally:
        step.restore(before)
        optimizer.n_step = count


def _dropped_bytes(profiled: Profile, run: Sequence[int]) -> int:
    """Return what checkpointing a run of blocks drops: all that they keep but the last one's result."""
    return sum(profiled.blocks[i].kept_bytes for i in run) - profiled.blocks[run[-1]].result_bytes


def _problem(profiled: Profile, size: int, batch_size: int, cost: _Cost, runs: list[list[int]]) -> Problem:
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
    for j, run in enumerate(runs):
        start, end = profiled.blocks[run[0]].start, run[-1]
        columns[j, end : 2 * count - 1 - end] = -int(_dropped_bytes(profiled, run) * scale)
        seconds = sum(profiled.blocks[i].seconds for i in run) * scale * microbatches
        options.append(Option((Region(tuple(profiled.blocks[i].fqn for i in run)),), {}, (), seconds))
        columns[j, : start + 1] = 0
    return Problem(
        options=options,
        reasons=[],
        conflicts=_conflicts(profiled, runs),
        base=base,
        columns=columns,
        rows=[Row(axis) for axis in range(2 * count)],
        plain_seconds=cost.seconds(size, batch_size),
    )


def _conflicts(profiled: Profile, runs: list[list[int]]) -> list[frozenset[int]]:
    """Return the regions around each block: of them at most one can be chosen."""
    around: dict[int, set[int]] = {}
    for j, run in enumerate(runs):
        for block in range(profiled.blocks[run[0]].start, run[-1] + 1):
            around.setdefault(block, set()).add(j)
    return list({frozenset(members) for members in around.values() if len(members) > 1})
