"""A recording of one step of the user's own training loop, which can be run again.

It holds the loop's calls of modules, the PyTorch functions between them, backward passes and updates, in their order,
and where each of their results was released. The operators inside a module are not recorded: it is called again. So
the step can run on other tensors (fake ones, of a copy), with levers on its modules.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from memfit.ir import Phase
from memfit.workload.batch import map_tensors
from memfit.workload.description import Workload
from memfit.workload.extent import Extent, Pairs, resized


@dataclass(frozen=True)
class BatchTensor:
    """A tensor from outside the step, by its place in the workload's batch."""

    index: int


@dataclass(frozen=True)
class ResultTensor:
    """A result of an entry, by its number."""

    number: int


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter or buffer of a module that the loop calls, by its FQN there."""

    root: int
    name: str


Reference = BatchTensor | ResultTensor | ModuleTensor


@dataclass(frozen=True)
class EntryArguments:
    """The arguments of an entry.

    Attributes:
        template: Positional and named arguments, with a tensor without memory in the place of each tensor.
        references: The tensor that each of these stands for, in the order of `map_tensors`.
    """

    template: tuple[tuple[Any, ...], dict[str, Any]]
    references: tuple[Reference, ...]

    def filled(self, look_up: Callable[[Reference], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors in their places."""
        if not self.references:
            return self.template
        references = iter(self.references)
        args, kwargs = map_tensors(lambda _: look_up(next(references)), self.template)
        return args, kwargs


@dataclass(frozen=True)
class ExecutionContext:
    """The autocast and gradient modes of an entry.

    Attributes:
        autocast: Device types with autocast on, the dtype of each, and whether weights that it casts are kept.
    """

    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    grad: bool

    @classmethod
    def now(cls) -> ExecutionContext:
        """Return the present modes."""
        kept = torch.is_autocast_cache_enabled()
        modes = [(kind, torch.get_autocast_dtype(kind), kept) for kind in _KINDS if torch.is_autocast_enabled(kind)]
        return cls(tuple(modes), torch.is_grad_enabled())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run code in these modes."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, kept in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=kept))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run code as outside of the autocast contexts around it, which are as they were on leaving.

    Within them an inner context keeps the weights that it casts when it is left, as if its forward pass went on.
    """
    enabled = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


_KINDS = ("cpu", "cuda")
_NO_MODES = ExecutionContext((), True)


@dataclass
class Entry:
    """One action of the loop.

    Attributes:
        what: The function, also of a backward pass; or the number of the module or optimizer.
        made: Numbers of the tensors in its result, in order.
        drops: Numbers of the tensors released after it.
        microbatch: Number of backward passes before it.
    """

    kind: Literal["function", "module", "backward", "update"]
    what: Any
    arguments: EntryArguments
    context: ExecutionContext
    made: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    phase: Phase = "forward"
    microbatch: int = 0


@dataclass(frozen=True)
class Tape:
    """The recording of a step.

    Attributes:
        roots: Names of the modules that it calls, as children of the workload's model; "" for the model itself.
    """

    entries: tuple[Entry, ...] = ()
    roots: tuple[str, ...] = ()
    passes: int = 0


@dataclass(frozen=True)
class LoopWorkload(Workload):
    """A workload whose step the user's own loop runs; no copy of it runs with data, for lack of memory.

    Attributes:
        tape: The recording of its step (`training.step` runs it), with a batch of the tensors from outside of it.
            Empty before the loop made a step: `loss_fn` then stands for the step to come.
    """

    tape: Tape = Tape()
    batch_varies: ClassVar[bool] = True


_SMALL_BYTES = 64 * 1024
CallNumber = tuple[int, int]
"""A call of a module that trains: the module's number, and the call's number within its pass."""


@dataclass(frozen=True)
class Geometry:
    """The geometry of a plain tensor, and the size of its storage."""

    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    is_trained: bool

    @classmethod
    def of(cls, tensor: torch.Tensor | Geometry) -> Geometry | None:
        """Return a tensor's geometry; None for parameters, and for tensors of other layouts and classes."""
        if isinstance(tensor, Geometry):
            return tensor
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        place, nbytes = tensor.storage_offset(), tensor.untyped_storage().nbytes()
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return cls(tensor.dtype, tensor.device, size, stride, int(place), nbytes, tensor.requires_grad)

    @property
    def is_own(self) -> bool:
        """Whether a tensor has its storage for itself, and no integers that a step may read."""
        return self.dtype.is_floating_point and self.nbytes == self.dtype.itemsize * math.prod(self.size)

    def resized(self, size: tuple[int, ...]) -> Geometry:
        """Return the geometry of a tensor of another size, which is contiguous; itself where the size is its own."""
        if size == self.size:
            return self
        made = torch.empty(size, dtype=self.dtype, device="meta")
        return replace(self, size=size, stride=tuple(made.stride()), offset=0, nbytes=made.nbytes)

    def made(self) -> torch.Tensor:
        """Return a tensor of this geometry."""
        if self.is_own:
            own = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            return own.requires_grad_(self.is_trained)
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(torch.UntypedStorage(self.nbytes, device=self.device), self.offset, self.size, self.stride)
        return tensor.zero_().requires_grad_(self.is_trained)


@dataclass(frozen=True)
class RecordedStep:
    """A step of a loop as it was seen.

    Attributes:
        entries: What it did, with phases.
        passes: The number of its backward passes.
        given: The tensors from outside that it used.
        trained: Whether each parameter of the modules that it called was to have a gradient, when it began.
        is_switched: Whether others were at its end.
        calls: The largest arguments of calls that train, by the module's number and the call's within its pass.
    """

    entries: tuple[Entry, ...]
    passes: int
    given: Sequence[torch.Tensor | Geometry]
    trained: dict[ModuleTensor, bool]
    is_switched: bool
    calls: dict[CallNumber, Extent] = field(default_factory=dict)

    @property
    def roots(self) -> set[int]:
        """Numbers of the modules that it uses."""
        named = {r.root for e in self.entries for r in e.arguments.references if isinstance(r, ModuleTensor)}
        return named | {e.what for e in self.entries if e.kind == "module"}

    @property
    def optimizers(self) -> set[int]:
        """Numbers of the optimizers that it steps."""
        return {e.what for e in self.entries if e.kind == "update"}

    def light(self) -> RecordedStep:
        """Return the step with the geometries of large tensors from outside, in the place of their memory."""
        given = [geometry if (geometry := Geometry.of(t)) and geometry.nbytes > _SMALL_BYTES else t for t in self.given]
        return replace(self, given=given)

    def resized(self, pairs: Pairs) -> RecordedStep:
        """Return the step on tensors from outside of other shapes, with their values repeated or cut.

        Equal sizes become equal ones: a size that became several is told apart by its dimension, else it becomes the
        largest. What the step itself says in numbers, as sizes of views, stays.

        Args:
            pairs: Shapes, and what each became.
        """
        anywhere: dict[int, int] = {}
        placed: dict[tuple[int, int, int], int] = {}
        for old, new in pairs:
            if len(old) == len(new):
                for dim, (a, b) in enumerate(zip(old, new, strict=True)):
                    anywhere[a] = max(anywhere.get(a, 0), b)
                    placed[len(old), dim, a] = max(placed.get((len(old), dim, a), 0), b)

        def changed(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(placed.get((len(shape), dim, a), anywhere.get(a, a)) for dim, a in enumerate(shape))

        given: list[torch.Tensor | Geometry] = []
        for t in self.given:
            if isinstance(t, Geometry):
                given.append(t.resized(changed(t.size)))
            else:
                given.append(resized(t, changed(tuple(t.shape))) if Geometry.of(t) is not None else t)
        calls = {
            key: Extent({path: column._replace(shape=changed(column.shape)) for path, column in extent.items()})
            for key, extent in self.calls.items()
        }
        return replace(self, given=given, calls=calls)


def in_turn(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Return steps of several kinds as one, in which each follows the one before.

    What a step leaves to the loop's variables is released where the next one has called its first module, and what it
    was given, where the next one has made what it is given of the same form: loops bind their batch anew first. Given
    integers, which a step may read, and slices of something larger are there all the time.
    """
    if len(steps) == 1 and not steps[0].is_switched:
        return replace(steps[0], given=[_made(t) for t in steps[0].given])
    given: list[torch.Tensor] = []
    own: list[list[Entry]] = []
    made = 0
    for step in steps:
        own.append(_renumbered(step, given, made))
        made = max((number for entry in own[-1] for number in entry.made), default=made)
    for entries, following in zip(own, [*own[1:], own[0]], strict=True) if len(own) > 1 else ():
        begins = next(entry for entry in following if entry.kind == "module" and entry.context.grad)
        rebinding = [entry for entry in following if _given_as(entry) is not None]
        given_as = {entry.made[0]: geometry for entry in entries if (geometry := _given_as(entry)) is not None}
        results = {number for entry in entries for number in entry.made}
        for number in sorted(results - {number for entry in entries for number in entry.drops}):
            like = [entry for entry in rebinding if number in given_as and _given_as(entry) == given_as[number]]
            releasing = like[0] if like else begins
            rebinding = [entry for entry in rebinding if entry is not releasing]
            releasing.drops = [*releasing.drops, number]
    entries = [entry for of_step in own for entry in of_step]
    return RecordedStep(tuple(entries), _set_phases(entries), given, {}, False)


def _given_as(entry: Entry) -> Geometry | None:
    """Return the geometry of a tensor from outside that an entry makes; None for other entries."""
    made_by = getattr(entry.what, "__self__", None)
    return made_by if isinstance(made_by, Geometry) else None


def _renumbered(step: RecordedStep, given: list[torch.Tensor], made: int) -> list[Entry]:
    """Return a step's entries for a tape of several.

    Args:
        given: The tensors from outside the tape, to which the step's are added.
        made: The largest number of a result before it.
    """
    # Parameters have gradients, or have none, as when the step was recorded.
    stand_ins = [torch.empty(0, device="meta")] * len(step.trained)
    trained = EntryArguments(((stand_ins, list(step.trained.values())), {}), tuple(step.trained))
    entries = [Entry("function", _set_trained, trained, _NO_MODES)]
    references: list[Reference] = []
    for tensor in step.given:
        geometry = Geometry.of(tensor)
        if geometry is not None and geometry.is_own:
            made += 1
            entries.append(Entry("function", geometry.made, EntryArguments(((), {}), ()), _NO_MODES, made=[made]))
            references.append(ResultTensor(made))
            continue
        same = (i for i, o in enumerate(given) if o is tensor or (geometry is not None and Geometry.of(o) == geometry))
        place = next(same, len(given))
        if place == len(given):
            given.append(_made(tensor))
        references.append(BatchTensor(place))

    def moved(reference: Reference) -> Reference:
        if isinstance(reference, BatchTensor):
            return references[reference.index]
        return ResultTensor(reference.number + made) if isinstance(reference, ResultTensor) else reference

    for entry in step.entries:
        of_entry = tuple(map(moved, entry.arguments.references))
        arguments = replace(entry.arguments, references=of_entry)
        results, drops = ([number + made for number in numbers] for numbers in (entry.made, entry.drops))
        entries.append(replace(entry, arguments=arguments, made=results, drops=drops))
    return entries


def _made(tensor: torch.Tensor | Geometry) -> torch.Tensor:
    return tensor.made() if isinstance(tensor, Geometry) else tensor


def _set_trained(parameters: list[torch.Tensor], trained: list[bool]) -> None:
    for parameter, is_trained in zip(parameters, trained, strict=True):
        parameter.requires_grad_(is_trained)


def with_phases(entries: list[Entry]) -> tuple[tuple[Entry, ...], int]:
    """Return entries with their phases, and the number of backward passes.

    Entries after a backward pass belong to the update, until a module is called for another forward pass. Entries after
    the last update prepare the next step, for example load the next batch before gradients are zeroed. They are left
    out unless they change parameters; tensors released there are released after the entry before.
    """
    last = max((i for i, entry in enumerate(entries) if entry.kind in ("backward", "update")), default=-1)
    needed: set[Reference] = set()
    wanted: set[int] = set()
    for i in range(len(entries) - 1, last, -1):
        references = entries[i].arguments.references
        changes = entries[i].kind == "function" and any(isinstance(r, ModuleTensor) for r in references)
        if changes or any(ResultTensor(number) in needed for number in entries[i].made):
            wanted.add(i)
            needed.update(references)
    remaining = entries[: last + 1]
    dropped: set[int] = set()
    for i, entry in enumerate(entries[last + 1 :], last + 1):
        if i in wanted:
            remaining.append(entry)
        else:
            dropped.update(entry.made)
            if remaining:
                remaining[-1].drops += entry.drops
    dropped -= {number for entry in remaining for number in entry.made}
    for entry in remaining:
        entry.drops = [number for number in entry.drops if number not in dropped]
    return tuple(remaining), _set_phases(remaining)


def _set_phases(entries_of_step: list[Entry]) -> int:
    """Set the phases of entries; return the number of backward passes."""
    phase: Phase = "forward"
    passes = 0
    for entry in entries_of_step:
        if entry.kind == "module" and entry.context.grad and phase == "optimizer":
            phase = "forward"
        elif entry.kind == "update":
            phase = "optimizer"
        entry.phase, entry.microbatch = ("backward" if entry.kind == "backward" else phase), passes
        if entry.kind == "backward":
            passes, phase = passes + 1, "optimizer"
    for entry in entries_of_step:
        entry.microbatch = min(entry.microbatch, max(0, passes - 1))
    return passes
