"""Modules in tiles over tokens give the outputs and gradients of whole ones in less memory, and plans take them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn

import memfit
from memfit.capture import real_copy
from memfit.errors import InfeasibleError, PlanError, PlanMismatchError
from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, Levers, Region, Regions, Tiles, simulate
from memfit.levers import LEVERS, applied, switched
from memfit.planner import capture_levers, costs_of
from memfit.recipes import byte_lm
from memfit.solver import build, options
from memfit.workload import Workload
from tests.measuring import peaks

WIDTH = 16
(LEVER,) = (lever for lever in LEVERS if lever.name == "tiles over tokens")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """An MLP between two other modules, so that its input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mlp, self.after = nn.Linear(WIDTH, WIDTH), MLP(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        return self.after(x + self.mlp(x))


def levers(tokens: int, *modules: str, **others: Any) -> Levers:
    return Levers(microbatch_size=1, tiles=Tiles(modules=modules or ("mlp",), tokens=tokens), **others)


def under(model: nn.Module, tokens: int | None) -> contextlib.AbstractContextManager[None]:
    return switched(model, levers(tokens)) if tokens else contextlib.nullcontext()


def outputs_and_gradients(
    model: nn.Module, x: Tensor, tokens: int | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    with under(model, tokens):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        out.float().square().sum().backward()
    return out.detach(), [x.grad, *(p.grad for p in model.parameters())]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    samples=st.integers(1, 3),
    length=st.integers(1, 13),
    frozen=st.sets(st.sampled_from(["before.weight", "mlp.gate.weight", "mlp.up.bias", "mlp.down.weight"])),
)
def test_any_length_and_any_frozen_weights(tokens: int, samples: int, length: int, frozen: set[str]) -> None:
    torch.manual_seed(0)
    model = Model().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(samples, length, WIDTH, dtype=torch.float64)
    expected, gradients = outputs_and_gradients(model, x, None)
    found, in_tiles = outputs_and_gradients(model, x, tokens)
    torch.testing.assert_close(found, expected)
    for one, other in zip(in_tiles, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_all_weights_frozen_and_no_gradient_of_the_input() -> None:
    model, x = Model(), torch.randn(2, 9, WIDTH)
    model.requires_grad_(False)
    expected = model(x)
    with under(model, 4):
        assert model(x).grad_fn is None
        torch.testing.assert_close(model(x), expected)
    model.mlp.requires_grad_(True)
    expected, gradients = outputs_and_gradients(model, x, None)
    found, in_tiles = outputs_and_gradients(model, x, 4)
    torch.testing.assert_close(found, expected)
    assert [g is None for g in in_tiles] == [g is None for g in gradients]
    with torch.no_grad(), under(model, 4):
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_rounds_no_more_than_whole(dtype: torch.dtype) -> None:
    model, x = Model(), torch.randn(2, 64, WIDTH)
    _, exact = outputs_and_gradients(model, x, None)
    _, gradients = outputs_and_gradients(model, x, None, dtype)
    _, in_tiles = outputs_and_gradients(model, x, 8, dtype)
    for name, one, other, true in zip(["x", *dict(model.named_parameters())], in_tiles, gradients, exact, strict=True):
        assert one is not None and other is not None and true is not None and one.dtype == other.dtype
        assert relative(one, true) < 1.5 * relative(other, true) + 1e-3, name


def test_gradients_of_weights_in_few_bits_are_added_up_in_more() -> None:
    torch.manual_seed(0)
    model, x = Model().bfloat16(), torch.randn(2, 256, WIDTH, dtype=torch.bfloat16)
    wide = copy.deepcopy(model).float()
    _, exact = outputs_and_gradients(wide, x.float(), None)
    _, gradients = outputs_and_gradients(model, x, None)
    _, in_tiles = outputs_and_gradients(model, x, 4)
    for one, other, true in zip(in_tiles, gradients, exact, strict=True):
        assert one is not None and other is not None and true is not None and one.dtype == torch.bfloat16
        assert relative(one, true) < 1.5 * relative(other, true)


def test_gradients_come_whole_and_once() -> None:
    model, x = Model(), torch.randn(2, 12, WIDTH)
    seen: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.update([name]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    outputs_and_gradients(model, x, 5)
    assert set(seen.values()) == {2} and len(seen) == len(list(model.parameters()))


def test_a_weight_that_has_changed_is_told() -> None:
    model, x = Model(), torch.randn(2, 12, WIDTH)
    with under(model, 5):
        out = model(x)
        with torch.no_grad():
            model.mlp.gate.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_second_backward_pass_is_as_without_tiles() -> None:
    model, x = Model(), torch.randn(2, 12, WIDTH)
    with under(model, 5):
        out = model(x).sum()
        out.backward(retain_graph=True)
        weight = model.mlp.up.weight
        assert weight.grad is not None
        first = weight.grad.clone()
        out.backward()
        torch.testing.assert_close(weight.grad, 2 * first)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_copies_compute_in_tiles_with_their_own_weights() -> None:
    model, x = Model(), torch.randn(2, 12, WIDTH)
    calls: list[int] = []
    with under(model, 5):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.mlp.down.bias.add_(1)
        copied.mlp.up.register_forward_hook(lambda *_: calls.append(1))
        expected = model(x) + copied.after.weight.sum(1)
        torch.testing.assert_close(copied(x), expected)
    assert len(calls) == 5
    assert "forward" not in vars(model.mlp)


def test_a_region_around_computes_no_tile_for_nothing() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.mlp = nn.Linear(WIDTH, WIDTH), MLP()

        def forward(self, x: Tensor) -> Any:
            return x + self.mlp(torch.tanh(self.before(x)))

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 12, WIDTH)
    calls: Counter[str] = Counter()
    for name in ("0.before", "0.mlp.up", "1.mlp.up"):
        kind = model.get_submodule(name)
        kind.forward = lambda x, kind=kind, name=name: (calls.update([name]), nn.Linear.forward(kind, x))[1]
    expected = model(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with switched(model, levers(5, "0.mlp", "1.mlp", regions=(Region(("0",)), Region(("1",))))):
        calls.clear()
        found = model(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
    assert calls == {"0.before": 2, "0.mlp.up": 2 * 5, "1.mlp.up": 2 * 5}
    for one, other in zip(gradients, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(other, one)


def test_what_is_not_token_wise_is_refused_by_name() -> None:
    workload = byte_lm(n_layer=1, d_model=32, n_head=2, context=32, batch_size=1, dropout=0.1, max_bytes=50_000)
    refused = {
        ("blocks.0.attention",): "'blocks.0.attention' of tiles.modules is not token-wise: it mixes tokens",
        ("blocks.0.dropout",): "draws random numbers",
        ("blocks.0.mlp", "blocks.0.mlp.fc"): "'blocks.0.mlp.fc' of tiles.modules is computed in tiles already",
    }
    for modules, why in refused.items():
        with pytest.raises(PlanError, match=why), applied(levers(4, *modules), workload):
            pass
    with pytest.raises(PlanMismatchError, match="has 'blocks.9.mlp', and the model has no such module"):
        with applied(levers(4, "blocks.9.mlp"), workload):
            pass
    assert not LEVER.is_applied(workload)
    with applied(levers(4, "blocks.0.mlp"), workload):
        assert LEVER.is_applied(workload)
        with pytest.raises(PlanError, match="computed in tiles already"):
            with switched(workload.model, levers(4, "blocks.0.mlp")):
                pass
    assert not LEVER.is_applied(workload) and "forward" not in vars(workload.model.get_submodule("blocks.0.mlp"))


# Peaks and plans


class Block(nn.Module):
    """A block that mixes tokens in little memory, so that its MLP makes the peak."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.proj = nn.Linear(width, width)
        layers = nn.Linear(width, 8 * width), nn.SiLU(), nn.Linear(8 * width, width)
        self.mlp = nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))

    def forward(self, x: Tensor) -> Any:
        x = x + self.proj(self.norm1(x).cumsum(1) / x.shape[1])
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32, classes: int = 97, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(2)))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens)))


def language_model(samples: int = 1, tokens: int = 512, **options: Any) -> Workload:
    torch.manual_seed(0)
    model = LanguageModel(**options)
    batch = torch.randint(97, (samples, tokens))
    return Workload(
        model=model,
        batch=batch,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer=torch.optim.AdamW(model.parameters()),
    )


MLPS = ("blocks.0.mlp", "blocks.1.mlp")
REGIONS = (Region(("blocks.0",)), Region(("blocks.1",)))
KEPT = ("aten.addmm.default#0", "aten.addmm.default#2", "aten.native_layer_norm.default#1")
COMBINED: dict[str, dict[str, Any]] = {
    "alone": {},
    "regions": {"regions": REGIONS},
    "regions that keep": {"regions": tuple(Region(one.modules, KEPT) for one in REGIONS)},
    "an outer region": {"regions": (Region(("blocks",)),)},
    "chunks": {"chunked_loss": ChunkedLoss(head="head", rows=64), "regions": REGIONS},
    "lean": {"lean": ("*",)},
    "updates": {"update": "in-backward", "regions": REGIONS},
    "microbatches": {"microbatch_size": 2},
    "bf16-mixed": {"precision": "bf16-mixed", "regions": REGIONS},
    "bf16-true": {"precision": "bf16-true"},
}


@pytest.mark.parametrize("name", COMBINED)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    workload = language_model(4 if name == "microbatches" else 1, 256 if name == "microbatches" else 512)
    workload = Workload(**{**vars(workload), "bf16_updates": "master-weights"})
    under = replace(levers(64, *MLPS), **COMBINED[name])
    predicted, measured = peaks(workload, under)
    assert predicted == pytest.approx(measured, rel=0.005)
    whole, _ = peaks(workload, replace(under, tiles=None))
    assert predicted < whole


@pytest.mark.parametrize("name", ["alone", "regions", "regions that keep", "chunks", "updates", "microbatches"])
def test_a_step_computes_the_same(name: str) -> None:
    workload = language_model(4 if name == "microbatches" else 1, 64)
    changed = replace(levers(16, *MLPS), **COMBINED[name])
    found = []
    for each in (replace(changed, tiles=None), changed):
        copied = real_copy(workload)
        with applied(each, copied) as step:
            losses = [float(step(copied.batch).loss) for _ in range(3)]
        found.append((losses, [p.detach().clone() for p in copied.model.parameters()]))
    (losses, weights), (in_tiles, others) = found
    assert in_tiles == pytest.approx(losses, rel=1e-5)
    for one, other in zip(others, weights, strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()


def test_the_solver_knows_regions_around_tiles() -> None:
    """A trace with tiles tells the peak that its step has with regions around them."""
    workload, device = language_model(), find_device("cpu")
    trace = capture_levers(workload, levers(64, *MLPS), device)
    costs = costs_of([trace], device)
    for regions in (REGIONS, REGIONS[:1], (Region(("blocks",)),)):
        simulated = simulate(trace, costs, regions).peak_bytes
        captured = capture_levers(workload, levers(64, *MLPS, regions=regions), device)
        assert simulated == pytest.approx(simulate(captured, costs_of([captured], device)).peak_bytes, rel=0.005)
    found = Regions(trace)
    around = [option.modules for option in options(found, costs, reruns=MLPS)]
    assert ("blocks.0",) in around and build(found, costs, options(found, costs, reruns=MLPS))
    assert ("blocks.0",) not in [option.modules for option in options(found, costs)]


def test_a_plan_takes_tiles_where_nothing_else_is_enough() -> None:
    workload = language_model()
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 2, "optimizers": ()}
    with pytest.raises(InfeasibleError) as lowest:
        memfit.plan(workload, budget="10KiB", **options)
    budget = int(1.01 * lowest.value.lowest_peak_bytes)
    plan = memfit.plan(workload, budget=budget, **options)
    assert plan.levers.tiles is not None and set(MLPS) <= set(plan.levers.tiles.modules)
    assert plan.classes["tiles over tokens"] == "reordered"
    assert "tokens at a time" in str(plan)
    verification = memfit.verify(plan, workload, steps=1)
    assert verification.holds, verification.failures
    roomy = memfit.plan(workload, budget="1GiB", **options)
    assert roomy.levers.tiles is None
    exact = memfit.plan(workload, budget=int(0.9 * plan.plain.peak_bytes), numerics="exact", **options)
    assert exact.levers.tiles is None


def test_what_forbids_tiles_that_would_pay_is_told() -> None:
    workload = language_model(dropout=0.1)
    plain = memfit.estimate(workload).peak_bytes
    plan = memfit.plan(workload, budget=int(0.9 * plain), precisions=["32-true"], points=2, optimizers=())
    told = [note for note in plan.notes if "tiles over tokens" in note]
    assert plan.levers.tiles is None and len(told) == 1
    assert told[0].startswith("blocks.0.mlp and 1 more are not computed in tiles over tokens: it draws random numbers")
