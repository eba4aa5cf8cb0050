"""Optimizers of less state: what they take is predicted, they train, and their trainings are resumed bitwise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit.errors import CheckpointError
from memfit.ir import Levers, OptimizerLever, Plan
from memfit.levers import applied
from memfit.recipes import byte_lm
from memfit.workload import Workload, fingerprint
from tests.measuring import peaks
from tests.update_settings import update_settings

LEVERS: list[OptimizerLever] = ["adamw-8bit", "adamw-4bit", "adafactor"]
EIGHT_BITS = Levers(microbatch_size=2, optimizer="adamw-8bit")


def workload(**options: Any) -> Workload:
    sizes = {"n_layer": 2, "d_model": 128, "n_head": 2, "context": 16, "batch_size": 2, "dropout": 0.0}
    return byte_lm(max_bytes=200_000, learning_rate=1e-3, **{**sizes, **options})


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("microbatch_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_saving_is_predicted(lever: OptimizerLever, microbatch_size: int) -> None:
    plain = Levers(microbatch_size=microbatch_size)
    predicted, measured = peaks(workload(), plain)
    lean_predicted, lean_measured = peaks(workload(), replace(plain, optimizer=lever))
    assert lean_predicted == pytest.approx(lean_measured, rel=0.01)
    assert predicted - lean_predicted == pytest.approx(measured - lean_measured, rel=0.05)
    state_bytes = 8 * sum(p.numel() for p in workload().model.parameters())
    assert measured - lean_measured > 0.4 * state_bytes


@pytest.mark.parametrize("lever", LEVERS)
def test_it_trains_about_as_well(lever: OptimizerLever) -> None:
    losses = {}
    for optimizer in ("as-is", lever):
        made = workload()
        with applied(Levers(microbatch_size=2, optimizer=optimizer), made) as step:  # type: ignore[arg-type]
            losses[optimizer] = [step(made.batch).loss for _ in range(12)]
    plain, found = losses["as-is"], losses[lever]
    assert found[-1] < 0.8 * found[0]
    fallen = (found[0] - found[-1]) / (plain[0] - plain[-1])
    assert fallen == pytest.approx(1.0, rel={"adamw-8bit": 0.02, "adamw-4bit": 0.05}.get(lever, 0.5))


def update(made: Workload, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    made.loss_fn(made.model, made.batch)[0].backward()  # type: ignore[index]
    optimizer.step()


def updated() -> Workload:
    """A workload whose optimizer has made its state."""
    made = workload()
    for _ in range(3):
        update(made, made.optimizer)
    return made


def test_states_are_taken_over_and_given_back() -> None:
    made = updated()
    before = {p: dict(values) for p, values in made.optimizer.state.items()}
    with applied(EIGHT_BITS, made) as step:
        optimizer = step.workload.optimizer
        assert {v["state1"].dtype for v in optimizer.state.values()} == {torch.uint8, torch.float32}
        assert {v["step"] for v in optimizer.state.values()} == {3}
        assert not made.optimizer.state  # or it would be held beside the other
    for parameter, values in before.items():
        after = made.optimizer.state[parameter]
        assert after["step"] == values["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            largest = values[name].abs().max()
            assert (after[name] - values[name]).abs().max() <= 0.02 * largest
            assert after[name].shape == values[name].shape
    update(made, made.optimizer)  # it goes on


def test_states_are_given_back_where_training_fails() -> None:
    found = []
    for error in (None, KeyboardInterrupt()):
        made = updated()
        with contextlib.suppress(KeyboardInterrupt), applied(EIGHT_BITS, made) as step:
            update(made, step.workload.optimizer)
            if error is not None:
                raise error
        found.append([made.optimizer.state[p] for p in made.model.parameters()])
    assert {int(values["step"]) for values in found[1]} == {4}
    for expected, values in zip(*found, strict=True):
        assert all(torch.equal(values[name], value) for name, value in expected.items())


@pytest.mark.parametrize("make", [updated, workload])
def test_what_was_not_quantised_when_memory_ran_out_is_as_it_was(
    make: Callable[[], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.optim import AdamW8bit

    init_state, calls = AdamW8bit.init_state, itertools.count()

    def fifth_fails(self: Any, group: Any, parameter: Any, *indices: int) -> None:
        if next(calls) == 4:
            self.state[parameter]["step"] = 0
            raise torch.OutOfMemoryError
        init_state(self, group, parameter, *indices)

    made = make()
    before = dict(made.optimizer.state)
    monkeypatch.setattr(AdamW8bit, "init_state", fifth_fails)
    with pytest.raises(torch.OutOfMemoryError), applied(EIGHT_BITS, made) as step:
        update(made, step.workload.optimizer)
    after = made.optimizer.state
    assert len(after) == (len(before) or 4)
    assert [p for p, values in before.items() if after[p] is not values] == list(before)[:4]


@pytest.mark.parametrize("lever", LEVERS)
def test_learning_rates_follow_the_scheduler(lever: OptimizerLever) -> None:
    made = workload()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.5)
    made = dataclasses.replace(made, scheduler=scheduler)
    first = 1e-2 if lever == "adafactor" else 1e-3
    with applied(Levers(microbatch_size=2, optimizer=lever), made) as step:
        for update in range(3):
            step(made.batch)
            (group,) = step.workload.optimizer.param_groups
            assert group["lr"] == pytest.approx(first * 0.5**update)
            assert group["lr"] * group["weight_decay"] == pytest.approx(1e-3 * 0.5**update * 0.01)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(workload(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)


def with_settings(plan: Plan, *values: str) -> Plan:
    return replace(plan, levers=replace(plan.levers, **update_settings(*values)), allowed="changed", frontier=[])


@pytest.mark.parametrize(
    "values",
    [
        ("adamw-8bit",),
        pytest.param(("adafactor",), marks=pytest.mark.ci),
        ("adamw-4bit",),
        ("in-backward",),
        ("in-backward", "adamw-8bit"),
        ("in-backward", "adamw-8bit", "offloaded"),
        pytest.param(("in-backward", "adafactor"), marks=pytest.mark.ci),
        pytest.param(("in-backward", "offloaded"), marks=pytest.mark.ci),
    ],
    ids=" ".join,
)
def test_a_training_is_resumed_bitwise(values: tuple[str, ...], plan: Plan, tmp_path: Path) -> None:
    planned, weights = with_settings(plan, *values), []
    for folder, stops in (("whole", [6]), ("resumed", [3, 6])):
        torch.manual_seed(0)
        for stop in stops:
            resume = stop != stops[0]
            made = workload(max_grad_norm=None, **({"seed": 0} if resume else {}))
            memfit.train(planned, made, out=tmp_path / folder, steps=stop, resume=resume, checkpoint_every=3)
        weights.append([p.detach().clone() for p in made.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_checkpoint_of_another_optimizer_is_refused(plan: Plan, tmp_path: Path) -> None:
    memfit.train(with_settings(plan, "adafactor"), workload(), out=tmp_path / "run", steps=2)
    with pytest.raises(CheckpointError, match=r"state of Adafactor.*levers\.optimizer"):
        memfit.train(plan, workload(), out=tmp_path / "run", steps=3, resume=True)


def test_it_is_another_optimizer_of_the_same_workload() -> None:
    made = workload()
    before = fingerprint(made)
    with applied(Levers(microbatch_size=2, optimizer="adafactor"), made) as step:
        assert fingerprint(step.workload) == before


@pytest.mark.ci
@pytest.mark.parametrize(
    ("numerics", "lever"), [pytest.param("reduced", "adamw-8bit", marks=pytest.mark.ci), ("changed", "adafactor")]
)
def test_plans_take_them_where_nothing_else_fits(numerics: Any, lever: str) -> None:
    made = workload()
    with pytest.raises(memfit.InfeasibleError) as lowest:
        memfit.plan(made, budget="1MiB", numerics="reordered", precisions=["32-true"], points=1)
    state_bytes = 8 * sum(p.numel() for p in made.model.parameters())
    budget = int(lowest.value.lowest_peak_bytes - {"reduced": 0.3, "changed": 0.85}[numerics] * state_bytes)
    found = memfit.plan(made, budget=budget, numerics=numerics, precisions=["32-true"], points=1)
    assert found.levers.optimizer == lever and found.numerics == numerics
    verification = memfit.verify(found, made, steps=0)
    assert verification.holds, verification.failures
