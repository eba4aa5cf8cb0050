"""Plans that chunk the loss: where it pays, what they predict, and what they train."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import memfit
from memfit import ir
from memfit.capture import real_copy
from memfit.ir import ChunkedLoss, Levers, Plan
from memfit.levers import applied, checkpointing, chunked_loss
from memfit.pipeline._apply import switchable
from memfit.recipes import byte_lm
from memfit.workload import Workload
from tests.measuring import peaks


def large_vocabulary(**options: Any) -> Workload:
    shape = {"n_layer": 1, "d_model": 64, "n_head": 4, "context": 64, "batch_size": 4, "dropout": 0.0}
    return byte_lm(max_bytes=200_000, **{**shape, "vocabulary_size": 32768, **options})


def one_sample() -> Workload:
    """Nothing but a chunked loss saves much of it."""
    return large_vocabulary(context=256, batch_size=1, vocabulary_size=16384)


@pytest.fixture(scope="module")
def plan() -> Plan:
    budget = int(0.7 * memfit.estimate(one_sample()).peak_bytes)
    return memfit.plan(one_sample(), budget=budget, precisions=["32-true"], points=2)


@pytest.mark.parametrize(
    ("tied_embedding", "precision"),
    [
        (True, "32-true"),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (
                (False, "32-true"),
                (False, "bf16-true"),
                (True, "bf16-mixed"),
                (False, "bf16-mixed"),
                (True, "bf16-true"),
            )
        ),
    ],
)
def test_saving_is_predicted(precision: Any, tied_embedding: bool) -> None:
    workload = large_vocabulary(tied_embedding=tied_embedding, vocabulary_size=8192)
    workload = dataclasses.replace(workload, bf16_updates="master-weights")
    plain = Levers(precision=precision, microbatch_size=4)
    predicted, measured = peaks(workload, plain)
    chunked = replace(plain, chunked_loss=ChunkedLoss(head="head", rows=32))
    chunked_predicted, chunked_measured = peaks(workload, chunked)
    assert chunked_predicted == pytest.approx(chunked_measured, rel=0.01)
    assert predicted - chunked_predicted == pytest.approx(measured - chunked_measured, rel=0.05)
    logits_bytes = 4 * 64 * 8192 * 4
    assert measured - chunked_measured > 0.8 * logits_bytes


def test_it_is_chosen_where_nothing_else_fits_and_is_what_the_plan_says(plan: Plan) -> None:
    assert plan.levers.chunked_loss == ChunkedLoss(head="head", rows=128)
    assert plan.classes["chunked loss"] == plan.numerics == "reordered"
    verification = memfit.verify(plan, one_sample(), steps=0)
    assert verification.failures == []
    assert verification.gradient_difference < 1e-6
    assert "128 rows of head at a time" in str(plan)


def test_lower_budgets_combine_it_with_other_levers(plan: Plan) -> None:
    leanest = min(plan.frontier, key=lambda c: c.peak_bytes)
    assert leanest.levers.chunked_loss and leanest.levers.regions
    lower = plan.at(int(1.01 * leanest.held_bytes))
    assert memfit.verify(lower, one_sample(), steps=0).failures == []


def test_plans_from_before_are_read(plan: Plan) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key != "chunked_loss"}
        return [without(item) for item in value] if isinstance(value, list) else value

    whole = replace(plan, levers=replace(plan.levers, chunked_loss=None), frontier=[])
    before = json.dumps(without(json.loads(ir.codec.encode(whole)))).encode()
    assert b"chunked_loss" not in before
    assert ir.codec.decode(before, Plan, source="plan.json") == whole
    assert ir.codec.decode(ir.codec.encode(plan), Plan, source="plan.json") == plan


@pytest.mark.ci
def test_exact_plans_keep_the_loss_whole() -> None:
    plan = memfit.plan(large_vocabulary(), budget="1GiB", numerics="exact", points=1)
    assert {c.levers.chunked_loss for c in plan.frontier} == {None}


@pytest.mark.ci
def test_one_capture_tells_where_it_does_not_matter(captures: list[Levers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "worthwhile", lambda *_: False)  # which has captures of its own
    small = byte_lm(n_layer=2, d_model=64, n_head=4, context=64, batch_size=4, max_bytes=200_000)
    memfit.plan(small, budget="1GiB", precisions=["32-true"], points=1)
    assert len(captures) == 4 and not any(levers.chunked_loss for levers in captures)
    for within, expected in ((1e9, {"32-true"}), (-1.0, {"32-true", "bf16-mixed"})):
        monkeypatch.setattr(chunked_loss, "SIMPLER_WITHIN", within)  # as if it were as fast as the whole loss; slower
        captures.clear()
        workload = large_vocabulary(batch_size=2, context=128, vocabulary_size=8192)
        memfit.plan(workload, budget="1GiB", precisions=["32-true", "bf16-mixed"], numerics="reduced", points=1)
        assert [bool(levers.chunked_loss) for levers in captures][:2] == [False, True]
        assert {levers.precision for levers in captures if levers.chunked_loss} == {"32-true", "bf16-mixed"}
        assert {levers.precision for levers in captures if not levers.chunked_loss} == expected
        assert {levers.microbatch_size for levers in captures if not levers.chunked_loss} == {1, 2}


def test_logits_that_something_else_asks_for_are_left_alone() -> None:
    workload = large_vocabulary(vocabulary_size=8192)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logs = torch.log_softmax(model(batch["tokens"]).flatten(0, 1), -1)
        return F.nll_loss(logs, batch["targets"].flatten())

    workload = dataclasses.replace(workload, loss_fn=loss)
    plan = memfit.plan(workload, budget="1GiB", precisions=["32-true"], points=1)
    assert {c.levers.chunked_loss for c in plan.frontier} == {None}
    assert any("use the logits of head" in note for note in plan.notes)


def test_a_running_step_is_switched() -> None:
    workload = large_vocabulary()
    plan = memfit.plan(workload, budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    chunked = replace(plan.levers, chunked_loss=ChunkedLoss(head="head", rows=32))
    with switchable(plan, workload, limit_bytes=None) as switch:
        loss, gradients = switch.step.gradients(workload.batch)
        switch.to(chunked)
        assert "forward" in workload.model.head.__dict__
        with switch.lifted():
            assert "forward" not in workload.model.head.__dict__  # type: ignore[operator]
        again, chunked_gradients = switch.step.gradients(workload.batch)
        assert again == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(chunked_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert not any("forward" in module.__dict__ for module in workload.model.modules())


def test_transformers_models_are_chunked() -> None:
    transformers = pytest.importorskip("transformers")
    from examples.gpt2 import loss

    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=4096, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.loss_type = "ForCausalLM"
    batch = {"tokens": torch.randint(4096, (8, 64))}
    gpt2 = Workload(model=model, batch=batch, loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters()))
    plain = Levers(microbatch_size=8)
    chunked = replace(plain, chunked_loss=ChunkedLoss(head="lm_head", rows=96))
    found = []
    for levers in (plain, chunked):
        copied = real_copy(gpt2)
        with applied(levers, copied) as step:
            found.append(step.gradients(copied.batch))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-6)
    (predicted, measured), (lean_predicted, lean_measured) = peaks(gpt2, plain), peaks(gpt2, chunked)
    assert predicted - lean_predicted == pytest.approx(measured - lean_measured, rel=0.05)
    assert measured - lean_measured > 8 * 64 * 4096 * 4
