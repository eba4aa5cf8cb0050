"""Gradient checkpointing that the user switched on in a model of transformers, off under a plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import real_copy
from memfit.errors import PlanError
from memfit.ir import Levers, Plan, Region
from memfit.levers import LEVERS, NotOffered, applied
from memfit.workload import Workload
from tests.measuring import peaks

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
OWN: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES, "num_key_value_heads": 2, "attention_dropout": 0.1},
    "GPT2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "Bert": SIZES,
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
"""With dropout, the second run of which has to draw as the first; T5's first layer makes a bias for all others."""
BUILT = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
(LEVER,) = (lever for lever in LEVERS if lever.field == "own_checkpointing")
OFF = Levers(microbatch_size=2, own_checkpointing="off")
SAFE = {"use_reentrant": False}


def own(kind: str = "Llama", options: dict[str, Any] | None = SAFE, **more: Any) -> Workload:
    """Return a step of a model that checkpoints itself, by the options; None for one that does not."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **OWN[kind]
    )
    model = getattr(transformers, f"{kind}{BUILT[kind]}")(config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 renames the switch
        if options is not None:
            model.gradient_checkpointing_enable(options, **more)
    ids = torch.randint(3, 64, (2, 64))
    return Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids.clone()},
        loss_fn=lambda model, batch: model(**batch).loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        name=f"own-{kind}",
    )


def trained(workload: Workload, levers: Levers | None) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    """Return the losses and the weights of two steps, and the random numbers that come next."""
    copied = real_copy(workload)
    levers = levers or Levers(microbatch_size=2)
    torch.manual_seed(1)
    with applied(levers, copied) as step:
        losses = [step(copied.batch).loss for _ in range(2)]
    return losses, [p.detach().clone() for p in copied.model.parameters()], torch.rand(4)


def equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, [*one[1], one[2]], [*other[1], other[2]]))


def planned(budget: Callable[[int], int], workload: Workload, **options: Any) -> Plan:
    as_is = memfit.estimate(workload).peak_bytes
    return memfit.plan(workload, budget=budget(as_is), **{"numerics": "exact", "points": 1, **options})


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.ci] * (kind != "Bert")) for kind in OWN])
def test_the_step_computes_what_it_did_and_holds_what_was_predicted(kind: str) -> None:
    workload = own(kind)
    assert equal(trained(workload, OFF), trained(workload, None))
    assert not equal(trained(own(kind), OFF), trained(dataclasses.replace(workload, batch=_other(workload)), OFF))
    predicted, measured = peaks(workload, OFF)
    assert abs(predicted - measured) <= 0.005 * measured
    assert predicted > peaks(workload, Levers(microbatch_size=2))[0]  # what was recomputed is kept


def _other(workload: Workload) -> dict[str, torch.Tensor]:
    return {name: values.flip(1) for name, values in workload.batch.items()}


def test_regions_take_the_place_of_the_users_checkpoints() -> None:
    """Down to the very modules that the user's own kept to themselves, at the same numbers."""
    workload = own()
    regions = (Region(("model.layers.0.mlp",)), Region(("model.layers.1", "model.layers.2")))
    assert equal(trained(workload, replace(OFF, regions=regions)), trained(workload, None))


def test_a_plan_switches_it_off_and_says_what_that_buys() -> None:
    workload = own()
    plan = planned(lambda nbytes: int(1.1 * nbytes), workload)
    assert plan.levers.own_checkpointing == "off" and plan.levers.regions
    assert plan.classes["own gradient checkpointing"] == "exact"
    assert plan.predicted.step_seconds < plan.plain.step_seconds
    assert not any("by the model itself" in note for note in plan.notes)
    (note,) = (note for note in plan.notes if "gradient checkpointing is switched off" in note)
    assert memfit.foundations.format_bytes(plan.plain.peak_bytes) in note
    assert "switched off" in str(plan)
    found = memfit.verify(plan, workload, steps=1)
    assert found.holds and found.bitwise, found.failures
    assert abs(found.measured_peak_bytes - plan.predicted.peak_bytes) <= 0.005 * plan.predicted.peak_bytes


@pytest.mark.ci
def test_with_room_nothing_is_recomputed_any_more() -> None:
    plan = planned(lambda nbytes: 100 * nbytes, own("Bert"))
    assert plan.levers == replace(OFF, precision=plan.levers.precision) and plan.levers.regions == ()
    assert plan.predicted.step_seconds < 0.95 * plan.plain.step_seconds


@pytest.mark.ci
def test_below_what_the_users_holds_finer_regions_fit() -> None:
    plan = planned(lambda nbytes: int(0.98 * nbytes), own("GPT2"), optimizers=())
    assert plan.levers.own_checkpointing == "off" and plan.predicted.peak_bytes <= 0.98 * plan.plain.peak_bytes


def test_every_second_layer_of_the_users_is_switched_off_too() -> None:
    workload = own(every_n_layers=2)
    assert equal(trained(workload, OFF), trained(own(options=None), None))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_reentrant": True}, "it is reentrant"),
        ({**SAFE, "preserve_rng_state": False}, "draws other random numbers"),
    ],
)
def test_what_would_change_numbers_stays_on_by_name(options: dict[str, Any], why: str) -> None:
    workload = own(options=options)
    step: Any = SimpleNamespace(
        workload=workload,
        plain=Levers(microbatch_size=2),
        trace=lambda levers: SimpleNamespace(calls=[SimpleNamespace(phase="recompute")]),
    )
    with pytest.raises(NotOffered, match=f"gradient checkpointing stays on: .*{why}") as refusal:
        LEVER.propose(step, [step.plain])
    assert refusal.value.is_noted
    with (
        pytest.raises(PlanError, match=rf"own_checkpointing is 'off'.*{why}.*'use_reentrant': False"),
        applied(OFF, workload),
    ):
        pass
    assert workload.model.is_activation_checkpointing


class Checkpointed(nn.Module):
    """Layers whose code calls `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
        self.gradient_checkpointing = True  # a name alone is no switch of transformers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpoints_in_a_models_own_code_stay() -> None:
    model = Checkpointed()
    workload = Workload(model, torch.randn(4, 32), lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()))
    step: Any = SimpleNamespace(workload=workload)
    with pytest.raises(NotOffered, match="no layer is checkpointed by a switch") as refusal:
        LEVER.propose(step, [])
    assert not refusal.value.is_noted
    assert equal(trained(workload, OFF), trained(workload, None))


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = planned(lambda nbytes: 100 * nbytes, own())
    assert found.levers.own_checkpointing == "off"
    return found


def test_it_is_undone_and_what_the_user_sets_meanwhile_stays(plan: Plan) -> None:
    workload = own()
    functions = [layer._gradient_checkpointing_func for layer in workload.model.model.layers]
    with memfit.apply(plan, workload):
        with pytest.raises(PlanError, match=r"is applied to the workload already.*own gradient checkpointing"):
            memfit.apply(plan, workload)
        assert not set(functions) & {layer._gradient_checkpointing_func for layer in workload.model.model.layers}
    assert functions == [layer._gradient_checkpointing_func for layer in workload.model.model.layers]
    with memfit.apply(plan, workload), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        workload.model.gradient_checkpointing_enable({"use_reentrant": True})
    assert workload.model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": True}


def test_a_copy_runs_as_its_model_does() -> None:
    workload = own("Bert")
    with applied(OFF, workload):
        copied = copy.deepcopy(workload.model)
    counted = []
    layer = copied.bert.encoder.layer[0].attention
    layer.register_forward_hook(lambda *_: counted.append(1))
    copied(**workload.batch).loss.backward()
    assert counted == [1]


def test_a_plan_file_keeps_it(plan: Plan, tmp_path: Path) -> None:
    assert Plan.load(plan.save(tmp_path / "plan.json")).levers == plan.levers


@pytest.mark.ci
def test_a_loop_under_fit_keeps_its_losses_within_less_than_its_own_checkpoints_hold() -> None:
    def looped(budget: int | None) -> list[float]:
        workload = own()
        model, optimizer = workload.model, workload.optimizer
        torch.manual_seed(1)
        losses = []
        around = contextlib.nullcontext() if budget is None else memfit.fit(model, optimizer, budget=budget)
        with around as fitted:
            for _ in range(3):
                loss = model(**workload.batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if fitted is not None:
            assert fitted.plan.levers.own_checkpointing == "off" and fitted.plan.levers.regions
        assert all(layer._gradient_checkpointing_func.keywords == SAFE for layer in model.model.layers)
        return losses

    budget = int(0.97 * memfit.estimate(own()).peak_bytes)
    assert looped(budget) == looped(None)
