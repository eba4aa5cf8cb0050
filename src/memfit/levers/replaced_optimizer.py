"""Optimizers of less state, as levers: another one in place of the user's, over the same parameters and groups.

- `adamw-8bit` is AdamW with states of 8 bits, each block of 256 numbers with a scale of its own (T. Dettmers, M. Lewis,
  S. Shleifer, L. Zettlemoyer 2022, *8-bit Optimizers via Block-wise Quantization*), from bitsandbytes. States that are
  there are quantised, so that those of fp32 are not held beside them, and given back to the user's optimizer in fp32
  at the end.
- `adafactor` keeps a row and a column of the second moment (N. Shazeer, M. Stern 2018, *Adafactor: Adaptive Learning
  Rates with Sublinear Memory Cost*), from PyTorch. Its steps are relative to each parameter's size: its learning rate
  is that of its paper, scheduled as the user's is, and weights decay per step as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from memfit._torch import mark_as_stepped
from memfit.errors import brought_by
from memfit.ir import Device
from memfit.levers.lever import Circumstance, Conflict, Running
from memfit.levers.parameter_updates import UpdateLever, update_conflicts
from memfit.workload import Workload

ADAMW_8BIT = "AdamW with 8-bit states"
ADAFACTOR = "Adafactor"
NOT_ADAMW = "an optimizer other than AdamW, or Adam without weight decay"
NO_BITSANDBYTES = "bitsandbytes not installed"
_BF16_UPDATES = "bf16 weights are updated through your own optimizer"
_HOOKS = "they belong to your own optimizer, and its step does not run"
_ADAFACTOR_RATE = 1e-2
_PAIRS = (("exp_avg", "1"), ("exp_avg_sq", "2"))  # of states: AdamW's name, and the number in bitsandbytes' names
_BLOCK = 256
_FOLLOWS = "memfit_follows"  # in a group: the number of the user's group whose settings it has

Optimizer = torch.optim.Optimizer


class _ReplacedOptimizer(UpdateLever):
    """Another optimizer in the place of the user's, whose learning rates and weight decays follow those of its groups.

    Schedulers set these.
    """

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        optimizer, is_8bit = running.workload.optimizer, self.value == "adamw-8bit"
        kind, convert = (
            (_bitsandbytes().optim.AdamW8bit, _as_adamw) if is_8bit else (torch.optim.Adafactor, _as_adafactor)
        )
        made: Any = kind(
            [
                {"params": list(group["params"]), _FOLLOWS: index, **convert(group)}
                for index, group in enumerate(optimizer.param_groups)
            ]
        )
        made.memfit_stands_for = type(optimizer).__qualname__

        def follow(*_: Any) -> None:
            for group in made.param_groups:  # of which a step may see some only
                group.update(convert(optimizer.param_groups[group[_FOLLOWS]]))
            mark_as_stepped(optimizer)

        made.register_step_pre_hook(follow)
        changed = dataclasses.replace(running, workload=dataclasses.replace(running.workload, optimizer=made))
        if not is_8bit:
            yield changed
            return
        try:
            _take_over(made, optimizer)
            yield changed
        finally:
            _give_back(made, optimizer)


class AdamW8bit(_ReplacedOptimizer):
    """AdamW with states of 8 bits."""

    name = ADAMW_8BIT
    rungs = (ADAMW_8BIT,)
    value = "adamw-8bit"
    numerics_class = "reduced"
    conflicts = update_conflicts(
        ADAMW_8BIT,
        {"bf16-true": _BF16_UPDATES, Circumstance.OPTIMIZER_HOOKS: _HOOKS},
        Conflict(
            ADAMW_8BIT,
            NOT_ADAMW,
            "it computes AdamW's update only, without amsgrad and maximize",
            "use torch.optim.AdamW, or set levers.optimizer to 'as-is'",
        ),
        Conflict(
            ADAMW_8BIT, NO_BITSANDBYTES, "bitsandbytes provides this optimizer", "pip install 'memfit[optimizers]'"
        ),
    )

    def state_bytes(self, state_bytes: int) -> int:
        return -(-state_bytes // 2)  # a quarter of that of fp32 weights, half of that of bf16 ones

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        missing = {NO_BITSANDBYTES} if importlib.util.find_spec("bitsandbytes") is None else set()
        return missing | (set() if _is_adamw(workload.optimizer) else {NOT_ADAMW})


class Adafactor(_ReplacedOptimizer):
    """Adafactor, which keeps a row and a column of the second moment."""

    name = ADAFACTOR
    rungs = (ADAFACTOR,)
    value = "adafactor"
    numerics_class = "changed"
    conflicts = (
        Conflict(ADAFACTOR, "bf16-true", _BF16_UPDATES, "use 'bf16-mixed', or set levers.optimizer to 'as-is'"),
        Conflict(
            ADAFACTOR,
            Circumstance.SEVERAL_OPTIMIZERS,
            "one optimizer can't keep the different update rules of several",
            "use one optimizer, or set levers.optimizer to 'as-is'",
        ),
        *update_conflicts(ADAFACTOR, {Circumstance.OPTIMIZER_HOOKS: _HOOKS}),
    )


def _as_adamw(group: dict[str, Any]) -> dict[str, Any]:
    return {"lr": float(group["lr"]), **{name: group[name] for name in ("betas", "eps", "weight_decay")}}


def _as_adafactor(group: dict[str, Any]) -> dict[str, Any]:
    rate, first = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
    scale = rate / first if first else 0.0
    decay = float(group.get("weight_decay", 0.0)) * first / _ADAFACTOR_RATE
    return {"lr": _ADAFACTOR_RATE * scale, "weight_decay": decay}


def _is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer does AdamW's mathematics: Adam with decoupled weight decay, or with none."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["amsgrad"]
        or group["maximize"]
        or (group["weight_decay"] and not (group.get("decoupled_weight_decay") or type(optimizer) is torch.optim.AdamW))
        for group in optimizer.param_groups
    )


# States of 8 bits


def _bitsandbytes() -> Any:
    with brought_by("optimizers", "levers.optimizer='adamw-8bit'"):
        import bitsandbytes
    return bitsandbytes


def _take_over(made: Any, optimizer: Optimizer) -> None:
    """Have an AdamW of 8 bits go on from the state of one of fp32, which keeps none of it."""
    quantise = _bitsandbytes().functional.quantize_blockwise
    for index, group in enumerate(made.param_groups):
        for position, parameter in enumerate(group["params"]):
            values = optimizer.state.get(parameter)
            if not values:
                continue
            made.init_state(group, parameter, index, position)
            state = made.state[parameter]
            for name, number in _PAIRS:
                held = state[f"state{number}"]
                if held.dtype is torch.uint8:
                    given = values[name].to(torch.float32).contiguous()
                    codes, found = quantise(given, code=state[f"qmap{number}"], blocksize=_BLOCK)
                    held.copy_(codes)
                    state[f"absmax{number}"].copy_(found.absmax)
                else:
                    held.copy_(values[name])
            state["step"] = int(values["step"])
            del optimizer.state[parameter]


def _give_back(made: Any, optimizer: Optimizer) -> None:
    """Put the state of an AdamW of 8 bits into the user's optimizer, in the parameters' dtype."""
    dequantise = _bitsandbytes().functional.dequantize_blockwise
    for parameter, state in made.state.items():
        if not state.get("step"):  # memory ran out before it was whole
            continue
        values: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
        for name, number in _PAIRS:
            held = state[f"state{number}"]
            if held.dtype is torch.uint8:
                scales, codes = state[f"absmax{number}"], state[f"qmap{number}"]
                held = dequantise(held, absmax=scales, code=codes, blocksize=_BLOCK)
            values[name] = held.to(parameter.dtype).reshape(parameter.shape)
        optimizer.state[parameter] = values
