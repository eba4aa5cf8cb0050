"""A recording of one step of the user's own training loop, which can be run again.

It holds the loop's calls of modules, the PyTorch functions between them, backward passes and updates, in their order,
and where each of their results was released. The operators inside a module are not recorded: it is called again. So
the step can run on other tensors (fake ones, of a copy), with levers on its modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from memfit.batch import map_tensors
from memfit.ir.trace import Phase
from memfit.workload import Workload


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
class Arguments:
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
    arguments: Arguments
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
        tape: The recording of its step (`training.taped` runs it), with a batch of the tensors from outside of it.
            Empty before the loop made a step: `loss_fn` then stands for the step to come.
    """

    tape: Tape = Tape()


def with_phases(entries: list[Entry]) -> tuple[tuple[Entry, ...], int]:
    """Return entries with their phases, and the number of backward passes.

    Entries after a backward pass belong to the update, until a module is called for another forward pass. Entries after
    the last update prepare the next step, and are left out unless they change parameters.
    """
    entries_of_step = _without_preparation(entries)
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
    return tuple(entries_of_step), passes


def _without_preparation(entries: list[Entry]) -> list[Entry]:
    """Return entries without those after the last update that don't change parameters or their gradients.

    They are, for example, those that load the next batch before gradients are zeroed. Tensors released there are
    released after the entry before.
    """
    last = max((i for i, entry in enumerate(entries) if entry.kind in ("backward", "update")), default=-1)
    needed: set[Reference] = set()
    wanted: set[int] = set()
    for i in range(len(entries) - 1, last, -1):
        entry = entries[i]
        if _changes_parameters(entry) or any(ResultTensor(number) in needed for number in entry.made):
            wanted.add(i)
            needed.update(entry.arguments.references)
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
    return remaining


def _changes_parameters(entry: Entry) -> bool:
    return entry.kind == "function" and any(isinstance(r, ModuleTensor) for r in entry.arguments.references)
