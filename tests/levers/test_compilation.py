"""Compiled steps: predicted on paper, held to their budgets, computed as the plain step, and trained with safely."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import fx, nn

import memfit
from memfit._torch import compilers
from memfit.capture import Recorder, measure_peak_bytes
from memfit.compiled import FUSED_ERROR, CompiledLoss, PlannedBackend
from memfit.compiled.compiled_loss import MOST_SHAPES, unwatched
from memfit.errors import InfeasibleError, MemfitError, PlanError, UsageError
from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, Levers, Plan, Region, Regions, Trace, is_kernel, simulate
from memfit.levers import LEVERS, applied, applied_to_copy, recomputes
from memfit.levers.compilation import Compilation
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests import warm
from tests.covering import some
from tests.scalar_kernels import scalar_kernels

WHOLE = Levers(microbatch_size=256, compiler="inductor")
ROWS = replace(WHOLE, microbatch_size=4)
CPU = find_device("cpu")


class Whole(nn.Module):
    """Residual blocks and a head, which Dynamo makes one graph of."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(blocks)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Broken(Whole):
    """Blocks between which Dynamo breaks the graph."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        torch._dynamo.graph_break()
        x = x + self.blocks[1](x)
        torch._dynamo.graph_break()
        x = x + self.blocks[2](x)
        return self.head(x)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def cross_entropy_of_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def workload_of(model: nn.Module) -> Workload:
    torch.manual_seed(1)
    batch = {"x": torch.randn(256, 32), "y": torch.randint(0, 10, (256,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Workload(model=model, batch=batch, loss_fn=cross_entropy, optimizer=optimizer, name="compiled")


def of_rows(make: Callable[[], nn.Module]) -> Callable[[], Workload]:
    """Return a workload whose samples are of many rows each: a plan has few sizes of microbatches to compile."""

    def build() -> Workload:
        torch.manual_seed(0)
        workload = workload_of(make())
        batch = {"x": workload.batch["x"].view(4, 64, 32), "y": workload.batch["y"].view(4, 64)}
        return dataclasses.replace(workload, batch=batch, loss_fn=cross_entropy_of_rows)

    return build


def of_batch(make: Callable[[], nn.Module], batch: Callable[[], Any], **changes: Any) -> Callable[[], Workload]:
    """Return a workload of a batch of its own: what the model takes, and the classes."""

    def build() -> Workload:
        torch.manual_seed(0)
        model, (x, y) = make(), batch()
        return dataclasses.replace(workload_of(model), batch={"x": x, "y": y}, **changes)

    return build


broken, whole, short = of_rows(Broken), of_rows(Whole), of_rows(lambda: Whole(1))
dropping = of_rows(
    lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32), nn.Linear(32, 10))
)
convolutions = of_batch(
    lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    ),
    lambda: (torch.randn(16, 3, 24, 24), torch.randint(0, 10, (16,))),
)


class Reading(nn.Module):
    """Reads values of its tensors between graphs: those of a counter, of activations, and of a mask's length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.register_buffer("calls", torch.tensor(0))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        self.calls += 1
        if self.calls.item() > 0:
            hidden = hidden.tanh()
        if hidden.mean().item() < 1e9:
            hidden = (2 * hidden).sigmoid()
        positive = sum((hidden.sum(1) > 0).tolist())
        hidden = self.second(hidden[(hidden.sum(1) > 0).nonzero().squeeze(1)]).relu() * positive
        return self.head(hidden)


class Checking(nn.Module):
    """Takes branches by what its tensors hold, as models do that guard against overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.limit = 1e6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if hidden.abs().max() > self.limit:
            hidden = hidden.clamp(-self.limit, self.limit)
        hidden = self.second(hidden).relu()
        if hidden.isnan().any().item() or torch.equal(hidden, -hidden):
            raise FloatingPointError("no activations")
        return self.head(hidden)


class Listening(nn.Module):
    """Runs a layer that Dynamo leaves alone, and registers hooks at its first call, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent, self.head = nn.Linear(32, 64), nn.LSTM(64, 64), nn.Linear(64, 10)
        self.heard: list[torch.Tensor] = []
        self.listens = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.listens:
            self.listens = True
            self.first.register_forward_hook(lambda module, given, out: self.heard.append(out))
        self.heard.clear()
        hidden, _ = self.recurrent(self.first(x).relu().unflatten(0, (16, -1)))
        return self.head(hidden.flatten(0, 1) + self.heard[0])


def listening() -> Workload:
    torch.manual_seed(0)
    return workload_of(Listening())


class Interpolating(nn.Module):
    """Takes maps of two sizes to one: look-ups, whose backward passes are scatters that run in one function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(16, 10, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x).relu()
        maps = [head(f) for head, f in zip(self.heads, (fine, self.second(fine).relu()), strict=True)]
        return torch.stack([nn.functional.interpolate(m, x.shape[-2:], mode="bilinear") for m in maps]).mean(0)


interpolating = of_batch(Interpolating, lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8, 32, 32))))


class NextToken(nn.Module):
    """Logits of all but the last token of each row, as language models compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)[:, :-1]


class TiedEnds(nn.Module):
    """A wide residual block between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 32)
        self.block = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return nn.functional.linear(x + self.block(x), self.embedding.weight)


# The gradient of the logits takes the place of the sums that its kernel computes, and not that of the logits.
of_logits = of_batch(lambda: nn.Linear(64, 2048), lambda: (torch.randn(512, 64), torch.randint(0, 2048, (512,))))
# A value that is summed and read again is computed for each, so that no tensor of its size is allocated.
of_a_part_of_the_logits = of_batch(
    NextToken, lambda: (torch.randn(8, 65, 64), torch.randint(0, 2048, (8, 64))), loss_fn=cross_entropy_of_rows
)
# The gradient of the logits does not wait for that of the embedding.
of_tied_ends = of_batch(TiedEnds, lambda: tuple(torch.randint(0, 2048, (2, 512))))


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
BLOCKS = (Region(("blocks.0",)), Region(("blocks.2.1", "blocks.2.2")))
CONVOLUTIONS = Levers(microbatch_size=8, compiler="inductor")
LOGITS = Levers(microbatch_size=512, compiler="inductor")
SHAPES: list[Any] = [
    pytest.param(broken, replace(ROWS, microbatch_size=2, regions=BLOCKS), 0.01, id="three-graphs-regions"),
    pytest.param(dropping, ROWS, 0.15, id="dropout"),
    pytest.param(interpolating, CONVOLUTIONS, 0.1, id="interpolation"),
    pytest.param(lambda: workload_of(Checking()), replace(WHOLE, microbatch_size=96), 0.1, id="branches-uneven"),
    pytest.param(listening, replace(WHOLE, microbatch_size=96), 0.05, id="eager-layers-hooks-uneven"),
    # 10 % less is allocated on some processors, for a reason not yet found.
    pytest.param(short, replace(ROWS, precision="bf16-mixed", microbatch_size=2), 0.12, id="bf16-mixed"),
    pytest.param(convolutions, replace(CONVOLUTIONS, compiler="inductor-channels-last"), 0.05, id="channels-last"),
    pytest.param(of_logits, LOGITS, 0.03, id="logits"),
    pytest.param(of_a_part_of_the_logits, replace(LOGITS, microbatch_size=8), 0.005, id="part-of-logits"),
    pytest.param(of_tied_ends, replace(LOGITS, regions=(Region(("block",)),)), 0.03, id="tied-ends-region"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("make", "levers", "tolerance"), SHAPES)
def test_the_predicted_peak_is_the_measured_one(make: Any, levers: Levers, tolerance: float) -> None:
    """Or the step takes less, where Inductor fuses across modules. In bfloat16 its kernels have vectors."""
    workload = make()
    trace = capture_levers(workload, levers, CPU)
    prediction, _ = predict(trace, costs_of([trace], CPU), CPU)
    vectors = levers.precision == "bf16-mixed"
    with applied_to_copy(levers, workload) as step, contextlib.nullcontext() if vectors else scalar_kernels():
        step(step.workload.batch)
        measured = measure_peak_bytes(step, step.workload.batch)
    assert (1 - tolerance) * prediction.peak_bytes <= measured <= prediction.peak_upper_bytes
    assert measured <= (1 + FUSED_ERROR) * prediction.peak_bytes


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """The step as it is, compiled, and compiled with a region."""
    levers = {"plain": Levers(microbatch_size=4), "compiled": ROWS, "region": replace(ROWS, regions=BLOCKS)}
    return {name: capture_levers(broken(), each, CPU) for name, each in levers.items()}


def test_kernels_are_operators_that_regions_can_be_chosen_of(traces: dict[str, Trace]) -> None:
    plain, compiled, region = (traces[name] for name in ("plain", "compiled", "region"))
    assert not any(map(is_kernel, plain.signatures)) and any(map(is_kernel, compiled.signatures))
    assert {"blocks.0", "blocks.1.2", "head"} <= set(Regions(compiled).calls)
    assert any(op.phase == "recompute" for op in region.ops)
    costs = costs_of([compiled, region], CPU)
    on_paper = simulate(compiled, costs, BLOCKS[:1]).peak_bytes
    assert simulate(region, costs).peak_bytes <= on_paper < simulate(compiled, costs).peak_bytes


def test_kernels_wait_for_no_dispatch_and_the_upper_end_is_wider(traces: dict[str, Trace]) -> None:
    compiled = traces["compiled"]
    costs = replace(costs_of([compiled], CPU), dispatch_seconds=1.0, peak_error=0.0)
    kernels = sum(is_kernel(compiled.signatures[op.signature]) for op in compiled.ops)
    prediction, timeline = predict(compiled, costs, CPU)
    assert timeline.step_seconds == pytest.approx(len(compiled.ops) - kernels, rel=0.01)
    held = sum(storage.nbytes for storage in compiled.storages if storage.birth < 0)
    added = prediction.peak_bytes - held
    assert prediction.peak_upper_bytes == int(prediction.peak_bytes + FUSED_ERROR * added)


@pytest.fixture(scope="module")
def compiled() -> Plan:
    return memfit.plan(whole(), budget="0.6x", compile=True, precisions=["32-true"], points=2)


@pytest.mark.ci
def test_compiled_steps_leave_what_others_fit() -> None:
    """Their error bars are wider: a compiled plan of a lower peak may need a larger budget."""
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 1}
    lowest: dict[Any, int] = {}
    for compile in (False, "auto"):
        with pytest.raises(InfeasibleError) as error:
            memfit.plan(whole(), budget="1B", compile=compile, **options)
        assert error.value.lowest_peak_bytes is not None
        lowest[compile] = error.value.lowest_peak_bytes
    assert lowest["auto"] <= lowest[False]
    plan = memfit.plan(whole(), budget=lowest["auto"], compile="auto", **options)
    assert plan.predicted.peak_upper_bytes <= lowest["auto"]


@pytest.mark.parametrize("must_compile", [False, True])
def test_sizes_that_are_searched_with_other_levers_are_compiled_without_them(must_compile: bool) -> None:
    """A chunked loss that costs no time stands for all sizes but the whole batch's; compiled code can't have it."""
    chunked = [Levers(microbatch_size=size, chunked_loss=ChunkedLoss(head="head", rows=8)) for size in (4, 2)]
    lean = [replace(levers, lean=("*",)) for levers in chunked]
    wanted = [Levers(microbatch_size=4), *chunked, *lean]
    step: Any = SimpleNamespace(
        compilers=("inductor", "inductor-channels-last"),
        must_compile=must_compile,
        plain=wanted[0],
        trace=lambda levers: SimpleNamespace(ops=[]),
    )
    found = Compilation().propose(step, wanted)
    compiled = [Levers(microbatch_size=size, compiler="inductor") for size in (4, 2)]
    assert found == (compiled if must_compile else [*wanted, *compiled])


@pytest.mark.ci
def test_a_plan_is_compiled_where_that_is_asked_for(compiled: Plan) -> None:
    options: dict[str, Any] = {"budget": "0.6x", "precisions": ["32-true"], "points": 1}
    eager, either = (memfit.plan(whole(), compile=compile, **options) for compile in (False, "auto"))
    for plan, allowed in ((eager, {"none"}), (compiled, {"inductor"}), (either, {"none", "inductor"})):
        assert {point.levers.compiler for point in plan.frontier} <= allowed
        assert plan.predicted.peak_upper_bytes <= plan.budget_bytes
    fastest = min(plan.predicted.step_seconds for plan in (eager, compiled))
    assert either.predicted.step_seconds <= 1.03 * fastest
    assert compiled.levers.compiler == "inductor" and compiled.classes["compilation"] == "reordered"
    assert any(re.search(r"compiles about \d+ kernels: about [\d.]+ s", n) for n in compiled.notes)
    assert compiled.code_seconds > 0 == eager.code_seconds


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"compile": "always"}, UsageError, "compile='always' is unknown"),
        ({"compile": True, "numerics": "exact"}, UsageError, "numerics='exact' does not allow compile=True"),
        (
            {"compile": True, "world_size": 2},
            PlanError,
            "compilation can't be combined with sharding|sharding .* compilation",
        ),
    ],
)
def test_what_can_not_be_compiled_is_refused(options: dict[str, Any], error: type[MemfitError], text: str) -> None:
    with pytest.raises(error, match=text):
        memfit.plan(whole(), budget="0.9x", **options)


@pytest.mark.ci
def test_a_step_without_code_says_so() -> None:
    disabled = torch.compiler.disable(cross_entropy_of_rows)
    apart = dataclasses.replace(whole(), loss_fn=lambda model, batch: disabled(model, batch))
    with pytest.raises(PlanError, match="compiled nothing of the step"):
        capture_levers(apart, ROWS, CPU)
    plan = memfit.plan(apart, budget="1x", compile="auto", precisions=["32-true"], points=1)
    assert plan.levers.compiler == "none"
    assert any(re.match("compiled: left out.*compiled nothing of the step", note) for note in plan.notes)


@pytest.mark.ci
def test_steps_that_read_between_graphs_are_refused_with_the_line() -> None:
    """Code is made for each value: steps of another value would wait for it."""
    with pytest.raises(PlanError, match=r"reads values of its tensors at .*test_compilation\.py:\d+, between"):
        capture_levers(workload_of(Reading()), WHOLE, CPU)


def test_layers_between_graphs_and_hooks_that_come_with_the_step_are_captured() -> None:
    trace = capture_levers(listening(), WHOLE, CPU)
    names = {op.name for op in trace.ops if not is_kernel(trace.signatures[op.signature])}
    assert any("lstm" in name or "rnn" in name for name in names), names
    assert any(map(is_kernel, trace.signatures)) and trace.saves


class Looping(nn.Module):
    """Breaks the graph in a loop, so that Dynamo leaves the whole method alone, with layers of PyTorch's own in it."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.first, self.head, self.breaks = nn.Linear(32, 16), nn.Linear(16, 10), breaks
        self.layers = nn.ModuleList(nn.LayerNorm(16) if breaks else nn.LSTM(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            found = layer(x)
            x = x + (found if self.breaks else found[0])
        return self.head(x)


GRAPH_BREAKS = {
    "lstm-in-loop": lambda: workload_of(Looping(breaks=False)),
    "break-in-loop": lambda: workload_of(Looping(breaks=True)),
    "between-blocks": broken,
    "hooks": listening,
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lists to which the operators of graphs are added as Dynamo gives them, the latest one's; no code is made."""
    found: list[list[str]] = [[]]
    compiled = PlannedBackend.__call__

    def noted(self: PlannedBackend, module: fx.GraphModule, inputs: Any) -> Any:
        found[-1] += [str(node.target) for node in module.graph.nodes if node.op != "placeholder"]
        if self.is_on_paper:
            return compiled(self, module, inputs)
        self.graphs += 1
        return module.forward

    monkeypatch.setattr(PlannedBackend, "__call__", noted)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("name", some(GRAPH_BREAKS, ["break-in-loop", "hooks"]))
def test_the_graphs_that_run_are_those_that_are_captured_whatever_was_compiled_before(
    name: str, graphs: list[list[str]]
) -> None:
    """Dynamo decides by a module's hooks which layers it compiles alone, and remembers those that it gave up on.

    A capture runs two steps. Since PyTorch 2.15 Dynamo compiles a method that registers hooks, and does so again in the
    second step.
    """
    for on_paper in (True, False, True, False, False):
        if on_paper:
            capture_levers(GRAPH_BREAKS[name](), WHOLE, CPU)
        else:
            with applied_to_copy(WHOLE, GRAPH_BREAKS[name]()) as step:
                for _ in range(2):
                    step(step.workload.batch)
        graphs.append([])
    assert graphs[0] and graphs == [*[graphs[0]] * 5, []]


# Not one that registers a hook as it runs: Dynamo compiles the hooked layer of a second copy by itself no more.
@pytest.mark.parametrize("make", [make for name, make in GRAPH_BREAKS.items() if name != "hooks"])
def test_code_stays_while_another_copy_is_compiled(make: Any, graphs: list[list[str]]) -> None:
    with applied_to_copy(WHOLE, make()) as outer:
        outer(outer.workload.batch)
        graphs.append([])
        with applied_to_copy(WHOLE, make()) as inner:
            inner(inner.workload.batch)
        assert graphs[0] and graphs[1] == graphs[0]
        outer(outer.workload.batch)
        assert graphs[1] == graphs[0]  # it is still compiled


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(GRAPH_BREAKS["lstm-in-loop"], id="lstm-in-loop"),
        pytest.param(broken, id="between-blocks", marks=pytest.mark.ci),
    ],
)
def test_a_process_plans_as_often_as_it_wants(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts the compilations of a model's methods, those of copies that are gone too."""
    monkeypatch.setattr(compilers, "_MOST", 3)  # as many as a step has blocks
    torch._dynamo.reset()
    for _ in range(3):
        capture_levers(make(), WHOLE, CPU)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo
def test_what_the_user_compiled_stays_compiled() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    workload = broken()
    mine = torch.compile(workload.model, backend=backend, dynamic=False)
    mine(workload.batch["x"])
    count = len(graphs)
    capture_levers(broken(), WHOLE, CPU)
    mine(workload.batch["x"])
    assert len(graphs) == count > 1


def test_a_module_keeps_the_hooks_that_a_step_adds_and_removes() -> None:
    """Where the recorder's are taken off for a while: a handle holds the mapping that it was made with."""

    def mine(*_: Any) -> None:
        pass

    layer, recorder = nn.Linear(2, 2), Recorder()
    first, second = layer.register_forward_hook(mine), layer.register_forward_hook(mine)
    with recorder.watch(layer):
        watched = list(layer._forward_hooks.items()), list(layer._forward_pre_hooks.items())
        with unwatched(layer):
            assert list(layer._forward_hooks) == [first.id, second.id] and not layer._forward_pre_hooks
            first.remove()
            third = layer.register_forward_hook(mine)
        left = [item for item in watched[0] if item[0] != first.id]
        assert list(layer._forward_hooks.items()) == [*left, (third.id, mine)]
        assert list(layer._forward_pre_hooks.items()) == watched[1]
        third.remove()
        assert third.id not in layer._forward_hooks
    assert list(layer._forward_hooks) == [second.id] and not layer._forward_pre_hooks


class Axes(nn.Module):
    """Reads values that are the same in every step: those of constants, as losses do that list the axes they sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        axes: list[int] = torch.arange(1, hidden.dim()).tolist()
        hidden = hidden - hidden.mean(axes, keepdim=True)
        return self.head(hidden) * (torch.full((), 3).item() - torch.ones(2, dtype=torch.long).sum().item())


@pytest.mark.filterwarnings("ignore:.*Tensor.item")  # torch.compile suggests an option of its own
def test_constants_may_be_read_between_graphs() -> None:
    torch.manual_seed(0)
    model = Axes()
    trace = capture_levers(workload_of(model), WHOLE, CPU)
    assert any(map(is_kernel, trace.signatures))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, where it compiles a branch later
def test_steps_that_branch_run_both_branches() -> None:
    torch.manual_seed(0)
    workload = workload_of(Checking())
    large = {**workload.batch, "x": 1e9 * workload.batch["x"]}
    with applied_to_copy(Levers(microbatch_size=256), workload) as step:
        expected = [step.gradients(batch) for batch in (workload.batch, large, workload.batch)]
    with applied_to_copy(WHOLE, workload) as step:
        found = [step.gradients(batch) for batch in (workload.batch, large, workload.batch)]
    for (loss, gradients), (plain_loss, plain_gradients) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-3, atol=1e-4 * float(plain_loss))
    assert expected[1][0] > 100 * expected[0][0]


class Table(nn.Module):
    """A table whose gradient is sparse, and that is called some times."""

    def __init__(self, make: Any, calls: int) -> None:
        super().__init__()
        self.table, self.calls = make(64, 8, sparse=True), calls

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [self.table(rows.roll(turn, 0)) for turn in range(self.calls)]
        return torch.stack(found).square().mean()


def with_table(make: Any, calls: int) -> Workload:
    model, rows = Table(make, calls), torch.randint(0, 64, (256, 4))
    return Workload(model, rows, lambda model, rows: model(rows), torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_compiled_and_a_sum_of_them_refused(make: Any) -> None:
    """Of what `EmbeddingBag` returns, its gradient needs outputs without a byte; code of a sum fails as it runs."""
    assert any(map(is_kernel, capture_levers(with_table(make, 1), WHOLE, CPU).signatures))
    with pytest.raises(PlanError, match=r"computes with sparse gradients \(aten.add.Tensor\)"):
        capture_levers(with_table(make, 2), WHOLE, CPU)


class Counting(PlannedBackend):
    """Compiles nothing."""

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


def test_batches_of_too_many_shapes_are_refused_by_name() -> None:
    backend = Counting(())
    loss, workload = CompiledLoss(cross_entropy, backend), workload_of(nn.Linear(32, 10))
    for samples in range(1, MOST_SHAPES + 1):
        loss(workload.model, {name: tensor[:samples] for name, tensor in workload.batch.items()})
    assert backend.graphs == MOST_SHAPES
    loss(workload.model, {name: tensor[:2] for name, tensor in workload.batch.items()})
    with pytest.raises(PlanError, match=r"a new shape.*9, 32.*pad batches"):
        loss(workload.model, {name: tensor[:9] for name, tensor in workload.batch.items()})
    assert backend.graphs == MOST_SHAPES


def test_regions_of_other_code_are_refused() -> None:
    with pytest.raises(PlanError, match="does not call blocks.7"):
        capture_levers(whole(), replace(ROWS, regions=(Region(("blocks.7",)),)), CPU)


def test_regions_are_part_of_the_code_and_do_not_switch() -> None:
    regions = replace(ROWS, regions=BLOCKS)
    assert not recomputes(regions) and recomputes(replace(regions, compiler="none"))
    with applied(regions, whole()) as step:  # nothing is put on the model
        assert not any(lever.is_applied(step.workload) for lever in LEVERS)


@pytest.mark.ci
def test_limits_of_the_process_are_refused(compiled: Plan) -> None:
    with pytest.raises(PlanError, match="limit_bytes"):
        memfit.apply(compiled, whole(), limit_bytes=2**30)


@pytest.mark.ci
@scalar_kernels()
def test_a_plan_is_what_it_says(compiled: Plan) -> None:
    verification = memfit.verify(compiled, whole(), steps=0)
    assert verification.failures == [] and not verification.bitwise
    dropped = memfit.plan(dropping(), budget="0.8x", compile=True, precisions=["32-true"], points=1)
    assert any(re.search("dropout masks of (compiled code|microbatches) differ", note) for note in dropped.notes)
    assert memfit.verify(dropped, dropping(), steps=0).failures == []


@pytest.mark.ci
@scalar_kernels()
def test_memory_that_runs_out_in_a_compiled_step_is_recovered(compiled: Plan) -> None:
    smaller = replace(compiled.levers, microbatch_size=compiled.levers.microbatch_size // 2)
    point = replace(compiled.frontier[0], levers=smaller, peak_bytes=compiled.predicted.peak_bytes // 2)
    workload, calls = whole(), 0
    parameter = next(iter(workload.model.parameters()))

    def fail_once(_: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("no room")

    parameter.register_post_accumulate_grad_hook(fail_once)
    allowing = replace(compiled, allowed="changed", frontier=[*compiled.frontier, point])  # the hook sees parts, then
    with memfit.apply(allowing, workload, recover=True) as step:
        losses = [step(workload.batch).loss for _ in range(3)]
        assert step.options.microbatch_size is not None
        assert step.options.microbatch_size < compiled.levers.microbatch_size
    undisturbed = whole()
    with memfit.apply(compiled, undisturbed) as step:
        assert losses == pytest.approx([step(undisturbed.batch).loss for _ in range(3)], rel=1e-4)


@pytest.mark.ci
@scalar_kernels()
def test_each_shape_has_code_and_a_plan_of_its_own(compiled: Plan) -> None:
    """Of the plans on the frontier, those of the same regions; losses are those of the step as it is."""
    workload, plain = whole(), whole()
    small = {name: tensor[:2] for name, tensor in workload.batch.items()}
    with memfit.apply(compiled, workload, adaptive=True) as step, applied(Levers(microbatch_size=4), plain) as expected:
        for batch in (workload.batch, small, workload.batch, small):
            assert step(batch).loss == pytest.approx(expected(batch).loss, rel=1e-4)
    recovery: Any = step.recovery
    assert {candidate.levers.compiler for candidate in recovery.candidates} == {"inductor"}


def trained(plan: Path, out: Path, on_step: Any = None, resume: bool = False) -> str:
    """Return the sum of what a training's parameters are at its end."""
    workload = whole()
    with scalar_kernels():
        memfit.train(
            memfit.Plan.load(plan), workload, out=out, steps=4, checkpoint_every=1, resume=resume, on_step=on_step
        )
    return sum(float(p.detach().double().sum()) for p in workload.model.parameters()).hex()


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.levers.test_compilation import trained

def kill(progress):
    if progress.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

trained(Path(sys.argv[1]), Path(sys.argv[2]), kill)
"""


@pytest.mark.ci
def test_a_training_that_is_killed_ends_bitwise_as_others(compiled: Plan, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    compiled.save(plan)
    killed = warm.run(["-c", _KILLED, str(plan), str(tmp_path / "killed")], cwd=warm.ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps = list[int]()
    resumed = trained(plan, tmp_path / "killed", lambda progress: steps.append(progress.step), resume=True)
    assert resumed == trained(plan, tmp_path / "undisturbed") and steps[0] > 1
