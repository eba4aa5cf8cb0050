"""The optimizer in the backward pass, as a lever: each gradient is used as soon as it is there, and freed.

Gradients are then never all in memory. Autograd tells when a parameter's gradient is complete
(`Tensor.register_post_accumulate_grad_hook`); the user's own optimizer takes its step for that parameter alone, with
the same operators as in its whole step, so that the result is bitwise the same. By then no operator of the backward
pass needs the parameter any more; where one does, autograd notices that it has changed, and says so.

An optimizer's step costs some 50 µs beside its operators, and most parameters are small. So small gradients wait until
they are a hundredth of all, and are used together: a diffusion U-Net of 320 parameters takes 40 steps, not 320.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch

from memfit._torch import replaced
from memfit.errors import PlanError
from memfit.ir import Trace
from memfit.levers.lever import Circumstance, Running
from memfit.levers.microbatches import MICROBATCHES
from memfit.levers.parameter_updates import UpdateLever, restricted, temporary_bytes, update_conflicts

IN_BACKWARD = "optimizer in the backward pass"
_WAITING_SHARE = 0.01  # of the bytes of all gradients
_TOO_LATE = "only after the last gradient, and the others are used by then"


class OptimizerInBackward(UpdateLever):
    """Each parameter updated as soon as its gradient is there, which is then freed."""

    name = IN_BACKWARD
    value = "in-backward"
    conflicts = update_conflicts(
        IN_BACKWARD,
        {
            MICROBATCHES: "each gradient is used and freed before later microbatches add to it",
            Circumstance.CLIPPING: f"the norm of all gradients is known {_TOO_LATE}",
            "16-mixed": f"an overflow of gradients is known {_TOO_LATE}",
            "bf16-true": "bf16 weights have their own update, after the backward pass",
            Circumstance.SEVERAL_OPTIMIZERS: (
                "if one optimizer skips a step, all must skip it, and that is known only after the backward pass"
            ),
            Circumstance.OPTIMIZER_HOOKS: "they would run once per parameter, not once per step",
            Circumstance.GRADIENT_HOOKS: (
                "they may read gradients that are freed, or parameters that are updated already"
            ),
            Circumstance.FOREIGN_OPTIMIZER: "its step may use gradients of other parameters",
        },
    )

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        with contextlib.closing(InBackward(running.workload.optimizer)) as updating:
            yield replace(running, options=replace(running.options, in_backward=updating))

    def most_saved_bytes(self, trace: Trace) -> int:
        gradient_bytes = sum(p.nbytes for p in trace.parameters if p.trainable and p.group >= 0)
        return gradient_bytes + temporary_bytes(trace)


class InBackward:
    """Takes the steps of an optimizer of `torch.optim` in the backward pass, while `taken` is entered."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._handles = [p.register_post_accumulate_grad_hook(self._update) for p in self._groups if p.requires_grad]
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._arrived: set[torch.Tensor] = set()
        self._waiting: list[torch.Tensor] = []  # parameters whose gradients are there and not used
        self._waiting_bytes = 0
        self._most_waiting_bytes = _WAITING_SHARE * sum(p.nbytes for p in self._groups if p.requires_grad)
        self._is_taking = self._is_dropping = False
        self._lock = threading.Lock()  # each device has a thread of its own in the backward pass

    def close(self) -> None:
        """Leave gradients to the user again."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Update parameters in the backward pass that runs until the context is left."""
        self._arrived, self._norms, self._waiting, self._waiting_bytes = set(), {}, [], 0
        with replaced(self, "_is_taking", True):
            try:
                yield
                with self._lock:
                    self._use()
            finally:
                for parameter in self._waiting:  # where an error came before they were used
                    parameter.grad = None

    def dropped(self) -> contextlib.AbstractContextManager[None]:
        """Let go of gradients in the backward passes that run until the context is left, and update nothing."""
        return replaced(self, "_is_dropping", True)

    def norms(self) -> list[torch.Tensor]:
        """Return the norms of the gradients that the last such pass used, in the order of the parameters."""
        return [self._norms[p] for p in self._groups if p in self._norms]

    def _update(self, parameter: torch.Tensor) -> None:
        if self._is_dropping:
            parameter.grad = None
        if not self._is_taking:
            return
        with self._lock:
            if parameter in self._arrived:
                raise PlanError(
                    f"a parameter of shape {tuple(parameter.shape)} got its gradient twice in one backward pass, as"
                    " under reentrant checkpointing, and the first one was used already: set levers.optimizer to"
                    " 'as-is'"
                )
            self._arrived.add(parameter)
            self._waiting.append(parameter)
            self._waiting_bytes += parameter.nbytes
            if self._waiting_bytes > self._most_waiting_bytes:
                self._use()

    @torch.no_grad()
    def _use(self) -> None:
        """Update the parameters whose gradients wait, and free these."""
        waiting: dict[int, list[torch.Tensor]] = {}
        for parameter in self._waiting:
            assert parameter.grad is not None
            gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[parameter] = torch.linalg.vector_norm(gradient, dtype=dtype)
            waiting.setdefault(id(self._groups[parameter]), []).append(parameter)
        for parameters in waiting.values():
            with restricted(self._optimizer, self._groups[parameters[0]], parameters):
                self._optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        self._waiting, self._waiting_bytes = [], 0
