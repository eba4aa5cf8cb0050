"""AdamW with states of 8 bits, each block of 256 numbers with a scale of its own, from bitsandbytes.

T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer 2022, *8-bit Optimizers via Block-wise Quantization*. States that are
there are quantised, so that those of fp32 are not held beside them, and given back to the user's optimizer in the
parameters' dtype at the end. Its kernel for the CPU holds five numbers of fp32 for each of a parameter's, and is given
a piece of it at a time.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from memfit.errors import brought_by
from memfit.ir import Device
from memfit.levers.lever import Conflict
from memfit.levers.low_bit_adamw import LowBitAdamW, adamw_conflicts, pieces
from memfit.levers.replaced_optimizer import Optimizer
from memfit.workload import Workload

ADAMW_8BIT = "AdamW with 8-bit states"
NO_BITSANDBYTES = "bitsandbytes not installed"
_PAIRS = (("exp_avg", "1"), ("exp_avg_sq", "2"))  # of states: AdamW's name, and the number in bitsandbytes' names
_BLOCK = 256


class AdamW8bit(LowBitAdamW):
    """AdamW with states of 8 bits."""

    name = ADAMW_8BIT
    rungs = (ADAMW_8BIT,)
    value = "adamw-8bit"
    conflicts = adamw_conflicts(
        ADAMW_8BIT,
        Conflict(
            ADAMW_8BIT, NO_BITSANDBYTES, "bitsandbytes provides this optimizer", "pip install 'memfit[optimizers]'"
        ),
    )

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        missing = {NO_BITSANDBYTES} if importlib.util.find_spec("bitsandbytes") is None else set()
        return missing | super().circumstances(workload, device)

    def state_bytes(self, state_bytes: int) -> int:
        return -(-state_bytes // 2)  # a quarter of that of fp32 weights, half of that of bf16 ones

    def kind(self) -> Any:
        return _kind(_bitsandbytes().optim.AdamW8bit)

    def take_over(self, made: Any, optimizer: Optimizer) -> None:
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

    def give_back(self, made: Any, optimizer: Optimizer) -> None:
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


def _bitsandbytes() -> Any:
    with brought_by("optimizers", "levers.optimizer='adamw-8bit'"):
        import bitsandbytes
    return bitsandbytes


@functools.cache
def _kind(base: Any) -> Any:
    """Return bitsandbytes' class, with parameters on the CPU updated by pieces."""

    @torch.no_grad()
    def update_step(self: Any, group: dict[str, Any], parameter: torch.Tensor, *indices: int) -> None:
        state = self.state[parameter]
        if parameter.device.type != "cpu" or state["state1"].dtype is not torch.uint8:
            base.update_step(self, group, parameter, *indices)
            return
        assert parameter.grad is not None
        state["step"] += 1
        settings = self.get_config(*indices, group)
        weights, gradient = parameter.detach().contiguous(), parameter.grad.contiguous()
        flat = {"p": weights, "g": gradient, **{name: state[name] for name in ("state1", "state2")}}
        flat = {name: tensor.view(-1) for name, tensor in flat.items()}
        for start, end in pieces(parameter):
            blocks = slice(start // _BLOCK, -(-end // _BLOCK))
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                "adam",
                *(flat[name][start:end] for name in ("g", "p", "state1", "state2")),
                *settings["betas"],
                0.0,
                0.0,
                settings["eps"],
                state["step"],
                settings["lr"],
                state["qmap1"],
                state["qmap2"],
                state["absmax1"][blocks],
                state["absmax2"][blocks],
                settings["weight_decay"],
                1.0,
            )
        if not parameter.is_contiguous():
            parameter.copy_(weights)

    def load_state_dict(self: Any, state: dict[str, Any], *options: Any) -> None:
        base.load_state_dict(self, state, *options)
        self.to_gpu()  # which the first step does for the parameters that it sees, and these may be some only

    added = {"update_step": update_step, "load_state_dict": load_state_dict, "__module__": __name__}
    return type(base.__name__, (base,), added)
