"""The captured steps of a plan under combinations of levers: their costs, their predictions, their regions.

Some combinations are captured only where they may be faster than the best plan found without them. A compiled step is
lowered by its compiler each time it is captured, which takes as long as ten captures of the step as it is; so compiled
microbatches wait until one is expected to be the fastest. So do microbatches of a precision whose step of the whole
batch is slow, since smaller ones are hardly faster.

So do microbatch sizes between two captured ones, where the larger has no room and the smaller is slow. Captured sizes
about halve, since each takes a capture, and times of operators of its own shapes. The one between that is tried has the
fewest microbatches that are expected to fit, all as equal as can be. Its peak is expected on the line between those of
the two: a peak is the largest of many sums that grow with the samples, and no higher than on that line. Its time is
expected on the line through theirs by the number of microbatches.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from memfit.cost import missing_kernel
from memfit.foundations import Budget, Progress
from memfit.ir import (
    CompilerLever,
    CostTable,
    Device,
    Levers,
    LeverUse,
    Mode,
    Precision,
    Prediction,
    Regions,
    Sharding,
    Trace,
    allows,
    freest,
)
from memfit.levers import (
    ACTIVATION_OFFLOAD,
    CONFLICTS,
    LeversOn,
    NotOffered,
    UpdateLever,
    as_captured,
    compiles,
    device_under,
    lever_host_bytes,
    lever_names,
    lever_uses,
    met,
    state_bytes,
    uncompiled,
    used_levers,
)
from memfit.planner.confirmation import CaptureFailures
from memfit.planner.prediction import costs_of, predict, upper_bytes_on_paper
from memfit.planner.verb_options import PlanOptions
from memfit.ranks import around, of_engine, proposals, repeated_blocks
from memfit.solver import SIMPLER_WITHIN, Combination, build, options
from memfit.workload import Workload, samples_of, tokens_per_sample

_HALVING = 0.96
"""The least time of a compiled step, as a multiple of the one expected by the next larger step: from one size to the
next it was 0.961 to 1.0 on ViT, BERT and a mixture of experts (predicted, one thread of an AMD EPYC)."""
_MANY_OPERATORS = 8000
"""Operators of a step from which on plans that are clearly too large on paper are not captured."""
_DOUBT = 0.95
"""The error of predicted times of compiled steps beside those of steps as they are: ×0.95 on the same mixture of
experts. Where both are near, plans are measured, and a compiled one is to be among them."""


@dataclass
class Findings:
    """What a plan finds out about a model, for the next plan of the same model."""

    plain: Trace | None = None  # of the plain step that was captured last
    excluded: frozenset[str] = frozenset()  # modules that are in no region: their second run differs from the first
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """The options of `memfit.plan`, checked, and what they stand for."""

    workload: Workload
    options: PlanOptions
    budget: Budget
    host_budget_bytes: int
    device: Device
    precisions: Sequence[Precision]
    fallbacks: Sequence[UpdateLever]
    progress: Progress
    world_size: int
    modes: Sequence[Mode]
    compilers: Sequence[CompilerLever]
    processes: int  # that a launcher or a process group has, and each make a plan
    findings: Findings  # of plans of the same model so far; this one adds its own


class CapturedSteps:
    """Captured steps, each with its costs, its prediction, and the problem of choosing its regions.

    It is the `Setting` that levers are asked about.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.workload, self.device, self.numerics = request.workload, request.device, request.options.numerics
        self.precisions, self.host_budget_bytes = request.precisions, request.host_budget_bytes
        self.compilers, self.must_compile = request.compilers, request.options.compile is True
        self.tries_all = False
        self.global_batch_size = samples_of(request.workload)
        self.part = request.workload  # of one rank: with the largest part of the batch
        if request.world_size > 1:
            from memfit.ranks import of_one_rank  # distributed packages take a second to import

            self.part = of_one_rank(request.workload, request.world_size)
        self.batch_size = samples_of(self.part)
        self.alone = Levers(microbatch_size=self.batch_size)
        self.failures = CaptureFailures(self.part, request.device, self.alone)
        self.plain = self.alone
        self.shardings: list[Sharding] = []
        self.traces: dict[Levers, Trace] = {}
        self.coupling: str | None = None
        self.budget_bytes: int | None = None
        self._predictions: dict[Levers, Prediction] = {}
        self._known: dict[tuple[bool, str], float] = {}  # seconds by which steps were predicted, in TF32 or not
        self.are_renewed = False  # whether operators were measured anew since this was set

    def on(self, levers: Levers) -> LeversOn:
        return LeversOn(levers, self.global_batch_size, self.coupling is not None)

    def uses(self, levers: Levers) -> tuple[LeverUse, ...]:
        return lever_uses(self.on(levers))

    def allows(self, levers: Levers) -> bool:
        return allows(self.numerics, freest(self.uses(levers)))

    def share(self) -> None:
        """Have ranks share the step, where there are several: the plain step is then that of data parallelism."""
        if self.request.world_size > 1:
            units = repeated_blocks(self.trace(self.alone))
            self.shardings = proposals(self.request.world_size, self.request.modes, units, self.device.cards_per_node)
            self.plain = replace(self.alone, sharding=self.shardings[0])

    def trace(self, levers: Levers) -> Trace:
        """Return the trace of the step with some levers; raise `NotOffered`, with a note, where there is none."""
        if not self._is_captured(levers):
            raise NotOffered("the step can't be captured with it")
        return self.traces[levers]

    def _is_captured(self, levers: Levers) -> bool:
        """Capture the step with some levers, of shared ones on paper; tell whether that is possible."""
        if levers in self.traces:
            return True
        if (same := as_captured(levers)) != levers:
            is_captured = self._is_captured(same)
            self.traces |= {levers: self.traces[same]} if is_captured else {}
            return is_captured
        alone = replace(levers, sharding=None)
        if (trace := self.traces.get(alone) or self.failures.capture(alone)) is None:
            return False
        if levers.sharding is not None:
            self.traces[alone] = trace
        self.traces[levers] = of_engine(trace, levers.sharding or self.request.options.engine)
        return True

    def predicted(self, levers: Levers) -> Prediction:
        if levers not in self._predictions:
            self._predictions[levers] = self.prediction_of(self.trace(levers), levers)
        return self._predictions[levers]

    def prediction_of(self, trace: Trace, levers: Levers) -> Prediction:
        device = device_under(levers, self.device)
        return predict(trace, self._costs_of([trace]), device, tokens_per_sample(self.workload.batch))[0]

    def module_seconds(self, levers: Levers) -> dict[str, float]:
        trace = self.trace(levers)
        return self._costs_of([trace]).module_seconds(trace)

    @property
    def is_long(self) -> bool:
        """Whether a capture of the step takes as long as dozens of simulations: tens of seconds, of many operators."""
        return len(self.traces[self.plain].ops) >= _MANY_OPERATORS

    def upper_bytes_on_paper(self, levers: Levers) -> int:
        """Return the upper end of the peak of a step with regions, from the captured one without; see `is_long`."""
        trace = self.traces[replace(levers, regions=())]
        return upper_bytes_on_paper(trace, self._costs(trace), self.device, levers.regions)

    def captured(self, wanted: Sequence[Levers]) -> list[Levers]:
        """Capture the step with combinations of levers, and measure its operators; return the ones that work."""
        progress, working = self.request.progress, list[Levers]()
        for index, levers in enumerate(wanted):
            working += [levers] if self._is_captured(levers) else []
            progress("capture", index + 1, len(wanted))
        if not working:
            return []
        in_tf32 = [trace for trace in self.traces.values() if trace.precision == "tf32"]
        others = [trace for trace in self.traces.values() if trace.precision != "tf32"]
        self.costs = self._costs_of(others, functools.partial(progress, "measure operators"))
        self.tf32_costs = self._costs_of(in_tf32) if in_tf32 else self.costs
        return [levers for levers in working if self._has_kernels(levers)]

    def _costs_of(self, traces: Sequence[Trace], *progress: Callable[[int, int], None]) -> CostTable:
        """Return the costs of steps. Forget predictions by other ones, as where the machine's pace has changed.

        Plans of which some were predicted by the one and some by the other would compare paces.
        """
        costs = costs_of(traces, self.device, *progress)

        def takes_another_time(trace: Trace) -> bool:  # than that of the operators by which steps were predicted
            uses = Counter(trace.signatures[op.signature] for op in trace.ops)
            known = {text: self._known.get((trace.precision == "tf32", text)) for text in costs.ops.keys() & uses}
            pairs = [(n * was, n * costs.ops[text].seconds) for text, n in uses.items() if (was := known.get(text))]
            return sum(abs(now - was) for was, now in pairs) > SIMPLER_WITHIN * sum(was for was, _ in pairs)

        if any(map(takes_another_time, traces)):
            self.are_renewed = True
            self._known.clear()
            self._predictions.clear()
        for trace in traces:
            for text in costs.ops.keys() & trace.signatures:
                self._known.setdefault((trace.precision == "tf32", text), costs.ops[text].seconds)
        return costs

    def _has_kernels(self, levers: Levers) -> bool:
        """Tell whether this machine has kernels for all operators of a step in its precision; note it where not."""
        trace, plain = self.traces[levers], self.traces[self.plain]
        if self.device.kind != "cpu" or trace.precision == plain.precision:
            return True
        costs, known = self._costs(trace), set(plain.signatures)
        unmeasured = [text for text in trace.signatures if text not in known and not costs.of(text).measured]
        why = next((why for text in unmeasured if (why := missing_kernel(text))), None)
        if why is not None:
            del self.traces[levers]
            self.failures.leave_out(levers, why)
        return why is None

    def _costs(self, trace: Trace) -> CostTable:
        return self.tf32_costs if trace.precision == "tf32" else self.costs

    def combination(self, levers: Levers, excluded: frozenset[str] = frozenset()) -> Combination:
        """Return the problem of choosing regions, none of them of excluded modules, under levers without regions."""
        trace = self.traces[levers]
        regions, costs = Regions(trace), self._costs(trace)
        reruns = set[str]()
        for lever in used_levers(self.on(levers)):
            out, costs = lever.recomputing(levers, costs)
            excluded |= out
            reruns |= set(lever.reruns(levers))
        engine = self.request.options.engine
        excluded |= around(engine.units or ()) if engine is not None else frozenset()
        # Copies whose rate is not known have no price, and are not proposed.
        used = lever_names(self.on(levers)) | {ACTIVATION_OFFLOAD}
        offload = (
            self.host_budget_bytes > 0 and costs.link_bytes_per_second > 0 and not met(CONFLICTS, used, self.numerics)
        )
        choices = options(regions, costs, excluded, offload=offload, reruns=reruns)
        problem = build(regions, costs, choices, max(0, self.host_bytes_left(levers)))
        return Combination(levers, problem, self.uses)

    def host_bytes_left(self, levers: Levers) -> int:
        """Return the host memory that levers leave for regions; below 0 where it is not enough."""
        taken = lever_host_bytes(levers, state_bytes(self.traces[self.plain]), self.host_budget_bytes)
        return self.host_budget_bytes - sum(taken.values())


class DeferredCandidates:
    """Combinations that wait, each for one of the whole batch, and what their steps are expected to take."""

    def __init__(self, steps: CapturedSteps, waiting: Mapping[Levers, Levers], captured: Sequence[Levers]) -> None:
        self._steps, self._wholes = steps, waiting
        self.waiting = list(waiting)
        self._compiled = [levers for levers in captured if compiles(levers)]

    @property
    def compiled_sizes(self) -> list[int]:
        """The sizes of compiled microbatches that compiled steps told not to capture, the largest first."""
        sizes = {levers.microbatch_size for levers in self.waiting if self._compiled and compiles(levers)}
        return sorted(sizes, reverse=True)

    def next(self, best_seconds: float, peak_bytes: int) -> list[Levers]:
        """Capture those that need not wait, and return the ones that work; none where the others can wait.

        The best plan that fits takes `best_seconds`: infinite where none does, and then nothing can wait. What may be
        enough faster need not wait; of compiled steps the largest, which tells of smaller ones.
        """
        while self.waiting:
            compiled = [levers for levers in self.waiting if compiles(levers)]
            others = [levers for levers in self.waiting if levers not in compiled]
            largest_first = sorted(compiled, key=lambda levers: -levers.microbatch_size)
            faster = (x for x in largest_first if self._expected_seconds(x, peak_bytes) < best_seconds)
            if math.isinf(best_seconds):
                chosen = self.waiting
            elif (first := next(faster, None)) is not None:
                chosen = [first]
            elif any(self._seconds(self._wholes[levers]) < best_seconds for levers in others):
                chosen = others
            else:
                break
            self.waiting = [levers for levers in self.waiting if levers not in chosen]
            if found := self._steps.captured(chosen):
                self._compiled += filter(compiles, found)
                return found
        return []

    def _expected_seconds(self, levers: Levers, peak_bytes: int) -> float:
        """Return what a compiled step takes at least.

        It is expected to be to the step as it is, in time and in peak, as the next larger one was. Infinite where none
        was captured, where another compiler's was faster, or where the step as it is does not fit.
        """
        size, wholes = levers.microbatch_size, self._wholes
        whole, family = wholes[levers], uncompiled(wholes[levers])
        larger = [x for x in self._compiled if x.microbatch_size > size and uncompiled(wholes.get(x, x)) == family]
        if not larger:
            return math.inf
        fastest = min(larger, key=lambda x: (x.microbatch_size, self._seconds(x)))
        own, other = uncompiled(levers), uncompiled(fastest)
        if wholes.get(fastest, fastest) != whole or len(self._steps.captured([own, other])) < 2:
            return math.inf
        compiled, plain = self._steps.predicted(fastest), self._steps.predicted(other)
        bound = self._steps.combination(own).solver.bound(int(peak_bytes * plain.peak_bytes / compiled.peak_bytes))
        least = _DOUBT * _HALVING ** math.log2(fastest.microbatch_size / size)
        return math.inf if bound is None else least * bound * compiled.step_seconds / plain.step_seconds

    def _seconds(self, levers: Levers) -> float:
        return self._steps.predicted(levers).step_seconds


def size_between(
    searched: Sequence[Levers],
    predicted: Callable[[Levers], Prediction],
    *,
    batch_size: int,
    budget_bytes: int,
    below_seconds: float,
) -> Levers | None:
    """Return the levers of the size between that is expected to be fastest, of those that are captured.

    None where its step is not expected to take less than `below_seconds`.
    """
    families: dict[Levers, list[Levers]] = defaultdict(list)
    for levers in searched:
        families[replace(levers, microbatch_size=batch_size)].append(levers)
    best_seconds, best = below_seconds, None
    for family in families.values():
        for high, low in itertools.pairwise(sorted(family, key=lambda levers: -levers.microbatch_size)):
            large, small = predicted(high), predicted(low)
            if not small.peak_upper_bytes <= budget_bytes < large.peak_upper_bytes:
                continue
            share = (budget_bytes - small.peak_upper_bytes) / (large.peak_upper_bytes - small.peak_upper_bytes)
            most = low.microbatch_size + int(share * (high.microbatch_size - low.microbatch_size))
            fewest, count, many = (-(-batch_size // size) for size in (high.microbatch_size, most, low.microbatch_size))
            if count == many:
                continue
            added = (small.step_seconds - large.step_seconds) * (count - fewest) / (many - fewest)
            if (seconds := large.step_seconds + added) < best_seconds:
                best_seconds, best = seconds, replace(low, microbatch_size=-(-batch_size // count))
    return best
