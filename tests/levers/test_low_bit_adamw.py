"""AdamW with states of 8 and 4 bits: by pieces as whole, as the papers' equations say, on any shape and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.ir import Levers
from memfit.levers import applied
from memfit.workload import Workload
from tests.measuring import peaks

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
BLOCKS = {"adamw-8bit": 256, "adamw-4bit": 128}


class Vectors(nn.Module):
    """Parameters of some shapes, whose gradients are what a batch says."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        found = [(w.flatten().float() * x[0, : w.numel()] * (n + 1)).sum() for n, w in enumerate(self.weights)]
        return torch.stack(found).sum()


def workload(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Workload:
    model = Vectors(*shapes, dtype=dtype)
    batch = torch.randn(1, max(math.prod(shape) for shape in shapes))
    return Workload(model, batch, lambda m, x: m(x), torch.optim.AdamW(model.parameters(), **SETTINGS))


def trained(made: Workload, optimizer: Any, steps: int = 4) -> list[Tensor]:
    with applied(Levers(microbatch_size=1, optimizer=optimizer), made) as step:
        for _ in range(steps):
            step(made.batch)
        made.batch.neg_()
        step(made.batch)
        held = [value for values in step.workload.optimizer.state.values() for value in values.values()]
        states = [value.clone() for value in held if isinstance(value, Tensor)]
    return [*(p.detach() for p in made.model.parameters()), *states]


SHAPES = [(700, 1000), (4097,), (4096,), (63,), (129, 128)]


@pytest.mark.parametrize("lever", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_leave_the_same_numbers_as_the_whole(
    lever: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for size in (2**12, 2**17, 2**30):
        monkeypatch.setattr("memfit.levers.low_bit_adamw._LEAST_ON_CPU", size)
        found[size] = trained(workload(*SHAPES, dtype=dtype), lever)
    whole = found.pop(2**30)
    assert all(torch.equal(a, b) for other in found.values() for a, b in zip(whole, other, strict=True))
    assert any(tensor.dtype is torch.uint8 for tensor in whole)


def test_8_bits_are_bitsandbytes_own() -> None:
    import bitsandbytes

    made = workload(*SHAPES)
    own = workload(*SHAPES)
    optimizer = bitsandbytes.optim.AdamW8bit(own.model.parameters(), **SETTINGS)
    for step in range(5):
        optimizer.zero_grad()
        own.model(own.batch if step < 4 else -own.batch).backward()
        optimizer.step()
    found = trained(made, "adamw-8bit")
    assert all(torch.equal(a, b) for a, b in zip(own.model.parameters(), found, strict=False))


def nearest(values: Tensor, shares: Tensor) -> Tensor:
    """Return the numbers of a block of 128 that 4 bits can tell, as the paper says: the nearest, times the largest."""
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % 128)).view(-1, 128)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    found = shares[(blocks[..., None] / scales[..., None] - shares).abs().argmin(-1)] * scales
    return found.flatten()[: values.numel()].view(values.shape)


def test_4_bits_do_the_papers_equations() -> None:
    made, own = workload((129, 128), (5000,)), workload((129, 128), (5000,))
    first = torch.tensor([-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0])
    first = torch.cat([first, -first[:-1], torch.ones(1)])
    second, moments = torch.arange(1, 17) / 16, {}
    weights = [p.detach() for p in own.model.parameters()]
    for step in range(1, 6):
        gradients = torch.autograd.grad(own.model(own.batch if step < 5 else -own.batch), list(own.model.parameters()))
        for n, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            mean, square = moments.get(n, (torch.zeros_like(weight), torch.zeros_like(weight) + 1e-12 / 16))
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.99 * square + 0.01 * gradient.square()
            weight.mul_(1 - 1e-2 * 0.1)
            weight.sub_(1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8))
            moments[n] = nearest(mean, first), nearest(square, second)
    found = trained(made, "adamw-4bit")
    for weight, other in zip(weights, found, strict=False):
        apart = (weight - other).abs() > 1e-5
        assert apart.float().mean() < 1e-3  # numbers that rounding puts in the middle of two codes
    plain = trained(workload((129, 128), (5000,)), "as-is")
    assert (weights[0] - plain[0]).abs().mean() > 1e-5


@pytest.mark.parametrize(("lever", "share"), [("adamw-8bit", 0.26), ("adamw-4bit", 0.135)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_small_taken_over_and_given_back(lever: Any, share: float, dtype: torch.dtype) -> None:
    made = workload((256, 512), (1000,), dtype=dtype)
    for _ in range(3):
        made.optimizer.zero_grad()
        made.model(made.batch).backward()
        made.optimizer.step()
    before = {p: dict(values) for p, values in made.optimizer.state.items()}
    large = made.model.weights[0]
    with applied(Levers(microbatch_size=1, optimizer=lever), made) as step:
        held = step.workload.optimizer.state[large]
        bytes_ = sum(v.nbytes for k, v in held.items() if isinstance(v, Tensor) and "qmap" not in k)
        assert bytes_ <= share * 8 * large.numel()
        assert held["step"] == 3 and not made.optimizer.state
    for parameter, values in before.items():
        after = made.optimizer.state[parameter]
        assert after["step"] == values["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            largest = values[name].abs().max()
            assert after[name].dtype == dtype and after[name].shape == parameter.shape
            assert (after[name] - values[name]).abs().max() <= {"adamw-8bit": 0.02, "adamw-4bit": 0.13}[lever] * largest
    made.model(made.batch).backward()
    made.optimizer.step()  # it goes on


@pytest.mark.parametrize("lever", BLOCKS)
def test_a_large_parameter_needs_no_temporaries_of_its_size(lever: Any) -> None:
    made = workload((2048, 1024), (64, 1024))
    predicted, measured = peaks(made, Levers(microbatch_size=1, optimizer=lever))
    assert predicted == pytest.approx(measured, rel=0.005)
    weights = sum(p.nbytes for p in made.model.parameters())
    held = 2 * weights + {"adamw-8bit": 0.26, "adamw-4bit": 0.135}[lever] * 2 * weights
    assert measured < held + 2 * weights  # the product of the loss, and a piece's
