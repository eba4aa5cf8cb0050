"""Optimizer states in host memory, as a lever for GPUs: each comes to the device for its parameter's update only.

The user's own optimizer takes its step for one parameter at a time, with the same operators as in its whole step, so
that the weights are bitwise the same. States are copied to the device before, and back after, in the order of the
computation; host memory is pinned. On the CPU the host's memory is the device's, and nothing is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from memfit import workload
from memfit.ir import Levers
from memfit.levers.conflicts import FOREIGN_OPTIMIZER, NO_LINK, OPTIMIZER_HOOKS, SEVERAL_OPTIMIZERS
from memfit.levers.lever import Running
from memfit.levers.parameter_updates import UpdateLever, restricted, update_conflicts
from memfit.recomputation import is_worth_moving

OFFLOADED = "optimizer states in host memory"


class OffloadedOptimizer(UpdateLever):
    """Optimizer states in pinned host memory between updates."""

    name = OFFLOADED
    value = "offloaded"
    conflicts = update_conflicts(
        OFFLOADED,
        {
            NO_LINK: "the speed of copies to the host is unknown, or host and device share their memory",
            "bf16-true": "bf16 weights have their own update",
            SEVERAL_OPTIMIZERS: "memfit moves the states of one optimizer only",
            OPTIMIZER_HOOKS: "they would run once per parameter, not once per step",
            FOREIGN_OPTIMIZER: "its step may use states of other parameters",
        },
    )

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        with contextlib.closing(OffloadedState(running.workload.optimizer)) as state:
            yield replace(running, options=replace(running.options, update=state.step))

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        return state_bytes


class OffloadedState:
    """Keeps the states of an optimizer of `torch.optim`, those that it has too, in host memory between its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hosts: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        for parameter in list(optimizer.state):
            self._send(parameter)
        self._settle()

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self._optimizer.param_groups:
            for parameter in list(group["params"]):
                if parameter.grad is None:
                    continue
                self._fetch(parameter)
                with restricted(self._optimizer, group, [parameter]):
                    self._optimizer.step()
                self._send(parameter)
        self._settle()

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

    def _settle(self) -> None:
        """Wait until what was sent is there: others read it without asking the device."""
        device = next((p.device for group in self._optimizer.param_groups for p in group["params"]), None)
        if device is not None and device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
