"""What a method is: something that makes a training step take less memory, and the settings it is measured at."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.frontier.models import Subject
from memfit.capture import real_copy
from memfit.training import Step
from memfit.workload import Workload

Kind = Literal["eager", "compiled", "joint", "all"]
KINDS: tuple[Kind, ...] = ("eager", "compiled", "joint", "all")
Sort = Literal["eager", "compiled"]
"""Of steps: compiled ones round otherwise, and draw other dropout masks."""
PLAIN = "plain"
OURS = "memfit"
LOWEST = "lowest"


def compiled_name(name: str) -> str:
    """Return what a compiled method is called where eager ones are beside it."""
    return f"compiled {name}"


PLAINS = (PLAIN, compiled_name(PLAIN))
"""The plain steps, eager and compiled, which others of their sort are held against."""


@dataclass(frozen=True)
class Task:
    """What methods are compared on.

    Attributes:
        workload: On the CPU; nothing of it is changed, outside of the contexts of methods.
        plain_peak_bytes: What the plain eager step was measured to take, parameters included.
        shares: Budgets, as shares of that.
        device: Where steps run, by the name that PyTorch has for it here.
    """

    subject: Subject
    workload: Workload
    plain_peak_bytes: int
    shares: Sequence[float]
    device: str = "cpu"

    @property
    def place(self) -> torch.device:
        """Where steps run."""
        return torch.device(self.device)

    def copied(self) -> Workload:
        """Return a copy of the workload where steps run."""
        return real_copy(self.workload, self.place)

    def budget_bytes(self, share: float) -> int:
        """Return the budget that is a share of the plain peak."""
        return int(share * self.plain_peak_bytes)


Apply = Callable[[Workload], contextlib.AbstractContextManager[Step]]
"""Turns a workload into the step that is measured, until the context is left; can be entered again."""


@dataclass(frozen=True)
class Prepared:
    """A method at one setting, ready to run.

    Attributes:
        facts: Goes into its row: what the method itself says.
        sort: Of its step; None for that of its method's kind.
        program: What its step is, where others may come to the same one: they are then timed together.
    """

    apply: Apply
    facts: dict[str, Any] = field(default_factory=dict)
    sort: Sort | None = None
    program: str | None = None


@dataclass(frozen=True)
class Method:
    """A way to make a step take less memory.

    Attributes:
        kind: Which methods it is held against.
        settings: What it is measured at; a share of the plain peak or `LOWEST` for those that take a budget in bytes.
        make: `make(task, studied, setting)`.
        study: Done once for each model and handed to `make`.
    """

    name: str
    kind: Kind
    settings: Callable[[Task], Sequence[Any]]
    make: Callable[[Task, Any, Any], Prepared]
    study: Callable[[Task], Any] = lambda task: None

    @property
    def sort(self) -> Sort:
        """Of its steps, where they do not say otherwise themselves."""
        return "compiled" if self.kind == "compiled" else "eager"


class Unsupported(Exception):
    """A method can't run a model, or can't run here. The message says why."""


def stepping(around: Callable[[Workload], contextlib.AbstractContextManager[Any]]) -> Apply:
    """Return how to run the plain step within a context."""

    @contextlib.contextmanager
    def apply(workload: Workload) -> Iterator[Step]:
        with around(workload):
            yield Step(workload)

    return apply


def accumulating(apply: Apply, microbatch_size: int) -> Apply:
    """Return how to run a step on microbatches, of the same global batch."""

    @contextlib.contextmanager
    def applied(workload: Workload) -> Iterator[Step]:
        with apply(workload) as step:
            step.change(microbatch_size=microbatch_size)
            yield step

    return applied


def without_batches(workload: Workload) -> Workload:
    """Return a workload without what only longer training needs."""
    return dataclasses.replace(workload, batches=None, evaluate=None)
