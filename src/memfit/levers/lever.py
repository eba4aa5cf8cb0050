"""The interface of a lever: everything that memfit knows of one way to save memory or time."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from memfit.hardware import pins_memory
from memfit.ir import (
    CompilerLever,
    CostTable,
    Device,
    Levers,
    LeverUse,
    Numerics,
    Precision,
    Prediction,
    Sharding,
    Trace,
)
from memfit.solver import Combination
from memfit.training import StepOptions
from memfit.workload import Workload

if TYPE_CHECKING:  # distributed packages take a second to import
    from torch.distributed.device_mesh import DeviceMesh

_LEAST_SHARE = 0.05
"""Of what a step may hold: what a lever must be able to save before a step is captured with it, and then must save."""


class Circumstance:
    """The names of what levers may not go with, besides one another: of the workload, the device or the call."""

    COUPLING_LOSS = "a loss that couples the samples of a batch"
    BATCH_NORM = "BatchNorm in training mode"
    CLIPPING = "Workload.max_grad_norm"
    SEVERAL_OPTIMIZERS = "several optimizers"
    FOREIGN_OPTIMIZER = "an optimizer from outside torch.optim"
    OPTIMIZER_HOOKS = "hooks around the optimizer's step, or a replaced step method"
    GRADIENT_HOOKS = "gradient hooks"
    COMPILED = "torch.compile"
    NO_LINK = "a device without a link to the host"
    JITTOR = "memfit.jittor"
    ADAPTING = "a plan for each batch's shapes (`adaptive=True`)"


class Conflict(NamedTuple):
    """Two things that don't go together."""

    one: str  # a lever, or its setting
    other: str  # a lever or its setting, or something about the workload, the device or the call
    why: str  # what would go wrong
    instead: str  # what to do
    unless: Numerics | None = None  # the numerics class under which they are allowed all the same

    def row(self) -> str:
        """Return the row of the table."""
        exception = f" (allowed under `numerics='{self.unless}'`)" if self.unless else ""
        return f"| {self.one} | {self.other} | {self.why}{exception} | {self.instead} |"


def met(conflicts: Iterable[Conflict], used: Collection[str], allowed: Numerics = "exact") -> list[Conflict]:
    """Return the conflicts of levers, settings and circumstances that are used, under the numerics class allowed."""
    return [c for c in conflicts if c.one in used and c.other in used and c.unless != allowed]


class NotOffered(Exception):
    """A lever is not worth trying on a step, or can't be; says why to the ladder, and to a plan where it is noted."""

    def __init__(self, why: str, *, is_noted: bool = False) -> None:
        super().__init__(why)
        self.is_noted = is_noted


class Setting(Protocol):
    """A step that levers are proposed for: the search for a plan, or the ladder."""

    workload: Workload
    device: Device  # that the step is to run on
    batch_size: int  # samples of the global batch
    plain: Levers  # of the step as the user wrote it
    numerics: Numerics  # that the user allows
    coupling: str | None  # what couples the samples of a batch
    budget_bytes: int | None  # what a step may hold; None where nobody said
    host_budget_bytes: int  # host memory that levers may take
    must_compile: bool  # whether only compiled steps are searched
    tries_all: bool  # whether whatever may save memory is tried, however little: before nothing is said to fit

    @property
    def is_long(self) -> bool: ...  # whether a capture takes long, so that few are made

    @property
    def precisions(self) -> Sequence[Precision]: ...  # that may be tried, the simplest first

    @property
    def shardings(self) -> Sequence[Sharding]: ...  # ways in which ranks may share the step; empty for one process

    @property
    def compilers(self) -> Sequence[CompilerLever]: ...  # that may compile the step; empty where nothing may

    def trace(self, levers: Levers) -> Trace:
        """Return the trace of the step with some levers."""

    def predicted(self, levers: Levers) -> Prediction:
        """Return the prediction for the step with some levers."""

    def module_seconds(self, levers: Levers) -> dict[str, float]:
        """Return the predicted seconds of the operators of each module's own code in a step, by FQN."""

    def combination(self, levers: Levers) -> Combination:
        """Return the problem of choosing regions under some levers."""

    def allows(self, levers: Levers) -> bool:
        """Tell whether the numerics class of some levers is allowed."""


def has_link(device: Device) -> bool:
    """Tell whether copies between a device and the host run beside its work, at a rate that is known or measured."""
    if device.is_here:
        return pins_memory(device.kind)
    return device.kind != "cpu" and device.link_bytes_per_second > 0


def least_bytes(step: Setting) -> float:
    """Return the bytes that a lever must be able to save of a step to be tried.

    They are a share of the budget. Beside the plain peak of a deep model little is large; of what is left once its
    layers are recomputed, the same may be most.
    """
    held_bytes = step.predicted(step.plain).peak_bytes
    return 0.0 if step.tries_all else _LEAST_SHARE * min(held_bytes, step.budget_bytes or held_bytes)


@dataclass(frozen=True)
class LeversOn:
    """Levers on a step."""

    levers: Levers
    batch_size: int  # samples of the step's batch, or of the global one where ranks share it
    couples_batch: bool = False  # whether the model or the loss couples the samples of a batch


class PartialUpdates(Protocol):
    """Updates some parameters of an optimizer at a time."""

    def update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update some parameters of one of the optimizer's groups from their gradients."""

    def settle(self) -> None:
        """Wait until what it moved is there, at the end of a step."""


@dataclass(frozen=True)
class Running:
    """A step in the making: each lever takes one and hands one on."""

    workload: Workload  # whose optimizer a lever may replace
    options: StepOptions
    mesh: DeviceMesh | None = None  # of the ranks that share the step; None for those of the default process group
    is_part: bool = False  # whether the batch is one rank's part
    partial: PartialUpdates | None = None  # how some parameters are updated; None for the optimizer's step for them


Rung = Callable[[Setting, Levers], tuple[Levers, str]]
"""Adds a lever to others; returns them, and what was added in words. Raises `NotOffered`."""


class Lever(ABC):
    """One way to save memory or time."""

    name: ClassVar[str]  # in plans, in notes and in the table of combinations
    field: ClassVar[str]  # of `Levers`, which sets it
    switchable: ClassVar[bool] = False  # may change between two steps
    recomputes: ClassVar[bool] = False  # has modules run again in the backward pass
    compiles: ClassVar[bool] = (
        False  # has code made for each step that it is put on, which takes longer than many steps
    )
    draws_otherwise: ClassVar[bool] = False  # a step draws as many random numbers, and as likely, but other ones
    frees_modules: ClassVar[bool] = False  # modules may be recomputed under it that the step as it is keeps to itself
    is_captured: ClassVar[bool] = True  # a step is another one under it; else the device runs the same one otherwise
    waits: ClassVar[bool] = False  # a step is captured without it first: where that one is slow, it is left out
    rounds_weights: ClassVar[bool] = False  # a step computes with other weights than the model's
    rungs: ClassVar[tuple[str, ...]] = ()  # the names of those that it makes of the ladder
    numerics_class: ClassVar[Numerics] = "exact"  # where that does not depend on the step
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # what it does not go with

    # What it is set to

    def is_used(self, on: LeversOn) -> bool:
        """Tell whether levers have it change the step."""
        return on.levers != self.without(on)

    def without(self, on: LeversOn) -> Levers:
        """Return levers that don't use it."""
        default = getattr(Levers(microbatch_size=on.batch_size), self.field)
        return msgspec.structs.replace(on.levers, **{self.field: default})

    @abstractmethod
    def words(self, on: LeversOn) -> tuple[str, str]:
        """Return its setting, for the table of a plan's levers, and in a word or two, for a table of many plans."""

    def numerics(self, on: LeversOn) -> Numerics:
        """Return its numerics class."""
        return self.numerics_class

    def use(self, on: LeversOn) -> LeverUse:
        """Return its use in words."""
        setting, brief = self.words(on)
        return LeverUse(
            name=self.name, setting=setting, brief=brief, numerics=self.numerics(on), recomputes=self.recomputes
        )

    def names(self, levers: Levers) -> set[str]:
        """Return the names by which conflicts know it and its setting."""
        return {self.name}

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        """Return the properties of a workload and a device, where it is known, that it alone conflicts with."""
        return set()

    def switches(self, levers: Levers) -> bool:
        """Tell whether it may change between two steps: no recomputation may that is a part of compiled code."""
        return self.switchable and not (self.recomputes and levers.compiler != "none")

    def may_switch(self, on: LeversOn, to: Levers) -> bool:
        """Tell whether a step under some levers may go on under others, as far as it is concerned."""
        return self.switches(on.levers) or getattr(on.levers, self.field) == getattr(to, self.field)

    # How it runs

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        """Put it on a step that is being made, until the context is left."""
        with self.on_workload(levers, running.workload):
            yield running

    def on_workload(self, levers: Levers, workload: Workload) -> contextlib.AbstractContextManager[None]:
        """Put it on a workload's model, and on others that its loss function refers to, until the context is left."""
        return self.on_model(levers, workload.model)

    def on_model(self, levers: Levers, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Put it on a model, until the context is left: all that a switchable lever does."""
        return contextlib.nullcontext()

    def is_applied(self, workload: Workload) -> bool:
        """Tell whether it is on a workload's model or optimizer at present."""
        return False

    def on_device(self, levers: Levers, device: Device) -> Device:
        """Return the device as steps run on it under levers."""
        return device

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        """Take what is not switchable of it off the model's modules and the optimizer, until the context is left."""
        yield

    def changes_state(self, levers: Levers) -> bool:
        """Tell whether the optimizer holds another state under it."""
        return False

    def state_bytes(self, state_bytes: int) -> int:
        """Return the most bytes that the optimizer's state has under it, of those that the user's optimizer has."""
        return state_bytes

    def stays_behind(self, levers: Levers, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are not moved to a step's device with the model: it moves less of them itself.

        Their attribute `memfit_place` tells the device.
        """
        return []

    def round_weights(self, levers: Levers, model: nn.Module) -> None:
        """Give a copy of a model the weights that a step computes with under it, where these are others."""
        raise NotImplementedError(f"{self.name} rounds no weights")

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        """Return the host memory that it takes under levers, within what they may take.

        Args:
            state_bytes: Of the optimizer.
        """
        return 0

    # How it is chosen

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        """Return the combinations to search: those given, and those that it adds.

        Raises:
            NotOffered: It adds none.
        """
        return wanted

    def beside(self, levers: Levers, device: Device) -> list[Levers]:
        """Return the same levers with it, to try where a captured step does not fit: for one that is not captured."""
        return []

    def notes(self, step: Setting, levers: Levers) -> list[str]:
        """Return what a plan that uses it says of it, besides its setting."""
        return []

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        """Add it to others, as one of its rungs of the ladder; return them, and what was added in words.

        Raises:
            NotOffered: It adds nothing.
        """
        raise NotOffered("it has no rungs")

    def recomputing(self, levers: Levers, costs: CostTable) -> tuple[set[str], CostTable]:
        """Return the modules that can't be recomputed where it is used, and the costs of a step's operators then."""
        return set(), costs

    def reruns(self, levers: Levers) -> tuple[str, ...]:
        """Return modules that it runs again in the backward pass from their inputs alone: regions may lie around."""
        return ()
