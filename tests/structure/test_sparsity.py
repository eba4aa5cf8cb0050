from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.errors import UsageError, WorkloadError
from memfit.structure import sparsify, to_sparse
from memfit.structure.sparsity import is_masked, mask_2_to_4, why_not_sparse
from memfit.training import Step, StepOptions
from tests.models import LARGE, convnet, tied, transformer
from tests.structure.measuring import classifier, savings


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 999))
def test_mask_keeps_the_pair_of_largest_magnitude(rows: int, fours: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, 4 * fours)
    kept = (weight * mask_2_to_4(weight)).reshape(-1, 4)
    assert mask_2_to_4(weight).reshape(-1, 4).sum(1).eq(2).all()
    for row, four in zip(kept, weight.reshape(-1, 4), strict=True):
        best = max(sum(abs(float(four[i])) for i in pair) for pair in itertools.combinations(range(4), 2))
        assert float(row.abs().sum()) == pytest.approx(best)


def test_mask_is_kept_while_training_and_the_original_stays() -> None:
    workload = transformer(layers=1)
    before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
    found = sparsify(workload, modules=("blocks.*",))
    made = found.workload
    assert all(torch.equal(t, before[name]) for name, t in workload.model.state_dict().items())
    layers = {name: m for name, m in made.model.named_modules() if is_masked(m)}
    assert len(layers) == len(found.changes) == 4
    masks = {name: mask_2_to_4(before[f"{name}.weight"]) for name in layers}
    starts = {name: m.weight.detach().clone() for name, m in layers.items()}
    for name, start in starts.items():
        torch.testing.assert_close(start, before[f"{name}.weight"] * masks[name])
    with Step(made, StepOptions(microbatch_size=4)) as step:
        gradients = step.gradients(made.batch)[1]
        for _ in range(3):
            step(made.batch)
    for name, layer in layers.items():
        gradient = gradients[f"{name}.parametrizations.weight.original"]
        assert torch.count_nonzero(gradient[~masks[name]]) == 0 < torch.count_nonzero(gradient)
        assert torch.count_nonzero(layer.weight[~masks[name]]) == 0
        assert not torch.equal(layer.weight, starts[name])
    held = {p for group in made.optimizer.param_groups for p in group["params"]}
    assert held == set(made.model.parameters())


@pytest.mark.ci
def test_price_is_honest_about_the_cpu() -> None:
    workload = transformer(**LARGE["transformer"])
    found = sparsify(workload)
    assert found.after.multiply_adds == found.before.multiply_adds
    assert found.after.peak_bytes > found.before.peak_bytes
    assert "On a CPU 2:4 sparsity saves nothing" in found.notes[0] and "no memory saved" in found.notes[1]
    predicted, really = savings(workload, found)
    assert predicted == pytest.approx(really, rel=0.05) and really < 0


@pytest.mark.ci
def test_plans_take_masked_models() -> None:
    made = sparsify(transformer(layers=1)).workload
    plan = memfit.plan(made, budget="1GiB", points=1, precisions=["32-true"])
    verification = memfit.verify(plan, made, steps=0)
    assert verification.holds, verification.failures


def test_why_there_are_no_sparse_tensors_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparsify(transformer()).workload.model
    with pytest.raises(UsageError, match="on cpu, and 2:4 sparsity saves nothing there"):
        to_sparse(model)
    assert any(is_masked(m) for m in model.modules())
    with pytest.raises(UsageError, match="no layer masked"):
        to_sparse(nn.Linear(4, 4))

    class OnGpu:
        device, dtype = torch.device("cuda", 0), torch.float32

    weight: Any = OnGpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5, and 8.0 is needed" in str(why_not_sparse(weight))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "torch.float32" in str(why_not_sparse(weight))
    weight.dtype = torch.bfloat16
    assert why_not_sparse(weight) is None


def test_wrong_use_is_named() -> None:
    with pytest.raises(WorkloadError, match="'none'"):
        sparsify(transformer(), modules=("none",))
    with pytest.raises(WorkloadError, match="head.weight is shared with embed.weight"):
        sparsify(tied())
    assert [c.module for c in sparsify(convnet()).changes] == ["head"]
    with pytest.raises(WorkloadError, match="multiple of 4"):
        sparsify(classifier(nn.Linear(6, 10), torch.randn(4, 6), 10))


@pytest.mark.gpu
def test_sparse_tensors_compute_what_the_masks_do() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(64, 128)
    made = sparsify(classifier(model, x, 64)).workload.model.cuda().to(torch.bfloat16).eval()
    x = x.cuda().to(torch.bfloat16)
    with torch.no_grad():
        expected = made(x)
        assert to_sparse(made) == ["0", "2"]
        torch.testing.assert_close(made(x), expected, rtol=2e-2, atol=2e-2)
