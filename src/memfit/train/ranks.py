"""Ranks that train together, where one of them may run out of memory.

`DistributedDataParallel` sends gradients while the backward pass runs, and a rank that fails there leaves the others
waiting for good. Here nothing is sent before every rank is through:

1. Each rank runs the forward and backward passes of its batch. Then all say whether they got through, and which
   parameters have gradients. If one ran out of memory, all undo the step.
2. Gradients are averaged, in place and without buckets, as `DistributedDataParallel` averages them.
3. Right before the optimizer changes anything, when what it needs is there, all say so once more.

So every rank makes an update or none does, and what is decided next is decided from the same answers. The price is that
sending does not overlap with the backward pass, and two small messages a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import UsageError

_FINE, _RAN_OUT, _FAILED = 0, 1, 2
Stage = Literal["passes", "gradients", "update"]


class PeerError(Exception):
    """Another rank gave a step up.

    Args:
        ran_out: Whether all of those that did ran out of memory.
    """

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out
        super().__init__(
            "another rank ran out of memory" if ran_out else "another rank failed, with an error of its own"
        )


class Alone:
    """One process: what it finds is what all find.

    Attributes:
        is_updating: Whether all have agreed to update, so that nothing can be undone together any more.
    """

    is_updating = False

    def begin(self) -> None:
        """Take note that a step begins."""

    def average(self) -> None:
        """Average the gradients, once all are through their backward passes."""

    def finish(self) -> None:
        """Take note that a step is done, with an update or without."""

    def failed(self, ran_out: bool) -> bool:
        """Tell the others that this rank gave the step up; return whether all who did ran out of memory."""
        return ran_out

    def settle(self) -> None:
        """Have every rank go on with the same buffers."""

    def all(self, value: bool) -> bool:
        """Tell whether something is so on every rank."""
        return value

    def most(self, values: list[float]) -> list[float]:
        """Return the largest of each value on any rank."""
        return values

    def first(self, value: int) -> int:
        """Return the value of the first rank."""
        return value

    def close(self) -> None:
        """Watch the optimizer no more."""


class Ranks(Alone):
    """The ranks of a process group, each with a copy of the model. They are made, and used, on all of them at once.

    Args:
        group: The process group.
        model: The model; parameters and buffers become those of the group's first rank.
        optimizer: Its optimizer, watched until `close`.
        parameters: Returns the parameters that may have gradients, in the same order on each rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], list[nn.Parameter]],
    ) -> None:
        self._group, self._model, self._parameters = group, model, parameters
        self._size, self._source = dist.get_world_size(group), dist.get_global_rank(group, 0)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._flags = torch.zeros(1 + len(parameters()), dtype=torch.int32, device=self._device)
        self._stage: Stage = "passes"
        self._broadcast([*parameters(), *model.buffers()])
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._before_update())

    @property
    def is_updating(self) -> bool:  # type: ignore[override]
        """Whether all have agreed to update."""
        return self._stage == "update"

    def close(self) -> None:
        """Watch the optimizer no more."""
        self._handle.remove()

    def begin(self) -> None:
        """Take note that a step begins."""
        self._stage = "passes"

    def average(self) -> None:
        """Average the gradients, once all are through their backward passes.

        Raises:
            PeerError: One of them is not.
        """
        parameters = self._parameters()
        self._agree([p.grad is not None for p in parameters])
        somewhere = self._flags[1:].tolist()
        self._stage = "gradients"
        works = []
        for parameter, is_somewhere in zip(parameters, somewhere, strict=True):
            if is_somewhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.mul_(1.0 / self._size)
                works.append(dist.all_reduce(parameter.grad, group=self._group, async_op=True))
        for work in works:
            work.wait()

    def finish(self) -> None:
        """Take note that a step is done, with an update or without.

        Raises:
            PeerError: It made no update, and on another rank it failed after the backward pass.
        """
        if self._stage == "gradients":
            self._agree([])

    def failed(self, ran_out: bool) -> bool:
        """Tell the others that this rank gave the step up; return whether all who did ran out of memory."""
        if self.is_updating:
            return ran_out
        return self._exchange(_RAN_OUT if ran_out else _FAILED, []) == _RAN_OUT

    def settle(self) -> None:
        """Have every rank go on with the first rank's buffers, as `DistributedDataParallel` does."""
        self._broadcast(list(self._model.buffers()))

    def all(self, value: bool) -> bool:
        """Tell whether something is so on every rank."""
        return self.most([float(not value)]) == [0.0]

    def most(self, values: list[float]) -> list[float]:
        """Return the largest of each value on any rank."""
        kind = torch.float32 if self._device.type == "mps" else torch.float64
        found = torch.tensor(values, dtype=kind, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def first(self, value: int) -> int:
        """Return the value of the first rank."""
        found = torch.tensor([value], device=self._device)
        dist.broadcast(found, self._source, group=self._group)
        return int(found.item())

    def check_same(self, what: str, data: bytes) -> None:
        """Raise UsageError unless all ranks give the same data."""
        digest = float(int.from_bytes(hashlib.sha256(data).digest()[:6], "big"))
        if self.most([digest, -digest]) != [digest, -digest]:
            raise UsageError(
                f"the ranks have different {what}: make it once, save it, and have every rank load it, so that they"
                " take the same lower plan when one runs out of memory"
            )

    def _before_update(self) -> None:
        if self._stage == "gradients":
            self._agree([])
            self._stage = "update"

    def _agree(self, flags: list[bool]) -> None:
        worst = self._exchange(_FINE, flags)
        if worst != _FINE:
            raise PeerError(worst == _RAN_OUT)

    def _exchange(self, own: int, flags: list[bool]) -> int:
        """Return the largest of what the ranks say, and leave in `_flags` which flags any of them has.

        All are at the same stage, so the messages have the same size.
        """
        message = self._flags if self._stage == "passes" else self._flags[:1]
        message.zero_()
        message[: 1 + len(flags)] = torch.tensor([own, *flags], dtype=torch.int32)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        return int(message[0])

    def _broadcast(self, tensors: list[Any]) -> None:
        with torch.no_grad():
            for work in [dist.broadcast(t.detach(), self._source, self._group, async_op=True) for t in tensors]:
                work.wait()


def check_can_recover(model: nn.Module) -> None:
    """Raise UsageError where other ranks would wait for one that undoes a step: they are in the middle of it then."""
    from torch.distributed.tensor import DTensor

    wrapped = [name or "Workload.model" for name, m in model.named_modules() if isinstance(m, _WRAPPERS)]
    if wrapped or any(isinstance(p, DTensor) for p in model.parameters()):
        what = f"{wrapped[0]} is a DistributedDataParallel" if wrapped else "the parameters are sharded"
        raise UsageError(
            f"recover=True and adaptive plans can't be had where {what}: it sends in the middle of forward and backward"
            " passes, and ranks would wait for good for one that runs out of memory there. Give the model without it,"
            " and process_group=: its ranks then decide together, and gradients are averaged after the backward pass"
        )


_WRAPPERS = (nn.parallel.DistributedDataParallel,)
