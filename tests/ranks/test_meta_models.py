"""A model on the meta device is sharded first, and each rank makes the values of its shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.errors import WorkloadError
from memfit.ir import Levers, Plan, Sharding
from memfit.ranks import Initialisation
from memfit.workload import Workload
from tests.processes import on_ranks
from tests.training.conftest import make_plan

UNITS = ("1.0", "1.1")


class Scaled(nn.Module):
    """A block with a parameter of fewer elements than ranks, a buffer, and orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(5, 6))
        self.register_buffer("positions", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.orthogonal_(self.weight)
        self.positions = torch.arange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale + (x @ self.weight.T).mean() + self.positions.sum()
        return out


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def workload(device: str = "meta") -> Workload:
    with torch.device(device):
        blocks = nn.Sequential(Scaled(), Scaled())
        model = nn.Sequential(nn.Embedding(7, 6, padding_idx=2), blocks, nn.LayerNorm(6), nn.Linear(6, 3))
    batch = torch.arange(8).reshape(4, 2) % 7
    return Workload(model, batch, loss_fn, torch.optim.AdamW(model.parameters(), 0.1))


def plan_for(given: Workload, sharding: Sharding | None) -> Plan:
    plan = make_plan(given, sharding=sharding)
    levers: Levers = replace(plan.levers, microbatch_size=1)
    return replace(plan, levers=levers)


def values(given: Workload) -> dict[str, Any]:
    held = given.model.state_dict()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in held.items()}


def made(rank: int, shardings: list[Sharding]) -> Iterator[Any]:
    for sharding in shardings:
        torch.manual_seed(7 + rank)  # the first rank's count
        given = workload()
        before = {id(p) for p in given.model.parameters()}
        with memfit.apply(plan_for(given, sharding), given) as step:
            found = values(given)
            held = {id(p) for group in given.optimizer.param_groups for p in group["params"]}
            assert held == {id(p) for p in given.model.parameters()} and (sharding.mode != "ddp" or held == before)
            loss = step(given.batch).loss
            yield found, loss, values(given)


def expected() -> tuple[dict[str, Any], float]:
    torch.manual_seed(7)
    given = workload()
    with memfit.apply(plan_for(given, None), given) as step:
        return values(given), step(given.batch).loss


@pytest.mark.ci
def test_values_are_those_of_one_process_however_many_ranks_there_are() -> None:
    torch.manual_seed(7)
    recipe = workload().model.to_empty(device="cpu")
    for module in recipe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    alone, loss = expected()
    assert all(torch.equal(alone[name], value) for name, value in recipe.state_dict().items())
    ddp = Sharding(world_size=2, mode="ddp")
    zero3 = Sharding(world_size=2, mode="zero3", units=UNITS)
    for size, shardings in {2: [ddp, zero3], 4: [replace(zero3, world_size=4, replicas=2)]}.items():
        for of_rank in on_ranks(size, made, shardings):
            for found, first_loss, after in of_rank:
                assert found.keys() == alone.keys()
                assert all(torch.equal(found[name], value) for name, value in alone.items())
                assert first_loss == pytest.approx(loss, rel=1e-6)
                assert any(not torch.equal(after[name], value) for name, value in alone.items())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))


class InParts(Bare):
    def reset_parameters(self) -> None:
        self.scale.mul_(2)


class OfItsOwn(nn.Linear):
    """A module that makes its values by a method that its author calls."""

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.normal_(self.weight, std=0.02)


def refusal(module: nn.Module) -> str:
    given, other = workload(), workload()
    other.model.add_module("4", module)
    plan = replace(plan_for(given, None), fingerprint=make_plan(other, sharding=None).fingerprint)
    with pytest.raises(WorkloadError) as e:
        memfit.apply(plan, other)
    return str(e.value)


def test_what_can_not_make_its_values_is_refused_by_its_name() -> None:
    assert "with values (4.scale)" in refusal(Bare())
    assert "Workload.model.4, a Bare, was built under" in refusal(Bare().to("meta"))
    assert "the values of scale of a InParts are not all initialised" in refusal(InParts().to("meta"))
    assert "OfItsOwn._init_weights() initialises the parameters in its own way" in refusal(OfItsOwn(8, 8).to("meta"))


def gpt2(device: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    with torch.device(device):
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_models_of_transformers_make_their_values_as_they_do_by_themselves() -> None:
    recipe: Any = gpt2("meta").to_empty(device="cpu")
    torch.manual_seed(3)
    recipe.initialize_weights()
    recipe.tie_weights()
    found: Any = gpt2("meta")
    head = found.lm_head.weight
    torch.manual_seed(3)
    Initialisation(found).run()
    assert found.lm_head.weight is head is found.transformer.wte.weight
    expected = recipe.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    plain = gpt2("cpu").state_dict()
    for name, value in found.state_dict().items():  # GPT-2 makes the last weights of each residual branch smaller
        assert value.std().item() == pytest.approx(plain[name].std().item(), rel=0.5), name
