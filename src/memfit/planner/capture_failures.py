"""Trials of levers: what can't be captured or run with one is left out of a plan, with a note, rather than end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from memfit._torch import DataDependentOutputException, DynamicOutputShapeException
from memfit.errors import MemfitError, RecomputationError
from memfit.ir import Device, Levers, Region, Trace
from memfit.levers import LeversOn, lever_uses
from memfit.planner.captures import Captures
from memfit.workload import Workload

Attempt = Callable[[Levers], object]
"""Tries a step with some levers, and raises where it fails."""

_LONGEST = 240  # of an error's first line that goes into a note
_NAMED = 3  # modules that a note names before it counts the others


class CaptureFailures:
    """Captures a step with levers that are optional, and knows which of them failed.

    Attributes:
        captures: Captures it.
        plain: The levers of the step as the user wrote it.
        data: Has what the step reads with data.
    """

    def __init__(self, workload: Workload, device: Device, plain: Levers) -> None:
        self.captures, self.plain = Captures(workload, device), plain
        self.data = self.captures.data
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
        """Note that a step fails with some levers."""
        self._failed[levers] = why

    def notes(self) -> list[str]:
        """Return which levers were left out and why, those that fail alike together."""
        alike: dict[str, list[str]] = {}
        for levers, why in self._failed.items():
            alike.setdefault(why, []).append(" with ".join(sorted(self._names(levers))))
        listed = {why: ", ".join(dict.fromkeys(names)) for why, names in alike.items()}
        return [f"{names}: left out, since the step fails with it ({why})" for why, names in listed.items()]

    def _names(self, levers: Levers) -> frozenset[str]:
        on = LeversOn(levers, self.plain.microbatch_size)
        return frozenset(use.brief for use in lever_uses(on))


def fails(attempt: Attempt, levers: Levers) -> bool:
    """Tell whether a step fails with some levers."""
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
        if fails(attempt, replace(levers, regions=tuple(half))):
            found += failing(levers, half, attempt)
    return found or list(regions)


def first_line(error: BaseException) -> str:
    """Return an error in one line, as the user's own code said it where that is known."""
    if isinstance(error, RecomputationError):
        return f"the second run of {error.module} differs from the first ({error.how})"
    origin = error.__cause__ or error
    if isinstance(origin, DataDependentOutputException | DynamicOutputShapeException):  # says not where
        place, _, _ = str(error).partition("). ")  # and then what to do
        return _shortened(f"{place})")
    said = (str(origin).strip() or type(origin).__name__).splitlines()[0]
    return _shortened(said if isinstance(origin, MemfitError) else f"{type(origin).__name__}: {said}")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def refusal_notes(refused: Mapping[str, str]) -> list[str]:
    """Return why modules are not recomputed (`solver.candidates.refusals`), those of one reason together."""
    alike: dict[str, list[str]] = {}
    for fqn, why in refused.items():
        if fqn:
            alike.setdefault(why, []).append(fqn)
    who = {why: "it" if len(names) == 1 else "each" for why, names in alike.items()}
    return [f"{_listed(names)} not recomputed: {who[why]} {why}" for why, names in alike.items()]


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    others = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])}{f' and {others} more' if others > 0 else ''} are"
