"""Values that code reads of tensors, as by `item()`, `tolist()` or a mask that selects: written down, and told.

Under fake tensors there are no values. Where the step can run, its code runs once with data, and what it reads is
written down in order, with the line that reads it (`Log`). Under fake tensors the same code is told the same
(`Replay`). Where it can't run, a `Policy` answers, and each answer is listed as a guess.

A replay follows the generators' states: code that runs again, as checkpointing does, takes the state of the random
generator that it had, and with it what it read from there on.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parent.parent
_PASSED = tuple(str(_PACKAGE / stage) for stage in ("capture", "apply"))  # they stand between the user's code and torch
_OURS = tuple(str(_PACKAGE / stage) for stage in ("train", "pipeline", "cli"))
_LIBRARY = (contextlib.__file__, __file__)
_ITEM = "item"
_MOST_REPEATS = 16  # answers of a guess at one line, after which a loop must come to its end

Place = tuple[str, int]
"""A phase of the step, and the microbatch."""

Number = bool | int | float


class Site(NamedTuple):
    """A line of code that reads.

    Attributes:
        path: Of the file.
        line: Number of the line.
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Read:
    """One reading of a tensor.

    Attributes:
        site: Where; None in code of PyTorch alone.
        kind: "item", "array", or the operator whose output's shape depends on values.
        form: Dtype and shape of the tensor that is read.
        answer: The number; the array; the shape and dtype of each output of an operator; or, of an index, how many
            elements each of its masks selects.
    """

    site: Site | None
    kind: str
    form: str
    answer: Any


@dataclass
class Log:
    """The values that a step reads, in order, by phase and microbatch.

    Attributes:
        reads: What is read.
        forward: For each microbatch, a number that stands for the operators of its forward pass and their outputs'
            shapes.
    """

    reads: dict[Place, list[Read]] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)

    @property
    def microbatches_differ(self) -> bool:
        """Whether the forward passes of microbatches ran different operators."""
        return len(set(self.forward.values())) > 1


def reading_site() -> tuple[Site | None, bool]:
    """Return the innermost line outside of PyTorch that is running, and whether memfit's own step reads there.

    The line is None in what the backward pass does by itself.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return None, torch._C._current_graph_task_id() == -1
        if not path.startswith((_TORCH, *_PASSED)) and path not in _LIBRARY and not path.startswith("<frozen"):
            return Site(path, frame.f_lineno), False
        frame = frame.f_back
    return None, False


def form_of(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as text."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


class _Array(NamedTuple):
    """An array, as it travels between processes."""

    content: bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Array:
        content = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else None
        return cls(
            b"" if content is None else torch._C.TensorBase.numpy(content).tobytes(), tuple(tensor.shape), tensor.dtype
        )

    def tensor(self) -> torch.Tensor:
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).reshape(self.shape)


class Writing(TorchDispatchMode):
    """Writes down what code reads of real tensors. Enter it around the code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self.place: Place = ("forward", 0)
        self._paused = False

    def enter_phase(self, phase: str, microbatch: int) -> None:
        """Say what the step does from now on."""
        self.place = phase, microbatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(func, out)
        if torch.Tag.data_dependent_output in func.tags:
            self._write(_ITEM, args[0], out)
        elif func is _aten.index.Tensor:
            masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype is torch.bool]
            if masks:
                self._write(str(func), args[0], [int(mask.sum()) for mask in masks])
        elif func.namespace == "aten" and torch.Tag.dynamic_output_shape in func.tags:
            outputs = out if isinstance(out, tuple | list) else (out,)
            self._write(str(func), args[0], [(tuple(t.shape), t.dtype) for t in outputs])
        return out

    def _count(self, func: Any, out: Any) -> None:
        phase, microbatch = self.place
        shapes = tuple(t.shape for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dim())
        if phase == "forward" and shapes:  # not what adds up losses
            before = self.log.forward.get(microbatch, 0)
            self.log.forward[microbatch] = hash((before, str(func), shapes))

    def _write(self, kind: str, tensor: torch.Tensor, answer: Any) -> None:
        site, is_ours = reading_site()
        if not is_ours and not self._paused:
            self.log.reads.setdefault(self.place, []).append(Read(site, kind, form_of(tensor), answer))

    @contextlib.contextmanager
    def arrays(self) -> Iterator[None]:
        """Write down arrays that code makes of tensors, which no mode sees; and not what printing a tensor reads."""
        repr_of: Any = torch.Tensor.__repr__

        def array_of(tensor: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                found = tensor.detach().cpu().clone()
            self._write("array", tensor, _Array.of(found))
            return found

        def unwritten(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            self._paused = True
            try:
                return str(repr_of(tensor, *args, **kwargs))
            finally:
                self._paused = False

        torch.Tensor.__repr__ = unwritten  # type: ignore[method-assign, assignment]
        try:
            with _arrays_by(array_of):
                yield
        finally:
            torch.Tensor.__repr__ = repr_of  # type: ignore[method-assign]


@contextlib.contextmanager
def _arrays_by(array_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Have `numpy()`, `numpy.asarray(t)` and `tolist()` ask for a tensor's values, until the context is left."""
    real = torch._C.TensorBase
    of_fake = FakeTensor.tolist

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if tensor.requires_grad and not force:
            return real.numpy(tensor)  # which says what to do
        found = array_of(tensor)
        with _disable_current_modes():
            return real.numpy(found)

    def array(tensor: torch.Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
        found = numpy(tensor)
        return found if dtype is None else found.astype(dtype, copy=False)

    def tolist(tensor: torch.Tensor) -> Any:
        found = array_of(tensor)
        with _disable_current_modes():
            return real.tolist(found)

    replaced: dict[str, Any] = {"numpy": numpy, "__array__": array, "tolist": tolist}
    before = {name: torch.Tensor.__dict__.get(name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch.Tensor, name, function)
    FakeTensor.tolist = tolist  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensor.tolist = of_fake  # type: ignore[method-assign]
        for name, function in before.items():
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)


@dataclass(frozen=True)
class Guess:
    """An answer that nothing shows to be right.

    Attributes:
        site: Where code reads; None in code of PyTorch alone.
        kind: As of `Read`.
        form: Dtype and shape of the tensor.
        answer: What was answered first.
    """

    site: Site | None
    kind: str
    form: str
    answer: Any

    @property
    def is_number(self) -> bool:
        """Whether numbers were read, and not a shape."""
        return self.kind in (_ITEM, "array")

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site is not None else ""
        if self.is_number:
            stated = "" if self.site is None else ". Workload.values can state it"
            tried = f"{self.answer} and its opposite were tried, and the worse is predicted"
            return f"{self.form} is read{where}; {tried}{stated}"
        return f"{self.kind.split('.')[1]} of {self.form}{where} is taken to select everything"


@dataclass(frozen=True)
class Policy:
    """Answers where nothing is known.

    Attributes:
        is_high: Whether numbers are 1 and truths true where nothing else is said; else 0 and false.
        flipped: Sites that are answered the other way.
    """

    is_high: bool = False
    flipped: frozenset[Site | None] = frozenset()

    def number(self, site: Site | None, dtype: torch.dtype, neutral: bool) -> Number:
        """Return an answer to `item()`.

        Args:
            site: Where code reads.
            dtype: Of the tensor.
            neutral: What a check that passes would read, where that is known of the operator that made the tensor.
        """
        high = (self.is_high != (site in self.flipped)) != neutral
        return high if dtype is torch.bool else float(high) if dtype.is_floating_point else int(high)


class Replay:
    """Tells code under fake tensors what it reads: from a log, from what the user states, or as a policy guesses.

    Args:
        logs: What each step in a row reads with data; empty where none ran.
        stated: What the user says is read, by "file.py:line"; the file's path may be given in part.
        policy: Answers the rest.

    Attributes:
        guesses: The answers of the policy, one for each site.
        needs_data: Whether a shape was asked for that no policy can guess.
    """

    def __init__(
        self, logs: Sequence[Log] = (), stated: Mapping[str, Number] | None = None, policy: Policy | None = None
    ) -> None:
        self.logs, self.stated, self.policy = logs, stated or {}, policy or Policy()
        self.begin_step(0)
        self.guesses: dict[Site | None, Guess] = {}
        self.needs_data = False
        self._repeats: Counter[Site | None] = Counter()
        self._place: Place = ("forward", 0)
        self._position = 0
        self._positions = WeakIdKeyDictionary()

    def begin_step(self, step: int) -> None:
        """Say which step begins, from 0; those after the last of the logs read as it does."""
        self._log = self.logs[min(step, len(self.logs) - 1)] if self.logs else Log()

    def enter_phase(self, phase: str, microbatch: int) -> None:
        """Say what the step does from now on."""
        self._place, self._position = (phase, microbatch), 0
        self._repeats.clear()

    def logged(self, kind: str, tensor: torch.Tensor) -> Any:
        """Return what the log has of a reading, and go on from there; None where it has nothing."""
        if not self.logs:
            return None
        site, is_ours = reading_site()
        read = None if is_ours else self._next(site, kind, form_of(tensor))
        return None if read is None else read.answer

    def number(self, tensor: torch.Tensor, dtype: torch.dtype, neutral: bool = False) -> Number:
        """Return what `item()` returns, or another operator that returns a number.

        Args:
            tensor: What it reads.
            dtype: Of the number.
            neutral: What a check that passes would read, where that is known.
        """
        site, is_ours = reading_site()
        if is_ours:
            return Policy().number(None, dtype, neutral)
        stated = self._stated(site)
        if stated is not None:
            return stated
        read = self._next(site, _ITEM, form_of(tensor))
        if read is not None:
            logged: Number = read.answer
            return logged
        guess = self._number_guessed(site, dtype, neutral)
        self._guessed(site, _ITEM, tensor, guess)
        return guess

    def array(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `numpy()` and `tolist()` are made of."""
        site, is_ours = reading_site()
        read = None if is_ours else self._next(site, "array", form_of(tensor))
        if read is not None:
            with _disable_current_modes():
                found: torch.Tensor = read.answer.tensor()
            return found
        number = self._number_guessed(site, tensor.dtype, False)
        if not is_ours:
            self._guessed(site, "array", tensor, number)
        with _disable_current_modes():
            return torch.full(tuple(tensor.shape), number, dtype=tensor.dtype)

    def guessed_shape(self, func: Any, tensor: torch.Tensor) -> None:
        """Take note that a shape was guessed."""
        site, _ = reading_site()
        self._guessed(site, str(func), tensor, None)

    def _stated(self, site: Site | None) -> Number | None:
        if site is None:
            return None
        return next((value for place, value in self.stated.items() if f"/{site}".endswith(f"/{place}")), None)

    def _next(self, site: Site | None, kind: str, form: str) -> Read | None:
        """Return the next reading of the log at a line of a kind of tensor, and go on from there."""
        reads = self._log.reads.get(self._place, ())
        for position in range(self._position, len(reads)):
            read = reads[position]
            if (read.site, read.kind, read.form) == (site, kind, form):
                self._position = position + 1
                return read
        return None

    def _number_guessed(self, site: Site | None, dtype: torch.dtype, neutral: bool) -> Number:
        self._repeats[site] += 1
        loops = self._repeats[site] > _MOST_REPEATS and not neutral
        return (Policy() if loops else self.policy).number(site, dtype, neutral)

    def _guessed(self, site: Site | None, kind: str, tensor: torch.Tensor, answer: Any) -> None:
        self.guesses.setdefault(site, Guess(site, kind, form_of(tensor), answer))

    @contextlib.contextmanager
    def arrays(self, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
        """Answer `numpy()` and `tolist()` too, until the context is left.

        Args:
            value_of: Returns what is known of a tensor.
        """

        def array_of(tensor: torch.Tensor) -> torch.Tensor:
            known = value_of(tensor)
            if known is None:
                return self.array(tensor)
            self.logged("array", tensor)
            return known

        with _arrays_by(array_of):
            yield

    @contextlib.contextmanager
    def rewinding(self) -> Iterator[None]:
        """Go back in the log where code sets a generator back, until the context is left."""
        take: Any = torch.get_rng_state
        set_back: Any = torch.set_rng_state

        def taken() -> torch.Tensor:
            state: torch.Tensor = take()
            self._positions[state] = self._place, self._position
            return state

        def back(state: torch.Tensor) -> None:
            set_back(state)
            if state in self._positions:
                self._place, self._position = self._positions[state]

        torch.get_rng_state, torch.set_rng_state = taken, back  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.get_rng_state, torch.set_rng_state = take, set_back
