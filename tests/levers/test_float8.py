"""Products in float8: those of rounded factors, memory as predicted, the model untouched, and proposed where faster."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

import memfit
from memfit.errors import PlanError
from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, Levers, Plan, Region, Tiles
from memfit.levers import LEVERS, LeversOn, NotOffered, Switch, applied, check_combination, lever_uses
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload, fingerprint
from tests.measuring import peaks, step_peak_bytes
from tests.scalar_kernels import scalar_kernels

NAME = "products in float8"
(LEVER,) = (lever for lever in LEVERS if lever.name == NAME)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORWARD, BACKWARD = 0.037, 0.059


def levers(*patterns: str, size: int = 4, **changes: Any) -> Levers:
    return Levers(microbatch_size=size, float8=patterns or ("blocks.*",), **changes)


def rounded(values: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the numbers that a matrix in 8 bits stands for, in float64: with one scale, as the lever says."""
    scale = values.abs().max().float() / torch.finfo(dtype).max
    return (values / scale).to(dtype).double() * scale.double()


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def layer(rows: int, n: int, m: int, *, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(rows)
    made = nn.Linear(n, m, bias=bias)
    nn.init.normal_(made.weight)
    return made, torch.randn(rows, n, requires_grad=True), torch.randn(rows, m)


def run(module: nn.Module, x: Tensor, grad: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    out = module(x)
    return out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))


# The products


@pytest.mark.parametrize("rows", [32, 37])
def test_each_product_is_that_of_rounded_factors(rows: int) -> None:
    """And not of the factors as they were; a count of rows that is no multiple of 16 has another product in one."""
    module, x, grad = layer(rows, 48, 64)
    plain = run(module, x, grad, x, module.weight, module.bias)
    with LEVER.on_model(levers("*"), nn.Sequential(module)):
        out, of_x, of_weight, of_bias = run(module, x, grad, x, module.weight, module.bias)
    a, w, g = (rounded(values.detach()) for values in (x, module.weight, grad))
    g = rounded(grad, E5M2)
    expected = a @ w.t() + module.bias.double(), g @ w, (g if rows == 32 else grad.double()).t() @ a
    for found, wanted, as_is in zip((out, of_x, of_weight), expected, plain, strict=False):
        assert error(found, wanted) < 1e-6 < 0.02 < error(found, as_is)
    assert torch.allclose(of_bias, plain[3])


@pytest.mark.filterwarnings("ignore")  # of what torchao imports
def test_products_are_those_of_torchao() -> None:
    """Which replaces the module, and emulates products by fp32's."""
    torchao = pytest.importorskip("torchao.float8")
    module, x, grad = layer(64, 128, 96, bias=False)
    config = torchao.Float8LinearConfig(emulate=True)
    (other,) = torchao.convert_to_float8_training(nn.Sequential(copy.deepcopy(module)), config=config)
    expected = run(other, x, grad, x, other.weight)
    with LEVER.on_model(levers("*"), nn.Sequential(module)):
        found = run(module, x, grad, x, module.weight)
    assert all(error(one, wanted) < 1e-6 for one, wanted in zip(found, expected, strict=True))


def test_normal_matrices_are_as_far_as_the_lever_says() -> None:
    module, x, grad = layer(512, 512, 512, bias=False)
    plain = run(module, x, grad, x, module.weight)
    with LEVER.on_model(levers("*"), nn.Sequential(module)):
        found = run(module, x, grad, x, module.weight)
    out, *gradients = map(error, found, plain)
    assert out == pytest.approx(FORWARD, rel=0.03) and gradients == pytest.approx([BACKWARD] * 2, rel=0.03)
    words = LEVER.words(LeversOn(levers("0"), 4))[0]
    assert words == f"1 linear layer; {FORWARD:.1%} of a product's norm off, {BACKWARD:.1%} of a gradient's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_those_of_a_plain_layer(dtype: torch.dtype, autocast: bool) -> None:
    module, x, grad = layer(32, 32, 48)
    grad.div_(100)
    if not autocast:
        module, x = module.to(dtype), x.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        plain = run(module, x, grad, x, module.weight, module.bias)
        with LEVER.on_model(levers("*"), nn.Sequential(module)):
            found = run(module, x, grad, x, module.weight, module.bias)
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert all(0.01 < error(one, other) < 0.08 for one, other in zip(found[:3], plain[:3], strict=True))
    assert error(found[3], plain[3]) < 0.01


def test_what_is_not_asked_for_is_not_made() -> None:
    """A frozen weight has no gradient, and nothing is saved of the input, which has none where it needs none."""
    module, x, grad = layer(32, 48, 64)
    module.requires_grad_(False)
    saved = list[Tensor]()
    with (
        LEVER.on_model(levers("*"), nn.Sequential(module)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        (of_x,) = torch.autograd.grad(module(x), [x], grad)
        assert [t.shape for t in saved] == [module.weight.shape]
        saved.clear()
        module.requires_grad_(True)
        module(x.detach()).backward(grad)
        assert sorted(t.nbytes for t in saved) == [4, x.numel()]  # 8 bits a number, and the scale
    assert module.weight.grad is not None and of_x.shape == x.shape


@pytest.mark.parametrize("shape", [(48,), (2, 3, 48), (0, 48), (2, 0, 48)])
def test_inputs_have_the_shapes_of_a_plain_layers(shape: tuple[int, ...]) -> None:
    module, _, _ = layer(16, 48, 64)
    x = torch.randn(shape, requires_grad=True)
    with LEVER.on_model(levers("*"), nn.Sequential(module)):
        out = module(x)
        out.sum().backward()  # an expanded gradient
    assert out.shape == (*shape[:-1], 64) and x.grad.shape == x.shape  # type: ignore[union-attr]
    assert not x.numel() or error(out, F.linear(x, module.weight, module.bias)) < 0.1


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    module, x, _ = layer(16, 32, 32, bias=False)
    with LEVER.on_model(levers("*"), nn.Sequential(module)), torch.no_grad():
        assert torch.equal(module(torch.zeros(16, 32)), torch.zeros(16, 32))
        for value in (float("inf"), float("nan")):
            broken = x.detach().clone()
            broken[3, 4] = value
            assert module(broken).isnan().any()
        with pytest.raises(RuntimeError, match="dtype"):  # as of a plain layer
            module(torch.zeros(16, 32, dtype=torch.bfloat16))


# Which layers


class Various(nn.Module):
    """Layers whose products stay, each for a reason of its own, and two whose do not."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Linear(64, 32)
        self.embedding = nn.Embedding(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.embedding.weight
        self.uneven, self.odd = nn.Linear(64, 24), nn.Linear(24, 64)
        self.double = nn.Linear(64, 64).double()
        self.attention = nn.MultiheadAttention(64, 2)
        self.normalised = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.replaced = nn.Linear(64, 64)
        self.replaced.forward = lambda x: x  # type: ignore[method-assign]


def taken(model: nn.Module) -> set[str]:
    return {fqn for fqn, module in model.named_modules() if type(vars(module).get("forward")).__name__ == "Multiplying"}


def test_only_layers_whose_products_have_kernels_are_taken() -> None:
    model = Various()
    with LEVER.on_model(levers("*"), model):
        assert taken(model) == {"taken", "tied"}
        with pytest.raises(PlanError, match=r"in float8 already: call close\(\)"):
            LEVER.on_model(levers("*"), model).__enter__()
    with LEVER.on_model(levers("t?ken"), model):
        assert taken(model) == {"taken"}
    assert not taken(model)
    for pattern in ("uneven", "attention.*", "no.such"):
        with pytest.raises(PlanError, match=rf"levers.float8 has '{pattern}', and no layer.*multiples of 16.*Take it"):
            LEVER.on_model(levers("taken", pattern), model).__enter__()
    assert not taken(model)


# A step


class Language(nn.Module):
    """A residual network over tokens, with a head."""

    def __init__(self, width: int = 64, depth: int = 2, words: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1).float(), batch["tokens"].flatten())


def workload(samples: int = 4, tokens: int = 32, **changes: Any) -> Workload:
    torch.manual_seed(0)
    model = Language()
    batch = {"tokens": torch.randint(0, 96, (samples, tokens))}
    made = Workload(model, batch, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), name="language")
    return dataclasses.replace(made, bf16_updates="master-weights", **changes)


CHANGES: dict[str, dict[str, Any]] = {
    "alone": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "16-mixed": {"precision": "16-mixed"},
    "regions": {"regions": (Region(("blocks.0",)), Region(("blocks.1.3",)))},
    "a kept product": {"regions": (Region(("blocks.0",), keep=("aten._scaled_mm.default#0",)),)},
    "microbatches": {"size": 2, "precision": "bf16-mixed"},
    "chunks": {"chunked_loss": ChunkedLoss(head="head", rows=16), "lean": ("*",)},
    "tiles": {"tiles": Tiles(modules=("blocks.0", "blocks.1"), tokens=32), "regions": (Region(("blocks.1",)),)},
    "updates": {"update": "in-backward", "regions": (Region(("blocks.1",)),)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_peak_is_predicted_to_the_byte(name: str) -> None:
    predicted_bytes, measured_bytes = peaks(workload(), levers(**CHANGES[name]))
    assert predicted_bytes == measured_bytes
    assert step_peak_bytes(workload(), levers("blocks.0.1", **CHANGES[name])) != measured_bytes


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_are_near_the_plain_ones_under_other_levers(name: str) -> None:
    made, used = workload(), levers(**CHANGES[name])
    with applied(replace(used, float8=()), made) as step:
        loss, plain = step.gradients(made.batch)
    with applied(used, made) as step:
        assert taken(made.model) or used.precision == "bf16-true"  # where casts are around
        assert LEVER.is_applied(made)
        other, found = step.gradients(made.batch)
    assert not LEVER.is_applied(made)
    assert loss != other == pytest.approx(loss, rel=2e-3)
    assert found.keys() == plain.keys()
    assert all(0.003 < error(found[fqn], plain[fqn]) < 0.15 for fqn in plain if fqn.startswith("blocks"))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchDynamo, and of what Inductor imports
@scalar_kernels()
def test_compiled_code_computes_the_same() -> None:
    """To the order of sums, in as much memory as predicted; and where the lever is put on a compiled step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Workload(model, torch.randn(64, 32), lambda model, x: model(x).square().mean(), sgd)
    used = levers("*", size=64, compiler="inductor")
    with applied(replace(used, compiler="none"), made) as step:
        expected = step.gradients(made.batch)
    with applied(used, made) as step:
        found = step.gradients(made.batch)
    with applied(replace(used, float8=()), made) as step:
        plain = step.gradients(made.batch)
        switch = Switch(step, used)
        switched = step.gradients(made.batch)
        switch.close()
        again = step.gradients(made.batch)
    assert abs(plain[0] - expected[0]) > 1e-6 and again[0] == plain[0]
    for compiled in (found, switched):
        assert compiled[0] == pytest.approx(expected[0], rel=1e-6)
        assert all(error(compiled[1][fqn], gradient) < 1e-5 for fqn, gradient in expected[1].items())
    assert all(error(plain[1][fqn], gradient) > 1e-3 for fqn, gradient in expected[1].items())
    predicted_bytes, measured_bytes = peaks(made, used)
    assert predicted_bytes == measured_bytes


def test_modules_that_are_to_stay_in_fp32_do() -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        made = workload(fp32_modules=("blocks.0.*",))
        with applied(levers("blocks.1.*", precision=precision), made):
            assert LEVER.is_applied(made)
        used = levers("blocks.0.1", precision=precision)
        with pytest.raises(PlanError, match="no layer of that name"), applied(used, made):
            pytest.fail("not reached")


def test_the_head_of_a_chunked_loss_stays() -> None:
    chunks = ChunkedLoss(head="head", rows=16)
    made = workload()
    with applied(levers("*", chunked_loss=chunks), made) as step:
        loss, _ = step.gradients(made.batch)
        assert "head" not in taken(made.model) and "blocks.0.1" in taken(made.model)
    with applied(levers(chunked_loss=chunks), made) as step:
        assert step.gradients(made.batch)[0] == loss
    with (
        pytest.raises(PlanError, match="not the head of a chunked loss"),
        applied(levers("head", chunked_loss=chunks), made),
    ):
        pytest.fail("not reached")


def test_the_model_is_the_users() -> None:
    made = workload()
    before, parameters = copy.deepcopy(made.model.state_dict()), list(made.model.parameters())
    known, attributes = fingerprint(made), [set(vars(module)) for module in made.model.modules()]
    with applied(levers(), made) as step:
        assert fingerprint(made) == known
        assert list(made.model.state_dict()) == list(before)
        assert all(one is other for one, other in zip(made.model.parameters(), parameters, strict=True))
        for copied in (copy.deepcopy(made.model), pickle.loads(pickle.dumps(made.model))):
            assert taken(copied) == taken(made.model)
            assert torch.equal(loss_of(copied, made.batch), loss_of(made.model, made.batch))
            copied.blocks[0][1].weight.data.zero_()  # the copy's own
            assert not torch.equal(loss_of(copied, made.batch), loss_of(made.model, made.batch))
        step(made.batch)
    assert [set(vars(module)) for module in made.model.modules()] == attributes
    assert not torch.equal(made.model.blocks[0][1].weight, before["blocks.0.1.weight"])
    with pytest.raises(ZeroDivisionError), applied(levers(), made):
        raise ZeroDivisionError
    assert [set(vars(module)) for module in made.model.modules()] == attributes


def test_a_trace_knows_the_work_and_the_time_of_each_layer() -> None:
    """In both passes, by the layer's name: as many operations as the plain products have, in float8."""
    device = find_device("cpu")
    traces = [capture_levers(workload(), used, device) for used in (levers("blocks.*"), replace(levers(), float8=()))]
    counts = [
        sum(
            trace.works[op.signature].flops
            for op in trace.ops
            if op.phase in ("forward", "backward") and trace.fqn_of(op.call) == "blocks.0.1"
        )
        for trace in traces
    ]
    assert counts[0] == counts[1] == 3 * 2 * (4 * 32) * 64 * 256
    dtypes = {trace.works[op.signature].dtype for trace in traces for op in trace.ops if "_scaled_mm" in op.name}
    assert dtypes == {"float8"}
    costs = costs_of(traces, device)
    for trace in traces:
        seconds = costs.module_seconds(trace)
        assert seconds["blocks.0.1"] > 0
        assert sum(seconds.values()) == pytest.approx(float(sum(trace.repeats * costs.op_seconds(trace))))


def test_verify_says_how_far_it_is_and_training_goes_on() -> None:
    made, used = workload(), levers()
    plan = memfit.plan(made, budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    assert not plan.levers.float8
    trace = capture_levers(made, used, device := find_device("cpu"))
    prediction, _ = predict(trace, costs_of([trace], device), device)
    words: dict[str, Any] = {"uses": lever_uses(LeversOn(used, plan.batch_size)), "numerics": "reduced"}
    eight: Plan = replace(plan, levers=used, predicted=prediction, allowed="reduced", **words)
    found = memfit.verify(eight, made, steps=0)
    assert found.holds and not found.bitwise and 0 < found.loss_difference < 0.01
    with memfit.apply(plan, copied := workload()) as step:
        losses = [step(copied.batch).loss for _ in range(8)]
    with memfit.apply(eight, made) as step:
        others = [step(made.batch).loss for _ in range(8)]
    assert others[-1] < others[0] - 0.5 and others == pytest.approx(losses, rel=0.02)


# Where it is proposed


@pytest.mark.parametrize("name", ["cpu", "rtx-3090", "a100-80gb", "mi300x", "t4"])
def test_it_is_never_proposed_where_there_are_no_units(name: str) -> None:
    device = find_device(name)
    step: Any = SimpleNamespace(device=device)
    with pytest.raises(NotOffered, match=f"{name} has no float8 products"):
        LEVER.propose(step, [])
    if name == "cpu":
        check_combination(levers(), workload(), device)  # which emulates them
        return
    with pytest.raises(PlanError, match="products in float8 can't be combined with a device without float8 products"):
        check_combination(levers(), workload(), device)


def test_all_layers_are_tried_before_nothing_is_said_to_fit() -> None:
    """But for the head, what is to stay in fp32, and beside levers that go with it; whatever time they take."""
    made = workload(fp32_modules=("blocks.0.1",))
    trace = capture_levers(made, plain := Levers(microbatch_size=4), find_device("cpu"))
    step: Any = SimpleNamespace(workload=made, plain=plain, device=find_device("h100"), shardings=(), tries_all=True)
    step.trace, step.allows = lambda levers: trace, lambda levers: True
    compiled = replace(plain, compiler="inductor")
    tried = ("blocks.0.3", "blocks.1.1", "blocks.1.3")
    assert LEVER.propose(step, [plain, compiled]) == [plain, compiled, replace(plain, float8=tried)]
    step.shardings = ("zero3",)
    with pytest.raises(NotOffered, match="ranks share the step"):
        LEVER.propose(step, [plain])


class Gated(nn.Module):
    """A large layer, a small one, and a head."""

    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        self.large = nn.Linear(width, width, bias=False)
        self.small, self.back = nn.Linear(width, 16, bias=False), nn.Linear(16, width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.large(x)) + self.back(self.small(x)))


def gated(rows: int) -> Workload:
    with torch.device("meta"):
        model = Gated().to(torch.bfloat16)
        x = torch.empty(1, rows, 8192, dtype=torch.bfloat16, requires_grad=True)
    return Workload(model, x, lambda model, x: model(x).float().square().mean(), torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("device", "rows", "numerics", "expected"),
    [
        ("h100", 8192, "reduced", ("large",)),
        ("h100", 8192, "reordered", ()),
        ("h100", 64, "reduced", ()),  # rounding the weight takes longer than the product
    ],
)
def test_it_is_proposed_for_layers_that_are_faster_with_it(
    device: str, rows: int, numerics: Any, expected: tuple[str, ...]
) -> None:
    plan = memfit.plan(gated(rows), device=device, budget="40GiB", numerics=numerics, points=1, optimizers=())
    assert plan.levers.float8 == expected
    assert (plan.predicted.step_seconds < 0.95 * plan.plain.step_seconds) == bool(expected)
    if expected:
        assert plan.classes[NAME] == "reduced" and "products in float8" in str(plan)
