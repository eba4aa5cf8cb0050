"""Frozen weights in fewer bits: products of rounded weights, memory as predicted, and the weights back as they were."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.errors import MemfitError, PlanError
from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, FrozenWeights, Levers, Plan, Region
from memfit.levers import LEVERS, LeversOn, NotOffered, applied, lever_uses
from memfit.planner import capture_levers
from memfit.workload import Workload, fingerprint
from tests.measuring import peaks, step_peak_bytes

pytest.importorskip("bitsandbytes")
QUANTIZERS = ("nf4", "int8")
ERRORS = {"nf4": 0.092, "int8": 0.011}
NAME = "frozen weights in fewer bits"
(LEVER,) = (lever for lever in LEVERS if lever.name == NAME)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter beside it, as LoRA has it."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.down = nn.Linear(base_layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_layer(x)
        return y + self.up(self.down(x.to(self.down.weight.dtype))).to(y.dtype)

    def merge(self) -> None:
        self.base_layer.weight.data += self.up.weight @ self.down.weight


class Language(nn.Module):
    """A residual network over tokens: a frozen embedding, adapted blocks and a frozen head."""

    def __init__(self, width: int = 64, depth: int = 2, words: int = 96, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width).requires_grad_(False)
        layers = [
            nn.Sequential(
                nn.LayerNorm(width), Adapted(nn.Linear(width, 4 * width)), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        ]
        for layer in layers:
            layer[3] = Adapted(layer[3])  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, words, bias=False).requires_grad_(False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"].flatten())


def workload(samples: int = 4, tokens: int = 32, **options: Any) -> Workload:
    torch.manual_seed(0)
    model = Language(**options)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    batch = {"tokens": torch.randint(0, model.head.out_features, (samples, tokens))}
    return Workload(model, batch, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), name="adapted")


def levers(quantizer: Any = "nf4", *, size: int = 4, kept: tuple[str, ...] = ("head",), **changes: Any) -> Levers:
    return Levers(microbatch_size=size, frozen_weights=FrozenWeights(quantizer=quantizer, kept=kept), **changes)


def plan_of(made: Workload, used: Levers) -> Plan:
    plan = memfit.plan(made, budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    uses = lever_uses(LeversOn(used, plan.batch_size))
    return replace(plan, levers=used, uses=uses, numerics="reduced", allowed="reduced")


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_each_matrix_is_as_far_as_the_quantizer_says(quantizer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 320)).requires_grad_(False).to(dtype)
    nn.init.normal_(model[0].weight)
    before = model[0].weight.detach().clone()
    LEVER.round_weights(levers(quantizer, kept=()), model)
    error = float((model[0].weight.float() - before.float()).norm() / before.float().norm())
    assert error == pytest.approx(ERRORS[quantizer], rel=0.05)
    assert f"{ERRORS[quantizer]:.1%} of a matrix's norm off" in LEVER.words(LeversOn(levers(quantizer), 4))[0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_step_is_that_of_rounded_weights(quantizer: str, precision: Any) -> None:
    """And not of the weights as they were, from which loss and gradients differ."""
    made = workload()
    used, plain = levers(quantizer, precision=precision), Levers(microbatch_size=4, precision=precision)
    rounded = dataclasses.replace(workload(), name="rounded")
    LEVER.round_weights(used, rounded.model)
    with applied(used, made) as step, applied(plain, rounded) as other:
        loss, gradients = step.gradients(made.batch)
        expected, standard = other.gradients(rounded.batch)
    with applied(plain, made) as step:
        assert abs(step.gradients(made.batch)[0] - expected) > 1e-6
    assert loss == pytest.approx(expected, rel=1e-6 if precision == "32-true" else 1e-3)
    assert gradients.keys() == standard.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, standard[name], rtol=1e-4, atol=1e-6 if precision == "32-true" else 3e-3), name


def test_a_bias_that_trains_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    x = torch.randn(2, 3, 64, requires_grad=True)
    rounded = copy.deepcopy(model)
    LEVER.round_weights(levers(kept=()), rounded)
    with LEVER.on_model(levers(kept=()), model):
        given = torch.autograd.grad(model(x).square().sum(), [x, model[0].bias, model[2].bias])
    expected = torch.autograd.grad(rounded(x).square().sum(), [x, rounded[0].bias, rounded[2].bias])
    for one, other in zip(given, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


def test_autograd_saves_no_widened_matrix() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).requires_grad_(False)
    x = torch.randn(2, 512, requires_grad=True)

    def saved_bytes() -> int:
        found = list[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.nbytes) or t, lambda t: t):
            model(x).sum()
        return sum(found)

    assert saved_bytes() >= 2 * 512 * 512 * 4  # plain: both weights
    with LEVER.on_model(levers(kept=()), model):
        assert saved_bytes() < 512 * 512


# Which matrices


class Various(nn.Module):
    """Layers whose weights stay, each for a reason of its own, and one whose does not."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Linear(64, 64)
        self.embedding = nn.Embedding(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.embedding.weight
        self.convolution = nn.Conv1d(64, 64, 1)
        self.small = nn.Linear(8, 8)
        self.uneven = nn.Linear(65, 67)
        self.double = nn.Linear(64, 64).double()
        self.attention = nn.MultiheadAttention(64, 2)
        self.normalised = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.requires_grad_(False)
        self.trained = nn.Linear(64, 64)
        self.replaced = nn.Linear(64, 64).requires_grad_(False)
        self.replaced.forward = lambda x: x  # type: ignore[method-assign]
        self.piece = nn.Linear(64, 64).requires_grad_(False)
        self.piece.weight.data = torch.randn(128, 64)[:64]


def test_only_matrices_that_are_frozen_and_a_layers_own_are_taken() -> None:
    model = Various()
    with LEVER.on_model(levers(kept=()), model):
        taken = {fqn for fqn, module in model.named_modules() if hasattr(module, "weight_codes")}
    assert taken == {"taken"}


def test_a_model_without_any_is_refused() -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(PlanError, match=r"changes nothing of this model.*Set levers.frozen_weights to null"):
        LEVER.on_model(levers(kept=()), model).__enter__()
    with pytest.raises(PlanError, match="kept names 'heat', and the model has no such module"):
        LEVER.on_model(levers(kept=("heat",)), model.requires_grad_(False)).__enter__()


def test_the_head_of_a_chunked_loss_stays() -> None:
    made = workload()
    used = levers(kept=(), chunked_loss=ChunkedLoss(head="head", rows=16))
    with applied(used, made) as step:
        loss, _ = step.gradients(made.batch)
        assert not hasattr(made.model.head, "weight_codes")
    with applied(levers(), made) as step:
        assert step.gradients(made.batch)[0] == pytest.approx(loss, rel=1e-6)


# Memory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16-mixed"},
        {"regions": (Region(("blocks.0",)), Region(("blocks.1",)))},
        {"size": 2},
        {"chunked_loss": ChunkedLoss(head="head", rows=16), "lean": ("*",), "size": 2},
        {"update": "in-backward", "regions": (Region(("blocks.1",)),)},
    ],
    ids=lambda changes: "+".join(changes) or "alone",
)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_peak_is_predicted(quantizer: str, changes: dict[str, Any]) -> None:
    made = workload(width=128)
    predicted_bytes, measured_bytes = peaks(made, levers(quantizer, **changes))
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)
    numbers = 2 * 2 * 128 * 512
    plain_bytes = step_peak_bytes(made, replace(levers(quantizer, **changes), frozen_weights=None))
    saved_bytes = numbers * (4 - {"nf4": 0.516, "int8": 1.016}[quantizer])
    assert plain_bytes - measured_bytes > 0.8 * saved_bytes


def test_a_model_in_bf16_is_predicted() -> None:
    predicted_bytes, measured_bytes = peaks(workload(width=128, dtype=torch.bfloat16), levers())
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)


def test_a_model_without_data_is_predicted_as_one_with() -> None:
    made = workload(width=128)
    with torch.device("meta"):
        model = Language(width=128)
    on_paper = dataclasses.replace(made, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    cpu = find_device("cpu")
    with_data, without = (capture_levers(each, levers(), cpu) for each in (made, on_paper))
    assert [storage.nbytes for storage in with_data.storages] == [storage.nbytes for storage in without.storages]


# The weights, while they are in fewer bits and after


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_closing_puts_all_back(quantizer: str) -> None:
    made = workload()
    before, parameters = copy.deepcopy(made.model.state_dict()), list(made.model.parameters())
    known, attributes = fingerprint(made), [set(vars(module)) for module in made.model.modules()]
    held_bytes = sum(p.untyped_storage().nbytes() for p in parameters)
    with applied(levers(quantizer), made):
        assert fingerprint(made) == known
        assert held_bytes - sum(p.untyped_storage().nbytes() for p in parameters) > 4 * 60_000
        assert [tuple(p.shape) for p in made.model.parameters()] == [tuple(p.shape) for p in parameters]
    assert is_same(made.model.state_dict(), before)
    assert all(one is other for one, other in zip(made.model.parameters(), parameters, strict=True))
    assert [set(vars(module)) for module in made.model.modules()] == attributes
    assert not dict(made.model.named_buffers()) and not LEVER.is_applied(made)


def test_a_failed_step_leaves_the_weights_as_they_were() -> None:
    made = workload()
    before = copy.deepcopy(made.model.state_dict())
    with pytest.raises(ZeroDivisionError), applied(levers(), made):
        raise ZeroDivisionError
    assert is_same(made.model.state_dict(), before)


def test_the_state_dict_has_the_weights_as_they_were_given() -> None:
    made = workload()
    before = copy.deepcopy(made.model.state_dict())
    others = {name: values * 1.5 for name, values in before.items()}
    with applied(levers(), made) as step:
        assert is_same(made.model.state_dict(), before)
        loss, _ = step.gradients(made.batch)
        made.model.load_state_dict(before)
        assert step.gradients(made.batch)[0] == loss
        made.model.load_state_dict(others)
        assert is_same(made.model.state_dict(), others)
        other_loss, _ = step.gradients(made.batch)
        with pytest.raises(RuntimeError, match="size mismatch for blocks.0.1.base_layer.weight"):
            made.model.load_state_dict({**others, "blocks.0.1.base_layer.weight": torch.zeros(3, 3)})
    assert is_same(made.model.state_dict(), others)
    again = workload()
    again.model.load_state_dict(others)
    with applied(levers(), again) as step:
        assert step.gradients(again.batch)[0] == other_loss != loss


def test_a_copy_is_quantised_by_itself() -> None:
    made = workload()
    before = copy.deepcopy(made.model.state_dict())
    with applied(levers(), made):
        copied = copy.deepcopy(made.model)
        held_bytes = sum(t.untyped_storage().nbytes() for t in (*copied.parameters(), *copied.buffers()))
        assert held_bytes < sum(t.nbytes for t in copied.parameters()) / 2
        expected = loss_of(made.model, made.batch)
        assert torch.equal(loss_of(copied, made.batch), expected)
        copied.load_state_dict({name: 2 * values for name, values in before.items()})
        assert not torch.equal(loss_of(copied, made.batch), expected)
        assert torch.equal(loss_of(made.model, made.batch), expected)
    copied.load_state_dict(before)
    assert torch.equal(loss_of(copied, made.batch), expected) and is_same(copied.state_dict(), before)


def test_what_would_go_wrong_is_refused_by_name() -> None:
    made = workload()
    layer = made.model.blocks[0][1]
    with applied(levers(), made):
        with pytest.raises(PlanError, match=r"merge\(\) adds adapters to weights .* call close\(\) on the step first"):
            layer.merge()
        with pytest.raises(PlanError, match=r"blocks.0.1.base_layer.weight is in nf4, .*state_dict\(\)"):
            pickle.dumps(made.model)
        layer.base_layer.weight.requires_grad_(True)
        with pytest.raises(PlanError, match="blocks.0.1.base_layer.weight trains now, and its numbers are in nf4"):
            loss_of(made.model, made.batch)
        layer.base_layer.weight.requires_grad_(False)
        made.model.half()
        with pytest.raises(PlanError, match="scales of blocks.0.1.base_layer.weight were converted with the model"):
            loss_of(made.model, made.batch)
        with pytest.raises(PlanError, match=r"in fewer bits already: call close\(\)"):
            LEVER.on_model(levers(), made.model).__enter__()
    layer.merge()


def test_code_that_reads_a_weight_past_its_layer_is_found() -> None:
    made = workload()

    def penalised(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(model, batch) + model.blocks[1][3].base_layer.weight.square().mean()

    reading = dataclasses.replace(made, loss_fn=penalised)
    with pytest.raises(MemfitError, match=r"reads blocks.1.3.base_layer.weight past .*\(square\).*frozen_weights.kept"):
        capture_levers(reading, levers(), find_device("cpu"))
    kept = ("head", "blocks.1.3.base_layer")
    predicted_bytes, measured_bytes = peaks(reading, levers(kept=kept))
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.005)
    with applied(levers(), reading) as step:  # and is not silent where nothing captured it
        assert not torch.isfinite(penalised(step.workload.model, step.workload.batch))


# A plan


@pytest.fixture(scope="module")
def adapted() -> Workload:
    return workload(width=128, samples=1)


def planned(made: Workload, budget: float, numerics: Any = "reduced") -> Plan:
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 1, "optimizers": ()}
    return memfit.plan(made, budget=int(budget), numerics=numerics, **options)


def test_a_plan_takes_as_few_bits_as_it_needs(adapted: Workload) -> None:
    """8 where those are enough, 4 where not, and none where the step fits or the class is not allowed."""
    peak_bytes, numbers = memfit.estimate(adapted).peak_bytes, 2 * 2 * 128 * 512
    assert planned(adapted, 2 * peak_bytes).levers.frozen_weights is None
    assert planned(adapted, peak_bytes - numbers).levers.frozen_weights == FrozenWeights(
        quantizer="int8", kept=("head",)
    )
    plan = planned(adapted, peak_bytes - 3.2 * numbers)
    assert plan.levers.frozen_weights == FrozenWeights(quantizer="nf4", kept=("head",))
    assert plan.classes[NAME] == "reduced" and plan.numerics == "reduced"
    assert "nf4, 4.13 bits a number" in str(plan) and "but for head" in str(plan)
    found = memfit.verify(plan, adapted, steps=0)
    assert found.holds and not found.bitwise and found.loss_difference > 0
    assert "compared with the plain step under frozen weights nf4" in " ".join(str(found).split())
    assert found.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.005)
    with pytest.raises(memfit.InfeasibleError, match="numerics='reduced' allows frozen weights nf4"):
        planned(adapted, peak_bytes - 3.2 * numbers, "reordered")


def test_verification_finds_another_product(adapted: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(adapted, levers(size=1))
    wrong = type(LEVER).round_weights

    def rounds_otherwise(lever: Any, used: Levers, model: nn.Module) -> None:
        wrong(lever, replace(used, frozen_weights=FrozenWeights(quantizer="int8", kept=("head",))), model)

    monkeypatch.setattr(type(LEVER), "round_weights", rounds_otherwise)
    found = memfit.verify(plan, adapted, steps=0)
    assert any("gradients: " in failure and "class exact allows 1e-06" in failure for failure in found.failures)


def test_a_plan_file_holds_it_and_one_step_does_not_fit_another(adapted: Workload, tmp_path: Path) -> None:
    plan = plan_of(adapted, levers(size=1))
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.levers == plan.levers
    with memfit.apply(read, adapted) as step:
        assert step(adapted.batch).loss > 0
        with pytest.raises(PlanError, match=rf"applied to the workload already \({NAME}\).*close\(\)"):
            memfit.apply(read, adapted)


def test_a_larger_batch_is_predicted_while_the_plan_is_applied() -> None:
    """From the weights' files, which take no memory; then the step goes on with their codes."""
    made = workload(samples=2)
    plan = plan_of(made, levers(size=2))
    larger = {"tokens": made.batch["tokens"].repeat(2, 2)}
    before = copy.deepcopy(made.model.state_dict())
    with memfit.apply(plan, made) as step:
        first = step(made.batch)
        found = step(larger)
        assert found.loss > 0 and LEVER.is_applied(made)
        assert dict(made.model.named_buffers()).keys() >= {"blocks.0.1.base_layer.weight_codes"}
    frozen = [name for name in before if "base_layer.weight" in name]
    assert frozen and all(torch.equal(made.model.state_dict()[name], before[name]) for name in frozen)
    assert first.loss > 0


def test_whole_weights_are_not_moved_to_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that holds the codes may have no room for what they are made of."""
    made = workload()
    plan = replace(plan_of(made, levers()), device="rtx-4090")
    before, moved = copy.deepcopy(made.model.state_dict()), list[int]()

    def to(place: Any) -> None:
        moved.append(sum(p.untyped_storage().nbytes() for p in made.model.parameters()))

    monkeypatch.setattr(made.model, "to", to)
    monkeypatch.setattr("memfit.pipeline.placement.on_this_machine", lambda named: replace(named, name="cuda:0"))
    monkeypatch.setattr("memfit.pipeline.placement.on_device", lambda batch, place: batch)
    monkeypatch.setattr("memfit.pipeline._apply.check_plan", _refusing)
    with pytest.raises(ZeroDivisionError):
        memfit.apply(plan, made)
    whole_bytes = sum(p.nbytes for p in made.model.parameters())
    assert moved == [whole_bytes - 4 * 64 * 256 * 4]
    assert is_same(made.model.state_dict(), before)
    places = {name: getattr(p, "memfit_place", None) for name, p in made.model.named_parameters()}
    assert {name for name, place in places.items() if place == torch.device("cuda:0")} == {
        name for name in places if name.endswith("base_layer.weight")
    }
    for parameter in made.model.parameters():
        if hasattr(parameter, "memfit_place"):
            parameter.memfit_place = torch.device("cpu")
    with applied(levers(), made) as step:
        assert step.gradients(made.batch)[0] > 0
    assert not any(hasattr(p, "memfit_place") for p in made.model.parameters())
    assert is_same(made.model.state_dict(), before)


def _refusing(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_missing_package_is_noted(adapted: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trace = capture_levers(adapted, Levers(microbatch_size=1), find_device("cpu"))
    step: Any = SimpleNamespace(
        workload=adapted,
        plain=Levers(microbatch_size=1),
        allows=lambda levers: True,
        trace=lambda levers: trace,
        predicted=lambda levers: SimpleNamespace(peak_bytes=10**6, peak_upper_bytes=10**6),
        budget_bytes=10**5,
        tries_all=False,
    )
    with pytest.raises(
        NotOffered, match=r"bitsandbytes is not installed \(pip install 'memfit\[optimizers\]'\)"
    ) as error:
        LEVER.propose(step, [step.plain])
    assert error.value.is_noted
    with pytest.raises(PlanError, match=r"bitsandbytes not installed.*pip install 'memfit\[optimizers\]'"):
        with applied(levers(size=1), adapted):
            pass


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    def trained(steps: int, out: Path, **options: Any) -> dict[str, torch.Tensor]:
        made = dataclasses.replace(workload(samples=4), batches=None)
        plan = plan_of(made, levers())
        memfit.train(plan, made, steps=steps, out=out, **options)
        return made.model.state_dict()

    whole = trained(4, tmp_path / "whole")
    trained(2, tmp_path / "half")
    assert is_same(trained(4, tmp_path / "half", resume=True), whole)
    first = workload().model.state_dict()
    frozen = [name for name in first if "base_layer.weight" in name]
    assert frozen and all(torch.equal(first[name], whole[name]) for name in frozen)
