from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import WorkloadError
from memfit.structure import grouped_convolutions, separable_convolutions
from memfit.structure.convolutions import SeparableConv, separated
from memfit.training import Step, StepOptions
from memfit.workload import Workload
from tests.models import LARGE, convnet, cross_entropy, unet
from tests.structure.measuring import classifier, savings

KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    dims = draw(st.sampled_from([1, 2, 3]))
    groups = draw(st.sampled_from([1, 2]))
    torch.manual_seed(draw(st.integers(0, 99)))
    stride, kernel = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 3]))
    conv: nn.Module = KINDS[dims](
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 4)),
        kernel,
        stride=stride,
        padding="same" if (stride, kernel) == (1, 3) and draw(st.booleans()) else draw(st.integers(0, 2)),
        dilation=draw(st.sampled_from([1, 2])),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "circular"])),
    )
    return conv.double()


@settings(max_examples=40, deadline=None)
@given(convolutions())
def test_as_many_kernels_as_elements_make_the_same_convolution(conv: Any) -> None:
    x = torch.randn(2, conv.in_channels, *[9] * (conv.weight.dim() - 2), dtype=torch.float64)
    whole = SeparableConv(conv, rank=conv.weight[0, 0].numel())
    torch.testing.assert_close(whole(x), conv(x))
    assert SeparableConv(conv, rank=1)(x).shape == conv(x).shape


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_what_fewer_kernels_lose_are_the_singular_values_left_out(groups: int, n_in: int, rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(groups * 5, n_in, 3, 3, dtype=torch.float64)
    depthwise, pointwise = separated(weight, groups, rank)
    kernels = depthwise.view(groups, n_in, rank, 9)
    made = torch.einsum("goir,girk->goik", pointwise.view(groups, 5, n_in, rank), kernels).reshape(weight.shape)
    values = torch.linalg.svdvals(weight.view(groups, 5, n_in, 9).transpose(1, 2))
    torch.testing.assert_close((weight - made).square().sum(), values[..., rank:].square().sum())


def test_groups_keep_the_weights_within_them() -> None:
    workload = convnet(channels=8)
    found = grouped_convolutions(workload, groups=4, modules=("stages.*",))
    old, new = (w.model.get_submodule("stages.0.conv1") for w in (workload, found.workload))
    inside = torch.block_diag(*[torch.ones(2, 2)] * 4)[:, :, None, None]
    x = torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(new(x), F.conv2d(x, old.weight * inside, padding=1))
    assert len(found.changes) == 4 and "4 groups" in str(found)


@pytest.mark.parametrize("make", [convnet, pytest.param(unet, marks=pytest.mark.ci)])
def test_prices_are_counted_and_the_original_stays(make: Any) -> None:
    workload = make()
    before = copy.deepcopy(workload.model.state_dict())
    found = separable_convolutions(workload, measure=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in workload.model.state_dict().items())
    assert all(p.grad is None for p in [*workload.model.parameters(), *found.workload.model.parameters()])
    for priced, w in ((found.before, workload), (found.after, found.workload)):
        assert priced.parameters == sum(p.numel() for p in w.model.parameters())
        assert priced.peak_bytes == memfit.estimate(w).peak_bytes
        assert priced.measured_peak_bytes == pytest.approx(priced.peak_bytes, rel=0.01)
    assert found.after.multiply_adds < found.before.multiply_adds
    text = str(found)
    assert f"{found.after.multiply_adds:,}" in text and "step, measured" in text and "numerics changed" in text


def test_multiply_adds_are_those_of_the_arithmetic() -> None:
    model = nn.Sequential(nn.Conv3d(2, 6, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(6 * 4**3, 5))
    workload = classifier(model, torch.randn(3, 2, 8, 8, 8), 5)
    linear = 6 * 4**3 * 5
    found = separable_convolutions(workload, rank=2)
    assert found.before.multiply_adds == 4**3 * 6 * 2 * 27 + linear
    assert found.after.multiply_adds == 4**3 * (2 * 2 * 27 + 6 * 2 * 2) + linear
    assert list(found.changes)[0].module == "0"


def test_optimizer_goes_on_with_what_is_left() -> None:
    workload = convnet()
    stem, rest = workload.model.stem, [workload.model.stages, workload.model.head]
    groups = [{"params": [p for m in rest for p in m.parameters()]}, {"params": list(stem.parameters()), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    workload = Workload(workload.model, workload.batch, cross_entropy, optimizer, scheduler=scheduler)
    with Step(workload, StepOptions(microbatch_size=4)) as step:
        step(workload.batch)
    made = separable_convolutions(workload).workload
    rates = {id(p): g["lr"] for g in made.optimizer.param_groups for p in g["params"]}
    named = dict(made.model.named_parameters())
    assert rates.keys() == {id(p) for p in named.values()}
    assert all(rates[id(p)] == (0.25 if name.startswith("stem") else 0.05) for name, p in named.items())
    assert made.optimizer.param_groups[0]["weight_decay"] == 1e-3
    old = dict(workload.model.named_parameters())
    assert torch.equal(
        made.optimizer.state[named["stem.0.pointwise.bias"]]["momentum_buffer"],
        optimizer.state[old["stem.0.bias"]]["momentum_buffer"],
    )
    assert named["stem.0.depthwise.weight"] not in made.optimizer.state
    assert set(made.optimizer.state) <= set(named.values())
    with Step(made, StepOptions(microbatch_size=4)) as step:
        step(made.batch)
    assert made.optimizer.param_groups[1]["lr"] == 0.125 and optimizer.param_groups[1]["lr"] == 0.25


def test_convolution_with_two_names_is_replaced_once() -> None:
    conv = nn.Conv2d(4, 8, 3, padding=1)
    back = nn.Conv2d(8, 4, 1)
    model = nn.Sequential(conv, back, conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    other = nn.Conv2d(8, 8, 3)
    other.weight = conv.weight  # never called, so it stays, and the shared weight with it
    model.add_module("unused", nn.Identity())
    model.unused.other = other
    made = separable_convolutions(classifier(model, torch.randn(2, 4, 8, 8), 8)).workload
    assert made.model[0] is made.model[2] and isinstance(made.model[0], SeparableConv)
    assert {id(p) for p in made.model.parameters()} == {
        id(p) for group in made.optimizer.param_groups for p in group["params"]
    }


@pytest.mark.ci
def test_a_share_is_reached_with_the_fewest_and_the_order_is_what_was_asked_for() -> None:
    workload = unet(width=8)
    whole = separable_convolutions(workload)
    by_work = separable_convolutions(workload, multiply_adds=0.5)
    by_bytes = separable_convolutions(workload, multiply_adds=0.5, by="bytes")
    for found in (by_work, by_bytes):
        assert found.after.multiply_adds <= 0.5 * found.before.multiply_adds
        assert len(found.changes) < len(whole.changes)
    assert len(by_work.changes) <= len(by_bytes.changes)
    assert by_bytes.after.peak_bytes < by_work.after.peak_bytes
    with pytest.raises(WorkloadError, match=r"multiply_adds=0.01 can't be reached.*remain"):
        separable_convolutions(workload, multiply_adds=0.01)


def test_fit_to_the_batch_is_the_least_squares_solution() -> None:
    workload, name = unet(batch=8), "unet.inner.down.0"
    seen: list[torch.Tensor] = []
    conv = workload.model.get_submodule(name)
    with conv.register_forward_hook(lambda module, args, made: seen.extend([args[0].detach(), made.detach()])):
        workload.model(workload.batch["x"])
    x, target = seen

    def error(fit: Any) -> float:
        made = separable_convolutions(workload, fit=fit, modules=(name,)).workload.model.get_submodule(name)
        return F.mse_loss(made(x), target).item()

    depthwise = SeparableConv(conv, 1).depthwise(x).transpose(0, 1).flatten(1).detach()  # type: ignore[arg-type]
    features, wanted = torch.cat([depthwise, torch.ones(1, depthwise.shape[1])]).T, target.transpose(0, 1).flatten(1).T
    least = (features @ torch.linalg.lstsq(features, wanted).solution - wanted).square().mean().item()
    assert least <= error("batch") * (1 + 1e-4) <= 1.01 * least < 0.99 * error("weights")


def test_what_is_separable_already_is_found_again() -> None:
    workload = unet()
    conv = workload.model.unet.inner.down[0]
    kernels = torch.randn(conv.in_channels, 3, 3)
    with torch.no_grad():
        conv.weight.copy_(torch.randn(conv.out_channels, conv.in_channels, 1, 1) * kernels)
    for fit in ("weights", "batch"):
        made = separable_convolutions(workload, fit=fit, modules=("unet.inner.down.0",)).workload  # type: ignore[arg-type]
        torch.testing.assert_close(made.model(made.batch["x"]), workload.model(made.batch["x"]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lever", [separable_convolutions, lambda w: grouped_convolutions(w, groups=4)])
@pytest.mark.parametrize(
    "make, sizes",
    [(convnet, LARGE["convnet"] | {"channels": 64}), pytest.param(unet, LARGE["unet"], marks=pytest.mark.ci)],
)
def test_predicted_saving_is_the_measured_one(make: Any, sizes: Any, lever: Any) -> None:
    workload = make(**sizes)
    predicted, really = savings(workload, lever(workload))
    assert abs(really) > 1e5
    assert predicted == pytest.approx(really, rel=0.05)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"rank": 0}, "rank=0"),
        ({"fit": "data"}, "fit='data'"),
        ({"by": "size"}, "by='size'"),
        ({"multiply_adds": 1.5}, "multiply_adds=1.5"),
        ({"modules": ("stages.*", "nothing*")}, "'nothing*'"),
        ({"rank": 9}, "no convolution that would need fewer"),
    ],
)
def test_wrong_use_is_named(arguments: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        separable_convolutions(convnet(), **arguments)
    with pytest.raises(WorkloadError, match="groups=1"):
        grouped_convolutions(convnet(), groups=1)


def test_kinds_that_are_not_known_stay() -> None:
    class Standardized(nn.Conv2d):
        pass

    watched = nn.Conv2d(8, 8, 3)
    watched.register_forward_hook(lambda *given: None)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Standardized(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8), watched, nn.Conv2d(8, 10, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    workload = classifier(model, torch.randn(2, 3, 12, 12), 10)
    assert [c.module for c in separable_convolutions(workload).changes] == ["0"]


def test_models_without_data_are_priced_but_not_fitted() -> None:
    with torch.device("meta"):
        workload = convnet()
    found = separable_convolutions(workload, fit="weights")
    assert found.after.multiply_adds < found.before.multiply_adds and not found.after.metrics
    assert found.before.peak_bytes == separable_convolutions(convnet()).before.peak_bytes
    with pytest.raises(WorkloadError, match="use fit='weights'"):
        separable_convolutions(workload)
