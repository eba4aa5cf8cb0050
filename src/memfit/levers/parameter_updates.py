"""Ways of updating the parameters: the base of their levers, and three of them.

Which optimizer updates (`Levers.optimizer`), where its state is (`Levers.optimizer_state`) and when it updates
(`Levers.update`) are levers that combine: each takes the step as those before it left it, in that order.

- The optimizer in the backward pass uses each gradient as soon as it is there, and frees it: they are never all in
  memory. Autograd tells when a parameter's gradient is complete (`Tensor.register_post_accumulate_grad_hook`); the
  user's own optimizer takes its step for that parameter alone, with the same operators as in its whole step, so that
  the result is bitwise the same. By then no operator of the backward pass needs the parameter any more; where one does,
  autograd notices that it has changed, and says so. A step costs some 50 µs beside its operators, and most parameters
  are small. So small gradients wait until they are a hundredth of all, and are used together: a diffusion U-Net of 320
  parameters takes 40 steps, not 320.
- The fused step is one kernel that updates all, and makes no temporary tensors of the parameters' size.
  `torch.optim.Adam`, `AdamW`, `Adagrad` and `SGD` have one (`fused=True`), which rounds otherwise than the operators
  that it stands for.
- Optimizer states in host memory, for GPUs, each come to the device for their parameter's update only. The optimizer
  takes its step for one parameter at a time, with the same operators as in its whole step, so that the weights are
  bitwise the same. States are copied to the device before, and back after, in the order of the computation; host memory
  is pinned. On the CPU the host's memory is the device's, and nothing is saved. In the backward pass, states come as
  their parameter's gradient does.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec
import torch

from memfit import workload
from memfit._torch import replaced
from memfit.errors import PlanError
from memfit.ir import Device, Levers, Trace, UpdateSetting
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, PartialUpdates, Running, Setting
from memfit.levers.microbatches import MICROBATCHES
from memfit.recomputation import is_worth_moving
from memfit.workload import Workload

IN_BACKWARD = "optimizer in the backward pass"
_WAITING_SHARE = 0.01  # of the bytes of all gradients
_TOO_LATE = "only after the last gradient, and the others are used by then"
FUSED = "fused optimizer"
NO_FUSED = "an optimizer without a fused step, or fused already"
OFFLOADED = "optimizer states in host memory"
_FUSED_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
_FUSED_ON = {"fused": True, "foreach": False}
_BEFORE_FUSED = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]()
"""What the groups of optimizers had before memfit switched their fused steps on."""
_UPDATING: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[UpdateSetting]] = weakref.WeakKeyDictionary()
"""The settings that are applied to an optimizer at present."""
_INSTEAD = {
    "bf16-true": "use 'bf16-mixed', or set {off}",
    "16-mixed": "use 'bf16-mixed', or set {off}",
    Circumstance.CLIPPING: "set Workload.max_grad_norm=None, or {off}",
    Circumstance.FOREIGN_OPTIMIZER: "use an optimizer of torch.optim, or set {off}",
    Circumstance.GRADIENT_HOOKS: "set {off}",
    Circumstance.OPTIMIZER_HOOKS: "set {off}, or call the hooks' code after the step",
    Circumstance.JITTOR: "set {off}",
    MICROBATCHES: "set levers.microbatch_size to the whole batch, or {off}",
    Circumstance.NO_LINK: "name a GPU with a known link_bytes_per_second, or set {off}",
    Circumstance.SEVERAL_OPTIMIZERS: "use one optimizer with several groups, or set {off}",
}
"""What to do about a conflict with a way of updating parameters."""
_OFF = {"optimizer": "as-is", "optimizer_state": "on-device", "update": "after"}
"""The value of each field that sets a way of updating parameters, where none is set."""


class UpdateLever(Lever):
    """A way of updating the parameters, tried where no plan with the user's own optimizer as it is is cheap.

    Attributes:
        value: Of its field.
    """

    field = "optimizer"
    value: ClassVar[UpdateSetting]

    def is_used(self, on: LeversOn) -> bool:
        return bool(getattr(on.levers, self.field) == self.value)

    def words(self, on: LeversOn) -> tuple[str, str]:
        return self.value, f"optimizer {self.value}"

    def is_applied(self, workload: Workload) -> bool:
        return self.value in _UPDATING.get(workload.optimizer, ())

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        applied = _UPDATING.setdefault(running.workload.optimizer, set())
        if self.value in applied:
            raise PlanError(
                f"levers.{self.field}={self.value!r} is applied to Workload.optimizer already: call close() on the"
                " earlier step first"
            )
        applied.add(self.value)
        try:
            with self.updating(running) as changed:
                yield changed
        finally:
            applied.remove(self.value)

    @abc.abstractmethod
    def updating(self, running: Running) -> AbstractContextManager[Running]:
        """Have a step update its parameters so, until the context is left."""

    def changes_state(self, levers: Levers) -> bool:
        return True

    def fallback(self, base: Levers) -> Levers:
        """Return a combination with it, beside the settings of other fields."""
        return msgspec.structs.replace(base, **{self.field: self.value})

    def most_saved_bytes(self, trace: Trace) -> int:
        """Return a bound on the bytes that it saves of a step."""
        return state_bytes(trace) + temporary_bytes(trace)

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        return self.fallback(levers), self.value


def update_conflicts(
    name: str, reasons: Mapping[str, str], *own: Conflict, field: str = "optimizer"
) -> tuple[Conflict, ...]:
    """Return the conflicts of a way of updating parameters: its own, those of some reasons, and Jittor's."""
    reasons = {**reasons, Circumstance.JITTOR: "this lever needs PyTorch"}
    off = f"levers.{field} to '{_OFF[field]}'"
    return *own, *(Conflict(name, other, why, _INSTEAD[other].format(off=off)) for other, why in reasons.items())


def state_bytes(trace: Trace) -> int:
    """Return the bytes of the optimizer's state in a step."""
    return sum(storage.nbytes for storage in trace.storages if storage.category == "optimizer state")


def temporary_bytes(trace: Trace) -> int:
    """Return the most that tensors which only the optimizer's step has take at a time."""
    changes = Counter[int]()
    for storage in trace.storages:
        if trace.ops[storage.birth].phase == "optimizer" and storage.death < len(trace.ops):
            changes[storage.birth] += storage.nbytes
            changes[storage.death + 1] -= storage.nbytes
    return max(itertools.accumulate(changes[at] for at in sorted(changes)), default=0)


@contextlib.contextmanager
def restricted(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Have an optimizer see only some parameters of one of its groups, until the context is left."""
    groups, before = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], list(parameters)
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, before


class OptimizerStep:
    """An optimizer's own step, for some of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Take the step for some parameters of one group."""
        with restricted(self._optimizer, group, parameters):
            self._optimizer.step()

    def settle(self) -> None:
        """Wait for nothing."""


class OptimizerInBackward(UpdateLever):
    """Each parameter updated as soon as its gradient is there, which is then freed."""

    name = IN_BACKWARD
    field = "update"
    rungs = (IN_BACKWARD,)
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
        field=field,
    )

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        with contextlib.closing(InBackward(running.workload.optimizer, running.partial)) as updating:
            yield dataclasses.replace(running, options=dataclasses.replace(running.options, in_backward=updating))

    def most_saved_bytes(self, trace: Trace) -> int:
        gradient_bytes = sum(p.nbytes for p in trace.parameters if p.trainable and p.group >= 0)
        return gradient_bytes + temporary_bytes(trace)


class InBackward:
    """Takes the steps of an optimizer in the backward pass, while `taken` is entered.

    Args:
        optimizer: One that updates each parameter by itself.
        partial: How it updates some of its parameters; None for a step of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partial: PartialUpdates | None = None) -> None:
        self._partial = partial or OptimizerStep(optimizer)
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
                self._partial.settle()
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
                    " under reentrant checkpointing, and the first one was used already: set levers.update to 'after'"
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
            self._partial.update(self._groups[parameters[0]], parameters)
            for parameter in parameters:
                parameter.grad = None
        self._waiting, self._waiting_bytes = [], 0


class FusedOptimizer(UpdateLever):
    """The user's own optimizer, with its fused step."""

    name = FUSED
    rungs = (FUSED,)
    value = "fused"
    numerics_class = "reordered"
    conflicts = update_conflicts(
        FUSED,
        {},
        Conflict(
            FUSED,
            NO_FUSED,
            "memfit has nothing to switch on",
            "use torch.optim's Adam, AdamW, Adagrad or SGD, or set levers.optimizer to 'as-is'",
        ),
        Conflict(
            FUSED,
            "bf16-true",
            "bf16 weights have their own update",
            "use 'bf16-mixed', or give the optimizer fused=True",
        ),
    )

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        optimizer = workload.optimizer
        is_on = any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
        return set() if type(optimizer) in _FUSED_KINDS and not is_on else {NO_FUSED}

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        optimizer = running.workload.optimizer
        with _grouped(optimizer, [_FUSED_ON] * len(optimizer.param_groups), on_device=True) as before:
            _BEFORE_FUSED[optimizer] = before
            try:
                yield running
            finally:
                del _BEFORE_FUSED[optimizer]

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        before = _BEFORE_FUSED.get(workload.optimizer)
        with contextlib.nullcontext() if before is None else _grouped(workload.optimizer, before, on_device=False):
            yield

    def most_saved_bytes(self, trace: Trace) -> int:
        return temporary_bytes(trace)


@contextlib.contextmanager
def _grouped(
    optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]], *, on_device: bool
) -> Iterator[list[dict[str, Any]]]:
    """Give each group its settings until the context is left; its counts of steps are where they are read then.

    A fused step reads them on the device, others on the CPU.
    """

    def give(settings: Sequence[dict[str, Any]], on_device: bool) -> None:
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        for parameter, values in optimizer.state.items():
            count: Any = values.get("step")
            if isinstance(count, torch.Tensor):
                values["step"] = count.to(parameter.device if on_device else "cpu", torch.float32)

    before = [{name: group[name] for name in _FUSED_ON} for group in optimizer.param_groups]
    give(settings, on_device)
    try:
        yield before
    finally:
        give(before, not on_device)


class OffloadedOptimizer(UpdateLever):
    """Optimizer states in pinned host memory between updates."""

    name = OFFLOADED
    field = "optimizer_state"
    rungs = (OFFLOADED,)
    value = "offloaded"
    conflicts = update_conflicts(
        OFFLOADED,
        {
            Circumstance.NO_LINK: "the speed of copies to the host is unknown, or host and device share their memory",
            "bf16-true": "bf16 weights have their own update",
            Circumstance.SEVERAL_OPTIMIZERS: "memfit moves the states of one optimizer only",
            Circumstance.OPTIMIZER_HOOKS: "they would run once per parameter, not once per step",
            Circumstance.FOREIGN_OPTIMIZER: "its step may use states of other parameters",
        },
        field=field,
    )

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        with contextlib.closing(OffloadedState(running.workload.optimizer)) as state:
            options = dataclasses.replace(running.options, update=state.step)
            yield dataclasses.replace(running, options=options, partial=state)

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        return state_bytes


class OffloadedState:
    """Keeps the states of an optimizer, those that it has too, in host memory between its steps.

    Args:
        optimizer: One that updates each parameter by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hosts: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        for parameter in list(optimizer.state):
            self._send(parameter)
        self.settle()

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self._optimizer.param_groups:
            self.update(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        self.settle()

    def update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update some parameters of one group, one after the other, each with its states on its device meanwhile."""
        for parameter in parameters:
            self._fetch(parameter)
            with restricted(self._optimizer, group, [parameter]):
                self._optimizer.step()
            self._send(parameter)

    def close(self) -> None:
        """Bring the states back to their parameters' devices."""
        for parameter in list(self._optimizer.state):
            self._fetch(parameter)
        self._hosts.clear()

    def _states(self, parameter: torch.Tensor) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield the states of a parameter that are large enough to be moved, with where they are kept."""
        values = self._optimizer.state.get(parameter, {})
        for name, value in list(values.items()):
            if isinstance(value, torch.Tensor) and is_worth_moving(value):
                yield values, name, value

    def _fetch(self, parameter: torch.Tensor) -> None:
        with torch.no_grad():
            for values, name, host in self._states(parameter):
                if (parameter, name) in self._hosts:
                    values[name] = torch.empty_like(host, device=parameter.device)
                    workload.transfers.copy_in(values[name], host)
                    workload.transfers.wait(values[name])

    def _send(self, parameter: torch.Tensor) -> None:
        """Copy a parameter's states to the host, and let go of them."""
        with torch.no_grad():
            for values, name, tensor in self._states(parameter):
                host = self._hosts.get((parameter, name))
                if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                    pinned = tensor.device.type != "cpu"
                    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
                    self._hosts[parameter, name] = host
                workload.transfers.copy_out(host, tensor)
                workload.transfers.wait(host)
                values[name] = host

    def settle(self) -> None:
        """Wait until what was sent is there: others read it without asking the device."""
        device = next((p.device for group in self._optimizer.param_groups for p in group["params"]), None)
        if device is not None and device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
