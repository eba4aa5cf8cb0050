"""Modules are proven to be token-wise, or told why not; a run in which one token changes agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memfit.levers import why_not_token_wise

WIDTH = 8


class Lambda(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate * 1, inplace=True) * up)


class Heads(nn.Module):
    """A product of the heads of one token with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // 2)

    def forward(self, x: Tensor) -> Any:
        heads = self.norm(x.view(*x.shape[:2], 2, WIDTH // 2))
        return x + (heads @ heads.transpose(-1, -2) @ heads).flatten(2)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x + self.table[: x.shape[1]]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        rows = x.flatten(0, 1)
        chosen = torch.where(self.gate(rows).argmax(-1) == 0)[0]
        return torch.zeros_like(rows).index_add(0, chosen, self.expert(rows[chosen])).view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class Outside(nn.Module):
    scale = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x * self.scale


TOKEN_WISE: dict[str, nn.Module] = {
    "linear": nn.Linear(WIDTH, 5),
    "MLP": nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
    "gated, in place": Gated(),
    "LayerNorm": nn.LayerNorm(WIDTH),
    "RMSNorm": nn.RMSNorm(WIDTH),
    "norm by hand": Lambda(lambda x: x / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5),
    "softmax over features": nn.Softmax(-1),
    "heads of a token": Heads(),
    "no dropout": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)),
    "evaluated dropout": nn.Dropout(0.5).eval(),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "statistics of a token": Lambda(lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt()),
    "joined features": Lambda(lambda x: torch.cat([x.sin(), x[..., :3] * 2], -1)),
}
MIXING: dict[str, tuple[nn.Module, str]] = {
    "attention": (Attention(), "mixes tokens"),
    "softmax over tokens": (nn.Softmax(1), "mixes tokens"),
    "cumulative sum": (Lambda(lambda x: x.cumsum(1)), "mixes tokens"),
    "reversed": (Lambda(lambda x: x.flip(1)), "may mix tokens"),
    "shifted": (Lambda(lambda x: F.pad(x[:, 1:], (0, 0, 0, 1))), "mixes tokens"),
    "transposed": (Lambda(lambda x: x.transpose(1, 2).reshape(x.shape)), "splits tokens"),
    "samples and tokens swapped": (Lambda(lambda x: x.transpose(0, 1).reshape(x.shape)), "splits tokens"),
    "a norm of all": (Lambda(lambda x: x / x.norm()), "may mix tokens"),
    "a mean": (Lambda(lambda x: x - x.mean(1, keepdim=True)), "mixes tokens"),
    "a count of tokens": (Lambda(lambda x: x / x.shape[1]), "depend on the number of tokens"),
    "a constant of it": (Lambda(lambda x: x / torch.tensor(float(x.shape[1]))), "depend on the number of tokens"),
    "positions": (Positions(), "joins tokens with others"),
    "BatchNorm": (nn.BatchNorm1d(5), "writes to"),
    "PReLU over channels": (nn.PReLU(), "may mix tokens"),
    "dropout": (nn.Dropout(0.1), "draws random numbers"),
    "noise": (Lambda(lambda x: x + torch.rand_like(x)), "draws random numbers"),
    "in place of its input": (Lambda(lambda x: x.mul_(2)), "writes to its input"),
    "pooling": (Lambda(lambda x: x[:, 0]), "mixes tokens"),
    "routing": (Router(), "does not run on a tensor without data"),
    "a tensor from outside": (Outside(), "neither its own nor given"),
    "two outputs": (Lambda(lambda x: (x, x)), "something else than one tensor"),
}


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_token_wise_modules_are_proven_and_one_changed_token_changes_that_one_alone(name: str) -> None:
    module = TOKEN_WISE[name]
    assert why_not_token_wise(module) == ""
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    module = module.double()
    other = x.clone()
    other[1, 3] += torch.randn(WIDTH)
    differs = (module(x.clone()) - module(other)).abs().amax(-1) > 1e-9
    assert differs.nonzero().tolist() == [[1, 3]]
    module.float()


@pytest.mark.parametrize("name", MIXING)
def test_others_are_told_why_not(name: str) -> None:
    module, why = MIXING[name]
    assert why in why_not_token_wise(module)


def test_hooks_inside_are_refused_and_those_of_the_module_itself_are_not() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    module.register_forward_hook(lambda *_: None)
    assert why_not_token_wise(module) == ""
    handle = module[0].register_forward_hook(lambda *_: None)
    assert "hooks of its Linear" in why_not_token_wise(module)
    handle.remove()
    module[0].register_full_backward_hook(lambda *_: None)
    assert "hooks of its Linear" in why_not_token_wise(module)


def test_the_proof_is_made_again_where_the_module_is_another_one() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    assert "random" in why_not_token_wise(module)
    assert why_not_token_wise(module.eval()) == ""
    soft = nn.Softmax(-1)
    assert why_not_token_wise(soft) == ""
    soft.dim = 1
    assert why_not_token_wise(soft) != ""


def test_the_module_is_left_as_it_was() -> None:
    module = Gated()
    before = dict(module.named_parameters())
    why_not_token_wise(module)
    assert all(p is before[name] and p.device.type == "cpu" for name, p in module.named_parameters())


OPERATORS: dict[str, Any] = {
    "sin": torch.sin,
    "view": lambda x: x.reshape(*x.shape[:-1], 2, -1).flatten(-2),
    "swap features": lambda x: x.view(*x.shape[:2], 2, -1).transpose(-1, -2).flatten(2),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "samples first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "split": lambda x: torch.cat(x.split(4, -1)[::-1], -1),
    "tokens": lambda x: x + x.sum(1, keepdim=True),
    "roll": lambda x: x.roll(1, 1),
    "samples": lambda x: x - x.amax(0, keepdim=True),
    "flat": lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
    "wrong flat": lambda x: x.flatten().view(-1, 4 * WIDTH).softmax(-1).view_as(x) if x.numel() % 32 == 0 else x,
}


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=5))
def test_whatever_is_proven_is_so_in_a_run(names: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = OPERATORS[name](x)
        return x

    if why_not_token_wise(Lambda(function)):
        assert {"tokens", "roll", "samples", "wrong flat"} & set(names), "refused for no reason"
        return
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    whole = function(x)
    tiles = [function(x.flatten(0, 1)[None, at : at + 5]) for at in range(0, 12, 5)]
    torch.testing.assert_close(torch.cat(tiles, 1).view_as(whole), whole)
