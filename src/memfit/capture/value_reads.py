"""Readings of tensors' values, as by `item()`, `tolist()` or a mask that selects: recorded with data, and replayed.

Where the step can run with data, its readings are recorded in order, with the line that reads (`ReadLog`). Under fake
tensors, which have no values, `ReadReplay` answers the same code from the log. Without a log, a `Policy` answers, and
each answer is listed as a guess.
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
from torch.utils.weak import WeakIdKeyDictionary

from memfit import foundations
from memfit._torch import (
    EagerMode,
    FakeTensor,
    TensorBase,
    current_graph_task_id,
    disable_current_modes,
    replaced,
    replaced_here,
    sparse_indices,
    tree_leaves,
)
from memfit.workload import TO_SPARSE

_aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parent.parent
_BETWEEN = tuple(str(_PACKAGE / room) for room in ("_torch", "capture", "levers", "recomputation"))
"""Folders whose code may run between the user's and PyTorch's."""
_STEPS = tuple(str(_PACKAGE / room) for room in ("training", "planner", "pipeline", "cli"))
"""Folders whose code runs the step."""
_LIBRARY = (contextlib.__file__, foundations.turns.__file__, __file__)
_MOST_REPEATS = 16  # guesses at one line, after which the answer changes, so that a loop ends

ReadNumber = bool | int | float


class Site(NamedTuple):
    """A line of code that reads a tensor's values: the path of its file, and its number."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Read:
    """One reading of a tensor.

    Attributes:
        site: The line that reads; None in code of PyTorch alone.
        kind: "item", "array", or the operator whose output shape depends on values.
        form: Dtype and shape of the tensor that is read.
        answer: The number; the array; the form of each output of an operator; of an index, the number of
            elements that each mask selects; or of a tensor that becomes sparse, its indices.
    """

    site: Site | None
    kind: str
    form: str
    answer: Any

    @property
    def is_number(self) -> bool:
        """Whether a number was read, not a shape."""
        return self.kind in ("item", "array")

    def as_guess(self) -> str:
        """Return a note on the answer, which was guessed."""
        where = f" at {self.site}" if self.site is not None else ""
        if self.is_number:
            stated = "" if self.site is None else ". Workload.values can state it"
            tried = f"memfit tried {self.answer} and its opposite, and predicts the one with the higher peak"
            return f"{self.form} is read{where}; {tried}{stated}"
        return f"{self.kind.split('.')[1]} of {self.form}{where} is assumed to select everything"


@dataclass
class ReadLog:
    """The readings of a step, in order.

    Attributes:
        reads: The readings, by phase and microbatch.
        forward: For each microbatch, a hash of its forward pass's operators and their outputs' shapes.
    """

    reads: dict[tuple[str, int], list[Read]] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)


def reading_site() -> tuple[Site | None, bool]:
    """Return the innermost running line outside of PyTorch, and whether memfit's own step reads there.

    The line is None in the backward pass's own code.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_STEPS):
            return None, current_graph_task_id() == -1
        if not path.startswith((_TORCH, *_BETWEEN)) and path not in _LIBRARY and not path.startswith("<frozen"):
            return Site(path, frame.f_lineno), False
        frame = frame.f_back
    return None, False


def _form_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


class _Form(NamedTuple):
    """An output whose shape depends on values: kernels may lay it out otherwise, or return a part of more memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        nbytes = tensor.untyped_storage().nbytes()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.stride(), int(tensor.storage_offset()), nbytes)

    def empty(self, device: torch.device) -> torch.Tensor:
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=device)
        return whole.as_strided(self.shape, self.stride, self.offset)


class Array(NamedTuple):
    """An array on the CPU in a form that travels between processes; NumPy has not all dtypes."""

    content: bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Array:
        content = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else None
        return cls(b"" if content is None else TensorBase.numpy(content).tobytes(), tuple(tensor.shape), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).view(self.dtype).view(self.shape)


class ReadRecorder(EagerMode):
    """A dispatch mode that records the readings of real tensors. Enter it around the code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = ReadLog()
        self.place = "forward", 0
        self._paused = False

    def enter_phase(self, phase: str, microbatch: int) -> None:
        """Begin a phase of a microbatch."""
        self.place = phase, microbatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        phase, microbatch = self.place
        shapes = tuple(t.shape for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dim())
        if phase == "forward" and shapes:  # scalars add up losses
            before = self.log.forward.get(microbatch, 0)
            self.log.forward[microbatch] = hash((before, str(func), shapes))
        if torch.Tag.data_dependent_output in func.tags:
            self._write("item", args[0], out)
        elif func is _aten.index.Tensor:
            masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype is torch.bool]
            if masks:
                self._write(str(func), args[0], [int(mask.sum()) for mask in masks])
        elif func in TO_SPARSE and args[0].layout is torch.strided and out.layout is torch.sparse_coo:
            self._write(str(func), args[0], Array.of(sparse_indices(out)))
        elif func.namespace == "aten" and torch.Tag.dynamic_output_shape in func.tags:
            outputs = out if isinstance(out, tuple | list) else (out,)
            self._write(str(func), args[0], [_Form.of(t) for t in outputs])
        return out

    def _write(self, kind: str, tensor: torch.Tensor, answer: Any) -> None:
        site, is_ours = reading_site()
        if not is_ours and not self._paused:
            self.log.reads.setdefault(self.place, []).append(Read(site, kind, _form_of(tensor), answer))

    @contextlib.contextmanager
    def arrays(self) -> Iterator[None]:
        """Record conversions to arrays, which no mode sees, and no readings by printing, until the context is left."""
        repr_of: Any = torch.Tensor.__repr__

        def array_of(tensor: torch.Tensor) -> torch.Tensor:
            with disable_current_modes():
                copied = tensor.detach().cpu().clone()
            self._write("array", tensor, Array.of(copied))
            return copied

        def unwritten(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            with replaced(self, "_paused", True):
                return str(repr_of(tensor, *args, **kwargs))

        with replaced_here(torch.Tensor, "__repr__", unwritten), _arrays_by(array_of):
            yield


@contextlib.contextmanager
def _arrays_by(array_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Have `numpy()`, `numpy.asarray(t)` and `tolist()` ask a function for values, until the context is left."""
    real = TensorBase

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if tensor.requires_grad and not force:
            return real.numpy(tensor)  # raises PyTorch's own error
        values = array_of(tensor)
        with disable_current_modes():
            return real.numpy(values)

    def array(tensor: torch.Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
        values = numpy(tensor)
        return values if dtype is None else values.astype(dtype, copy=False)

    def tolist(tensor: torch.Tensor) -> Any:
        values = array_of(tensor)
        with disable_current_modes():
            return real.tolist(values)

    with (
        replaced_here(torch.Tensor, "numpy", numpy),
        replaced_here(torch.Tensor, "__array__", array),
        replaced_here(torch.Tensor, "tolist", tolist),
        replaced_here(FakeTensor, "tolist", tolist),
    ):
        yield


@dataclass(frozen=True)
class Policy:
    """Answers to readings of unknown values.

    Attributes:
        is_high: Whether numbers are 1 and booleans true by default; else 0 and false.
        flipped: Sites with the opposite answer.
    """

    is_high: bool = False
    flipped: frozenset[Site | None] = frozenset()

    def number(self, site: Site | None, dtype: torch.dtype, neutral: bool) -> ReadNumber:
        """Return an answer to `item()`; a neutral reading is of a check, which passes where it reads true."""
        high = (self.is_high != (site in self.flipped)) != neutral
        return high if dtype is torch.bool else float(high) if dtype.is_floating_point else int(high)


class ReadReplay:
    """Answers to readings under fake tensors: from a log, from the user's statements, or from a policy.

    Args:
        logs: The readings of each step in a row with data; empty where none ran.
        stated: Values that the user states, by "file.py:line"; the file's path may be given in part.
        policy: The answers to all other readings.

    Attributes:
        guesses: The first answer of the policy at each site.
        needs_data: Whether code needs a shape that no policy can guess.
    """

    def __init__(
        self, logs: Sequence[ReadLog] = (), stated: Mapping[str, ReadNumber] | None = None, policy: Policy | None = None
    ) -> None:
        self.logs, self.stated, self.policy = logs, stated or {}, policy or Policy()
        self.begin_step(0)
        self.guesses: dict[Site | None, Read] = {}
        self.needs_data = False
        self._repeats: Counter[Site | None] = Counter()
        self._place, self._position = ("forward", 0), 0
        self._positions = WeakIdKeyDictionary()

    def begin_step(self, step: int) -> None:
        """Begin a step, numbered from 0; steps after the last log read as that one."""
        self._log = self.logs[min(step, len(self.logs) - 1)] if self.logs else ReadLog()

    def enter_phase(self, phase: str, microbatch: int) -> None:
        """Begin a phase of a microbatch."""
        self._place, self._position = (phase, microbatch), 0
        self._repeats.clear()

    def logged(self, kind: str, tensor: torch.Tensor) -> Any:
        """Return the log's answer to a reading, and advance past it; None where it has none."""
        if not self.logs:
            return None
        site, is_ours = reading_site()
        return None if is_ours else self._next(site, kind, tensor)

    def number(self, tensor: torch.Tensor, dtype: torch.dtype, neutral: bool = False) -> ReadNumber:
        """Return the answer to `item()`, or to another operator that returns a number; see `Policy.number`."""
        site, is_ours = reading_site()
        if is_ours:
            return Policy().number(None, dtype, neutral)
        for place, stated in self.stated.items() if site is not None else ():
            if f"/{site}".endswith(f"/{place}"):
                return stated
        logged: ReadNumber | None = self._next(site, "item", tensor)
        return self._guess(site, "item", tensor, dtype, neutral) if logged is None else logged

    def guessed_shape(self, func: Any, tensor: torch.Tensor) -> None:
        """Note a guess of a shape."""
        self._note_guess(reading_site()[0], str(func), tensor, None)

    def _next(self, site: Site | None, kind: str, tensor: torch.Tensor) -> Any:
        """Return the answer of the log's next reading with a site, kind and form, and advance past it; else None."""
        reads, sought = self._log.reads.get(self._place, ()), (site, kind, _form_of(tensor))
        for position in range(self._position, len(reads)):
            read = reads[position]
            if (read.site, read.kind, read.form) == sought:
                self._position = position + 1
                return read.answer
        return None

    def _guess(
        self,
        site: Site | None,
        kind: str,
        tensor: Any,
        dtype: torch.dtype,
        neutral: bool = False,
        is_noted: bool = True,
    ) -> ReadNumber:
        self._repeats[site] += 1
        loops = self._repeats[site] > _MOST_REPEATS and not neutral
        guess = (Policy() if loops else self.policy).number(site, dtype, neutral)
        if is_noted:
            self._note_guess(site, kind, tensor, guess)
        return guess

    def _note_guess(self, site: Site | None, kind: str, tensor: torch.Tensor, answer: Any) -> None:
        self.guesses.setdefault(site, Read(site, kind, _form_of(tensor), answer))

    @contextlib.contextmanager
    def arrays(self, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
        """Answer `numpy()` and `tolist()` too, where `value_of` knows no values, until the context is left."""

        def array_of(tensor: torch.Tensor) -> torch.Tensor:
            known, (site, is_ours) = value_of(tensor), reading_site()
            logged: Array | None = None if is_ours else self._next(site, "array", tensor)
            if known is not None:
                return known
            number = 0 if logged else self._guess(site, "array", tensor, tensor.dtype, is_noted=not is_ours)
            with disable_current_modes():
                return logged.tensor() if logged else torch.full(tuple(tensor.shape), number, dtype=tensor.dtype)

        with _arrays_by(array_of):
            yield

    @contextlib.contextmanager
    def rewinding(self) -> Iterator[None]:
        """Rewind the log where code restores a generator's state, as checkpointing does, until the context is left."""
        take, set_back = torch.get_rng_state, torch.set_rng_state

        def taken() -> torch.Tensor:
            state: torch.Tensor = take()
            self._positions[state] = self._place, self._position
            return state

        def back(state: torch.Tensor) -> None:
            set_back(state)
            if state in self._positions:
                self._place, self._position = self._positions[state]

        with replaced_here(torch, "get_rng_state", taken), replaced_here(torch, "set_rng_state", back):
            yield
