"""Paths of a step whose control flow depends on values of tensors or on random numbers.

Where code reads a value that is not known, the step runs with data if it can, and its readings are replayed; else both
answers are tried. Where a generator of Python or NumPy, or a number that PyTorch draws, decides what runs, other draws
are tried. The trace is of the path from the present states of the generators; `Trace.slack` says by how much others
take more.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from memfit.capture.known_values import Extreme
from memfit.capture.recorder import Recording
from memfit.capture.value_reads import Policy, ReadLog, ReadNumber, ReadReplay
from memfit.errors import MemfitError
from memfit.ir import Phase, Trace
from memfit.workload import default_generator

_MOST_FLIPS = 24  # checks that would raise, one after the other
_MOST_SITES = 6  # guesses, up to which each one's other answer is tried by itself
_SEEDS = 2
_GUESSED = 0.1  # chosen, not measured: a guessed number may change more than the branch taken
_WORDS = 624  # of the Mersenne twister's state
_TEMPERED_TO_ONES = 0x12DD9BB3  # M. Matsumoto, T. Nishimura (1998), *Mersenne Twister*, section 2.1


@dataclass(frozen=True)
class GeneratorStates:
    """The states of Python's, NumPy's and PyTorch's global generators.

    Attributes:
        extreme: Whether the generators draw the least ("low") or the greatest ("high") numbers; "" for neither.
    """

    python: Any
    numpy: Any
    extreme: Extreme = field(default="", compare=False)
    of_torch: torch.Tensor = field(default_factory=lambda: default_generator().get_state(), compare=False)

    @classmethod
    def now(cls, python: Any = random, of_numpy: Any = np.random) -> GeneratorStates:
        """Return the present states; of other generators of Python and NumPy where they are given."""
        name, keys, *rest = of_numpy.get_state()
        return cls(python.getstate(), (name, tuple(np.asarray(keys).tolist()), *rest))

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """Return the states of generators with a seed."""
        return cls.now(random.Random(seed), np.random.RandomState(seed))

    @classmethod
    def drawing(cls, extreme: Literal["low", "high"]) -> GeneratorStates:
        """Return states from which Python's and NumPy's generators draw extreme numbers, some hundreds of times."""
        # Both are the Mersenne twister, whose next words are its state's, tempered.
        word = 0 if extreme == "low" else _TEMPERED_TO_ONES
        last = random.Random(0)  # other words at the end: code that draws until a number differs comes to an end
        words = (*[word] * (_WORDS - 24), *(last.getrandbits(32) for _ in range(24)))
        return cls((3, (*words, 0), None), ("MT19937", words, 0, 0, 0.0), extreme)

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        default_generator().set_state(self.of_torch)


@dataclass(frozen=True)
class Readings:
    """Values that two steps in a row read with data, and the states of the generators at the start of each."""

    logs: tuple[ReadLog, ReadLog]
    starts: tuple[GeneratorStates, GeneratorStates]


class DataRun(Protocol):
    """A run of two steps with data.

    Attributes:
        explores: Whether other paths of the step are tried too; not in a search, which confirms its result.
        policy: The answers of the path that takes the most memory, once paths were tried.
        known: The readings, where the steps ran already and read something; else None.
    """

    explores: bool
    policy: Policy | None

    @property
    def known(self) -> Readings | None: ...

    def __call__(self) -> Readings | None:
        """Return the readings; None where the steps can't run."""


@dataclass
class ControlFlowPath:
    """The control-flow path of two steps, of which one is recorded.

    Attributes:
        replay: Answers to the values that the steps read.
        starts: The states of the generators at the start of each step; None for those that the step before left.
        records_first: Whether the first step is recorded, which makes the optimizer's state; else the second.
        reads_draws: Whether the steps read a number that PyTorch drew.
    """

    replay: ReadReplay
    starts: tuple[GeneratorStates | None, GeneratorStates | None]
    records_first: bool = False
    reads_draws: bool = False
    _step: int = 0
    _ended: GeneratorStates | None = None
    _at: dict[tuple[int, int], GeneratorStates] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Begin a step, numbered from 0."""
        self._step = step
        self.replay.begin_step(step)

    def follow(self, phase: Phase, microbatch: int) -> None:
        """Begin a phase; a forward pass that runs again draws as it did the first time."""
        if phase == "forward":
            given = None if microbatch else self.starts[self._step]
            self._at.setdefault((self._step, microbatch), given or GeneratorStates.now()).restore()
        elif phase == "backward":
            self._ended = GeneratorStates.now()
        self.replay.enter_phase(phase, microbatch)

    @property
    def draws(self) -> bool:
        """Whether random numbers may have decided the operators that ran."""
        began, ended = self._at.get((self._step, 0)), self._ended
        return self.reads_draws or (began is not None and ended is not None and ended != began)


class ControlFlowPaths:
    """The control-flow paths that a step may take.

    Args:
        run: Captures the step on one path.
        stated: Values that the user states (`Workload.values`).
        reading: The run with data; None where there can't be any.
    """

    def __init__(
        self, run: Callable[[ControlFlowPath], Trace], stated: Mapping[str, ReadNumber], reading: DataRun | None
    ) -> None:
        self.run, self.stated, self.reading = run, stated, reading
        self.start = GeneratorStates.now()
        self.notes: list[str] = []

    def worst(self) -> Trace:
        """Return the trace of the step, on the path with the highest peak where guesses decide.

        Raises:
            CaptureError: The step can't be captured on any path.
        """
        path, trace = self._first_path()
        replay = path.replay
        if self.reading is not None and not self.reading.explores:
            return trace
        differ = any(log.reads != replay.logs[0].reads for log in replay.logs)
        if not (replay.guesses or path.draws or differ):
            return trace
        if replay.guesses:
            path, trace = self._worst_guess(path, trace)
        slack = _GUESSED if replay.guesses else 0.0
        if differ and not path.draws:
            log, start = path.replay.logs[0], path.starts[0]
            same = self._tried(path, (start, start), logs=(log, log))
            slack += _GUESSED if same is None else abs(live_peak_bytes(same[1]) / live_peak_bytes(trace) - 1)
        if path.draws or slack:
            first = self._tried(path, records_first=True)
            trace = trace if first is None else max(trace, first[1], key=live_peak_bytes)
        if path.draws:
            slack += self._excess_of_draws(path, live_peak_bytes(trace))
        return replace(trace, slack=trace.slack + slack, notes=[*trace.notes, *self.notes])

    def _first_path(self) -> tuple[ControlFlowPath, Trace]:
        """Return the path taken from the present states, and its trace; readings are replayed where known.

        Where it raises on a guess, and can't run with data, the last answer before each exception is flipped.
        """
        policy = None
        if self.reading is not None:
            if self.reading.known is not None and (known := self._path_with_data()) is not None:
                return known
            policy = self.reading.policy
        path = ControlFlowPath(ReadReplay(stated=self.stated, policy=policy), (self.start, None))
        try:
            trace = self.run(path)
        except MemfitError as e:
            if not (path.replay.guesses or path.replay.needs_data):
                raise
            if (found := self._path_with_data()) is not None:
                return found
            error = e
        else:
            return (self._path_with_data() if path.replay.guesses or path.reads_draws else None) or (path, trace)
        flipped = path.replay.policy.flipped
        for _ in range(_MOST_FLIPS):
            open_sites = [site for site in path.replay.guesses if site not in flipped]
            if not open_sites:
                break
            flipped |= {open_sites[-1]}
            path = ControlFlowPath(ReadReplay(stated=self.stated, policy=Policy(flipped=flipped)), path.starts)
            try:
                return path, self.run(path)
            except MemfitError as e:
                error = e
        raise error

    def _path_with_data(self) -> tuple[ControlFlowPath, Trace] | None:
        """Return the path that replays two steps with data, and its trace; None where they can't run."""
        readings = None if self.reading is None else self.reading()
        if readings is None:
            return None
        path = ControlFlowPath(ReadReplay(readings.logs, self.stated), readings.starts)
        return path, self.run(path)

    def _tried(
        self, path: ControlFlowPath, starts: Any = None, records_first: bool = False, **read: Any
    ) -> tuple[ControlFlowPath, Trace] | None:
        """Return a path that differs from another in what is given, and its trace; None where it can't be captured."""
        given: dict[str, Any] = {"logs": path.replay.logs, "policy": path.replay.policy, **read}
        other = ControlFlowPath(ReadReplay(stated=self.stated, **given), starts or path.starts, records_first)
        try:
            return other, self.run(other)
        except MemfitError:
            return None

    def _worst_guess(self, path: ControlFlowPath, trace: Trace) -> tuple[ControlFlowPath, Trace]:
        """Return the path with the highest peak among those of other answers; answers that raise are left out."""
        best = path, trace
        policy, guesses = path.replay.policy, dict(path.replay.guesses)
        policies = [dataclasses.replace(policy, is_high=True)]
        if 1 < len(guesses) <= _MOST_SITES:
            policies += [dataclasses.replace(policy, flipped=policy.flipped ^ {site}) for site in guesses]
        for other in policies if any(guess.is_number for guess in guesses.values()) else ():
            if (tried := self._tried(path, policy=other)) is not None:
                guesses = {**tried[0].replay.guesses, **guesses}
                best = max(best, tried, key=lambda pair: live_peak_bytes(pair[1]))
        self.notes += [f"a guess: {guess.as_guess()}" for guess in guesses.values()]
        if self.reading is not None:
            self.reading.policy = best[0].replay.policy
        return best

    def _excess_of_draws(self, path: ControlFlowPath, peak_bytes: int) -> float:
        """Return the share by which the worst of other draws exceeds a peak, and note it."""
        starts = [GeneratorStates.drawing("low"), GeneratorStates.drawing("high")]
        starts += [GeneratorStates.seeded(seed) for seed in range(_SEEDS)]
        tried = (self._tried(path, starts=(start, start)) for start in starts)
        peaks = [live_peak_bytes(one[1]) for one in tried if one is not None]
        if all(peak == peak_bytes for peak in peaks):
            return 0.0
        worst = max(peaks) / peak_bytes - 1
        self.notes.append(
            "random numbers choose the operators of the step. The prediction is for the next two steps, with the"
            f" generators as they are now. The worst of {len(peaks)} other draws needs {abs(worst):.1%}"
            f" {'more' if worst > 0 else 'less'}"
        )
        return max(0.0, worst)


def live_peak_bytes(trace: Trace | Recording) -> int:
    """Return the peak bytes of live storages, without the workspaces of operators."""
    change = np.zeros(len(trace.ops) + 2, np.int64)
    for storage in trace.storages:
        change[max(storage.birth, 0)] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    return int(np.cumsum(change).max(initial=0))
