"""Estimates and plans: capture, cost, solve, apply, and capture again."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from memfit.apply.probe import Differences, probing
from memfit.capture.step import without_collector
from memfit.cost.calibrate import missing_kernel
from memfit.devices.advice import precisions as precisions_of
from memfit.devices.host import find_device
from memfit.errors import InfeasibleError, MemfitError, RecomputationError, UsageError
from memfit.ir import combinations
from memfit.ir.device import Device
from memfit.ir.plan import (
    NUMERICS,
    Candidate,
    Levers,
    Numerics,
    OptimizerLever,
    Plan,
    Precision,
    Prediction,
    Proof,
    Solution,
    levers_key,
    recomputes,
)
from memfit.ir.remat import Regions
from memfit.ir.trace import Trace
from memfit.pipeline import leaning, remote
from memfit.pipeline.applying import check_workload
from memfit.pipeline.chunking import LEAST_SHARE, is_chunked, worthwhile
from memfit.pipeline.classes import OPTIMIZER_CLASSES, allows, freest, lever_classes
from memfit.pipeline.combining import circumstances
from memfit.pipeline.coupling import coupling
from memfit.pipeline.predicting import (
    Progress,
    capture_levers,
    check_precision,
    costs_of,
    is_elsewhere,
    predict,
    silent,
)
from memfit.pipeline.proving import differences, why_not_here
from memfit.pipeline.reading import readings_to_send
from memfit.pipeline.refusals import check_supported
from memfit.pipeline.trials import Trials, failing, fails, first_line, refusal_notes
from memfit.solve.candidates import options, refusals
from memfit.solve.frontier import SIMPLER_WITHIN, Combination, fastest, frontier
from memfit.solve.problem import build
from memfit.units import format_bytes, parse_budget
from memfit.version import __version__
from memfit.workload import Workload, fingerprint, samples_of, tokens_per_sample

_ATTEMPTS = 6
_FIRST_SHARE = 0.9  # of the time for solving that the first attempt may take; the second, of what it leaves; and so on
_CHEAP = 0.05  # a plan that is slower than the fastest step by no more needs no other optimizer
_ALL_AGAIN = 2.0  # a step with all of its forward pass computed again takes less than this times as long
_ROUNDING_BYTES = 64  # what floats in the solver may miss


def plan(
    workload: Workload,
    *,
    budget: int | float | str,
    device: str = "cpu",
    numerics: Numerics = "reordered",
    precisions: Sequence[Precision] | None = None,
    optimizers: Sequence[OptimizerLever] | None = None,
    points: int = 8,
    host_budget: int | str | None = None,
    time_limit_seconds: float = 10.0,
    progress: Progress = silent,
) -> Plan:
    """Choose the fastest combination of levers whose predicted peak fits a budget.

    Searched are precision, microbatch size (the global batch stays), chunked losses of language models, lean
    normalisations and activations, activation checkpointing of any modules, whole or selective, and, for a GPU
    with `host_budget`, activation offload. The plan chosen is applied to a copy and captured again; what it says
    is predicted is predicted for that step.

    Args:
        workload: The user's workload; nothing of it is changed.
        budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%").
        device: The device's name: "cpu", "cuda", or one of the catalogue. For a GPU the budget is held
            against what the allocator reserves, and the frontier's peaks are live bytes.
        numerics: How far the numbers may change: "exact", "reordered", "reduced" or "changed".
        precisions: Precisions to search; None for "32-true" and the mixed one that the device is made
            for; "tf32" and "bf16-true" only when asked for. Those that `numerics` does not allow are solved for
            the frontier only.
        host_budget: Pinned host memory for activations and optimizer states: bytes, or a string with a unit. None for
            none.
        optimizers: Ways of updating the parameters that may be tried where no other plan is cheap (`Levers.optimizer`);
            None for all that `numerics` allows.
        points: Budgets that the frontier is solved for, for each precision and microbatch size.
        time_limit_seconds: Of solving, about: nine tenths for the plan where it needs them, the rest, up to half,
            for the frontier. When time is up, the best found and how far it is from the bound proven are returned.
        progress: Told how far it is.

    Raises:
        BudgetError: The budget says no number of bytes.
        InfeasibleError: No plan that `numerics` allows fits.
        CaptureError: The step can't be captured.
    """
    check_supported(workload)
    found = find_device(device)
    budget_bytes = parse_budget(budget, found.usable_bytes)
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    if points < 1:
        raise UsageError(f"points={points} is not above 0: give the budgets to solve the frontier for")
    for lever in set(optimizers or ()) - {"as-is", *OPTIMIZER_CLASSES}:
        raise UsageError(f"optimizers={lever!r} is unknown: use some of {', '.join(OPTIMIZER_CLASSES)}")
    for precision in precisions or ():
        check_precision(precision, "precisions", found, workload)
    host_budget_bytes = 0 if host_budget is None else parse_budget(host_budget, None, "host_budget")
    if host_budget_bytes:
        used = {combinations.OFFLOAD} | circumstances(workload, found)
        combinations.check(used, where=f"host_budget={host_budget!r} on {found.name}: ")
    searched = tuple(precisions or precisions_of(found))
    if "32-true" not in searched and not allows(numerics, "reduced"):
        raise UsageError(
            f"precisions={list(searched)} are not allowed by numerics={numerics!r}: allow numerics='reduced'"
        )
    if is_elsewhere(found):
        options = {
            "budget": budget,
            "device": device,
            "numerics": numerics,
            "precisions": precisions,
            "optimizers": optimizers,
            "points": points,
            "host_budget": host_budget,
            "time_limit_seconds": time_limit_seconds,
        }
        readings = readings_to_send(workload, microbatch_sizes(samples_of(workload)))
        made: Plan = remote.call(plan, workload, options, progress, readings)
        return made
    check_workload(workload, found)
    ways = tuple(OPTIMIZER_CLASSES) if optimizers is None else tuple(optimizers)
    planner = _Planner(
        workload,
        budget_bytes,
        host_budget_bytes,
        found,
        numerics,
        searched,
        ways,
        points,
        time_limit_seconds,
        progress,
    )
    with without_collector():  # which would go through millions of objects, none of which is garbage
        return planner.plan()


@dataclass
class _Planner:
    workload: Workload
    budget_bytes: int
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

    def __post_init__(self) -> None:
        self.batch_size = samples_of(self.workload)
        self.plain = Levers(microbatch_size=self.batch_size)
        self.trials = Trials(self.workload, self.device, self.plain)

    def plan(self) -> Plan:
        """Capture and solve; what turns out not to work is left out, and the rest solved again."""
        self._capture_all()
        started = time.monotonic()
        while True:
            searched = self._searched()
            try:
                self._solve_all()
                candidate, prediction = self._choose()
                proof = self._proven(candidate.levers, prediction)
                break
            except _LeftOut as e:
                if self._searched() == searched:  # it would be chosen again
                    raise e.error from None
        self._note_draws(candidate.levers)
        progress = functools.partial(self.progress, "frontier")
        limit = self.time_limit_seconds
        left = min(max((1 - _FIRST_SHARE) * limit, limit - self.solving_seconds), limit / 2)
        points = frontier(self.combinations, self.points, progress, left)
        chosen = replace(candidate, budget_bytes=self.budget_bytes)
        points = sorted([c for c in points if c.levers != chosen.levers] + [chosen], key=lambda c: c.step_seconds)
        bound = min(candidate.bound_seconds, prediction.step_seconds)
        plain = self.traces[self.plain]
        return Plan(
            memfit_version=__version__,
            torch_version=str(torch.__version__),
            workload=self.workload.name,
            fingerprint=fingerprint(self.workload),
            device=self.device.name,
            batch_size=self.batch_size,
            budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_budget_bytes,
            levers=candidate.levers,
            numerics=candidate.numerics,
            classes=self._classes(candidate.levers),
            allowed=self.numerics,
            plain=self._as_is,
            predicted=prediction,
            solution=Solution(
                status=candidate.status,
                bound_seconds=bound,
                gap=1 - bound / prediction.step_seconds,
                solve_seconds=time.monotonic() - started,
            ),
            frontier=points,
            notes=list(dict.fromkeys([*plain.notes, *self.notes, *self.trials.notes()])),
            proof=proof,
        )

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
        first = self._capture_by_itself(self.plain)
        self.traces = {self.plain: first}
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
            self.progress("solve", index, len(self.wanted) + 1)
        self.notes += refusal_notes(refusals(Regions(self.traces[self.plain])))

    def _solve(self, levers: Levers) -> Combination:
        """Make the problem of what to checkpoint under some levers."""
        regions = Regions(self.traces[levers])
        costs = self.tf32_costs if levers.precision == "tf32" else self.costs
        whole = _around(levers.chunked_loss.head) if levers.chunked_loss else set()
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

    def _capture_by_itself(self, levers: Levers) -> Trace:
        return capture_levers(self.workload, levers, self.device, self.trials.data)

    def _confirm(self, candidate: Candidate) -> Prediction:
        """Predict a plan from a capture of the step with the plan applied.

        Raises:
            _LeftOut: The plan can't be applied; what can't be is searched no more.
        """
        try:
            trace = self._capture_by_itself(candidate.levers)
        except RecomputationError as e:
            self._without_differing(self._differences(candidate.levers) or {e.modules: e}, candidate.levers)
            raise _LeftOut(e) from e
        except MemfitError as e:
            self._without_failing(candidate.levers, e, self._capture_by_itself)
            raise _LeftOut(e) from e
        return self._predict(trace)

    def _proven(self, levers: Levers, prediction: Prediction) -> Proof:
        """Hold what a plan recomputes against the user's step, where that can run here.

        Raises:
            _LeftOut: Something differs, or the planned step can't run where the plain one does; it is searched no more.
        """
        if not recomputes(levers):
            return Proof()
        why = why_not_here(self.workload, self.device, self._as_is, prediction.step_seconds)
        if why:
            return Proof(why=why)
        self.progress("prove", 0, 1)
        try:
            found = differences(self.workload, levers)
        except Exception as e:  # someone's code, which may raise anything
            if self._fails_as_it_is():
                return Proof(why=f"the step can't be run here ({first_line(e)})")
            self._without_failing(levers, e, lambda x: differences(self.workload, x))
            raise _LeftOut(e) from e
        if found:
            self._without_differing(found, levers)
            raise _LeftOut(next(iter(found.values())))
        self.progress("prove", 1, 1)
        return Proof(levers=levers_key(levers))

    def _fails_as_it_is(self) -> bool:
        """Tell whether the plain step can't be run with data."""
        try:
            differences(self.workload, self.plain)
        except Exception:  # someone's code
            return True
        return False

    def _differences(self, levers: Levers) -> Differences:
        """Return what does something else when it runs again, without data."""
        with probing() as found, contextlib.suppress(MemfitError):
            self._capture_by_itself(levers)
        return found

    def _without_differing(self, found: Differences, levers: Levers) -> None:
        """Search no longer for plans that recompute what does something else when it runs again."""
        regions = {region.modules for region in levers.regions}
        for modules, error in found.items():
            self.notes.append(f"{error.module} is not recomputed: run again, it does something else ({error.how})")
            if modules in regions:
                self.excluded |= _around(error.module)
            else:
                self._leave_out(lambda x: bool(x.lean))

    def _without_failing(self, levers: Levers, error: Exception, attempt: Callable[[Levers], object]) -> None:
        """Search no longer for plans with those regions without which a step works, or with its other levers.

        Args:
            levers: Of a step that fails.
            error: How it fails.
            attempt: Tries a step with some levers.
        """
        bare = replace(levers, regions=())
        if fails(attempt, bare):
            if bare == self.plain:
                raise error
            self.trials.leave_out(bare, first_line(error))
            self._leave_out(self.trials.has_failed)
            return
        for region in failing(levers, levers.regions, attempt):
            self.notes.append(
                f"{', '.join(region.modules)} is not recomputed: the step then fails ({first_line(error)})"
            )
            self.excluded |= set(region.modules)

    def _leave_out(self, is_out: Callable[[Levers], bool]) -> None:
        """Search no longer for plans with some levers."""
        self.wanted = self._with_any([levers for levers in self.wanted if not is_out(levers)])
        self.postponed = [levers for levers in self.postponed if not is_out(levers)]

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


class _LeftOut(Exception):
    """Something is searched no more: what is left is to be solved again.

    Args:
        error: What went wrong with it.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def _around(fqn: str) -> set[str]:
    """Return a module and those around it: a region with it inside can't be recomputed either."""
    parts = fqn.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


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
