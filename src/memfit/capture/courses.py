"""The courses that a step may take: by what it reads of tensors, and by what it draws.

Most steps take one. Where code reads a value that is not known, the step is run with data if it can be, and told what
it read; else both answers are tried. Where Python's or NumPy's generator, or a number that PyTorch draws, decides what
runs, other draws are tried. The trace is of the course that the step takes from the present states of the generators,
and says by how much others take more (`Trace.slack`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from memfit.capture.draws import GeneratorStates
from memfit.capture.reads import Log, Number, Policy, Replay
from memfit.errors import MemfitError
from memfit.ir.trace import Phase, Trace

_MOST_FLIPS = 24  # checks that would raise, one after the other
_MOST_SITES = 6  # whose other answer is tried by itself
_SEEDS = 2
_GUESSED = 0.1  # chosen, not measured: what a number that was guessed may change besides the branch taken


@dataclass(frozen=True)
class Readings:
    """What two steps read that ran one after the other.

    Attributes:
        logs: One for each.
        starts: The states of the generators at the start of each.
    """

    logs: tuple[Log, Log]
    starts: tuple[GeneratorStates, GeneratorStates]


class Reading(Protocol):
    """Runs two steps with data.

    Attributes:
        explores: Whether courses are tried that the step may take besides: not in a search, which confirms what it
            finds.
        policy: The answers of the course that takes most, once they were tried.
        known: What they read, where they ran already and read something; else None.
    """

    explores: bool
    policy: Policy | None

    @property
    def known(self) -> Readings | None: ...

    def __call__(self) -> Readings | None:
        """Return what they read; None where they can't run."""


@dataclass
class Course:
    """One way through two steps, of which one is recorded.

    Attributes:
        replay: What they are told that they read.
        starts: The states of the generators at the start of each; None for those that the step before left.
        records_first: Whether the first step is recorded, which makes the optimizer's state; else the second.
        reads_draws: Whether it read something that PyTorch drew.
    """

    replay: Replay
    starts: tuple[GeneratorStates | None, GeneratorStates | None]
    records_first: bool = False
    reads_draws: bool = False
    _step: int = 0
    _ended: GeneratorStates | None = None
    _at: dict[tuple[int, int], GeneratorStates] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Say which step begins, from 0."""
        self._step = step
        self.replay.begin_step(step)

    def follow(self, phase: Phase, microbatch: int) -> None:
        """Note the phase that begins; a forward pass that runs again draws as it did the first time."""
        if phase == "forward":
            given = None if microbatch else self.starts[self._step]
            self._at.setdefault((self._step, microbatch), given or GeneratorStates.now()).restore()
        elif phase == "backward":
            self._ended = GeneratorStates.now()
        self.replay.enter_phase(phase, microbatch)

    @property
    def draws(self) -> bool:
        """Whether what was drawn may have decided what ran."""
        began = self._at.get((self._step, 0))
        moved = began is not None and self._ended is not None and not self._ended.draws_as(began)
        return moved or self.reads_draws


def worst_course(run: Callable[[Course], Trace], stated: Mapping[str, Number], reading: Reading | None) -> Trace:
    """Return the trace of a step, of the course that takes most where guesses decide.

    Args:
        run: Captures the step on one course.
        stated: What the user says is read (`Workload.values`).
        reading: Runs the step with data; None where that can't be.

    Raises:
        CaptureError: The step can't be captured on any course.
    """
    return _Courses(run, stated, reading).trace()


class _Courses:
    def __init__(self, run: Callable[[Course], Trace], stated: Mapping[str, Number], reading: Reading | None) -> None:
        self.run, self.stated, self.reading = run, stated, reading
        self.start = GeneratorStates.now()
        self.notes: list[str] = []

    def trace(self) -> Trace:
        course, trace = self._first()
        replay = course.replay
        if self.reading is not None and not self.reading.explores:
            return trace
        differ = any(log.reads != replay.logs[0].reads for log in replay.logs)
        if not (replay.guesses or course.draws or differ):
            return trace
        if replay.guesses:
            course, trace = self._guessed(course, trace)
        slack = _GUESSED if replay.guesses else 0.0
        if differ and not course.draws:
            slack += self._spread(course, live_peak_bytes(trace))
        if course.draws or slack:
            trace = self._larger_of_both_steps(course, trace)
        if course.draws:
            slack += self._drawn(course, live_peak_bytes(trace))
        return replace(trace, slack=trace.slack + slack, notes=[*trace.notes, *self.notes])

    def _first(self) -> tuple[Course, Trace]:
        """Return the course that is taken, and its trace: told what is read where the step can run with data."""
        if self.reading is not None and self.reading.known is not None:
            found = self._read()
            assert found is not None
            return found
        policy = None if self.reading is None else self.reading.policy
        course = Course(Replay(stated=self.stated, policy=policy), (self.start, None))
        try:
            trace = self.run(course)
        except MemfitError as e:
            if not (course.replay.guesses or course.replay.needs_data):
                raise
            return self._read() or self._flipped(course, e)
        return (self._read() if course.replay.guesses or course.reads_draws else None) or (course, trace)

    def _read(self) -> tuple[Course, Trace] | None:
        """Return the course of two steps that ran with data; None where they can't."""
        readings = None if self.reading is None else self.reading()
        if readings is None:
            return None
        course = Course(Replay(readings.logs, self.stated), readings.starts)
        return course, self.run(course)

    def _spread(self, course: Course, peak_bytes: int) -> float:
        """Return by what share what is read changes the peak from one step to the next."""
        first = course.replay.logs[0]
        replay = Replay((first, first), self.stated, course.replay.policy)
        try:
            other = live_peak_bytes(self.run(Course(replay, (course.starts[0], course.starts[0]))))
        except MemfitError:
            return _GUESSED
        return abs(other / peak_bytes - 1)

    def _larger_of_both_steps(self, course: Course, trace: Trace) -> Trace:
        """Return the trace of the step that takes more, of the first and the second."""
        replay = Replay(course.replay.logs, self.stated, course.replay.policy)
        try:
            first = self.run(Course(replay, course.starts, records_first=True))
        except MemfitError:
            return trace
        return max(trace, first, key=live_peak_bytes)

    def _flipped(self, course: Course, error: MemfitError) -> tuple[Course, Trace]:
        """Return the course on which checks pass: the last answer before an exception is turned round, and so on."""
        flipped = course.replay.policy.flipped
        for _ in range(_MOST_FLIPS):
            open_sites = [site for site in course.replay.guesses if site not in flipped]
            if not open_sites:
                break
            flipped |= {open_sites[-1]}
            course = Course(Replay(stated=self.stated, policy=Policy(flipped=flipped)), course.starts)
            try:
                return course, self.run(course)
            except MemfitError as e:
                error = e
        raise error

    def _guessed(self, course: Course, trace: Trace) -> tuple[Course, Trace]:
        """Return the course that takes most of those that other answers lead to; answers that raise are none."""
        best = course, trace
        policy, guesses = course.replay.policy, dict(course.replay.guesses)
        others = [dataclasses.replace(policy, is_high=True)]
        if 1 < len(guesses) <= _MOST_SITES:
            others += [dataclasses.replace(policy, flipped=policy.flipped ^ {site}) for site in guesses]
        for other in others if any(guess.is_number for guess in guesses.values()) else ():
            tried = Course(Replay(course.replay.logs, self.stated, other), course.starts)
            try:
                found = self.run(tried)
            except MemfitError:
                continue
            guesses = {**tried.replay.guesses, **guesses}
            best = max(best, (tried, found), key=lambda one: live_peak_bytes(one[1]))
        self.notes += [f"a guess: {guess}" for guess in guesses.values()]
        if self.reading is not None:
            self.reading.policy = best[0].replay.policy
        return best

    def _drawn(self, course: Course, peak_bytes: int) -> float:
        """Return by what share of a peak the worst of other draws takes more, and note it."""
        starts = [GeneratorStates.drawing("low"), GeneratorStates.drawing("high")]
        starts += [GeneratorStates.seeded(seed) for seed in range(_SEEDS)]
        found = []
        for start in starts:
            replay = Replay(course.replay.logs, self.stated, course.replay.policy)
            try:
                found.append(live_peak_bytes(self.run(Course(replay, (start, start)))))
            except MemfitError:
                continue
        if all(other == peak_bytes for other in found):
            return 0.0
        worst = max(found) / peak_bytes - 1
        self.notes.append(
            "what the step draws decides what runs: predicted for the first two steps from the present states of the"
            f" generators; the worst of {len(found)} other draws takes {abs(worst):.1%}"
            f" {'more' if worst > 0 else 'less'}"
        )
        return max(0.0, worst)


def live_peak_bytes(trace: Trace) -> int:
    """Return the most bytes that storages of a trace take at a time, without what operators take inside."""
    change = np.zeros(len(trace.ops) + 2, np.int64)
    for storage in trace.storages:
        change[max(storage.birth, 0)] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    return int(np.cumsum(change).max(initial=0))
