"""A step of somebody's own training loop, written down while it ran, so that it can be run again.

What is written down is what the loop itself does: calls of modules, PyTorch functions between them, backward passes and
updates, in their order, and where each tensor that they made was let go. What a module does within is not: it is
called again. So the step runs again on other tensors (fake ones, of a copy), with levers on its modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from memfit.batch import map_tensors
from memfit.ir.trace import Phase
from memfit.workload import Workload


@dataclass(frozen=True)
class Given:
    """A tensor from outside the step, by its place in the workload's batch."""

    index: int


@dataclass(frozen=True)
class Made:
    """A tensor that an entry made, by its number."""

    number: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of a module that the loop calls, by its FQN there."""

    root: int
    name: str


Reference = Given | Made | Held


@dataclass(frozen=True)
class Arguments:
    """What an entry was given.

    Attributes:
        template: Positional and named arguments, with a tensor without memory in the place of each tensor.
        references: Which tensor each of these stands for, in the order in which `map_tensors` goes through them.
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
class Surroundings:
    """What an entry ran in.

    Attributes:
        autocast: Device types with autocast on, the dtype of each, and whether weights that it casts are kept.
        grad: Whether gradients were on.
    """

    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    grad: bool

    @classmethod
    def now(cls) -> Surroundings:
        """Return those of the code that is running."""
        kept = torch.is_autocast_cache_enabled()
        found = [(kind, torch.get_autocast_dtype(kind), kept) for kind in _KINDS if torch.is_autocast_enabled(kind)]
        return cls(tuple(found), torch.is_grad_enabled())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run code in the same."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, kept in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=kept))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


_KINDS = ("cpu", "cuda")


@dataclass
class Entry:
    """Something that the loop did.

    Attributes:
        kind: A function was called, or a module, a backward pass ran, or an optimizer updated.
        what: The function, that of a backward pass too; or the number of the module, or of the optimizer.
        arguments: What it was given.
        surroundings: What it ran in.
        made: Numbers of the tensors in its result, in their order.
        drops: Numbers of the tensors that nothing held any longer after it.
        phase: That of the step.
        microbatch: How many backward passes ran before.
    """

    kind: Literal["function", "module", "backward", "update"]
    what: Any
    arguments: Arguments
    surroundings: Surroundings
    made: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    phase: Phase = "forward"
    microbatch: int = 0


@dataclass(frozen=True)
class Tape:
    """A step, written down.

    Attributes:
        entries: What it did, in order.
        roots: Names of the modules that it calls, as children of the workload's model; "" for the model itself.
        passes: Backward passes.
    """

    entries: tuple[Entry, ...] = ()
    roots: tuple[str, ...] = ()
    passes: int = 0


@dataclass(frozen=True)
class LoopWorkload(Workload):
    """A workload whose step the user's own loop runs, in the memory that it has: no copy of it runs with data.

    Attributes:
        tape: What the step does (`memfit.train.taped` runs it), with a batch of the tensors that it took from outside.
            Empty before the loop made a step: `loss_fn` then stands for what it will do.
    """

    tape: Tape = Tape()


def root_of(model: nn.Module, name: str) -> nn.Module:
    """Return a module that a tape calls."""
    return model.get_submodule(name)


def with_phases(entries: list[Entry]) -> tuple[tuple[Entry, ...], int]:
    """Return entries with their phases, and the number of backward passes.

    After a backward pass comes what belongs to the update, until a module is called for another forward pass. What the
    loop does after its last update is left out: it prepares the next step.
    """
    last = max((i for i, entry in enumerate(entries) if _is_of_the_update(entry)), default=-1)
    kept = entries[: last + 1]
    phase: Phase = "forward"
    passes = 0
    for entry in kept:
        if entry.kind == "module" and entry.surroundings.grad and phase == "optimizer":
            phase = "forward"
        elif entry.kind == "update":
            phase = "optimizer"
        entry.phase, entry.microbatch = ("backward" if entry.kind == "backward" else phase), passes
        if entry.kind == "backward":
            passes, phase = passes + 1, "optimizer"
    for entry in kept:
        entry.microbatch = min(entry.microbatch, max(0, passes - 1))
    return tuple(kept), passes


def _is_of_the_update(entry: Entry) -> bool:
    changes = any(isinstance(reference, Held) for reference in entry.arguments.references)
    return entry.kind in ("backward", "update") or (entry.kind == "function" and changes)
