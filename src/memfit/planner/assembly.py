"""A plan, assembled from its three parts: steps captured, the fastest that fits searched for, and confirmed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from memfit._torch import replaced
from memfit.cost import code_seconds, kernels_of
from memfit.errors import PlanError, RecomputationError
from memfit.foundations import __version__, format_bytes, format_seconds
from memfit.ir import (
    OTHER_DRAWS,
    Candidate,
    Levers,
    Plan,
    Prediction,
    Proof,
    Regions,
    Solution,
    Trace,
    bytes_of_plain,
    freest,
    levers_key,
    uses_text,
)
from memfit.levers import (
    CONFLICTS,
    LEVERS,
    LeversOn,
    NotOffered,
    UpdateLever,
    as_captured,
    circumstances,
    compiles,
    draws_otherwise,
    least_bytes,
    lever_names,
    met,
    sharding_text,
    used_levers,
    used_whole,
)
from memfit.planner.batch_coupling import coupling
from memfit.planner.candidate_search import (
    ADVICE_SECONDS,
    Advice,
    Confirmed,
    Limits,
    Saving,
    fastest_that_fits,
    held_against,
    leanest_that_fits,
    near_ties,
    with_plan,
)
from memfit.planner.captured_steps import CapturedSteps, DeferredCandidates, Request, size_between
from memfit.planner.confirmation import Confirmation, Excluded, refusal_notes
from memfit.planner.fallback_stacks import expected_to_fit
from memfit.planner.measured_steps import CODE_SECONDS, ChosenPlan, measured_choice, unmeasured, why_not_here
from memfit.solver import SIMPLER_WITHIN, Combination, frontier, refusals
from memfit.workload import LoopWorkload, fingerprint

_CHEAP = 0.05  # a plan that is slower than the fastest step by no more needs no fallback
_SLOW = 2.0  # a step with all of its forward pass computed again takes less than this times as long
_SIZES_BETWEEN = 2  # captured at most: the first one's peak tells whether fewer microbatches fit
_MOST_STACKS = 16  # of fallbacks, captured at most
_MUCH, _LITTLE = 0.05, 0.01
"""Of a long step's lowest peak: a fallback that saves more comes first; one that saves less is not worth a capture."""
_NEAR = 0.03  # a size between that is expected to be slower by no more may be faster, and is for measuring to tell
_FIRST_SHARE = 0.9  # of the time for solving: what the plan may take; the frontier has the rest
_LOOP_FRONTIER_SECONDS = 0.5  # while a loop waits


def assemble(request: Request) -> Plan:
    """Return the fastest plan that fits; what turns out not to work is left out, and the rest searched again.

    Raises:
        InfeasibleError: No plan that the numerics class allows fits.
        CaptureError: The step can't be captured.
    """
    assembly = _Assembly(request)
    assembly.capture()
    started = time.monotonic()
    chosen, points, proof = assembly.proven()
    solve_seconds = time.monotonic() - started
    choice = assembly.measured(ChosenPlan(chosen, proof))
    if choice.confirmed.point.levers != chosen.point.levers:
        points = with_plan(points, choice.confirmed, assembly.limits)
    return assembly.plan(choice, points, solve_seconds)


class _Assembly:
    def __init__(self, request: Request) -> None:
        self.request, self.options, self.steps = request, request.options, CapturedSteps(request)
        self.confirmation = Confirmation(request.workload, self.steps.failures, request.options.engine)
        self.notes: list[str] = list(request.findings.notes)
        self.excluded = request.findings.excluded
        self.solving_seconds = 0.0
        self.as_run: dict[Levers, Levers] = {}  # with those that leave a captured step as it is, and lower its peak
        self.gains: dict[Levers, str] = {}  # by them, in words
        self.wanted: list[Levers] = []
        self.is_cut = False  # whether what may be lower than the leanest step was not captured
        self.is_renewed = False  # whether the search was begun again, by times that were measured anew

    # Capture

    def capture(self) -> None:
        """Capture the step with every combination of levers but regions that is searched."""
        steps, request, device = self.steps, self.request, self.request.device
        request.progress("capture", 0, 1)
        first = self.confirmation.capture(steps.alone)
        request.findings.plain = steps.traces[steps.alone] = first
        steps.share()
        # On a GPU the budget is held against what the allocator reserves.
        plain_bytes = bytes_of_plain(request.budget, self._as_is) if request.budget.of == "plain" else 0
        budget_bytes = request.budget.nbytes(device_bytes=device.usable_bytes, plain_bytes=plain_bytes)
        self.budget_share = request.budget.share_text(device.name, device.usable_bytes, plain_bytes)
        steps.budget_bytes = budget_bytes
        fits = self._as_is.peak_upper_bytes <= budget_bytes
        if request.budget.of == "device" and fits:
            self.notes.append("the plain step fits this share of the device: half of the plain step's peak is '0.5x'")
        steps.coupling = coupling(first, request.workload)
        if isinstance(request.workload, LoopWorkload) and (fits or not request.workload.tape.entries):
            # A loop waits, and other levers only save memory: none is needed where the plain step fits, and for the
            # first step alone they hardly pay for their captures. Where regions are not enough, all are tried.
            wanted = [steps.plain]
        else:
            wanted = self._proposed()
        waiting: dict[Levers, Levers] = {}  # the combination that is captured before another
        for levers in wanted:
            on = LeversOn(levers, steps.batch_size)
            found = (lever.without(on) for lever in used_levers(steps.on(levers)) if lever.waits)
            if (before := next((each for each in found if each is not None), None)) is not None:
                waiting[levers] = before
        early = steps.captured([levers for levers in wanted if levers not in waiting])
        seconds = {levers: steps.predicted(levers).step_seconds for levers in early}
        least = min((seconds[levers] for levers in early if steps.allows(levers)), default=math.inf)
        slow = {levers for levers in early if seconds[levers] > _SLOW * least}
        deferred = {levers: before for levers, before in waiting.items() if before in slow or compiles(levers)}
        self.deferred = DeferredCandidates(steps, deferred, early)
        wanted = [levers for levers in wanted if levers in early or levers in waiting and levers not in deferred]
        self.wanted = self._with_any(steps.captured(wanted))

    def _proposed(self) -> list[Levers]:
        wanted = [self.steps.plain]
        for lever in LEVERS:
            try:
                wanted = lever.propose(self.steps, wanted)
            except NotOffered as e:
                self.notes += [str(e)] if e.is_noted else []
        return wanted

    @property
    def _as_is(self) -> Prediction:
        """The prediction for the step as the user wrote it."""
        return self.steps.predicted(self.steps.plain)

    @property
    def limits(self) -> Limits:
        assert self.steps.budget_bytes is not None
        return Limits(self.steps.budget_bytes, self.steps.costs.peak_error, self.options.numerics)

    def _with_any(self, wanted: list[Levers]) -> list[Levers]:
        """Return combinations, with the plain step where no other is left that may be chosen."""
        if any(map(self.steps.allows, wanted)):
            return wanted
        if self.options.compile is True:
            not_allowed = [f"numerics={self.options.numerics!r} does not allow it"]
            why = "; ".join(self.steps.failures.notes() or not_allowed)
            raise PlanError(f"compile=True, and the step can't be compiled: {why}")
        return [*wanted, *self.steps.captured([self.steps.plain])]

    # Search

    def proven(self) -> tuple[Confirmed, list[Candidate], Proof]:
        """Return the fastest plan that fits and works, the frontier, and what the plan was held against."""
        steps, findings = self.steps, self.request.findings

        def extent() -> object:  # of the search, to tell whether as much is searched as before
            return len(self.excluded), list(self.wanted), list(self.deferred.waiting)

        while True:
            before, steps.are_renewed = extent(), False
            try:
                chosen, points = self._search()
                if steps.are_renewed and not self.is_renewed:
                    self.is_renewed, self.wanted = True, steps.captured(self.wanted)
                    continue
                return chosen, points, self._proof(chosen)
            except Excluded as e:
                self.notes += e.notes
                self.excluded |= e.modules
                if isinstance(e.error, RecomputationError):
                    findings.notes += e.notes
                    findings.excluded |= e.modules
                self.wanted = self._with_any([levers for levers in self.wanted if not e.are_out(levers)])
                self.deferred.waiting = [levers for levers in self.deferred.waiting if not e.are_out(levers)]
                if extent() == before:  # it would be chosen again
                    raise e.error from None

    def _search(self) -> tuple[Confirmed, list[Candidate]]:
        """Return the fastest plan that fits, confirmed, and the frontier."""
        progress, total = self.request.progress, len(self.wanted) + 1
        self.combinations: list[Combination] = []
        for index, levers in enumerate(self.wanted):
            self._add(levers)
            progress("solve", index + 1, total)
        chosen = self._choose()
        self.notes += refusal_notes(refusals(Regions(self.steps.traces[self._freed(chosen.point.levers)])))
        progress("solve", total, total)
        self.chosen, points = held_against(self._frontier(chosen), chosen, self.limits, self._confirm)
        points = [self._as_run(point) if point.is_captured else point for point in points]
        return self.chosen._replace(point=self._as_run(self.chosen.point)), points

    def _freed(self, levers: Levers) -> Levers:
        """Return the levers of the plain step, with those that free modules for regions where a plan uses them."""
        freeing = {x.field: getattr(levers, x.field) for x in used_levers(self.steps.on(levers)) if x.frees_modules}
        return replace(self.steps.plain, **freeing)

    def _add(self, levers: Levers) -> Combination:
        self.combinations.append(self.steps.combination(levers, self.excluded))
        return self.combinations[-1]

    def _choose(self) -> Confirmed:
        """Return the fastest plan that fits. Fallbacks are tried only where no other is cheap."""
        seconds = self.options.time_limit_seconds
        best = self._fastest(self.combinations, seconds)
        while True:
            best_seconds = math.inf if best is None else best.prediction.step_seconds
            if not (added := self._search_too(self.deferred.next(best_seconds, self.limits.peak_bytes))):
                break
            best = self._fastest(added, seconds, best)
        for _ in range(_SIZES_BETWEEN if best is not None else 0):  # where such microbatches may be about as fast
            assert best is not None
            searched = [c.levers for c in self.limits.allow(self.combinations) if not compiles(c.levers)]
            levers = size_between(
                searched,
                self.steps.predicted,
                batch_size=self.steps.batch_size,
                budget_bytes=self.limits.budget_bytes,
                below_seconds=(1 + _NEAR) * best.prediction.step_seconds,
            )
            if levers is None or self.steps.failures.has_failed(levers):
                break
            if not (added := self._search_too(self.steps.captured([levers]))):
                break
            best = self._fastest(added, seconds / 4, best)
        least = min(c.problem.plain_seconds for c in self.limits.allow(self.combinations))
        for lever in self.request.fallbacks if best is not None or not self.steps.is_long else ():
            if best is not None and best.prediction.step_seconds <= (1 + _CHEAP) * least:
                break
            captured = self.steps.captured(self._with_fallback(lever, best))
            best = self._fastest(self._search_too(captured), seconds / 4, best)
        if best is None:
            best = self._of_all(seconds)
        if best is not None:
            return best
        batch = "the loop's batch" if isinstance(self.request.workload, LoopWorkload) else "Workload.batch"
        return leanest_that_fits(
            self.combinations,
            self.limits,
            self._confirm,
            seconds,
            self._beside,
            advice=Advice(batch, self._savings, self._as_is.peak_upper_bytes, self._as_run, is_whole=not self.is_cut),
        )

    def _fastest(
        self, combinations: Sequence[Combination], seconds: float, best: Confirmed | None = None
    ) -> Confirmed | None:
        """Return the fastest plan that fits, of these and the best one before.

        Compiled steps have wider error bars: where one does not fit, that says nothing of the others.
        """
        ways: dict[bool, list[Combination]] = {}
        for combination in self.limits.allow(combinations):
            ways.setdefault(compiles(combination.levers), []).append(combination)
        for way in sorted(ways):
            share = seconds / len(ways)
            on_paper = self.steps.upper_bytes_on_paper if self.steps.is_long else None
            best, spent = fastest_that_fits(ways[way], self.limits, self._confirm, share, best, on_paper)
            self.solving_seconds += spent
        return best

    def _search_too(self, captured: Sequence[Levers]) -> list[Combination]:
        self.wanted += captured
        return [self._add(levers) for levers in captured]

    def _with_fallback(self, lever: UpdateLever, best: Confirmed | None) -> list[Levers]:
        """Return a fallback's combinations: of the whole batch, of the smallest microbatches, and of the best's."""
        steps = self.steps
        if lever.most_saved_bytes(steps.traces[steps.plain]) < least_bytes(steps):
            return []

        def kept(levers: Levers) -> tuple[object, ...]:  # what neither a switch nor a fallback changes
            fields = [each.field for each in LEVERS if not (each.switchable or isinstance(each, UpdateLever))]
            return tuple(getattr(levers, field) for field in fields)

        bases = self._bases(best)
        if best is not None:
            bases = [c for c in bases if kept(c.levers) == kept(best.point.levers)]
        bases.sort(key=lambda c: -c.solver.peak_floor_bytes)  # of those that differ in switches, the leanest is last
        distinct = {(kept(c.levers), c.levers.microbatch_size): c.levers for c in bases}
        return [levers for base in distinct.values() if self._can_be_tried(levers := lever.fallback(base))]

    def _bases(self, best: Confirmed | None = None) -> list[Combination]:
        """Return the combinations that a fallback is added to: of the whole batch, and of the smallest microbatches.

        A step of microbatches between holds at least as much as one of the smallest. It may be faster, as the best is.
        """
        bases = [
            c
            for c in self.limits.allow(self.combinations)
            if not any(isinstance(used, UpdateLever) for used in used_whole(c.levers))
        ]
        sizes = {self.steps.batch_size, min(c.levers.microbatch_size for c in bases)}
        sizes |= set() if best is None else {best.point.levers.microbatch_size}
        return [c for c in bases if c.levers.microbatch_size in sizes]

    def _can_be_tried(self, levers: Levers) -> bool:
        """Tell whether a combination is allowed, has room in the host, has not failed, and was not searched."""
        steps = self.steps
        names = lever_names(steps.on(levers)) | circumstances(self.request.workload, self.request.device)
        return (
            levers not in self.wanted
            and steps.allows(levers)
            and steps.host_bytes_left(levers) >= 0
            and not steps.failures.has_failed(levers)
            and not met(CONFLICTS, names, self.options.numerics)
        )

    def _of_all(self, seconds: float) -> Confirmed | None:
        """Return the fastest plan that fits of whatever the levers allow, however little each saves; None for none.

        What is left untried after that can't hold less than the leanest step found, but where `is_cut` says so: no
        fallback saves as much, alone or beside others.
        """
        steps = self.steps
        steps.tries_all = True
        if steps.is_long:
            return self._one_by_one(seconds)
        added = self._search_too(steps.captured([x for x in self._proposed() if self._can_be_tried(x)]))
        best = self._fastest(added, seconds)
        for lever in self.request.fallbacks if best is None else ():
            added, saved = [], lever.most_saved_bytes
            floors = [(c.solver.peak_floor_bytes - saved(steps.traces[c.levers]), c) for c in self._bases()]
            for floor_bytes, base in sorted(floors, key=lambda found: found[0]):
                share, allowed = seconds / len(self.combinations), self.limits.allow(self.combinations)
                lowest_bytes = min(c.solver.leanest(share).peak_bytes for c in allowed)
                levers = lever.fallback(base.levers)
                if floor_bytes < lowest_bytes and self._can_be_tried(levers):
                    added += self._search_too(steps.captured([levers]))
            best = self._fastest(added, seconds / 4, best)
        return best or self._stacked(seconds)

    def _one_by_one(self, seconds: float) -> Confirmed | None:
        """Return the fastest plan that fits of the leanest step with one lever more after the other; None for none.

        A lever stays where it lowers the peak. All of them together would take a capture for each combination, and one
        of a long step takes as long as dozens of others.
        """
        steps, self.is_cut = self.steps, True
        others = [lever for lever in LEVERS if not (lever.compiles or isinstance(lever, UpdateLever))]
        share = seconds / (len(others) + len(self.request.fallbacks))

        def lowest(combination: Combination) -> int:
            return combination.solver.leanest(share).peak_bytes

        def saves(lever: UpdateLever, share: float) -> bool:
            return lever.most_saved_bytes(steps.traces[leanest.levers]) >= share * lowest(leanest)

        leanest = min(self.limits.allow(self.combinations), key=lowest)
        first = [lever for lever in self.request.fallbacks if saves(lever, _MUCH)]
        for lever in dict.fromkeys((*first, *others, *self.request.fallbacks)):
            near = list[Levers]()
            if not isinstance(lever, UpdateLever):
                with contextlib.suppress(NotOffered):
                    near = lever.propose(steps, [leanest.levers])
            elif saves(lever, _LITTLE):
                near = [lever.fallback(leanest.levers)]
            added = self._search_too(steps.captured([x for x in dict.fromkeys(near) if self._can_be_tried(x)]))
            if (best := self._fastest(added, share)) is not None:
                return best
            leanest = min([leanest, *self.limits.allow(added)], key=lowest)
        return None

    def _stacked(self, seconds: float) -> Confirmed | None:
        """Return the fastest plan that fits of several fallbacks together, captured one by one until one fits.

        First come those that fit if each saves what it saves alone, the cheapest first; then those that may hold less
        than the leanest step found: its neighbours, then others. Not all are captured where these are many.
        """
        steps, fallbacks = self.steps, self.request.fallbacks
        share, tried = seconds / len(self.combinations), set[Levers]()

        def lowest(combination: Combination) -> int:
            return combination.solver.leanest(share).peak_bytes

        def next_levers() -> Levers | None:
            allowed = self.limits.allow(self.combinations)
            found = {c.levers: functools.partial(lowest, c) for c in allowed}
            order = [
                levers
                for base in self._bases()
                for levers in expected_to_fit(base.levers, fallbacks, found, self.limits.peak_bytes)
            ]
            leanest = min(allowed, key=lowest)
            bounds = [
                (
                    c is not leanest,
                    c.solver.peak_floor_bytes - lever.most_saved_bytes(steps.traces[c.levers]),
                    lever.fallback(c.levers),
                )
                for c in allowed
                for lever in fallbacks
            ]
            bounds.sort(key=lambda bound: bound[:2])
            order += [levers for _, floor_bytes, levers in bounds if floor_bytes < lowest(leanest)]
            return next((levers for levers in order if levers not in tried and self._can_be_tried(levers)), None)

        best: Confirmed | None = None
        while best is None and (levers := next_levers()) is not None:
            if len(tried) == _MOST_STACKS:
                self.is_cut = True
                break
            tried.add(levers)
            best = self._fastest(self._search_too(steps.captured([levers])), seconds / 4)
        return best

    def _beside(self, point: Candidate) -> list[Confirmed]:
        """Return a plan with lean modules beside its regions; the solver does not combine the two."""
        found, plans = list[Levers](), list[Confirmed]()
        for lever in LEVERS:
            with contextlib.suppress(NotOffered):
                found += lever.propose(self.steps, [point.levers]) if lever.recomputes else []
        for levers in found:
            if levers != point.levers and self._can_be_tried(levers):
                uses = self.steps.uses(levers)
                other = replace(point, levers=levers, uses=uses, numerics=freest(uses), status="feasible")
                if (prediction := self._confirm_another(other)) is not None:
                    plans.append(Confirmed(other, prediction))
        return plans

    def _savings(self, leanest: Levers, lowest_bytes: int) -> list[Saving]:
        """Return what else would save of the leanest step, the most first: what the arguments of the plan forbid."""
        steps, request, base = self.steps, self.request, replace(leanest, regions=())
        found: list[Saving] = []
        with replaced(steps, "numerics", "changed"):
            near = [lever.fallback(base) for lever in request.fallbacks if not steps.is_long]
            for lever in LEVERS if not steps.is_long else ():  # whose captures take long
                if not lever.compiles:
                    with contextlib.suppress(NotOffered):
                        near += [levers for levers in lever.propose(steps, [base]) if levers.sharding == base.sharding]
            near = [x for x in dict.fromkeys(near) if x not in self.wanted and self._can_be_tried(x)]
            least = min((x.microbatch_size for x in near), default=0)
            near = [x for x in near if x.microbatch_size in (base.microbatch_size, least)]
            for levers in steps.captured(near):
                saved = lowest_bytes - steps.combination(levers, self.excluded).lowest(ADVICE_SECONDS).peak_bytes
                added = [use for use in steps.uses(levers) if use not in steps.uses(base)]
                found.append(Saving(saved, f"numerics={freest(added)!r} allows {uses_text(added)}"))
        if request.device.link_bytes_per_second and not steps.host_budget_bytes:
            with replaced(steps, "host_budget_bytes", request.device.memory_bytes):
                lowest = steps.combination(base, self.excluded).lowest(ADVICE_SECONDS)
                found.append(Saving(lowest_bytes - lowest.peak_bytes, "host_budget= allows activation offload"))
        return sorted((each for each in found if each.nbytes > 0), reverse=True)

    def _frontier(self, chosen: Confirmed) -> list[Candidate]:
        """Solve the frontier, without the chosen plan; set the `peak_upper_bytes` of each point."""
        limit, workload = self.options.time_limit_seconds, self.request.workload
        left = min(max((1 - _FIRST_SHARE) * limit, limit - self.solving_seconds), limit / 2)
        if isinstance(workload, LoopWorkload):
            if not workload.tape.entries:  # for the first step alone
                return []
            left = min(left, _LOOP_FRONTIER_SECONDS)
        progress = functools.partial(self.request.progress, "frontier")
        points = frontier(self.combinations, self.options.points, progress, left)
        with_regions = chosen.excess if chosen.point.levers.regions else 1.0
        found = []
        for point in points:
            if point.levers != chosen.point.levers:
                excess = Confirmed(point, self.steps.predicted(replace(point.levers, regions=()))).excess
                excess = max(with_regions * bool(point.levers.regions), excess)
                found.append(replace(point, peak_upper_bytes=int(point.peak_bytes * excess)))
        return found

    # Confirm

    def _confirm(self, candidate: Candidate) -> Prediction:
        """Predict a plan from a capture of the step with the plan applied."""
        return self._on_device(candidate, self.confirmation.confirmed(candidate.levers, is_long=self.steps.is_long))

    def _on_device(self, candidate: Candidate, trace: Trace) -> Prediction:
        """Predict a captured plan; where it does not fit, with the levers under which the device holds least for it."""
        steps = self.steps
        plain = best = steps.prediction_of(trace, candidate.levers)
        for lever in LEVERS if not self.limits.fit(plain) else ():
            for levers in lever.beside(candidate.levers, self.request.device):
                prediction = steps.prediction_of(trace, levers)
                if prediction.peak_upper_bytes < best.peak_upper_bytes:
                    best, self.as_run[candidate.levers] = prediction, levers
                    less = format_bytes(plain.peak_upper_bytes - best.peak_upper_bytes)
                    added = ", ".join(use.setting for use in steps.uses(levers) if use not in candidate.uses)
                    self.gains[levers] = f"{added}: at most {less} less than without"
        return best

    def _as_run(self, point: Candidate) -> Candidate:
        """Return a point with the levers that it was predicted with."""
        levers = self.as_run.get(point.levers, point.levers)
        uses = self.steps.uses(levers)
        return point if levers == point.levers else replace(point, levers=levers, uses=uses, numerics=freest(uses))

    def _confirm_another(self, candidate: Candidate) -> Prediction | None:
        """Predict a plan in the same way; None where it can't be applied, since there is one that can."""
        if not candidate.levers.regions:
            return self._on_device(candidate, self.steps.trace(candidate.levers))
        try:
            return self._confirm(candidate)
        except Excluded:
            return None

    def _proof(self, plan: Confirmed) -> Proof:
        """Hold a plan's recomputation against the user's step; raise `Excluded` where it differs."""
        seconds = plan.prediction.step_seconds
        levers = plan.point.levers
        proof = self.confirmation.proof(as_captured(levers), self._as_is, seconds, self.request.progress)
        return replace(proof, levers=levers_key(levers)) if proof.levers else proof

    def measured(self, predicted: ChosenPlan) -> ChosenPlan:
        """Return the plan that is fastest as it runs here, of those that the prediction can't tell apart."""
        request, measure, chosen = self.request, self.options.measure, predicted.confirmed
        if measure is False:
            return predicted
        why = why_not_here(request.workload, request.device, max(request.world_size, request.processes))
        if self.options.engine is not None:
            why = "another library's engine shares the step"
        code = self._code_seconds(chosen.point.levers)
        if measure == "auto" and code > CODE_SECONDS:
            why = why or f"compiling it is predicted to take {format_seconds(code)}: measure=True compiles it"
        if why:
            return unmeasured(predicted, why)

        def near() -> list[Confirmed]:  # with measure="auto" those only whose code is made in time
            error, confirm = self.steps.costs.step_error, self._confirm_another
            found = near_ties(self.combinations, self.limits, self.chosen, confirm, step_error=error, way=compiles)
            found = [plan._replace(point=self._as_run(plan.point)) for plan in found]
            total, kept = 0.0, list[Confirmed]()
            for plan in found:
                seconds = self._code_seconds(plan.point.levers) if measure == "auto" else 0.0
                if total + seconds <= CODE_SECONDS:
                    total += seconds
                    kept.append(plan)
            return kept

        return measured_choice(
            predicted,
            near,
            self._proof,
            workload=request.workload,
            device=request.device,
            measure=measure,
            progress=request.progress,
        )

    def _code_seconds(self, levers: Levers) -> float:
        """Return about how long a plan's code takes to make; 0 where none is."""
        if not compiles(levers):
            return 0.0
        return code_seconds(self.steps.trace(replace(levers, regions=())), os.cpu_count() or 1)

    # Tell

    def plan(self, choice: ChosenPlan, points: list[Candidate], solve_seconds: float) -> Plan:
        request, steps = self.request, self.steps
        point, prediction = choice.confirmed
        is_here = request.device.kind == "cpu" and request.device.is_here
        code_seconds = self._code_seconds(point.levers) if is_here else 0.0
        bound = min(point.bound_seconds, prediction.step_seconds)
        gap = 1 - bound / prediction.step_seconds
        return Plan(
            memfit_version=__version__,
            torch_version=str(torch.__version__),
            workload=request.workload.name,
            fingerprint=fingerprint(request.workload),
            device=request.device.name,
            batch_size=steps.global_batch_size,
            budget_bytes=self.limits.budget_bytes,
            budget_share=self.budget_share,
            host_budget_bytes=request.host_budget_bytes,
            levers=point.levers,
            uses=point.uses,
            numerics=point.numerics,
            allowed=request.options.numerics,
            plain=self._as_is,
            predicted=prediction,
            solution=Solution(
                status="optimal" if point.status == "optimal" and gap <= SIMPLER_WITHIN else "feasible",
                bound_seconds=bound,
                gap=gap,
                solve_seconds=solve_seconds,
            ),
            frontier=points,
            notes=self._notes(choice, code_seconds),
            proof=choice.proof,
            engine=self.options.engine,
            measured=choice.measured,
            code_seconds=code_seconds,
        )

    def _notes(self, choice: ChosenPlan, code_seconds: float) -> list[str]:
        """Return the notes of a plan: on the plain step, on the search, on what was chosen, and on what failed."""
        steps, levers, engine = self.steps, choice.confirmed.point.levers, self.options.engine
        plain = steps.traces[steps.plain]
        notes = [*plain.notes, *self.notes, *choice.notes]
        draws = any(op.random for op in plain.ops)
        other = "microbatches differ from the whole batch's" if levers.microbatch_size < steps.batch_size else ""
        if not other and draws_otherwise(levers):
            other = "compiled code differ from the uncompiled step's"
        notes += [f"{OTHER_DRAWS}{other}; their probability is the same"] if draws and other else []
        if compiles(levers):
            kernels = kernels_of(steps.trace(replace(levers, regions=())))
            takes = "seconds to minutes"
            if code_seconds:
                takes = f"about {format_seconds(code_seconds)}, unless an earlier run kept it"
            notes.append(f"the first step compiles about {kernels} kernels: {takes}. Step times do not include this")
        if sizes := self.deferred.compiled_sizes:
            notes.append(
                f"compiled microbatches of {', '.join(map(str, sizes))} were not searched: the searched"
                " compiled steps predict no faster plan there"
            )
        bare = replace(levers, regions=())
        notes += [note for run, note in self.gains.items() if run == levers]
        notes += [note for lever in used_levers(steps.on(levers)) for note in lever.notes(steps, bare)]
        notes += steps.failures.notes()
        if engine is not None:
            notes.append(
                f"another library's engine shares the step: {sharding_text(engine)}. memfit counted it on"
                " paper and did not capture it; the batch and the prediction are one rank's"
            )
        return list(dict.fromkeys(notes))
