"""Memory of the user's loop: what grows from step to step, and what the loop holds beside the step that was planned.

Growth is noticed by a counter, and traced to the variable that holds it. A second model, an average of weights or a
checkpoint is used by no step, so no plan counts it. It takes the memory of the same device all the same.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import re
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit._torch import FakeTensor, is_wrapper, storage_key_of
from memfit.foundations import format_bytes, is_users
from memfit.hardware import live_bytes
from memfit.workload import Geometry

_SAMPLES = 4
"""Samples that must grow one after the other, as fast as one another within `_STEADY`."""
_STEADY = 3.0
_LEAST_BYTES = 2**17
_LEAST_SHARE = 0.002  # of the budget
_LEAST_UNFOUND = 2**22  # bytes that no variable holds: libraries fill caches of 3 MiB in 80 steps of FSDP
_SPACING = 1.2  # of the numbers of the steps that are sampled
_MOST_TIME = 0.003  # of the time since the watch began, for sampling
_MOST_NODES = 4000
_MOST_VALUES = 50_000
_DEEPEST = 4
_LARGE_BYTES = 2**14
_MOST_LOOKED_THROUGH = 100_000
_MOST_NAMED = 4
_LIBRARIES = ("torch.", "numpy", "memfit.", "_pytest", "pluggy")
"""Whose objects are not looked through, but for modules, optimizers and data sets."""
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_INSTALLED = "-packages"  # in the paths of what pip or a distribution installed
_LOOKED_THROUGH = ("torch.nn.", "torch.optim.", "torch.utils.data.")


class Growth:
    """A watch of the bytes that are in use between steps; `stepped` is called after each.

    It samples steps farther and farther apart, as long as that takes 0.3 % of the time at most. Where samples grow one
    after the other, the user's variables are weighed after two steps, and what grew is told, once. Where no variable
    did, it is told if memory grows on.

    Args:
        device: The device of the parameters.
        budget_bytes: Returns the budget, and what a step is predicted to take at its peak.
        named: Returns objects to look through by name, besides the variables of the user's frames.
        tell: Takes the text.

    Attributes:
        free_seconds: What sampling may take of any run, however short.
    """

    free_seconds = 0.05

    def __init__(
        self,
        device: torch.device,
        budget_bytes: Callable[[], tuple[int, int]],
        tell: Callable[[str], object],
        named: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._device, self._budget, self._tell, self._named = device, budget_bytes, tell, named
        self._started = time.perf_counter()
        self._spent, self._step, self._is_to_go_on = 0.0, 0, True
        self.begin_anew()

    def bytes_in_use(self) -> int | None:
        """Return the bytes in use on the device; None where that is not known."""
        return live_bytes(self._device)

    def begin_anew(self) -> None:
        """Forget the samples, as where a step changes or memory is taken for another reason."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)  # steps, and the bytes in use after them
        self._next = self._step + 2
        self._before: dict[tuple[int, str], _Weight] | None = None

    def stepped(self) -> None:
        """See to the end of a step."""
        self._step += 1
        if self._step < self._next:
            return
        began = time.perf_counter()
        # What was weighed is weighed again at the next step: later it would be of other steps, or the loop at its end.
        if self._before is None and self._spent > self.free_seconds + _MOST_TIME * (began - self._started):
            return
        if self._before is not None:
            self._explain()
        else:
            self._sample()
        self._spent += time.perf_counter() - began

    def _sample(self) -> None:
        nbytes = self.bytes_in_use()
        if nbytes is None:
            self._next = sys.maxsize
            return
        self._samples.append((self._step, nbytes))
        self._next = max(self._step + 1, int(_SPACING * self._step))
        slopes = [(more - less) / (later - step) for (step, less), (later, more) in itertools.pairwise(self._samples)]
        if len(self._samples) < _SAMPLES or min(slopes) <= 0 or max(slopes) > _STEADY * min(slopes):
            return
        if nbytes - self._samples[0][1] >= max(_LEAST_BYTES, _LEAST_SHARE * self._budget()[0]):
            self._before = dict(self._weighed())
            self._next = self._step + 1

    def _explain(self) -> None:
        before, self._before = self._before or {}, None
        nbytes = self.bytes_in_use() or 0
        (first, first_bytes), (last, last_bytes) = self._samples[0], self._samples[-1]
        slope = (last_bytes - first_bytes) / (last - first)
        if nbytes <= last_bytes:
            self.begin_anew()
            return
        grown = [(weight, weight.beyond(before.get(key))) for key, weight in self._weighed() if key in before]
        found = max((g for g in grown if g[1] > 0), key=lambda g: g[1], default=None)
        if found is None and (self._is_to_go_on or nbytes - first_bytes < _LEAST_UNFOUND):
            self._is_to_go_on = False  # once, it may be an allocator's pace, or turns of a loop
            self.begin_anew()
            return
        holder = "memfit did not find the variable that keeps it" if found is None else str(found[0])
        budget, peak = self._budget()
        room = budget - peak - (nbytes - first_bytes)
        outlook = "Steps now" if room < 0 else f"From step {self._step + int(room / slope) + 1:,} on, steps will"
        self._tell(
            f"memory grows by {format_bytes(int(slope))} a step: {holder}. {outlook} exceed the budget of"
            f" {format_bytes(budget)}"
        )
        self._next = sys.maxsize

    def _weighed(self) -> Iterator[tuple[tuple[int, str], _Weight]]:
        """Yield what the user's variables hold, by the namespace that has them and their name."""
        seen: set[int] = set()
        for space in namespaces(self._named()):
            for name, value in list(space.values.items()):
                if isinstance(name, str) and not name.startswith("__"):
                    for path, holder in _holders(value, name, seen, _DEEPEST):
                        yield (id(space.owner), path), _Weight.of(path, holder, space)


class Space(NamedTuple):
    """Variables of a frame, a module or an object, and the code that changes them."""

    owner: Any
    values: Mapping[str, Any]
    code: types.CodeType | None = None


class _Weight(NamedTuple):
    """How much a variable holds: its tensors' bytes, its items, and the nodes of their graphs."""

    path: str
    what: str
    nbytes: int
    items: int
    nodes: int
    place: str

    @classmethod
    def of(cls, path: str, value: Any, space: Space) -> _Weight:
        tensors = [value] if isinstance(value, torch.Tensor) else list(_tensors_in(value, 2))
        nbytes = sum(t.nbytes for t in tensors if t.layout is torch.strided)
        seen: set[Any] = set()  # nodes of their graphs, up to a bound for each
        waiting: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
        most = max(_MOST_NODES, 20 * len(waiting))
        while waiting and len(seen) < most:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += [inner for inner, _ in node.next_functions if inner is not None]
        items = 1 if isinstance(value, torch.Tensor) else len(value)
        return cls(path, type(value).__name__, nbytes, items, len(seen), _place_of(path, space))

    def beyond(self, before: _Weight | None) -> int:
        """Return how much more it holds than before: bytes, and about as many for the nodes of graphs."""
        if before is None or before.what != self.what:
            return 0
        more = self.nbytes - before.nbytes if self.is_tensor or self.items > before.items else 0
        return max(0, more) + 200 * max(0, self.nodes - before.nodes)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor by itself."""
        return self.what in ("Tensor", "Parameter")

    def __str__(self) -> str:
        if self.is_tensor and not self.nodes:
            return f"`{self.path}` (a tensor{self.place}) grows"
        if self.is_tensor:
            return (
                f"`{self.path}` (a tensor{self.place}) keeps the graphs of all earlier steps. Add loss.item() or"
                " loss.detach() instead, or detach tensors between steps"
            )
        graphs = ", with their graphs" if self.nodes else ""
        advice = ". Keep loss.item() or tensor.detach() instead" if self.nodes else ""
        return (
            f"`{self.path}` (a {self.what} of {self.items:,} items{self.place}) keeps more and more"
            f" tensors{graphs}{advice}"
        )


def namespaces(named: Mapping[str, Any]) -> Iterator[Space]:
    """Yield the namespaces of the user's frames, and objects by name."""
    frame: types.FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            if frame.f_code.co_flags & inspect.CO_NEWLOCALS:
                variables = frame.f_locals
                copied = dict(variables)
                if type(variables) is dict:  # before Python 3.13 it would keep the values alive
                    variables.clear()
                yield Space(frame.f_code, copied, frame.f_code)
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield Space(frame.f_globals, dict(frame.f_globals), frame.f_code)
        frame = frame.f_back
    if named:
        yield Space(None, named)


def _holders(value: Any, path: str, seen: set[int], deepest: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors with graphs and the containers of tensors that a value leads to, with their paths."""
    if id(value) in seen or len(seen) > _MOST_VALUES or deepest < 0:
        return
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None or value.nbytes > _LARGE_BYTES:
            yield path, value
        return
    if kind in (list, deque, dict, set, tuple):
        seen.add(id(value))
        if next(_tensors_in(value, 2), None) is not None:
            yield path, value
        inner = value.items() if kind is dict else enumerate(value) if len(value) <= 64 else ()
        for key, item in list(inner):
            if type(item) in (list, deque, dict) or hasattr(item, "__dict__"):
                yield from _holders(item, f"{path}[{key!r}]", seen, deepest - 1)
        return
    if isinstance(value, types.FunctionType):
        seen.add(id(value))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield from _holders(cell.cell_contents, name, seen, deepest - 1)
        return
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or not hasattr(value, "__dict__"):
        return
    if kind.__module__.split(".")[0] in ("memfit", "builtins"):
        return
    seen.add(id(value))
    for name, inner_value in list(vars(value).items()):
        if name in ("_parameters", "_buffers"):
            continue
        if name == "_modules" and isinstance(value, nn.Module):
            for child_name, child in inner_value.items():
                yield from _holders(child, f"{path}.{child_name}", seen, deepest)
        else:
            yield from _holders(inner_value, f"{path}.{name}", seen, deepest - 1)


def _tensors_in(value: Any, deepest: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, nested ones too."""
    items: Iterable[Any] = value.values() if type(value) is dict else value
    for item in list(items):
        if isinstance(item, torch.Tensor):
            yield item
        elif deepest and type(item) in (list, tuple, dict, deque):
            yield from _tensors_in(item, deepest - 1)


def _place_of(path: str, space: Space) -> str:
    """Return the line of code that adds to a variable, as ", train.py:31"; "" where it is not found."""
    if space.code is None:
        return ""
    name = re.escape(re.split(r"[.\[]", path)[-1 if "[" not in path else 0])
    adds = re.compile(rf"\b{name}\b\s*(\[[^\]]*\]\s*)?(\.(append|extend|add|insert|put|update|push)\b|\+=|=(?!=))")
    lines = linecache.getlines(space.code.co_filename)
    found = [number for number, line in enumerate(lines, 1) if adds.search(line)]
    within = [number for number in found if number >= space.code.co_firstlineno]
    growing = [
        n for n in within or found if not re.search(r"=\s*(\[\]|\{\}|0(\.0)?|None|deque\(|torch\.zeros)", lines[n - 1])
    ]
    number = (growing or within or found or [0])[0]
    return f", {Path(space.code.co_filename).name}:{number}" if number else ""


class HeldBeside(NamedTuple):
    """A variable of the loop, and the bytes of its tensors that no step of the plan has."""

    name: str
    what: str
    nbytes: int

    def __str__(self) -> str:
        return f"`{self.name}` ({self.what}, {format_bytes(self.nbytes)})"


def held_beside(
    known: Iterable[torch.Tensor], given: Sequence[torch.Tensor | Geometry], device: str
) -> list[HeldBeside]:
    """Return the variables of the user's frames and modules that hold other tensors than a step's, the largest first.

    Results with a graph are left out: they are of the step that is under way.

    Args:
        known: The tensors that are counted.
        given: The tensors that the step takes from the loop: those of the next one are like them.
        device: The kind of device whose memory is asked for.
    """
    known = [*known, *(t for t in given if isinstance(t, torch.Tensor))]
    seen = {storage_key_of(t) for t in known if _has_storage(t)}
    alike = {(g.dtype, g.size) for t in given if (g := Geometry.of(t)) is not None}
    visited: set[int] = set()
    found = []
    for space in namespaces({}):
        for name, value in list(space.values.items()):
            if not isinstance(name, str) or name.startswith("__"):
                continue
            nbytes = 0
            for tensor in _tensors_of(value, visited):
                if _has_storage(tensor) and tensor.device.type == device and tensor.grad_fn is None:
                    key = storage_key_of(tensor)
                    if value is tensor and (tensor.dtype, tuple(tensor.shape)) in alike:
                        continue
                    nbytes += 0 if key in seen else tensor.untyped_storage().nbytes()
                    seen.add(key)
            if nbytes:
                found.append(HeldBeside(name, type(value).__name__, nbytes))
    return sorted(found, key=lambda held: -held.nbytes)


def beside_text(held: Sequence[HeldBeside], peak_bytes: int, budget_bytes: int) -> str:
    """Return the variables beside a plan in words, and whether the budget holds them too."""
    total = sum(each.nbytes for each in held)
    named = ", ".join(map(str, held[:_MOST_NAMED]))
    more = f", and {len(held) - _MOST_NAMED} more" if len(held) > _MOST_NAMED else ""
    fits = "within" if peak_bytes + total <= budget_bytes else "over"
    return (
        f"your loop keeps {format_bytes(total)} outside the step, not in the prediction: {named}{more}. The step's peak"
        f" and these tensors need {format_bytes(peak_bytes + total)}, {fits} the budget of {format_bytes(budget_bytes)}"
    )


def _has_storage(tensor: torch.Tensor) -> bool:
    is_plain = not (isinstance(tensor, FakeTensor) or is_wrapper(type(tensor)))
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested


def _tensors_of(value: Any, visited: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value leads to: of containers, objects, closures and classes."""
    waiting = deque([value])
    while waiting and len(visited) < _MOST_LOOKED_THROUGH:
        held = waiting.popleft()
        if isinstance(held, torch.Tensor):
            yield held
            if held.is_leaf and held.grad is not None:
                yield held.grad
            continue
        if id(held) in visited or isinstance(held, (str, bytes, int, float, types.ModuleType, types.FrameType)):
            continue
        visited.add(id(held))
        waiting += _inner(held)


def _inner(held: Any) -> list[Any]:
    """Return an object's parts, without its own methods: a lazy mapping of transformers would import all its models."""
    if isinstance(held, dict):
        return list(dict.values(held))
    for kind in _SEQUENCES:
        if isinstance(held, kind):
            return list(kind.__iter__(held))
    if isinstance(held, types.FunctionType):
        cells = []
        for cell in held.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                cells.append(cell.cell_contents)
        return [*cells, *(held.__defaults__ or ())]
    if isinstance(held, types.MethodType):
        return [held.__self__]
    if isinstance(held, type):
        file = getattr(sys.modules.get(held.__module__), "__file__", None) or ""
        return list(vars(held).values()) if is_users(file) and _INSTALLED not in file else []
    home = f"{type(held).__module__}."
    if home.startswith(_LIBRARIES) and not home.startswith(_LOOKED_THROUGH):
        return []
    try:
        return [*object.__getattribute__(held, "__dict__").values(), type(held)]
    except AttributeError:
        return []
