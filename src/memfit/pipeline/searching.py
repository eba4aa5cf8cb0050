"""The search for a plan: combinations of levers captured and solved, and the fastest that fits, confirmed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from memfit.cost.calibrate import missing_kernel
from memfit.errors import InfeasibleError
from memfit.ir import combinations
from memfit.ir.device import Device
from memfit.ir.plan import Candidate, Levers, Numerics, OptimizerLever, Plan, Precision, Prediction, Solution
from memfit.ir.remat import Regions
from memfit.ir.trace import Trace
from memfit.pipeline import leaning
from memfit.pipeline.chunking import LEAST_SHARE, is_chunked, worthwhile
from memfit.pipeline.classes import OPTIMIZER_CLASSES, allows, freest, lever_classes
from memfit.pipeline.combining import circumstances
from memfit.pipeline.confirming import Confirmation, LeftOut, around
from memfit.pipeline.coupling import coupling
from memfit.pipeline.predicting import Progress, costs_of, predict
from memfit.pipeline.trials import Trials, refusal_notes
from memfit.solve.candidates import options, refusals
from memfit.solve.frontier import SIMPLER_WITHIN, Combination, fastest, frontier
from memfit.solve.problem import build
from memfit.units import Budget, format_bytes
from memfit.version import __version__
from memfit.workload import Workload, fingerprint, samples_of, tokens_per_sample

_ATTEMPTS = 6
_FIRST_SHARE = 0.9  # of the time for solving that the first attempt may take; the second, of what it leaves; and so on
_CHEAP = 0.05  # a plan that is slower than the fastest step by no more needs no other optimizer
_ALL_AGAIN = 2.0  # a step with all of its forward pass computed again takes less than this times as long
_ROUNDING_BYTES = 64  # what floats in the solver may miss


@dataclass
class Search:
    """A search for the fastest plan within a budget. Its fields are the arguments of `memfit.plan`, made definite."""

    workload: Workload
    budget: Budget
    host_budget_bytes: int
    device: Device
    numerics: Numerics
    precisions: Sequence[Precision]
    optimizers: Sequence[OptimizerLever]
    points: int
    time_limit_seconds: float
    progress: Progress
    notes: list[str] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    couples_batch: bool = False
    solving_seconds: float = 0.0
    _excesses: dict[Levers, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_size = samples_of(self.workload)
        self.plain = Levers(microbatch_size=self.batch_size)
        self.trials = Trials(self.workload, self.device, self.plain)
        self.confirmation = Confirmation(self.workload, self.device, self.trials, self.plain)

    def plan(self) -> Plan:
        """Capture and solve; what turns out not to work is left out, and the rest solved again."""
        self._capture_all()
        started = time.monotonic()
        while True:
            searched = self._searched()
            try:
                self._solve_all()
                chosen = self._choose()
                self.progress("solve", len(self.wanted) + 1, len(self.wanted) + 1)
                points = self._frontier(chosen)
                (candidate, prediction), points = self._held_against(points, chosen)
                seconds = prediction.step_seconds
                proof = self.confirmation.proof(candidate.levers, self._as_is, seconds, self.progress)
                break
            except LeftOut as e:
                self._leave_out(e)
                if self._searched() == searched:  # it would be chosen again
                    raise e.error from None
        self._note_draws(candidate.levers)
        bound = min(candidate.bound_seconds, prediction.step_seconds)
        gap = 1 - bound / prediction.step_seconds
        plain = self.traces[self.plain]
        return Plan(
            memfit_version=__version__,
            torch_version=str(torch.__version__),
            workload=self.workload.name,
            fingerprint=fingerprint(self.workload),
            device=self.device.name,
            batch_size=self.batch_size,
            budget_bytes=self.budget_bytes,
            budget_share=self.budget_share,
            host_budget_bytes=self.host_budget_bytes,
            levers=candidate.levers,
            numerics=candidate.numerics,
            classes=self._classes(candidate.levers),
            allowed=self.numerics,
            plain=self._as_is,
            predicted=prediction,
            solution=Solution(
                status="optimal" if candidate.status == "optimal" and gap <= SIMPLER_WITHIN else "feasible",
                bound_seconds=bound,
                gap=gap,
                solve_seconds=time.monotonic() - started,
            ),
            frontier=points,
            notes=list(dict.fromkeys([*plain.notes, *self.notes, *self.trials.notes()])),
            proof=proof,
        )

    def _frontier(self, chosen: tuple[Candidate, Prediction]) -> list[Candidate]:
        """Solve for the frontier; return its points but that of the plan chosen, with what is held against a budget."""
        limit = self.time_limit_seconds
        left = min(max((1 - _FIRST_SHARE) * limit, limit - self.solving_seconds), limit / 2)
        found = frontier(self.combinations, self.points, functools.partial(self.progress, "frontier"), left)
        excess = _excess(chosen[1]) if chosen[0].levers.regions else 1.0
        return [
            replace(c, peak_upper_bytes=int(c.peak_bytes * max(excess * bool(c.levers.regions), self._base_excess(c))))
            for c in found
            if c.levers != chosen[0].levers
        ]

    def _base_excess(self, point: Candidate) -> float:
        """Return what is held against the budget, as a share of the peak, for the step of a point without regions."""
        base = replace(point.levers, regions=())
        if base not in self._excesses:
            self._excesses[base] = _excess(self._predict(self.traces[base]))
        return self._excesses[base]

    def _held_against(
        self, points: list[Candidate], chosen: tuple[Candidate, Prediction]
    ) -> tuple[tuple[Candidate, Prediction], list[Candidate]]:
        """Capture the points that seem to fit and to be faster than the plan chosen, once that was captured.

        Returns:
            The fastest of them all, and the frontier, with what is predicted for each point that was captured.
        """
        captured: list[Candidate] = []
        for _ in range(_ATTEMPTS):
            rivals = [c for c in points if self._may_be_faster(c, chosen[1].step_seconds)]
            if not rivals:
                break
            rival = min(rivals, key=lambda c: c.step_seconds)
            prediction = self._confirm(rival)
            points = [c for c in points if c.levers != rival.levers]
            fits = prediction.peak_upper_bytes <= self.budget_bytes
            left = rival, prediction
            if fits and _is_faster(prediction.step_seconds, chosen[1].step_seconds):
                proven = {"status": chosen[0].status, "bound_seconds": chosen[0].bound_seconds}  # of all combinations
                left, chosen = chosen, (replace(rival, **proven), prediction)
            captured.append(_as_captured(*left))
        own = replace(_as_captured(*chosen), budget_bytes=self.budget_bytes)
        return chosen, sorted([*points, *captured, own], key=lambda c: c.step_seconds)

    def _may_be_faster(self, point: Candidate, seconds: float) -> bool:
        allowed = allows(self.numerics, point.numerics) and point.held_bytes <= self.budget_bytes
        return allowed and _is_faster(point.step_seconds, seconds)

    def _searched(self) -> object:
        """Return what tells whether as much is searched as before."""
        return len(self.excluded), list(self.wanted), list(self.postponed)

    def _predict(self, trace: Trace) -> Prediction:
        costs = costs_of([trace], self.device)
        return predict(trace, costs, self.device, tokens_per_sample(self.workload.batch))[0]

    @functools.cached_property
    def _as_is(self) -> Prediction:
        """What is predicted for the step as the user wrote it."""
        return self._predict(self.traces[self.plain])

    def _note_draws(self, levers: Levers) -> None:
        draws = any(op.random for op in self.traces[self.plain].ops)
        if draws and levers.microbatch_size < self.batch_size:
            self.notes.append(
                "each microbatch draws its own random numbers (dropout): as many and as likely, but other ones than the"
                " whole batch would draw"
            )

    def _capture_all(self) -> None:
        """Capture the step with every combination of levers but regions that is searched."""
        self.progress("capture", 0, 1)
        first = self.confirmation.capture(self.plain)
        self.traces = {self.plain: first}
        self._take_budget()
        self.coupling = coupling(first, self.workload)
        self.couples_batch = self.coupling is not None
        searched = self._with_lean(self._with_chunked_loss(self._combinations()))
        whole = self._capture([levers for levers in searched if levers.microbatch_size == self.batch_size])
        seconds = self._seconds_of_precisions(whole)
        slow = {p: s for p, s in seconds.items() if s > _ALL_AGAIN * min(seconds.values())}
        cut = [levers for levers in searched if levers.microbatch_size < self.batch_size]
        self.postponed = [levers for levers in cut if levers.precision in slow]
        self.postponed_seconds = min(slow.values(), default=math.inf)
        wanted = [x for x in searched if x in whole or (x in cut and x not in self.postponed)]
        self.wanted = self._with_any(self._capture(wanted))

    def _take_budget(self) -> None:
        """Say what the budget is in bytes: on a GPU it is held against what the allocator reserves."""
        usable_bytes, plain = self.device.usable_bytes, self._as_is if self.budget.of == "plain" else None
        plain_bytes = 0 if plain is None else plain.peak_reserved_bytes or plain.peak_bytes
        self.budget_bytes = self.budget.nbytes(device_bytes=usable_bytes, plain_bytes=plain_bytes)
        self.budget_share = self.budget.share_text(self.device.name, usable_bytes, plain_bytes)
        if self.budget.of == "device" and self._as_is.peak_upper_bytes <= self.budget_bytes:
            self.notes.append("the plain step fits this share of the device: half of the plain step's peak is '0.5x'")

    def _seconds_of_precisions(self, whole: list[Levers]) -> dict[Precision, float]:
        """Return how long the step takes in each precision that is allowed, with the whole batch."""
        seconds: dict[Precision, float] = {}
        for levers in whole:
            if allows(self.numerics, freest(self._classes(levers))):
                found = self._predict(self.traces[levers]).step_seconds
                seconds[levers.precision] = min(found, seconds.get(levers.precision, math.inf))
        return seconds

    def _capture(self, wanted: list[Levers]) -> list[Levers]:
        """Capture the step with combinations of levers, and measure its operators; return those that work."""
        for index, levers in enumerate(wanted):
            if levers not in self.traces and (trace := self.trials.capture(levers)) is not None:
                self.traces[levers] = trace
            self.progress("capture", index + 1, len(wanted))
        captured = [levers for levers in wanted if levers in self.traces]
        if not captured:
            return []
        measuring = functools.partial(self.progress, "measure operators")
        in_tf32 = [trace for trace in self.traces.values() if trace.precision == "tf32"]
        others = [trace for trace in self.traces.values() if trace.precision != "tf32"]
        self.costs = costs_of(others, self.device, measuring)
        self.tf32_costs = costs_of(in_tf32, self.device) if in_tf32 else self.costs
        return [levers for levers in captured if self._has_kernels(levers)]

    def _has_kernels(self, levers: Levers) -> bool:
        """Tell whether a step has no operator that this machine can't run in its precision; where it has, note that."""
        if self.device.kind != "cpu" or levers.precision == "32-true":
            return True
        plain, costs = set(self.traces[self.plain].signatures), self.tf32_costs
        costs = costs if levers.precision == "tf32" else self.costs
        unknown = [text for text in self.traces[levers].signatures if text not in plain and not costs.of(text).measured]
        why = next((why for text in unknown if (why := missing_kernel(text))), None)
        if why is not None:
            del self.traces[levers]
            self.trials.leave_out(levers, why)
        return why is None

    def _with_chunked_loss(self, wanted: list[Levers]) -> list[Levers]:
        """Return combinations with those that chunk the loss, where logits take enough and nothing else asks for them.

        Where the step is then as fast as before, only the plain step is searched with its loss whole.
        """
        plain = self._as_is
        lever = worthwhile(self.workload, self.traces[self.plain], plain.peak_bytes)
        if lever is None or not allows(self.numerics, "reordered"):
            return wanted
        whole = replace(self.plain, chunked_loss=lever)
        trace = self.trials.capture(whole)
        if trace is None:
            return wanted
        if not is_chunked(trace, self.traces[self.plain], lever):
            self.notes.append(
                f"the loss is not chunked: something else than F.cross_entropy asks for the logits of {lever.head}"
            )
            return wanted
        self.traces[whole] = trace
        chunked = [replace(levers, chunked_loss=lever) for levers in wanted]
        is_slower = self._predict(trace).step_seconds > (1 + SIMPLER_WITHIN) * plain.step_seconds
        return [*(wanted if is_slower else [self.plain]), *chunked]

    def _with_lean(self, wanted: list[Levers]) -> list[Levers]:
        """Return combinations, and each with lean normalisations and activations, where these save enough."""
        plain = self._as_is
        if not leaning.worthwhile(self.workload, self.traces[self.plain], plain.peak_bytes):
            return wanted
        whole = replace(self.plain, lean=("*",))
        trace = self.trials.capture(whole)
        if trace is None:
            return wanted
        if self._predict(trace).peak_bytes > (1 - leaning.LEAST_SHARE) * plain.peak_bytes:
            return wanted
        self.traces[whole] = trace
        return [*wanted, *(replace(levers, lean=("*",)) for levers in wanted)]

    def _combinations(self) -> list[Levers]:
        """Return what is searched, the simplest first; precisions that are not allowed with the whole batch only."""
        sizes = microbatch_sizes(self.batch_size)
        if self.coupling is not None and self.numerics != "changed":
            sizes = [self.batch_size]
            self.notes.append(self.coupling)
        elif self.numerics == "exact":
            sizes = [self.batch_size]
        found: list[Levers] = []
        for precision in self.precisions:
            allowed = precision == "32-true" or allows(self.numerics, "reduced")
            for size in sizes if allowed else [self.batch_size]:
                found.append(Levers(precision=precision, microbatch_size=size))
        return found

    def _solve_all(self) -> None:
        self.combinations: list[Combination] = []
        for index, levers in enumerate(self.wanted):
            self._solve(levers)
            self.progress("solve", index + 1, len(self.wanted) + 1)
        self.notes += refusal_notes(refusals(Regions(self.traces[self.plain])))

    def _solve(self, levers: Levers) -> Combination:
        """Make the problem of what to checkpoint under some levers."""
        regions = Regions(self.traces[levers])
        costs = self.tf32_costs if levers.precision == "tf32" else self.costs
        whole = around(levers.chunked_loss.head) if levers.chunked_loss else set()
        found = options(regions, costs, self.excluded | whole, offload=self.host_budget_bytes > 0)
        problem = build(regions, costs, found, max(0, self._host_bytes_left(levers.optimizer)))
        self.combinations.append(Combination(levers, freest(self._classes(levers)), problem))
        return self.combinations[-1]

    def _classes(self, levers: Levers) -> dict[str, Numerics]:
        return lever_classes(levers, self.batch_size, self.couples_batch)

    def _host_bytes_left(self, lever: OptimizerLever) -> int:
        """Return what a way of updating the parameters leaves of the host's memory; below 0 where it is not enough."""
        taken = _most_saved(lever, self.traces[self.plain]) if lever == "offloaded" else 0
        return self.host_budget_bytes - taken

    def _choose(self) -> tuple[Candidate, Prediction]:
        """Return the fastest plan that fits. How parameters are updated is changed only where no other is cheap."""
        best = self._fastest(self._allowed(), self.time_limit_seconds)
        if self.postponed and (best is None or best[1].step_seconds > self.postponed_seconds):
            best = self._fastest(self._with_postponed(), self.time_limit_seconds, best)
        least = min(c.problem.plain_seconds for c in self._allowed())
        for lever in (lever for lever in OPTIMIZER_CLASSES if lever in self.optimizers):
            if best is not None and best[1].step_seconds <= (1 + _CHEAP) * least:
                break
            precisions = {c.levers.precision for c in self._allowed()} if best is None else {best[0].levers.precision}
            best = self._fastest(self._with_optimizer(lever, precisions), self.time_limit_seconds / 4, best)
        return best or self._leanest(self._allowed())

    def _with_postponed(self) -> list[Combination]:
        """Capture and return the combinations of precisions so slow that they were left for when no other is fast."""
        added, self.postponed = self.postponed, []
        return self._search_too(added)

    def _search_too(self, added: list[Levers]) -> list[Combination]:
        captured = self._capture(added)
        self.wanted += captured
        return [self._solve(levers) for levers in captured]

    def _allowed(self) -> list[Combination]:
        return [c for c in self.combinations if allows(self.numerics, c.numerics)]

    def _with_optimizer(self, lever: OptimizerLever, precisions: set[Precision]) -> list[Combination]:
        """Capture and return the combinations that another way of updating the parameters adds."""
        first = self.traces[self.plain]
        if _most_saved(lever, first) < LEAST_SHARE * self._as_is.peak_bytes:
            return []
        if not allows(self.numerics, OPTIMIZER_CLASSES[lever]) or self._host_bytes_left(lever) < 0:
            return []
        as_is = [x for c in self._allowed() if (x := c.levers).optimizer == "as-is" and x.precision in precisions]
        sizes = {self.batch_size, min(levers.microbatch_size for levers in as_is)}
        bases = {(x.precision, x.microbatch_size): x for x in as_is if x.microbatch_size in sizes}
        around = circumstances(self.workload, self.device)
        added = [
            levers
            for base in bases.values()
            if (levers := replace(base, optimizer=lever)) not in self.wanted
            and not self.trials.has_failed(levers)
            and not combinations.refusals(combinations.names_of(levers, self.batch_size) | around, self.numerics)
        ]
        return self._search_too(added)

    def _fastest(
        self, allowed: list[Combination], seconds: float, best: tuple[Candidate, Prediction] | None = None
    ) -> tuple[Candidate, Prediction] | None:
        """Return the fastest plan of some combinations whose applied step, captured again, is predicted to fit.

        Where that is hardly faster than the best known before, the latter.
        """
        target = int(self.budget_bytes / (1 + self.costs.peak_error))
        for _ in range(_ATTEMPTS if allowed else 0):
            started = time.thread_time()
            candidate = fastest(allowed, target, _FIRST_SHARE * seconds)
            taken = time.thread_time() - started
            self.solving_seconds += taken
            seconds -= taken
            if candidate is None:
                break
            if best is not None and not _is_faster(candidate.step_seconds, best[1].step_seconds):
                return _bounded(best[0], candidate), best[1]
            prediction = self._confirm(candidate)
            if prediction.peak_upper_bytes <= self.budget_bytes:
                found = candidate, prediction
                return found if best is None else _faster(best, found)
            target = int(target - (prediction.peak_upper_bytes - self.budget_bytes) / (1 + self.costs.peak_error)) - 1
        return best

    def _confirm(self, candidate: Candidate) -> Prediction:
        """Predict a plan from a capture of the step with the plan applied."""
        return self._predict(self.confirmation.confirmed(candidate.levers))

    def _leave_out(self, found: LeftOut) -> None:
        """Search no longer for plans with levers or regions that turned out not to work."""
        self.notes += found.notes
        self.excluded |= found.modules
        self.wanted = self._with_any([levers for levers in self.wanted if not found.are_out(levers)])
        self.postponed = [levers for levers in self.postponed if not found.are_out(levers)]

    def _with_any(self, wanted: list[Levers]) -> list[Levers]:
        """Return combinations, with the plain step where no other is left that may be chosen."""
        allowed = any(allows(self.numerics, freest(self._classes(levers))) for levers in wanted)
        return wanted if allowed else [*wanted, *self._capture([self.plain])]

    def _leanest(self, allowed: list[Combination]) -> tuple[Candidate, Prediction]:
        """Return the plan of the lowest peak if it fits.

        Raises:
            InfeasibleError: It does not.
        """
        seconds = self.time_limit_seconds / len(allowed)
        choices = [(c, c.solver.leanest(seconds)) for c in allowed]
        combination, lowest = min(choices, key=lambda pair: pair[1].peak_bytes)
        candidate = combination.candidate(lowest, self.budget_bytes)
        prediction = self._confirm(candidate)
        if prediction.peak_upper_bytes <= self.budget_bytes:
            bound = min(c.problem.plain_seconds for c in allowed)
            return replace(candidate, status="feasible", bound_seconds=bound), prediction
        proven = lowest.status == "optimal" and all(c.bound >= lowest.bound for _, c in choices)
        raise self._infeasible(candidate, prediction, proven, [c for c in self.combinations if c not in allowed])

    def _infeasible(
        self, candidate: Candidate, prediction: Prediction, proven: bool, freer: list[Combination]
    ) -> InfeasibleError:
        needed = prediction.peak_upper_bytes + _ROUNDING_BYTES
        advice = [f"raise budget= to {format_bytes(needed)} ({needed} bytes)"]
        if any(c.solver.leanest().peak_bytes * (1 + self.costs.peak_error) <= self.budget_bytes for c in freer):
            advice.append("allow numerics='reduced', with which a plan fits")
        advice.append("make Workload.batch smaller, or the model")
        message = (
            f"no plan fits budget={format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes) with"
            f" numerics={self.numerics!r}: the lowest peak {'there is' if proven else 'found'} is"
            f" {format_bytes(prediction.peak_bytes)} ({format_bytes(needed)} with its error bar), in {prediction.where}"
            f" (precision {candidate.levers.precision}, microbatches of {candidate.levers.microbatch_size})."
            f" What to do: {'; '.join(advice)}"
        )
        return InfeasibleError(
            message,
            budget_bytes=self.budget_bytes,
            lowest_peak_bytes=needed,
            where=prediction.where,
            proven=proven,
        )


def _excess(prediction: Prediction) -> float:
    """Return what is held against the budget, as a share of the peak."""
    return prediction.peak_upper_bytes / max(prediction.peak_bytes, 1)


def _as_captured(point: Candidate, prediction: Prediction) -> Candidate:
    """Return a point of the frontier with what is predicted for its captured step."""
    return replace(
        point,
        peak_bytes=prediction.peak_bytes,
        peak_upper_bytes=prediction.peak_upper_bytes,
        step_seconds=prediction.step_seconds,
        bound_seconds=min(point.bound_seconds, prediction.step_seconds),
        is_captured=True,
    )


def _most_saved(lever: OptimizerLever, trace: Trace) -> int:
    """Return a bound on the bytes that another way of updating the parameters saves."""
    if lever == "in-backward":
        return sum(p.nbytes for p in trace.parameters if p.trainable and p.group >= 0)
    return sum(storage.nbytes for storage in trace.storages if storage.category == "optimizer state")


def _faster(one: tuple[Candidate, Prediction], other: tuple[Candidate, Prediction]) -> tuple[Candidate, Prediction]:
    """Return the faster of two plans; the first where the other is hardly faster."""
    chosen, left = (other, one) if _is_faster(other[1].step_seconds, one[1].step_seconds) else (one, other)
    return _bounded(chosen[0], left[0]), chosen[1]


def _is_faster(seconds: float, than: float) -> bool:
    """Tell whether a plan is enough faster to take another precision or way of updating the parameters for it."""
    return than > (1 + SIMPLER_WITHIN) * seconds


def _bounded(chosen: Candidate, other: Candidate) -> Candidate:
    """Return a plan with the bound of what it was chosen of: none of the combinations of either is faster."""
    bound = min(chosen.bound_seconds, other.bound_seconds)
    proven = chosen.status == other.status == "optimal" and chosen.bound_seconds <= bound
    return replace(chosen, bound_seconds=bound, status="optimal" if proven else "feasible")


def microbatch_sizes(batch_size: int, most: int = 5) -> list[int]:
    """Return microbatch sizes that divide a batch evenly, the whole first, about halving down to one sample."""
    divisors = [d for d in range(batch_size, 0, -1) if batch_size % d == 0]
    sizes = [batch_size]
    for divisor in divisors[1:]:
        if divisor * 2 <= sizes[-1] or divisor == 1:
            sizes.append(divisor)
    return sizes if len(sizes) <= most else [*sizes[: most - 1], 1]
