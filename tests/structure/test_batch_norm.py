from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import WorkloadError
from memfit.ir import Levers
from memfit.levers import applied
from memfit.pipeline import plan
from memfit.structure import freeze_batch_norm, group_norm_for_batch_norm
from memfit.workload import Workload, fingerprint
from tests.models import BUILDERS, cross_entropy


def convnet(change: Any = None, **sizes: int) -> Workload:
    """A residual network with BatchNorm, whose statistics are those of some batches, changed."""
    workload = BUILDERS["convnet"](**sizes)
    with torch.no_grad():
        for _ in range(20):
            workload.model(workload.batch["x"])
    if change is not None:
        assert change(workload.model)
    return workload


def difference(workload: Workload) -> float:
    """How far the gradients of microbatches are from those of the whole batch."""
    found = []
    for size in (4, 1):
        with applied(Levers(microbatch_size=size), workload) as step:
            gradients = step.gradients(workload.batch)[1]
            found.append(torch.cat([g.flatten().double() for g in gradients.values()]))
    return float((found[0] - found[1]).norm() / found[0].norm())


@pytest.mark.parametrize("change", [freeze_batch_norm, group_norm_for_batch_norm])
def test_microbatches_then_give_the_gradients_of_the_whole_batch(change: Any) -> None:
    assert difference(convnet()) > 0.05
    assert difference(convnet(change)) < 1e-5


@pytest.mark.ci
@pytest.mark.parametrize("change", [None, freeze_batch_norm])
def test_plans_take_microbatches_where_nothing_is_in_the_way(change: Any) -> None:
    workload = convnet(change, blocks=1, channels=4)
    found = plan(workload, budget="1GiB", points=1, time_limit_seconds=0.5, precisions=["32-true"])
    sizes = {c.levers.microbatch_size for c in found.frontier if c.numerics in ("exact", "reordered")}
    assert sizes == {4} if change is None else 1 in sizes
    assert any("freeze_batch_norm" in note for note in found.notes) == (change is None)


def test_frozen_statistics_stay_in_training_and_in_copies() -> None:
    workload = convnet()
    before = fingerprint(workload)
    state = copy.deepcopy(workload.model.state_dict())
    norms = freeze_batch_norm(workload.model)
    assert len(norms) > 2 and fingerprint(workload) != before
    workload.model.eval()
    expected = workload.model(workload.batch["x"])
    for model in (workload.model, copy.deepcopy(workload.model)):
        model.train()
        torch.testing.assert_close(model(workload.batch["x"]), expected)
        model.load_state_dict(state)
        for name in norms:
            assert isinstance(model.get_submodule(name), nn.BatchNorm2d)
    cross_entropy(workload.model, workload.batch).backward()
    assert all(workload.model.get_submodule(name).weight.grad is not None for name in norms)
    assert freeze_batch_norm(workload.model) == []


def test_what_has_no_statistics_can_not_be_frozen_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(WorkloadError, match="'1' is a BatchNorm1d with track_running_stats=False"):
        freeze_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize(("channels", "groups", "count"), [(64, 32, 32), (48, 32, 24), (7, 32, 1), (6, 4, 3)])
def test_groups_divide_the_channels(channels: int, groups: int, count: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(channels))
    parameters = list(model.parameters())
    assert group_norm_for_batch_norm(model, groups=groups) == ["0"]
    norm = model[0]
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == count
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(3, channels, 5, 5)
    torch.testing.assert_close(norm(x), nn.GroupNorm(count, channels)(x))


def test_shared_and_plain_ones_are_replaced_too() -> None:
    shared = nn.BatchNorm1d(4, affine=False)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert group_norm_for_batch_norm(model) == ["a", "b"]
    assert model["a"] is model["b"] and not list(model.parameters())
    model["a"](torch.randn(2, 4))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(WorkloadError, match="groups=0"):
        group_norm_for_batch_norm(nn.Sequential(nn.BatchNorm1d(4)), groups=0)
    with pytest.raises(WorkloadError, match="itself"):
        group_norm_for_batch_norm(nn.BatchNorm1d(4))
