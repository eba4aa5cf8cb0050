"""Every verb on an accelerator: planned, verified, compared and trained, with a workload that was built on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit import hardware
from memfit.capture import measure_peaks, real_copy
from memfit.errors import PlanError, UsageError, WorkloadError
from memfit.hardware import find_device
from memfit.ir import Levers, Plan
from memfit.levers import applied
from memfit.pipeline import on_this_machine
from memfit.planner import capture_levers, costs_of, predict
from memfit.tools import ladder
from memfit.workload import samples_of
from tests.accelerators.steps import STEPS, language_model, same, state_of
from tests.covering import each


def plan_of(name: str, kind: str, budget: str = "0.75x", **options: object) -> Plan:
    options = {"numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 1, **options}
    return memfit.plan(STEPS[name](), budget=budget, device=kind, **options)  # type: ignore[arg-type]


def test_plans_are_run_there_and_leave_nothing(kind: str, place: torch.device) -> None:
    before = hardware.accelerators.allocated_bytes(place)
    plan = plan_of("distilled", kind, numerics="reordered", measure=True)
    assert plan.measured_seconds is not None, plan.notes
    faster = [step for step in plan.measured if step.measured_seconds < 0.98 * plan.measured_seconds]
    assert plan.measured and all(step.predicted_seconds > plan.predicted.step_seconds for step in faster)
    assert not any("busy" in note for note in plan.notes)  # the host may wait for the device
    assert hardware.accelerators.allocated_bytes(place) == before


def on_the_cpu(plan: Plan) -> Plan:
    """Return the same levers as a plan for the CPU."""
    return replace(plan, device="cpu")


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_is_predicted_verified_and_keeps_its_budget(name: str, kind: str) -> None:
    plan = plan_of(name, kind)
    assert plan.device == f"{kind}:0" and plan.levers.regions
    found = memfit.verify(plan, STEPS[name](), steps=0)
    assert found.holds and found.bitwise, found.failures
    assert found.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    taken = found.measured_reserved_bytes if plan.predicted.peak_reserved_bytes else found.measured_peak_bytes
    assert taken is not None and taken <= plan.budget_bytes < found.plain_measured_peak_bytes * 1.3


@pytest.mark.parametrize(("name", "precision"), each(STEPS, ["32-true", "bf16-mixed", "16-mixed"]))
def test_peaks_are_as_predicted(name: str, precision: str, kind: str, place: torch.device) -> None:
    """Of the plain step, and in microbatches: allocated, within one percent."""
    device = find_device(kind)
    for size in {samples_of(STEPS[name]()), 4}:
        levers = Levers(precision=precision, microbatch_size=size)  # type: ignore[arg-type]
        trace = capture_levers(STEPS[name](), levers, device)
        predicted, _ = predict(trace, costs_of([trace], device), device)
        with applied(levers, real_copy(STEPS[name](), place)) as step:
            step(step.workload.batch)
            measured = measure_peaks(step, step.workload.batch)
        assert measured is not None
        assert predicted.peak_bytes == pytest.approx(measured.allocated_bytes, rel=0.01)
        assert measured.allocated_bytes <= predicted.peak_upper_bytes


def test_other_things_on_the_device_are_not_measured(place: torch.device) -> None:
    """The comparison above would see a tenth: a step beside a large tensor takes what it takes alone."""
    peaks = []
    for beside_bytes in (0, 2**20):
        held = torch.empty(beside_bytes, dtype=torch.uint8, device=place)
        with applied(Levers(microbatch_size=8), real_copy(language_model(), place)) as step:
            step(step.workload.batch)
            found = measure_peaks(step, step.workload.batch)
        assert found is not None
        peaks.append(found.allocated_bytes)
        del held
    assert peaks[0] == peaks[1] > 2**22


@pytest.mark.parametrize("name", STEPS)
def test_training_there_leaves_what_the_plain_step_leaves_and_the_model_there(
    name: str, kind: str, place: torch.device, tmp_path: Path
) -> None:
    plan, finals = plan_of(name, kind), []
    plain = replace(plan, levers=Levers(microbatch_size=plan.batch_size))
    for chosen in (plan, plain):
        workload = STEPS[name]()
        torch.manual_seed(1)
        record = memfit.train(chosen, workload, out=tmp_path, steps=3, overwrite=True)
        assert record.status == "finished" and all(p.device == place for p in workload.model.parameters())
        finals.append(state_of(workload))
    assert same(*finals)
    memfit.write_report(tmp_path)
    first = next(iter(finals[1]))
    finals[1][first] = finals[1][first] + 1
    assert not same(*finals)  # the comparison can fail


@pytest.mark.parametrize("name", STEPS)
def test_training_there_is_bitwise_that_on_the_cpu(name: str, kind: str, tmp_path: Path) -> None:
    if kind != "acc":
        pytest.skip("a GPU's kernels compute in another order")
    plan, finals = plan_of(name, kind), []
    for chosen in (plan, on_the_cpu(plan)):
        workload = STEPS[name]()
        torch.manual_seed(1)
        memfit.train(chosen, workload, out=tmp_path, steps=3, overwrite=True)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        losses = torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)
        finals.append({**state_of(workload), "losses": losses})
    assert len(finals[0]["losses"]) >= 3 and same(*finals)


def test_plain_and_planned_step_are_compared_there(kind: str) -> None:
    plan = plan_of("language_model", kind)
    found = memfit.verify(plan, language_model(), steps=2).comparison
    assert (
        found is not None
        and found.plain_losses == found.planned_losses
        and found.planned_peak_bytes < found.plain_peak_bytes
    )


def test_a_step_of_ones_own_loop_takes_batches_from_the_cpu(kind: str, place: torch.device) -> None:
    workload = language_model()
    parameters = list(workload.model.parameters())
    with memfit.apply(plan_of("language_model", kind), workload) as step:
        losses = [step(workload.batch).loss for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(a is b and a.device == place for a, b in zip(parameters, workload.model.parameters(), strict=True))
    held = [p for group in workload.optimizer.param_groups for p in group["params"]]
    assert set(map(id, held)) <= set(map(id, parameters))  # the optimizer updates the model that was moved


def test_optimizer_states_move_with_the_model(kind: str, place: torch.device) -> None:
    """As of a training that began on the CPU."""
    workload, plan = language_model(), plan_of("language_model", kind)
    with memfit.apply(on_the_cpu(plan), workload) as step:
        step(workload.batch)
    before = state_of(workload)
    with memfit.apply(plan, workload) as step:
        assert same(before, state_of(workload))
        assert all(t.device == place for s in workload.optimizer.state.values() for t in s.values() if t.dim())
        step(workload.batch)


def test_the_device_is_the_one_that_the_model_is_on(place: torch.device) -> None:
    workload = real_copy(language_model(), place)
    options = {"numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 0.5}
    assert memfit.plan(workload, budget="90%", **options).device == str(place)  # type: ignore[arg-type]
    there, here = memfit.estimate(workload), memfit.estimate(workload, device=str(place))
    assert there.peak_bytes == here.peak_bytes


def test_a_model_on_the_accelerator_is_not_trained_by_a_plan_for_the_cpu(kind: str, place: torch.device) -> None:
    plan, workload = on_the_cpu(plan_of("language_model", kind)), real_copy(language_model(), place)
    for verb in (memfit.apply, memfit.verify):
        with pytest.raises(WorkloadError, match=r"is on .*:0, and the plan .*'cpu'.*model\.cpu\(\)"):
            verb(plan, workload)  # type: ignore[operator]


def test_a_plan_for_a_card_that_is_not_here_is_not_run(kind: str, tmp_path: Path) -> None:
    plan = replace(plan_of("language_model", kind), device="mi300x")
    assert on_this_machine(find_device(plan.device)) is None
    with pytest.raises(PlanError, match=f"'mi300x'.*not on this machine.*{kind}:0"):
        memfit.train(plan, language_model(), out=tmp_path, steps=1)


def test_the_ladder_is_climbed_there(kind: str) -> None:
    found = ladder(language_model(), device=kind, numerics="exact", min_run_seconds=0.01)
    kept = {rung.name: rung for rung in found.rungs if rung.peak_bytes is not None}
    assert found.device == f"{kind}:0" and len(kept) >= 3
    for rung in kept.values():
        assert rung.predicted_peak_bytes == pytest.approx(rung.peak_bytes, rel=0.02)
    with pytest.raises(UsageError, match="'h200' is not on this machine"):
        ladder(language_model(), device="h200")


def test_batches_of_other_shapes_have_plans_of_their_own(kind: str) -> None:
    workload, plan = language_model(), plan_of("language_model", kind, points=3)
    gc.collect()
    held_bytes = hardware.accelerators.allocated_bytes(torch.device(kind, 0)) or 0  # what the tests before have left
    hardware.accelerators.reset_peaks(torch.device(kind, 0))
    with memfit.apply(plan, workload, adaptive=True) as step:
        for length in (64, 48):
            batch = {name: tensor[:, :length] for name, tensor in workload.batch.items()}
            result = step(batch)
            found = hardware.accelerators.peaks(torch.device(kind, 0))
            assert found is not None and result.predicted_peak_bytes is not None
            assert found.allocated_bytes - held_bytes <= plan.budget_bytes


@pytest.mark.parametrize("name", ["language_model"])
def test_a_loop_of_ones_own_is_fitted_there(name: str, place: torch.device) -> None:
    def trained(budget: str | None) -> tuple[list[float], int]:
        workload = real_copy(STEPS[name](), place)
        optimizer, losses = workload.optimizer, []

        def loop() -> None:
            torch.manual_seed(3)
            for _ in range(4):
                hardware.accelerators.reset_peaks(place)
                loss = workload.loss_fn(workload.model, workload.batch)
                total = loss[0] / loss[1] if isinstance(loss, tuple) else loss
                total.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(total.item())

        if budget is None:
            loop()
        else:
            with memfit.fit(workload.model, optimizer, budget=budget, tell=lambda _: None) as fitted:
                loop()
            assert fitted.plan is not None and fitted.plan.levers.regions
        found = hardware.accelerators.peaks(place)
        assert found is not None
        return losses, found.allocated_bytes

    (plain, plain_bytes), (fitted, fitted_bytes) = trained(None), trained("0.75x")
    assert plain == fitted and fitted_bytes < 0.85 * plain_bytes


def test_an_evaluation_on_data_of_the_cpu_says_what_to_move(kind: str, place: torch.device, tmp_path: Path) -> None:
    workload = language_model()

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        total, count = workload.loss_fn(model, workload.batch)  # type: ignore[misc]
        return {"loss": float(total) / float(count)}

    plan = plan_of("language_model", kind)
    with pytest.raises(RuntimeError, match="same device") as caught:
        memfit.train(plan, dataclasses.replace(workload, evaluate=evaluate), out=tmp_path, steps=1)
    assert any(f"model is on {place}: Workload.evaluate must move" in note for note in caught.value.__notes__)


def test_mixed_precision_trains_there_with_a_scaler_that_is_resumed(kind: str, tmp_path: Path) -> None:
    """HF#34053, Acc#4289: a scaler that begins again at 65536."""
    scaling = memfit.LossScaling(initial=2.0**10, growth_interval=3)
    plan = plan_of("language_model", kind, "90%")
    plan = replace(plan, levers=replace(plan.levers, precision="16-mixed", regions=()))
    finals = []
    for stops in ((4,), (2, 4)):
        workload = dataclasses.replace(language_model(), loss_scaling=scaling)
        torch.manual_seed(1)
        for steps in stops:
            memfit.train(plan, workload, out=tmp_path / str(len(stops)), steps=steps, resume=steps != stops[0])
        finals.append(state_of(workload))
    assert same(*finals)
    saved = [json.loads((tmp_path / n / "checkpoint-4" / "training.json").read_text()) for n in "12"]
    scales = {dict(state["scaler"]["dict"])["scale"] for state in saved}
    assert len(scales) == 1 and scales != {2.0**16}
