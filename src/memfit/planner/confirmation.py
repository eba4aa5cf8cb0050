"""The confirmation of a plan: its step captured again and held against the user's; failing levers and regions go."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from msgspec.structs import replace

from memfit._torch import DataDependentOutputException, DynamicOutputShapeException
from memfit.capture import nothing_changes
from memfit.errors import MemfitError, RecomputationError
from memfit.foundations import Progress, format_bytes, format_seconds
from memfit.hardware import free_bytes
from memfit.ir import Device, Levers, Prediction, Proof, Region, Sharding, Trace, enclosing, levers_key
from memfit.levers import LeversOn, applied_to_copy, recomputes, used_levers
from memfit.planner.captures import Captures, capture_levers
from memfit.ranks import of_engine
from memfit.recomputation import Differences, probing
from memfit.workload import LoopWorkload, Workload, has_data

Attempt = Callable[[Levers], object]
"""Tries a step with some levers, and raises where it fails."""

_LONGEST = 240  # of an error's first line that goes into a note
_NAMED = 3  # modules that a note names before it counts the others


class CaptureFailures:
    """Captures a step with levers that are optional, and knows which of them failed."""

    def __init__(self, workload: Workload, device: Device, plain: Levers) -> None:
        self.captures, self.plain = Captures(workload, device), plain
        self._failed: dict[Levers, str] = {}

    def capture(self, levers: Levers) -> Trace | None:
        """Return the trace of the step with some levers; None, and a note, where it can't be captured with them."""
        if self.has_failed(levers):
            return None
        try:
            return self.captures(levers)
        except MemfitError as e:
            if levers == self.plain:
                raise
            self.leave_out(levers, first_line(e))
        return None

    def has_failed(self, levers: Levers) -> bool:
        """Tell whether levers failed before, by themselves or as part of these."""
        return any(self._names(failed) <= self._names(levers) for failed in self._failed)

    def leave_out(self, levers: Levers, why: str) -> None:
        self._failed[levers] = why

    def notes(self) -> list[str]:
        """Return which levers were left out and why, those that fail alike together."""
        alike = _by_reason((" with ".join(sorted(self._names(levers))), why) for levers, why in self._failed.items())
        listed = {why: ", ".join(dict.fromkeys(names)) for why, names in alike.items()}
        return [f"{names}: left out, since the step fails with it ({why})" for why, names in listed.items()]

    def _names(self, levers: Levers) -> frozenset[str]:
        on = LeversOn(levers, self.plain.microbatch_size)
        return frozenset(lever.use(on).brief for lever in used_levers(on))


def _by_reason(whys: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    alike: dict[str, list[str]] = {}
    for what, why in whys:
        alike.setdefault(why, []).append(what)
    return alike


def _fails(attempt: Attempt, levers: Levers) -> bool:
    try:
        attempt(levers)
    except Exception:  # someone's code, which may raise anything
        return True
    return False


def failing(levers: Levers, regions: Sequence[Region], attempt: Attempt) -> list[Region]:
    """Return regions without which a step works, by halves; all where it fails with no half of them."""
    if len(regions) <= 1:
        return list(regions)
    middle = len(regions) // 2
    found: list[Region] = []
    for half in (regions[:middle], regions[middle:]):
        if _fails(attempt, replace(levers, regions=tuple(half))):
            found += failing(levers, half, attempt)
    return found or list(regions)


def first_line(error: BaseException) -> str:
    """Return an error in one line, as the user's own code said it where that is known."""
    if isinstance(error, RecomputationError):
        return f"the second run of {error.module} differs from the first ({error.how})"
    origin = error.__cause__ or error
    if isinstance(origin, DataDependentOutputException | DynamicOutputShapeException):  # says not where
        said = f"{str(error).partition('). ')[0]})"  # and then what to do
    else:
        said = (str(origin).strip() or type(origin).__name__).splitlines()[0]
        said = said if isinstance(origin, MemfitError) else f"{type(origin).__name__}: {said}"
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def refusal_notes(refused: Mapping[str, str]) -> list[str]:
    """Return why modules are not recomputed (`solver.candidates.refusals`), those of one reason together."""
    return [
        f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
        + (f" is not recomputed: it {why}" if len(names) == 1 else f" are not recomputed: each {why}")
        for why, names in _by_reason((fqn, why) for fqn, why in refused.items() if fqn).items()
    ]


_GROWS = "it takes larger tensors than before"
LONGEST_SECONDS = 30.0
"""A step that is predicted to take longer is not run to prove a plan."""
_ROOM = 2.0  # the free memory that a proof asks for, as a multiple of the plain peak: it holds that and a copy


class Excluded(Exception):
    """A plan can't be applied, or computes another result than the user's step: a part of it is searched no more.

    Modules are not to be in a region any more, and notes are for the plan without them. `are_out` tells whether a plan
    with some levers is searched no more.
    """

    def __init__(
        self, error: Exception, notes: list[str], modules: set[str], are_out: Callable[[Levers], bool] = lambda _: False
    ) -> None:
        super().__init__(first_line(error))
        self.error, self.notes, self.modules, self.are_out = error, notes, modules, are_out


class Confirmation:
    """Captures planned steps, and holds their recomputed tensors against the user's step."""

    def __init__(self, workload: Workload, failures: CaptureFailures, engine: Sharding | None = None) -> None:
        self._workload, self._failures, self._engine = workload, failures, engine
        self._captures, self._plain = failures.captures, failures.plain
        self._part, self._device = self._captures.workload, self._captures.device

    def capture(self, levers: Levers) -> Trace:
        shared = levers.sharding is not None  # whose capture takes the rank's part itself
        trace = capture_levers(self._workload if shared else self._part, levers, self._device, self._captures.data)
        return of_engine(trace, self._engine)

    def confirmed(self, levers: Levers, *, is_long: bool = False) -> Trace:
        """Return the trace of a planned step; raise `Excluded` where it can't be applied, but the plain one can.

        Args:
            is_long: Whether captures take long: then it is the second step of a copy that has made the plain one.
        """
        try:
            is_warm = is_long and levers.sharding is None
            trace = of_engine(self._captures(levers), self._engine) if is_warm else self.capture(levers)
        except RecomputationError as e:
            with probing() as found, contextlib.suppress(MemfitError):  # the modules that differ, without data
                self._captures.of_one_step(levers)
            raise self._without_differing(found or {e.modules: e}, levers) from e
        except MemfitError as e:
            raise self._without_failing(levers, e, self.capture) from e
        if growing := self._growing(trace):
            raise self._without_differing(growing, levers)
        return trace

    def proof(self, levers: Levers, as_is: Prediction, step_seconds: float, progress: Progress) -> Proof:
        """Hold a plan's recomputed tensors against the user's step, where that can run here.

        Raises:
            Excluded: Something differs, or the planned step can't run where the plain one does.
        """
        key = levers_key(levers)
        if not recomputes(levers):
            return Proof(levers=key)
        levers = replace(levers, sharding=None)  # what a rank recomputes is held against its own part of the step
        why = why_not_proven(self._part, self._device, as_is, step_seconds)
        if why:
            return Proof(why=why)
        progress("prove", 0, 1)
        compare = functools.partial(differences, self._part)
        try:
            found = compare(levers)
        except Exception as e:  # someone's code, which may raise anything
            if _fails(compare, self._plain):
                return Proof(why=f"the step can't be run here ({first_line(e)})")
            raise self._without_failing(levers, e, compare) from e
        if found:
            raise self._without_differing(found, levers)
        progress("prove", 1, 1)
        return Proof(levers=key)

    def _without_differing(self, found: Differences, levers: Levers) -> Excluded:
        """Leave out the regions around modules that differ when they run again, or lean modules."""
        found = {**found, **self._growing_alike(found, levers)}
        regions = {region.modules for region in levers.regions} | {e.modules for e in found.values() if e.how == _GROWS}
        notes = [
            f"{e.module} is not recomputed: its second run differs from the first ({e.how})" for e in found.values()
        ]
        modules = {fqn for of, e in found.items() if of in regions for fqn in enclosing(e.module)}
        error, out = next(iter(found.values())), () if found.keys() <= regions else (recomputes,)
        return Excluded(error, notes, modules, *out)  # what recomputes, where it runs again outside of regions

    def _growing(self, trace: Trace) -> Differences:
        """Return the modules that call an operator whose recomputation takes larger tensors than the forward pass.

        So does an attention that puts its keys into a cache once more. Its values may be right, and its peak is not
        that of what was solved for.
        """
        once, again = Counter[str](), Counter[str]()
        for op in trace.ops:
            if op.phase in ("forward", "recompute"):
                most = once if op.phase == "forward" else again
                most[op.name] = max(most[op.name], trace.works[op.signature].read_bytes)
        grown = {name for name, nbytes in again.items() if nbytes > once[name] > 0}
        calls = {op.call for op in trace.ops if op.phase == "forward" and op.name in grown and op.call >= 0}
        names = dict.fromkeys(trace.modules[trace.calls[call].module].fqn for call in sorted(calls))
        return {(fqn,): RecomputationError((fqn,), fqn, _GROWS) for fqn in names if fqn}

    def _growing_alike(self, found: Differences, levers: Levers) -> Differences:
        """Return the modules of the classes of those that differ which take larger tensors when they run again.

        The search would find one after the other of them, each with captures of its own.
        """
        modules = dict(self._part.model.named_modules())
        classes = {type(modules[e.module]) for e in found.values() if e.module in modules}
        alike = [fqn for fqn, module in modules.items() if fqn and type(module) in classes and (fqn,) not in found]
        if not alike or any(e.how == _GROWS for e in found.values()):
            return {}
        with contextlib.suppress(MemfitError):
            regions = tuple(Region((fqn,)) for fqn in alike)
            trace = self._captures.of_one_step(replace(self._plain, regions=regions))
            return {of: e for of, e in self._growing(trace).items() if of[0] in alike}
        return {}

    def _without_failing(self, levers: Levers, error: Exception, attempt: Callable[[Levers], object]) -> Excluded:
        """Leave out those regions without which a step works, or its other levers; raise where the plain one fails."""
        bare = replace(levers, regions=())
        if _fails(attempt, bare):
            if bare == self._plain:
                raise error
            self._failures.leave_out(bare, first_line(error))
            return Excluded(error, [], set(), self._failures.has_failed)
        regions = failing(levers, levers.regions, attempt)
        notes = [
            f"{', '.join(region.modules)} is not recomputed: with it the step fails ({first_line(error)})"
            for region in regions
        ]
        return Excluded(error, notes, {fqn for region in regions for fqn in region.modules})


def why_not_proven(workload: Workload, device: Device, plain: Prediction, step_seconds: float) -> str:
    """Return why a plan is not proven before it is returned; "" where it can be."""
    free = free_bytes()
    whys = {
        "the loop itself runs it": isinstance(workload, LoopWorkload),
        f"it runs on {device.name}": device.is_here and device.kind != "cpu",
        f"planned for {device.name}, and this machine's CPU computes differently": device.kind != "cpu",
        "the model or the batch has no data here": not has_data(workload),
        f"a step is predicted to take {format_seconds(step_seconds)}": step_seconds > LONGEST_SECONDS,
        f"the plain step needs {format_bytes(plain.peak_bytes)}, and {format_bytes(free)} is free here": (
            _ROOM * plain.peak_bytes > free
        ),
    }
    return next((why for why, holds in whys.items() if holds), "")


def differences(workload: Workload, levers: Levers, place: torch.device | None = None) -> Differences:
    """Return what makes something else when it is recomputed than the forward pass did, by its modules.

    Runs one forward and backward pass with data, on a copy of the workload, and compares every tensor that is
    recomputed with the one that autograd saved, bit by bit. The copy is on the device `place`; None for the
    workload's own.
    """
    with nothing_changes(workload), applied_to_copy(levers, workload, place) as step, probing() as found:
        step.gradients(step.workload.batch)
    return found


def probe_regions(workload: Workload, levers: Levers, place: torch.device | None = None) -> dict[Region, str]:
    """Return the regions whose recomputation makes something else than the forward pass did, and what differs."""
    named = {region.modules: region for region in levers.regions}
    return {
        named.get(modules, Region(modules)): f"the second run of {error.module} differs from the first ({error.how})"
        for modules, error in differences(workload, levers, place).items()
    }
