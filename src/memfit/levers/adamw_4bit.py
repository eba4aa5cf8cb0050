"""AdamW with states of 4 bits, each block of 128 numbers with a scale of its own.

B. Li, J. Chen, J. Zhu 2023, *Memory Efficient Optimizers with 4-bit States*: the first moment on a dynamic map with
sign, the second on a linear one without zero, as `torchao.optim.AdamW4bit` has them. That one compiles its update for
each shape, holds it in tensor subclasses that no checkpoint stores, and makes several fp32 tensors of a parameter's
size. Ours is of plain tensors and plain operators, and updates a piece of a parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from memfit.levers.low_bit_adamw import LEAST_NUMBERS, LowBitAdamW, adamw_conflicts, pieces
from memfit.levers.replaced_optimizer import Optimizer

ADAMW_4BIT = "AdamW with 4-bit states"
_BLOCK = 128
_TINY = 1e-12  # the least scale of a block
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAPS = {
    "exp_avg": tuple(
        sorted([0.0, 1.0, *(s * x for s in (-1, 1) for x in (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875))])
    ),
    "exp_avg_sq": tuple(n / 16 for n in range(1, 17)),
}
"""The number of each code of a moment, as a share of its block's scale."""


class AdamW4bit(LowBitAdamW):
    """AdamW with states of 4 bits."""

    name = ADAMW_4BIT
    rungs = (ADAMW_4BIT,)
    value = "adamw-4bit"
    conflicts = adamw_conflicts(ADAMW_4BIT)

    def state_bytes(self, state_bytes: int) -> int:
        return -(-state_bytes // 3)  # an eighth of that of fp32 weights, a quarter of that of bf16 ones, and scales

    def kind(self) -> Any:
        return FourBitAdamW

    def take_over(self, made: Any, optimizer: Optimizer) -> None:
        for parameter in [p for group in made.param_groups for p in group["params"]]:
            if values := optimizer.state.get(parameter):
                made.hold(parameter, {name: values[name] for name in _MOMENTS}, int(values["step"]))
                del optimizer.state[parameter]

    def give_back(self, made: Any, optimizer: Optimizer) -> None:
        for parameter in list(made.state):
            moments = {name: made.moment(parameter, name) for name in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(made.state[parameter]["step"])), **moments}


class FourBitAdamW(torch.optim.Optimizer):
    """AdamW whose moments have 4 bits, but those of tensors of few numbers, which have 32.

    Two numbers are in a byte, the first in its upper half, in the order of the parameter's numbers.

    Args:
        groups: Of parameters, each with `lr`, `betas`, `eps` and `weight_decay`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, dict.fromkeys(("lr", "betas", "eps", "weight_decay"), None))
        self._maps: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    @torch.no_grad()
    def hold(self, parameter: torch.Tensor, moments: dict[str, torch.Tensor], step: int) -> None:
        """Hold the moments of a parameter, quantised."""
        state = self._begun(parameter)
        flat = {name: moment.detach().contiguous().view(-1) for name, moment in moments.items()}
        for start, end in pieces(parameter):
            for name, moment in flat.items():
                self._store(state, name, start, moment[start:end].to(torch.float32))
        state["step"] = step

    @torch.no_grad()
    def moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a moment of a parameter, in its dtype."""
        state = self.state[parameter]
        found = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        for start, end in pieces(parameter):
            found[start:end] = self._load(state, name, start, end)
        return found.view(parameter.shape)

    def _begun(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, which is made where there is none."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            count, place = parameter.numel(), parameter.device
            state["step"] = 0
            for name in _MOMENTS:
                if count < LEAST_NUMBERS:
                    state[name] = torch.zeros(count, dtype=torch.float32, device=place)
                    continue
                blocks, zero = -(-count // _BLOCK), _MAPS[name].index(0.0) if 0.0 in _MAPS[name] else 0
                codes = torch.full((blocks * _BLOCK // 2,), 17 * zero, dtype=torch.uint8, device=place)
                state[f"{name}_codes"] = codes
                state[f"{name}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=place)
        return state

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._begun(parameter)
        state["step"] += 1
        (beta1, beta2), rate = group["betas"], group["lr"]
        first, second = 1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"])
        weights, gradient = parameter.detach().contiguous(), parameter.grad
        assert gradient is not None
        flat, gradient = weights.view(-1), gradient.contiguous().view(-1)
        for start, end in pieces(parameter):
            given = gradient[start:end].to(torch.float32)
            mean = self._load(state, "exp_avg", start, end).lerp_(given, 1 - beta1)
            self._store(state, "exp_avg", start, mean)
            square = self._load(state, "exp_avg_sq", start, end).mul_(beta2).addcmul_(given, given, value=1 - beta2)
            self._store(state, "exp_avg_sq", start, square)
            below = square.sqrt().div_(second).add_(group["eps"])
            piece = flat[start:end].to(torch.float32).mul_(1 - rate * group["weight_decay"])
            piece.addcdiv_(mean, below, value=-rate / first)
            if piece.dtype is not flat.dtype:
                flat[start:end] = piece
        if not parameter.is_contiguous():
            parameter.copy_(weights)

    def _map(self, name: str, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a byte stands for, its two numbers, and between which shares the codes of a number lie."""
        if (name, place) not in self._maps:
            shares = _MAPS[name]
            pairs = [[high, low] for high in shares for low in shares]
            middles = [(a + b) / 2 for a, b in zip(shares, shares[1:], strict=False)]
            self._maps[name, place] = torch.tensor(pairs, device=place), torch.tensor(middles, device=place)
        return self._maps[name, place]

    def _load(self, state: dict[str, Any], name: str, start: int, end: int) -> torch.Tensor:
        """Return some numbers of a moment, from the beginning of a block on."""
        if name in state:
            found: torch.Tensor = state[name][start:end]
            return found
        codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
        pairs, _ = self._map(name, codes.device)
        last = -(-end // _BLOCK)
        found = pairs.index_select(0, codes[start // 2 : last * _BLOCK // 2].int())
        found = found.view(-1, _BLOCK).mul_(scales[start // _BLOCK : last, None])
        return found.view(-1)[: end - start]

    def _store(self, state: dict[str, Any], name: str, start: int, numbers: torch.Tensor) -> None:
        """Put numbers of a moment in the place of those from some number on, which begins a block."""
        if name in state:
            state[name][start : start + len(numbers)] = numbers
            return
        codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
        _, middles = self._map(name, codes.device)
        blocks = F.pad(numbers, (0, -len(numbers) % _BLOCK)).view(-1, _BLOCK)
        first, last = start // _BLOCK, start // _BLOCK + len(blocks)
        largest = blocks.abs().amax(-1).clamp_(min=_TINY)
        scales[first:last] = largest
        found = torch.bucketize(blocks / largest[:, None], middles, right=True, out_int32=True).view(-1)
        codes[first * _BLOCK // 2 : last * _BLOCK // 2] = found[::2].mul_(16).add_(found[1::2])
