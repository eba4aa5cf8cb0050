"""The errors that memfit raises.

    MemfitError
    ├── UsageError              wrong argument, wrong file, wrong workload   (exit status 2)
    │   ├── BudgetError         a budget that can't be parsed
    │   ├── AllocatorSettingsError  allocator settings that PyTorch would refuse
    │   ├── WorkloadError       no such workload, or one that is not a training step
    │   ├── PlanError           a plan that can't be read, or is not legal
    │   │   └── PlanMismatchError   a plan made for another workload
    │   ├── CheckpointError     a checkpoint that can't be resumed from
    │   │   └── DamagedCheckpointError  a checkpoint that is torn or edited
    │   ├── OutputError         a place that can't be written, or must not be
    │   └── MissingExtraError   an optional dependency that is not installed
    ├── InfeasibleError         no plan fits the budget                      (exit status 3)
    ├── SimulatedOutOfMemoryError   a simulated device is full               (exit status 3)
    ├── CaptureError            the step can't be run under fake tensors     (exit status 2)
    ├── RecomputationError      a checkpointed region whose recomputation differs (exit status 4)
    ├── VerificationError       the planned step differs from its plan       (exit status 4)
    ├── OutOfMemoryError        a step ran out of memory, and no lower plan ran  (exit status 6)
    │   └── MemoryLimitError    a step would hold more than memfit.limit allows
    ├── NonFiniteError          a loss or gradient that is not finite        (exit status 5)
    └── RankError               another rank of the run failed, or ranks don't do the same

One warning: `UntestedTorchWarning`, of a PyTorch that memfit was not tested with.

Every message says what failed with its numbers, where, and what to do by exact argument name. The
numbers are attributes too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class MemfitError(Exception):
    """Base of everything that memfit raises on purpose. Its numbers are attributes, and travel between processes.

    Attributes:
        exit_status: Exit status of the command line.
        frames: The user's frames, if it was raised in another process; else None.
    """

    exit_status = 1
    frames: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__


class UsageError(MemfitError):
    """An argument, file or workload is wrong; nothing was changed or written."""

    exit_status = 2


class BudgetError(UsageError):
    """A budget that can't be parsed."""


class AllocatorSettingsError(UsageError, ValueError):
    """Settings of the caching allocator that PyTorch would refuse, or that are not simulated."""


class WorkloadError(UsageError):
    """A workload that can't be found, or that is not a training step."""


class PlanError(UsageError):
    """A plan that can't be read, or that is not legal for the workload."""


class PlanMismatchError(PlanError):
    """A plan that was made for another workload."""


class CheckpointError(UsageError):
    """A training checkpoint that can't be resumed from."""


class DamagedCheckpointError(CheckpointError):
    """A training checkpoint that is torn or edited."""


class OutputError(UsageError):
    """A path that can't be written, or with files that memfit must not overwrite."""


class MissingExtraError(UsageError):
    """An optional dependency that is not installed.

    Args:
        what: The feature that needs it.
        extra: The extra of memfit that brings it.
        missing: The module that could not be imported.
    """

    def __init__(self, what: str, extra: str, missing: str) -> None:
        self.extra = extra
        self.missing = missing
        super().__init__(f"{what} needs the package {missing!r}, which is not installed: pip install 'memfit[{extra}]'")


@contextlib.contextmanager
def brought_by(extra: str, what: str) -> Iterator[None]:
    """Have imports that fail name the extra of memfit that brings their package.

    Args:
        what: The feature that needs them.

    Raises:
        MissingExtraError: An import failed.
    """
    try:
        yield
    except ImportError as e:
        raise MissingExtraError(what, extra, (e.name or extra).split(".")[0]) from e


class UntestedTorchWarning(UserWarning):
    """A PyTorch newer or older than the tested versions."""


class InfeasibleError(MemfitError):
    """No plan fits the budget.

    Args:
        message: What failed and what to do.
        budget_bytes: The budget.
        lowest_peak_bytes: The lowest peak of all plans found.
        where: The operator or module at which that peak occurs.
        proven: Whether no plan of the levers that the arguments allow can reach a lower peak in the model solved.
    """

    exit_status = 3

    def __init__(
        self, message: str, *, budget_bytes: int, lowest_peak_bytes: int, where: str, proven: bool = False
    ) -> None:
        self.budget_bytes = budget_bytes
        self.lowest_peak_bytes = lowest_peak_bytes
        self.where = where
        self.proven = proven
        super().__init__(message)


class SimulatedOutOfMemoryError(MemfitError):
    """A simulated device is too full for a request, even after the allocator released its cache.

    Args:
        message: What failed and what to do.
        requested_bytes: The requested bytes.
        allocated_bytes: Bytes that tensors held.
        reserved_bytes: Bytes that the allocator held of the device.
        capacity_bytes: Most bytes that it may hold.
    """

    exit_status = 3

    def __init__(
        self, message: str, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        super().__init__(message)


class CaptureError(MemfitError):
    """The step can't be run under fake tensors, or not the way memfit needs it."""

    exit_status = 2


class RecomputationError(MemfitError):
    """A checkpointed region whose recomputation in the backward pass differs from its forward pass.

    Args:
        modules: The FQNs of the region's modules.
        module: The module that was running when it was noticed.
        how: The difference.
    """

    exit_status = 4

    def __init__(self, modules: tuple[str, ...], module: str, how: str) -> None:
        self.modules = modules
        self.module = module
        self.how = how
        run = "" if len(modules) == 1 else f" with the run {modules[0]!r} to {modules[-1]!r}"
        super().__init__(
            f"the module {module!r} can't be recomputed{run}: its recomputation in the backward pass differs"
            f" from its first run ({how}). Such a module updates a cache (with transformers: set"
            " use_cache=False), counts its calls, reads values that change, or has its inputs changed in"
            " place. Take it out of the plan's levers.regions"
        )


class VerificationError(MemfitError):
    """The planned step differs from its plan."""

    exit_status = 4


class OutOfMemoryError(MemfitError):
    """A step ran out of memory, and no lower plan of the frontier ran it.

    Args:
        message: What failed and what to do.
        step: The step at which it happened.
        is_torn: Whether the optimizer had begun to change weights that nothing can bring back: go on from a
            checkpoint. Otherwise weights, optimizer state, buffers and random states are those before the step.
    """

    exit_status = 6

    def __init__(self, message: str, *, step: int = 0, is_torn: bool = False) -> None:
        self.step = step
        self.is_torn = is_torn
        super().__init__(message)


class MemoryLimitError(OutOfMemoryError):
    """A step needs more bytes than its limit; the operator that would exceed the limit was not run.

    Args:
        message: What failed and what to do, with the bytes by category.
        limit_bytes: The limit.
        held_bytes: Bytes held.
        requested_bytes: Bytes requested beyond them.
        by_category: Bytes held, by category.
        where: The origin of the request.
    """

    def __init__(
        self,
        message: str,
        *,
        limit_bytes: int,
        held_bytes: int,
        requested_bytes: int,
        by_category: dict[str, int],
        where: str,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = held_bytes
        self.requested_bytes = requested_bytes
        self.by_category = by_category
        self.where = where
        super().__init__(message)


class NonFiniteError(MemfitError):
    """A loss or a gradient that is not finite.

    Args:
        message: What failed and what to do.
        step: The step at which it happened.
        value: The value.
        forward: FQN of the module whose output was the first that was not finite; None where all were, or unknown.
        backward: Owner of the first gradient that was not finite; None where all were, or unknown.
    """

    exit_status = 5

    def __init__(
        self, message: str, *, step: int, value: float, forward: str | None = None, backward: str | None = None
    ) -> None:
        self.step = step
        self.value = value
        self.forward = forward
        self.backward = backward
        super().__init__(message)


class RankError(MemfitError):
    """Another rank of a run failed, or this rank differs from the others."""


def _rebuilt(kind: type[MemfitError], args: tuple[Any, ...]) -> MemfitError:
    """Return an error of a class without calling its constructor, which takes more than the message."""
    error = kind.__new__(kind)
    error.args = args
    return error
