"""Lean normalisations and activations: the same bits, fewer bytes, and nothing left behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit._torch import top_saved_tensors_default_hooks
from memfit.capture import CaptureJob, capture, real_copy
from memfit.cost import calibrate
from memfit.errors import PlanError, PlanMismatchError, RecomputationError
from memfit.hardware import allocated
from memfit.ir import Levers, Precision, Region, Trace, simulate
from memfit.levers import applied
from memfit.recipes import brain_segmentation
from memfit.recomputation import checkpointed, is_lean, is_made_lean, lean
from memfit.workload import Workload, batch_size_of
from tests.covering import each, some
from tests.measuring import step_peak_bytes
from tests.models import BUILDERS, COSTS, convnet, transformer, twice, unet
from tests.recomputation.steps import differing, executed, results, without_collector

ALL = ("*",)


def loss_on(x: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(x).square().mean()


def peak_bytes(model: nn.Module, x: torch.Tensor, patterns: Sequence[str]) -> int:
    with lean(model, patterns):
        model(x).square().mean().backward()
        model.zero_grad()
        with allocated() as meter:
            model(x).square().mean().backward()
        model.zero_grad()
    return meter.peak_bytes


# Bits

_NORMS = [
    lambda n: nn.BatchNorm2d(n),
    lambda n: nn.BatchNorm2d(n, momentum=None),
    lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True),
    lambda n: nn.GroupNorm(2, n),
    lambda n: nn.LayerNorm([n, 6, 6]),
    lambda n: nn.RMSNorm([n, 6, 6]),
    lambda n: nn.Identity(),
]
_ACTIVATIONS = [
    lambda: nn.ReLU(),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.PReLU(),
    lambda: nn.GELU(),
    lambda: nn.SiLU(inplace=True),
    lambda: nn.LeakyReLU(inplace=True),
    lambda: nn.Tanh(),
    lambda: nn.Identity(),
]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    """Chains of convolutions, normalisations, dropouts and activations in any order, some of them residual."""
    blocks: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        parts: list[nn.Module] = [nn.Conv2d(4, 4, 3, padding=1, bias=draw(st.booleans()))]
        parts += [draw(st.sampled_from(_NORMS))(4), draw(st.sampled_from(_ACTIVATIONS))()]
        parts.insert(draw(st.integers(1, 3)), nn.Dropout(0.3, inplace=draw(st.booleans())))
        parts.insert(draw(st.integers(0, 4)), draw(st.sampled_from([nn.Conv2d(4, 4, 1), nn.Identity(), nn.GELU()])))
        block = nn.Sequential(*parts)
        blocks.append(Residual(block) if draw(st.booleans()) else block)
    return nn.Sequential(nn.Conv2d(2, 4, 1), *blocks, nn.Conv2d(4, 1, 1))


def _runs(model: nn.Module, x: torch.Tensor) -> bool:
    """Tell whether autograd differentiates a model: some changes in place it does not allow."""
    try:
        model(x).square().mean().backward()
    except RuntimeError:
        return False
    return True


@settings(deadline=None, max_examples=60)
@given(networks(), st.data())
def test_no_bit_changes_with_and_without_regions(model: nn.Sequential, data: st.DataObject) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 6)
    if not _runs(model, x):
        return
    plain = results(model, loss_on(x))
    assert not differing(results(model, loss_on(x), (), ALL), plain)
    names = [str(i) for i in range(1, len(model) - 1)]
    regions = [Region((name,)) for name in names if data.draw(st.booleans())]
    assert not differing(results(model, loss_on(x), regions, ALL), plain)
    assert not differing(results(model, loss_on(x), [Region(tuple(names))], ALL), plain)


@pytest.mark.parametrize(("name", "precision"), each(BUILDERS, ["32-true", "bf16-mixed"]))
def test_steps_are_bitwise_the_same(name: str, precision: Precision) -> None:
    def trained(patterns: tuple[str, ...]) -> dict[str, torch.Tensor]:
        workload = BUILDERS[name]()
        torch.manual_seed(0)
        levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch), lean=patterns)
        with applied(levers, workload) as step:
            losses = [torch.tensor(step(workload.batch).loss) for _ in range(3)]
        return {f"loss {i}": loss for i, loss in enumerate(losses)} | workload.model.state_dict()

    assert not differing(trained(ALL if name != "recurrent" else ("norm",)), trained(()))


# Bytes


def levers(workload: Workload, regions: Sequence[Region] = (), patterns: tuple[str, ...] = ALL) -> Levers:
    return Levers(microbatch_size=batch_size_of(workload.batch), lean=patterns, regions=tuple(regions))


def trace_of(workload: Workload, given: Levers) -> Trace:
    return capture(CaptureJob(workload, functools.partial(applied, given)))


def kept_bytes(trace: Trace) -> int:
    """Return the bytes of the activations that wait for the backward pass."""
    born_forward = (s for s in trace.storages if s.birth >= 0 and trace.ops[s.birth].phase == "forward")
    return sum(storage.nbytes for storage in born_forward if storage.category == "activations")


def brain() -> Workload:
    pytest.importorskip("monai")
    pytest.importorskip("nilearn")
    return brain_segmentation(patch=(16, 16, 16), batch_size=2, channels=(8, 16, 32), resolution=4)


@pytest.mark.parametrize(("build", "most"), [pytest.param(brain, 0.55, marks=pytest.mark.ci), (unet, 0.8)])
def test_a_u_net_keeps_a_fifth_less_at_least(build: Callable[[], Workload], most: float) -> None:
    workload = build()
    plain, made_lean = (trace_of(workload, levers(workload, patterns=patterns)) for patterns in ((), ALL))
    assert kept_bytes(made_lean) <= most * kept_bytes(plain)
    assert step_peak_bytes(workload, levers(workload)) < step_peak_bytes(workload, levers(workload, patterns=()))


@pytest.mark.parametrize("build", some([brain, unet, transformer, convnet, twice], [unet, transformer]))
def test_the_peak_is_predicted(build: Callable[[], Workload]) -> None:
    workload = build()
    trace = trace_of(workload, levers(workload))
    predicted = simulate(trace, calibrate([trace])).peak_bytes
    assert predicted == pytest.approx(step_peak_bytes(workload, levers(workload)), rel=0.01)


@pytest.mark.parametrize(
    ("build", "regions"),
    [
        pytest.param(transformer, [Region(("blocks.0",)), Region(("blocks.1",))], marks=pytest.mark.ci),
        pytest.param(transformer, [Region(("blocks.0", "blocks.1"))], marks=pytest.mark.ci),
        (transformer, [Region(("blocks.0",)), Region(("blocks.0.mlp",))]),
        (transformer, [Region(("blocks.0.mlp",), keep=("aten.addmm.default#0",))]),
        (unet, [Region(("unet.down",)), Region(("unet.inner",)), Region(("unet.up",))]),
        pytest.param(unet, [Region(("unet.inner.inner",))], marks=pytest.mark.ci),
        (convnet, [Region(("stem",)), Region(("stages.0",))]),
    ],
)
def test_regions_are_simulated_on_a_lean_trace_as_they_are_applied(
    build: Callable[[], Workload], regions: Sequence[Region]
) -> None:
    workload = build()
    simulated = simulate(trace_of(workload, levers(workload)), COSTS, regions)
    applied_too = simulate(trace_of(workload, levers(workload, regions)), COSTS)
    is_nested = any(a.modules[0].startswith(f"{b.modules[0]}.") for a in regions for b in regions)
    assert simulated.peak_bytes == pytest.approx(applied_too.peak_bytes, rel=0.02 if is_nested else 0)
    assert not differing(
        _gradients(workload, levers(workload, regions)), _gradients(workload, levers(workload, (), ()))
    )


def _gradients(workload: Workload, given: Levers) -> dict[str, torch.Tensor]:
    copied = real_copy(workload)
    torch.manual_seed(0)
    with applied(given, copied) as step:
        return step.gradients(copied.batch)[1]


def test_the_steps_of_a_composite_activation_are_not_kept() -> None:
    class SlowActivation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))

    blocks = [nn.Sequential(nn.Linear(64, 256), SlowActivation(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    x = torch.randn(512, 64)
    output_bytes = 512 * 256 * 4
    assert peak_bytes(model, x, ()) - peak_bytes(model, x, ALL) >= 3 * 4 * output_bytes
    assert not differing(results(model, loss_on(x), (), ALL), results(model, loss_on(x)))


def test_an_activation_whose_input_nobody_keeps_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3))
    x = torch.randn(2, 3, 16, 16)
    assert peak_bytes(model, x, ALL) == peak_bytes(model, x, ())
    assert executed(model, loss_on(x), patterns=ALL)["aten.relu.default"] == 1


# Once


class Attention(nn.Module):
    """Three projections of one normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))


def test_what_several_operators_ask_for_is_made_again_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Attention())
    assert executed(model, loss_on(torch.randn(2, 4, 8)), patterns=ALL)["aten.native_layer_norm.default"] == 2


def test_nothing_of_a_step_is_left_once_it_is_over() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(128, 32)
    with without_collector(), lean(model, ALL), checkpointed(model, [Region(("1", "2", "3"))]):
        for _ in range(3):
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        with allocated() as meter:
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
    assert meter.net_bytes == 0


# Semantics of autograd


def test_a_graph_that_is_retained_gives_the_same_gradients_again() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    with lean(model, ALL):
        loss = model(x).square().mean()
        first, second, third = (
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(3)
        )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))


def test_second_derivatives_are_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def penalty(patterns: Sequence[str]) -> torch.Tensor:
        with lean(model, patterns):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), model[0].weight)[0]

    assert torch.equal(penalty(ALL), penalty(()))


class Changing(nn.Module):
    """Changes what a normalisation takes, or what it makes."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.takes = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), takes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        made = self.norm(y)
        out: torch.Tensor = self.last(made if self.takes else made.mul_(2.0))
        if self.takes:
            y.add_(1)
        return out


@pytest.mark.parametrize("patterns", [(), ALL])
def test_a_change_in_place_of_what_is_kept_is_an_error_as_without(patterns: Sequence[str]) -> None:
    model = Changing(takes=True)
    with lean(model, patterns), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 4)).sum().backward()


def test_what_the_parent_changes_in_place_is_kept_changed() -> None:
    model, x = Changing(takes=False), torch.randn(3, 4)
    assert not differing(results(model, loss_on(x), (), ALL), results(model, loss_on(x)))


def test_a_module_that_does_something_else_the_second_time_is_named() -> None:
    class CountingNorm(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(x) if self.calls == 1 else torch.tanh(x).sum(0, keepdim=True)

    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), CountingNorm(), nn.Linear(4, 1))
    with lean(model, ALL), pytest.raises(RecomputationError, match="'2' can't be recomputed"):
        model(torch.randn(3, 4)).sum().backward()


def test_a_forward_pass_that_is_interrupted_leaves_nothing_behind() -> None:
    class Interrupted(nn.Module):
        is_interrupted = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Interrupted(), nn.Linear(4, 1))
    x = torch.randn(2, 4)
    with lean(model, ALL):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[2].is_interrupted = False
        model(x).sum().backward()
        assert top_saved_tensors_default_hooks(False) is None
        model[2].is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert top_saved_tensors_default_hooks(False) is None


# What is named, and what is left behind


def test_patterns_name_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    assert executed(model, loss_on(x), patterns=["1"])["aten.native_layer_norm.default"] == 3
    assert executed(model, loss_on(x), patterns=["1", "?"])["aten.native_layer_norm.default"] == 4
    with (
        pytest.raises(PlanMismatchError, match=r"levers.lean has '0'.*the model has 2 \(1, 3, …\)"),
        lean(model, ["0"]),
    ):
        pass


def test_a_model_is_made_lean_once_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = dict(model.__dict__)
    with lean(model, ALL):
        assert is_made_lean(model)
        with pytest.raises(PlanError, match="call close"), lean(model, ALL):
            pass
        copied = copy.deepcopy(model)
        copied(torch.randn(2, 4)).sum().backward()
        assert copied[0].weight.grad is not None
        assert model[0].weight.grad is None
    assert not is_made_lean(model)
    assert model.__dict__ == before
    assert not model[1]._forward_hooks


def test_normalisations_across_ranks_are_left_alone() -> None:
    assert is_lean(nn.BatchNorm2d(2))
    assert not is_lean(nn.SyncBatchNorm(2))
    assert not is_lean(nn.Conv2d(1, 1, 1))


def test_a_compiled_model_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1))
    x = torch.randn(2, 4)
    plain = results(model, loss_on(x))
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    with lean(model, ALL):
        compiled(x).square().mean().backward()
    assert torch.equal(model[0].weight.grad, plain["gradient 0 of 0.weight"])
