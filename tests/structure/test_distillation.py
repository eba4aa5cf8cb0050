from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import OutputError, WorkloadError
from memfit.structure import distill, precompute, softened_loss, student
from memfit.training import Step, StepOptions
from tests.models import LARGE, convnet, cross_entropy, transformer, unet
from tests.structure.measuring import classifier, measured_peak_bytes

SMALL: dict[str, Any] = {"channels": 4, "blocks": 1}


def teacher(channels: int = 12) -> nn.Module:
    return convnet(channels=channels).model.eval()


def test_softened_loss_is_the_divergence() -> None:
    ours, theirs = torch.randn(5, 7, 3, 2, dtype=torch.float64), torch.randn(5, 7, 3, 2, dtype=torch.float64)
    p, q = ((x / 3).softmax(1) for x in (theirs, ours))
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    found = softened_loss(ours, theirs, temperature=3.0)
    torch.testing.assert_close(found, expected.float(), check_dtype=False, rtol=1e-5, atol=1e-6)
    last = softened_loss(ours.transpose(1, -1), theirs.transpose(1, -1), temperature=3.0, channel_dim=-1)
    torch.testing.assert_close(last, found)
    assert abs(float(softened_loss(ours, ours))) < 1e-6


@pytest.mark.parametrize("counted", [False, True])
def test_loss_is_the_sum_of_its_parts(counted: bool) -> None:
    workload, large = convnet(**SMALL), teacher()
    if counted:
        workload = dataclasses.replace(workload, loss_fn=lambda m, b: (cross_entropy(m, b) * len(b["y"]), len(b["y"])))
    made = distill(workload, large, temperature=2.0, weight=0.3)
    value = made.loss_fn(made.model, made.batch)
    value = value[0] / value[1] if isinstance(value, tuple) else value
    logits = made.model.student(made.batch["x"])
    with torch.no_grad():
        taught = large(made.batch["x"])
    expected = 0.7 * F.cross_entropy(logits, made.batch["y"]) + 0.3 * softened_loss(logits, taught, temperature=2.0)
    torch.testing.assert_close(value, expected)


def test_microbatches_of_the_teacher_and_of_the_step_change_nothing() -> None:
    workload, large = transformer(dropout=0.0), transformer(dim=48).model
    found = []
    for size, step_size in ((None, 4), (1, 4), (3, 2)):
        made = distill(workload, large, teacher_microbatch_size=size, channel_dim=-1)
        with Step(made, StepOptions(microbatch_size=step_size)) as step:
            found.append(step.gradients(made.batch)[1])
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)
    assert all(name.startswith("student.") for name in found[0])


def test_only_the_student_is_trained_and_the_users_models_stay() -> None:
    workload, large = convnet(**SMALL), teacher().train()
    before = copy.deepcopy(workload.model.state_dict()), copy.deepcopy(large.state_dict())
    made = distill(workload, large, features={"stages.0": "stages.1"})
    kept = copy.deepcopy(made.model.teacher.state_dict())
    for _ in range(2):
        with Step(made, StepOptions(microbatch_size=4)) as step:
            step(made.batch)
    for state, model in zip(before, (workload.model, large), strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in made.model.teacher.state_dict().items())
    assert large.training and all(p.requires_grad for p in large.parameters())
    changed = [n for n, t in made.model.student.state_dict().items() if not torch.equal(t, before[0][n])]
    assert {*before[0]} - {*changed} <= {"stem.0.bias"}  # which BatchNorm takes away
    alone = student(made, workload)
    assert alone.model is made.model.student and alone.loss_fn is workload.loss_fn
    held = [p for group in alone.optimizer.param_groups for p in group["params"]]
    assert held == list(alone.model.parameters()) and set(alone.optimizer.state) <= set(held)
    with Step(alone, StepOptions(microbatch_size=4)) as step:
        step(alone.batch)


def test_named_parameters_keep_their_names() -> None:
    workload = convnet(**SMALL)
    optimizer = torch.optim.Adam(workload.model.named_parameters(), lr=0.1)
    workload = dataclasses.replace(workload, optimizer=optimizer)
    made = distill(workload, teacher(), features={"stem": "stem"})
    names = [name for name, p in made.model.named_parameters() if p.requires_grad]
    assert made.optimizer.param_groups[0]["param_names"] == names and names[-1] == "projections.stem.weight"
    alone = student(made, workload)
    assert alone.optimizer.param_groups[0]["param_names"] == [name for name, _ in workload.model.named_parameters()]


def test_features_come_near_through_a_projection() -> None:
    workload, large = convnet(**SMALL), teacher()
    made = distill(workload, large, weight=0.0, features={"stages.0": "stages.1", "stem": "stem"}, feature_weight=2.0)
    sizes = [tuple(p.shape) for p in made.model.projections.parameters()]
    assert sizes == [(12, 4, 1, 1)] * 2
    x = made.batch["x"]
    ours = made.model.student.stem(x), made.model.student.stages[0](made.model.student.stem(x))
    with torch.no_grad():
        theirs = large.stem(x), large.stages(large.stem(x))
    projections = made.model.projections
    expected = cross_entropy(made.model.student, made.batch)
    expected = expected + 2 * F.mse_loss(projections["stem"](ours[0]), theirs[0])
    expected = expected + 2 * F.mse_loss(projections["stages-0"](ours[1]), theirs[1])
    torch.testing.assert_close(made.loss_fn(made.model, made.batch), expected)
    with Step(made, StepOptions(microbatch_size=4)) as step:
        first = step(made.batch).loss
        for _ in range(10):
            last = step(made.batch).loss
    assert last < first


@pytest.mark.ci
@pytest.mark.parametrize(
    "make, sizes, large, options",
    [
        (convnet, LARGE["convnet"], {"channels": 32}, {"teacher_microbatch_size": 2}),
        (convnet, LARGE["convnet"], {"channels": 32}, {"features": {"stages.0": "stages.1"}}),
        (unet, LARGE["unet"], {"width": 24}, {"teacher_dtype": torch.bfloat16}),
        pytest.param(transformer, LARGE["transformer"], {"dim": 128}, {"channel_dim": -1}, marks=pytest.mark.ci),
    ],
)
def test_predictions_count_the_teacher(make: Any, sizes: Any, large: Any, options: Any) -> None:
    workload = make(**sizes)
    made = distill(workload, make(**(sizes | large)).model, **options)
    predicted, alone = memfit.estimate(made), memfit.estimate(workload)
    measured = measured_peak_bytes(made)
    assert measured <= predicted.peak_upper_bytes
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.005)
    assert predicted.peak_bytes >= alone.peak_bytes + sum(p.nbytes for p in made.model.teacher.parameters())


def test_of_the_teachers_activations_nothing_is_left() -> None:
    """With microbatches of one sample the teacher adds its weights, its outputs, and less than its own step would."""
    workload, large = convnet(**LARGE["convnet"]), teacher(16)
    one = memfit.estimate(distill(workload, large, teacher_microbatch_size=1)).peak_bytes
    alone = memfit.estimate(workload).peak_bytes
    weights = sum(p.nbytes for p in [*large.parameters(), *large.buffers()])
    assert one - alone - weights < 0.02 * alone


@pytest.mark.ci
def test_plans_count_the_teacher_and_run() -> None:
    workload = convnet(**LARGE["convnet"])
    made = distill(workload, teacher(16))
    plain = memfit.estimate(made).peak_bytes
    plan = memfit.plan(made, budget=int(0.7 * plain), points=1, precisions=["32-true"])
    verification = memfit.verify(plan, made, steps=0)
    assert verification.holds, verification.failures


@pytest.mark.ci
def test_a_file_of_outputs_stands_for_the_teacher(tmp_path: Path) -> None:
    workload, large = convnet(**SMALL), teacher()
    loader = torch.utils.data.DataLoader(
        [{"x": torch.randn(3, 12, 12), "y": torch.tensor(i % 10)} for i in range(12)], batch_size=4, shuffle=True
    )
    workload = dataclasses.replace(workload, batches=loader)
    path = precompute(workload, large, tmp_path / "teacher.safetensors")
    there, cached = distill(workload, large, weight=0.4), distill(workload, path, weight=0.4)
    for batch in cached.batches:
        torch.testing.assert_close(
            cached.loss_fn(cached.model, batch), there.loss_fn(there.model, batch["batch"]), rtol=1e-4, atol=1e-5
        )
    assert len(cached.batches) == 3 and cached.batches.batch_size == 4
    assert memfit.estimate(cached).peak_bytes < memfit.estimate(there).peak_bytes
    plan = memfit.plan(cached, budget="1GiB", points=1, precisions=["32-true"], numerics="changed")
    record = memfit.train(plan, cached, out=tmp_path / "run", epochs=1)
    assert record.steps == 3
    made = path.stat().st_mtime_ns
    assert precompute(workload, large, path).stat().st_mtime_ns == made
    with torch.no_grad():
        large.head.bias.add_(1)
    with pytest.raises(OutputError, match="overwrite=True"):
        precompute(workload, large, path)
    assert precompute(workload, large, path, overwrite=True, dtype=torch.float16).stat().st_mtime_ns > made


def test_samples_that_are_not_in_the_file_are_named(tmp_path: Path) -> None:
    workload = convnet(**SMALL)
    path = precompute(workload, teacher(), tmp_path / "teacher.safetensors")
    batch = {"x": workload.batch["x"].clone(), "y": workload.batch["y"]}
    batch["x"][1] += 1
    with pytest.raises(WorkloadError, match="1 of 4 samples"):
        distill(dataclasses.replace(workload, batch=batch), path)
    with pytest.raises(WorkloadError, match=r"float32\[3, 12, 12\]"):
        distill(convnet(size=16), path)
    (tmp_path / "other").write_bytes(b"not it")
    with pytest.raises(WorkloadError, match="was not written by"):
        distill(workload, tmp_path / "other")
    with pytest.raises(WorkloadError, match="features="):
        distill(workload, path, features={"stem": "stem"})


def test_evaluation_and_patterns_are_the_students() -> None:
    workload = dataclasses.replace(
        convnet(**SMALL), evaluate=lambda model: {"channels": float(model.head.in_features)}, fp32_modules=("head", "")
    )
    made = distill(workload, teacher())
    assert made.evaluate is not None and made.evaluate(made.model) == {"channels": 4.0}
    assert made.fp32_modules == ("student.head", "student")
    assert made.model.head is made.model.student.head
    with pytest.raises(AttributeError, match="nothing"):
        made.model.nothing  # noqa: B018


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"temperature": 0}, "temperature=0"),
        ({"weight": 1.5}, "weight=1.5"),
        ({"features": {"nowhere": "stem"}}, "the student has no module of this name"),
        ({"features": {"stem": "nowhere"}}, "the teacher has no module of this name"),
        ({"features": {"stem": "pool"}}, "differ in more than channel_dim=1"),
    ],
)
def test_wrong_use_is_named(arguments: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        distill(convnet(**SMALL), teacher(), **arguments)


def test_models_that_are_not_called_are_refused() -> None:
    workload = dataclasses.replace(
        classifier(nn.Linear(3, 2), torch.randn(4, 3), 2), loss_fn=lambda m, b: m.weight.square().mean()
    )
    made = distill(workload, nn.Linear(3, 2))
    with pytest.raises(WorkloadError, match="0 times"):
        made.loss_fn(made.model, made.batch)
    with pytest.raises(WorkloadError, match="distilled.model is a Linear"):
        student(workload, workload)
