"""Restores the state before a step that ran out of memory.

Before the optimizer's update a step changes only random states, the loss scale, buffers such as BatchNorm's statistics,
and gradients, which are dropped anyway. These are saved at the beginning of every step.

Weights and optimizer state are changed by the optimizer alone, and copies of them before every update would double
their memory, or take the time of a transfer to the host. So right before the optimizer begins:

1. If its memory is certainly free, nothing is copied.
2. Otherwise weights and state are copied to the host, and the copies dropped after the update. If the host has no room
   for them, the step fails there, before anything was changed.

Ranks that share a step agree on that: where one of them may run out, all copy. They do so too before the update that
creates the optimizer's state, where the host has room for it. After such an update they vote once more, and only then
drop the copies, so that one that fails in the middle of it is undone on all.

If the optimizer fails nevertheless, the version counters of its tensors show whether it changed one of them. If so, and
nothing was copied, the training is torn, and can only be resumed from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit._torch.distributed import local_part
from memfit._torch.modules import own_buffers
from memfit._torch.tensors import version_of
from memfit.hardware.host import free_bytes
from memfit.rng import rng_snapshot
from memfit.training.guards.limits import has_room
from memfit.training.optimizers import Optimizers, parameters_of, state_of
from memfit.training.step import Step


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    @property
    def is_changed(self) -> bool:
        now = own_buffers(self.module).get(self.name)
        return now is not self.tensor or not torch.equal(self.tensor, self.copy)

    def marked(self) -> _Buffer | None:
        """Return this buffer with a copy of its present values; None where the module no longer has it."""
        now = own_buffers(self.module).get(self.name)
        if now is None:
            return None
        fits = now.shape == self.copy.shape and now.dtype == self.copy.dtype
        return self._replace(tensor=now, copy=self.copy.copy_(now) if fits else now.clone())

    def put_back(self) -> None:
        own_buffers(self.module)[self.name] = self.tensor
        self.tensor.copy_(self.copy)


class Rollback:
    """Saves the state before a step, and restores it; its optimizer is watched until `close`.

    Buffers are copied on their device: all of them before the first step, later those that the first step changed.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._optimizer = step.workload.optimizer
        self._buffers: list[_Buffer] | None = None
        self._is_marked = self._is_settled = False
        self._set_back_rng: Callable[[], None] = rng_snapshot()
        self._forget_update()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ]

    def close(self) -> None:
        """Stop watching the optimizer."""
        for handle in self._handles:
            handle.remove()

    def mark(self) -> None:
        """Save the present state. If memory runs out here, `restore` knows that nothing has changed."""
        self._is_marked = False
        self._forget_update()
        self._set_back_rng = rng_snapshot()
        self._scaler_state = {} if self.step.scaler is None else self.step.scaler.state_dict()
        with torch.no_grad():
            if self._buffers is None:
                self._buffers = [_Buffer(*place, place[-1].clone()) for place in _buffers(self.step.workload.model)]
            else:
                self._buffers = [now for buffer in self._buffers if (now := buffer.marked()) is not None]
        self._is_marked = True

    def settle(self) -> None:
        """Note that the step is done."""
        if not self._is_settled:
            self._buffers = [buffer for buffer in self._buffers or () if buffer.is_changed]
            self._is_settled = True
        self._forget_update()

    def restore(self) -> bool:
        """Restore the saved state; tell whether that was possible.

        If not, weights or optimizer state are partly updated.
        """
        if not self._is_marked:
            return True
        if self._has_updated or not self._restore_update():
            return False
        with torch.no_grad():
            for buffer in self._buffers or ():
                buffer.put_back()
        if self.step.scaler is not None:
            self.step.scaler.load_state_dict(self._scaler_state)
        self._set_back_rng()
        self._forget_update()
        return True

    # The update

    def _forget_update(self) -> None:
        self._has_begun = self._has_updated = self._is_guarded = False
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        self._state: dict[torch.Tensor, dict[str, Any]] = {}

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ranks = self.step.options.ranks
        tensors = self._tensors()
        is_sure = has_room(needed_bytes(self._optimizer), tensors[0].device if tensors else torch.device("cpu"))
        self._is_guarded = not ranks.agree(is_sure and not (ranks.size > 1 and self._begins_state(tensors)))
        if self._is_guarded:
            self._copies = [(part, part.detach().to("cpu", copy=True)) for part in map(local_part, tensors)]
        if _changes_in_place(self._optimizer):
            self._versions = [(tensor, version_of(tensor)) for tensor in tensors]
        if _changes_in_place(self._optimizer) or self._copies:
            self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            self._state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        if self._is_guarded and ranks.size > 1:
            ranks.agree(True)
        else:
            ranks.commit()
        self._has_begun = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ranks = self.step.options.ranks
        if self._is_guarded and ranks.size > 1:
            ranks.agree(True)
            ranks.commit()
        self._has_updated = True
        self._copies = []

    def _begins_state(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether the next update creates state, and all ranks can undo it, as far as the host's memory goes."""
        is_new = any(p.grad is not None and not self._optimizer.state.get(p) for p in parameters_of(self._optimizer))
        copied_bytes = sum(local_part(tensor).nbytes for tensor in tensors) * self.step.options.ranks.size
        return is_new and copied_bytes < free_bytes()

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer changes: its parameters and its state."""
        return [*parameters_of(self._optimizer), *state_of(self._optimizer)]

    def _restore_update(self) -> bool:
        if not self._has_begun:
            return True
        if self._copies:
            with torch.no_grad():
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
        elif not self._versions or any(version_of(tensor) != version for tensor, version in self._versions):
            return False
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(before)
        return True


def needed_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return a bound on the bytes that an optimizer's next update allocates: temporaries, and state to be created.

    For optimizers of `torch.optim` with at most two tensors of state for each parameter, as Adam. "foreach"
    implementations, the default on accelerators, make temporaries for a whole group of parameters, others for one
    parameter at a time, fused ones none.
    """
    temporaries = state = 0
    for group in optimizer.param_groups:
        updated = [p for p in group["params"] if p.grad is not None]
        sizes = [local_part(p).nbytes for p in updated]
        state += 2 * sum(local_part(p).nbytes for p in updated if not optimizer.state.get(p))
        is_foreach = group.get("foreach")
        if is_foreach is None:
            is_foreach = all(p.device.type != "cpu" for p in group["params"])
        if not group.get("fused"):
            temporaries = max(temporaries, 2 * sum(sizes) if is_foreach else 3 * max(sizes, default=0))
    return state + temporaries


def _changes_in_place(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether version counters show which tensors an optimizer changed: true of PyTorch's optimizers."""
    optimizers = optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]
    return all(type(o).__module__.startswith("torch.optim.") for o in optimizers)


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    buffers = [(m, name, b) for m in model.modules() for name, b in own_buffers(m).items() if b is not None]
    return list({id(buffer): (module, name, buffer) for module, name, buffer in buffers}.values())
