"""The captured steps of a plan under combinations of levers: their costs, their predictions, their regions."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
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
    Numerics,
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
    lever_host_bytes,
    lever_names,
    lever_uses,
    met,
    state_bytes,
    used_levers,
)
from memfit.planner.capture_failures import CaptureFailures
from memfit.planner.near_ties import Measure
from memfit.planner.prediction import costs_of, predict
from memfit.ranks import around, of_engine, proposals, repeated_blocks
from memfit.solver import SIMPLER_WITHIN, Combination, build, options
from memfit.workload import Workload, samples_of, tokens_per_sample


@dataclass
class Findings:
    """What a plan finds out about a model, for the next plan of the same model.

    Attributes:
        plain: The trace of the plain step that was captured last; None before.
        excluded: Modules that are in no region, since their second run differs from the first.
        notes: What differs in them.
    """

    plain: Trace | None = None
    excluded: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """The arguments of `memfit.plan`, made definite."""

    workload: Workload
    budget: Budget
    host_budget_bytes: int
    device: Device
    numerics: Numerics
    precisions: Sequence[Precision]
    fallbacks: Sequence[UpdateLever]
    points: int
    time_limit_seconds: float
    progress: Progress
    world_size: int = 1
    modes: Sequence[Mode] = ()
    engine: Sharding | None = None
    measure: Measure = False
    compilers: Sequence[CompilerLever] = ()
    must_compile: bool = False
    processes: int = 1  # that a launcher or a process group has, and each make a plan
    findings: Findings = field(default_factory=Findings)


class CapturedSteps:
    """Captured steps, each with its costs, its prediction, and the problem of choosing its regions.

    It is the `Setting` that levers are asked about.

    Attributes:
        part: The workload of one rank: with the largest part of the batch.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.workload, self.device, self.numerics = request.workload, request.device, request.numerics
        self.precisions, self.host_budget_bytes = request.precisions, request.host_budget_bytes
        self.compilers, self.must_compile = request.compilers, request.must_compile
        self.tries_all = False
        self.global_batch_size = samples_of(request.workload)
        self.part = request.workload
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
        """Return levers on the global batch."""
        return LeversOn(levers, self.global_batch_size, self.coupling is not None)

    def uses(self, levers: Levers) -> tuple[LeverUse, ...]:
        return lever_uses(self.on(levers))

    def share(self) -> None:
        """Have ranks share the step, where there are several: the plain step is then that of data parallelism."""
        if self.request.world_size == 1:
            return
        units = repeated_blocks(self.trace(self.alone))
        self.shardings = proposals(self.request.world_size, self.request.modes, units, self.device.cards_per_node)
        self.plain = replace(self.alone, sharding=self.shardings[0])

    def allows(self, levers: Levers) -> bool:
        return allows(self.numerics, freest(self.uses(levers)))

    def trace(self, levers: Levers) -> Trace:
        """Return the trace of the step with some levers; raise `NotOffered`, with a note, where there is none."""
        if levers not in self.traces:
            trace = self._traced(levers)
            if trace is None:
                raise NotOffered("the step can't be captured with it")
            self.traces[levers] = trace
        return self.traces[levers]

    def _traced(self, levers: Levers) -> Trace | None:
        """Return the trace of the step with some levers, of shared ones on paper; None where it can't be captured."""
        if levers.sharding is None:
            trace = self.failures.capture(levers)
            return None if trace is None else of_engine(trace, self.request.engine)
        alone = replace(levers, sharding=None)
        if alone not in self.traces and (trace := self.failures.capture(alone)) is not None:
            self.traces[alone] = trace
        if alone not in self.traces:
            return None
        return of_engine(self.traces[alone], levers.sharding)

    def predicted(self, levers: Levers) -> Prediction:
        if levers not in self._predictions:
            self._predictions[levers] = self.prediction_of(self.trace(levers))
        return self._predictions[levers]

    def prediction_of(self, trace: Trace) -> Prediction:
        return predict(trace, self._costs_of([trace]), self.device, tokens_per_sample(self.workload.batch))[0]

    def captured(self, wanted: Sequence[Levers]) -> list[Levers]:
        """Capture the step with combinations of levers, and measure its operators; return the ones that work."""
        progress = self.request.progress
        for index, levers in enumerate(wanted):
            if levers not in self.traces and (trace := self._traced(levers)) is not None:
                self.traces[levers] = trace
            progress("capture", index + 1, len(wanted))
        working = [levers for levers in wanted if levers in self.traces]
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
        if any(self._takes_another_time(trace, costs) for trace in traces):
            self.are_renewed = True
            self._known.clear()
            self._predictions.clear()
        for trace in traces:
            for text in costs.ops.keys() & trace.signatures:
                self._known.setdefault((trace.precision == "tf32", text), costs.ops[text].seconds)
        return costs

    def _takes_another_time(self, trace: Trace, costs: CostTable) -> bool:
        """Tell whether the operators of a step take another time than those by which steps were predicted."""
        uses = Counter(trace.signatures[op.signature] for op in trace.ops)
        known = {text: self._known.get((trace.precision == "tf32", text)) for text in costs.ops.keys() & uses}
        pairs = [(n * was, n * costs.ops[text].seconds) for text, n in uses.items() if (was := known.get(text))]
        return sum(abs(now - was) for was, now in pairs) > SIMPLER_WITHIN * sum(was for was, _ in pairs)

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
        for lever in used_levers(self.on(levers)):
            out, costs = lever.recomputing(levers, costs)
            excluded |= out
        engine = self.request.engine
        excluded |= around(engine.units or ()) if engine is not None else frozenset()
        # Copies whose rate is not known have no price, and are not proposed.
        used = lever_names(self.on(levers)) | {ACTIVATION_OFFLOAD}
        offload = (
            self.host_budget_bytes > 0 and costs.link_bytes_per_second > 0 and not met(CONFLICTS, used, self.numerics)
        )
        choices = options(regions, costs, excluded, offload=offload)
        problem = build(regions, costs, choices, max(0, self.host_bytes_left(levers)))
        return Combination(levers, problem, self.uses)

    def host_bytes_left(self, levers: Levers) -> int:
        """Return the host memory that levers leave for regions; below 0 where it is not enough."""
        state = state_bytes(self.traces[self.plain])
        taken = lever_host_bytes(levers, state, self.host_budget_bytes)
        return self.host_budget_bytes - sum(taken.values())
