"""Agreement of ranks that train together, where one of them may run out of memory.

`DistributedDataParallel` sends gradients during the backward pass, and a rank that fails there leaves the others
waiting forever. Here nothing is sent before every rank has finished it:

1. Each rank runs the forward and backward passes of its batch. Then all exchange whether they succeeded, and which
   parameters have gradients. If one ran out of memory, all undo the step.
2. Gradients are averaged, in place and without buckets, as `DistributedDataParallel` averages them.
3. Right before the optimizer changes anything, with its memory available, all exchange once more.

So every rank makes an update or none does, and all decide from the same answers. The price: communication does not
overlap with the backward pass, and two small messages a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import UsageError
from memfit.ranks.one_process import SingleProcess

_FINE, _RAN_OUT, _FAILED = 0, 1, 2
Stage = Literal["passes", "gradients", "update"]


class PeerError(Exception):
    """Another rank aborted a step.

    Args:
        ran_out: Whether all aborting ranks ran out of memory.
    """

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out
        super().__init__(
            "another rank ran out of memory" if ran_out else "another rank failed, with an error of its own"
        )


class Ranks(SingleProcess):
    """The ranks of a process group, each with a copy of the model. All ranks create and call it together.

    Args:
        model: The model; parameters and buffers become those of the group's first rank.
        optimizer: The model's optimizer, watched until `close`.
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
        return self._stage == "update"

    def close(self) -> None:
        self._handle.remove()

    def begin(self) -> None:
        self._stage = "passes"

    def average(self) -> None:
        """Average the gradients, once all ranks have finished their backward passes.

        Raises:
            PeerError: A rank failed.
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
        """Note that a step is done, with an update or without.

        Raises:
            PeerError: The step made no update, and on another rank it failed after the backward pass.
        """
        if self._stage == "gradients":
            self._agree([])

    def failed(self, ran_out: bool) -> bool:
        if self.is_updating:
            return ran_out
        return self._exchange(_RAN_OUT if ran_out else _FAILED, []) == _RAN_OUT

    def settle(self) -> None:
        """Copy the first rank's buffers to all ranks, as `DistributedDataParallel` does."""
        self._broadcast(list(self._model.buffers()))

    def all(self, value: bool) -> bool:
        return self.most([float(not value)]) == [0.0]

    def most(self, values: list[float]) -> list[float]:
        kind = torch.float32 if self._device.type == "mps" else torch.float64
        largest = torch.tensor(values, dtype=kind, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def first(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        dist.broadcast(tensor, self._source, group=self._group)
        return int(tensor.item())

    def check_same(self, what: str, data: bytes) -> None:
        """Raise UsageError unless all ranks give the same data."""
        digest = float(int.from_bytes(hashlib.sha256(data).digest()[:6], "big"))
        if self.most([digest, -digest]) != [digest, -digest]:
            raise UsageError(
                f"the ranks have different {what}: create it once, save it, and load it on every rank, so that they"
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
        """Return the maximum of the ranks' values, and set `_flags` to the flags that any of them has.

        All ranks are at the same stage, so that their messages have the same size.
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
    """Raise UsageError for models that communicate within the step: other ranks would wait for one that undoes it."""
    from torch.distributed.tensor import DTensor

    kind = nn.parallel.DistributedDataParallel
    wrapped = [name or "Workload.model" for name, m in model.named_modules() if isinstance(m, kind)]
    if wrapped or any(isinstance(p, DTensor) for p in model.parameters()):
        what = f"{wrapped[0]} is a DistributedDataParallel" if wrapped else "the parameters are sharded"
        raise UsageError(
            f"recover=True and adaptive plans are not possible where {what}: it communicates within the forward and"
            " backward passes, and ranks would wait forever for one that runs out of memory there. Give the model"
            " without it, and process_group=: its ranks then decide together, and gradients are averaged after the"
            " backward pass"
        )
