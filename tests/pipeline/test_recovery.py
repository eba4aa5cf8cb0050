"""A run that ran out of memory ends bitwise as one that had the lower plan from the start."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit import ir
from memfit.errors import MemoryLimitError, OutOfMemoryError
from memfit.ir import Levers, Plan, Region, RunRecord
from memfit.levers import Switch, applied, lower_candidates
from memfit.recipes import SeededBatches
from memfit.training import Recovery, Rollback, RunOptions, StepRecord, Trainer, latest
from memfit.workload import Workload
from tests import models
from tests.bombs import Bomb
from tests.pipeline.plans import exact, with_frontier

STEPS = 3


def transformer() -> Workload:
    return models.transformer(layers=1)


def with_option(name: str, workload: Workload) -> Workload:
    for group in workload.optimizer.param_groups:
        group[name] = True
    return workload


def several(workload: Workload) -> Workload:
    first, *rest = workload.model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(rest)]
    object.__setattr__(workload, "optimizer", memfit.Optimizers(optimizers))
    return workload


BUILDERS: dict[str, Callable[[], Workload]] = {
    "transformer": transformer,
    "transformer, foreach": lambda: with_option("foreach", transformer()),
    "transformer, fused": lambda: with_option("fused", transformer()),
    "convnet": models.convnet,
    "several optimizers": lambda: several(transformer()),
}


@functools.cache
def plan_of(name: str) -> Plan:
    """A plan of no regions, with two lower ones: some modules recomputed, and all that can be."""
    workload = BUILDERS[name]()
    plan = exact(workload, "90%", points=2)
    modules = [fqn for fqn, module in workload.model.named_modules() if isinstance(module, nn.Sequential) and fqn]
    return with_frontier(plan, [(), tuple(Region((m,)) for m in modules[:1]), (Region(("",)),)])


def state_of(step: memfit.Step) -> dict[str, Any]:
    """Everything that must be equal: model, optimizer, random states."""
    optimizer = step.workload.optimizer.state_dict()
    state = {f"{index}.{key}": value for index, of in optimizer["state"].items() for key, value in of.items()}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    rest = [optimizer["param_groups"], {key: value for key, value in state.items() if key not in tensors}]
    draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
    values = {name: tensor.clone() for name, tensor in {**step.workload.model.state_dict(), **tensors}.items()}
    return {"tensors": values, "optimizer": json.dumps(rest, default=str), "draws": draws}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tensors"].keys() == other["tensors"].keys()
    differing = [name for name, tensor in one["tensors"].items() if not torch.equal(tensor, other["tensors"][name])]
    assert differing == []
    assert (one["optimizer"], one["draws"]) == (other["optimizer"], other["draws"])


def seed() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def run(name: str, bombs: dict[int, tuple[int, ...]]) -> tuple[dict[str, Any], Recovery, list[float], int]:
    """Train for some steps with bombs in some of them; return state, recovery, losses and the last step's operators."""
    workload = BUILDERS[name]()
    seed()
    with memfit.apply(plan_of(name), workload, recover=True) as step:
        assert isinstance(step.recovery, Recovery)
        losses = []
        for index in range(STEPS):
            with Bomb(*bombs.get(index, ())) as bomb:
                losses.append(step(workload.batch).loss)
        assert step.steps == STEPS
        return state_of(step), step.recovery, losses, bomb.count


@functools.cache
def expected(name: str, which: int) -> tuple[dict[str, Any], list[float]]:
    """The state after training with one of the frontier's plans from the start, and the losses."""
    workload = BUILDERS[name]()
    seed()
    with applied(plan_of(name).frontier[which].levers, workload) as step:
        losses = [step(workload.batch).loss for _ in range(STEPS)]
        return state_of(step), losses


def operators_before_the_update(name: str) -> int:
    workload = BUILDERS[name]()
    with memfit.apply(plan_of(name), workload) as step:
        step(workload.batch)
        with Bomb() as bomb:
            counts: list[int] = []
            handle = workload.optimizer.register_step_pre_hook(lambda *_: counts.append(bomb.count))
            step(workload.batch)
            handle.remove()
    return counts[0]


def check_run(name: str, bombs: dict[int, tuple[int, ...]], which: int = 1) -> Recovery:
    """Check that a run with bombs ends as under one of the frontier's plans."""
    state, recovery, losses, _ = run(name, bombs)
    assert_same(state, expected(name, which)[0])
    assert losses == expected(name, which)[1]
    return recovery


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_wherever_memory_runs_out_the_run_ends_as_under_the_lower_plan(name: str) -> None:
    last = operators_before_the_update(name)
    for at in [*range(1, last, max(1, last // 8)), last]:
        recovery = check_run(name, {1: (at,)})
        assert recovery.plan.levers == plan_of(name).frontier[1].levers
        assert [(e.step, e.error.kind, e.error.requested_bytes, e.held_bytes) for e in recovery.events] == [
            (2, "allocator", 2 * 2**20, 0)
        ]


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_in_the_first_step_and_twice_in_one_and_again_in_the_next(name: str) -> None:
    for bombs, which in (({0: (30,)}, 1), ({1: (30, 60)}, 2), ({0: (30,), 2: (50,)}, 2)):
        assert len(check_run(name, bombs, which).events) == which


def test_the_comparison_of_states_sees_a_lost_and_a_doubled_update() -> None:
    state, _ = expected("convnet", 1)
    for steps in (STEPS - 1, STEPS + 1):
        workload = BUILDERS["convnet"]()
        seed()
        with applied(plan_of("convnet").frontier[1].levers, workload) as step:
            for _ in range(steps):
                step(workload.batch)
            with pytest.raises(AssertionError):
                assert_same(state_of(step), state)


KINDS = ("transformer", "transformer, foreach", "transformer, fused", "several optimizers")
PAIRS = [(name, first) for name in KINDS for first in (True, False)]
SOME = [("transformer", False), ("transformer, fused", True), ("several optimizers", False)]


@pytest.mark.parametrize(("name", "first"), [p if p in SOME else pytest.param(*p, marks=pytest.mark.ci) for p in PAIRS])
def test_in_the_optimizer_with_copies_on_the_host(name: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollback, "has_room", lambda self, wanted_bytes, device: False)
    before = operators_before_the_update(name)
    _, _, _, operators = run(name, {})
    copies = 2 * sum(1 for _ in BUILDERS[name]().model.parameters())
    for at in {before + copies + 5, before + copies + 40, operators - 4}:
        state, recovery, _, _ = run(name, {0 if first else 1: (at,)})
        if recovery.events:  # later operators than there are fail nowhere
            assert_same(state, expected(name, 1)[0])


@pytest.mark.parametrize("name", ["transformer", "several optimizers"])
def test_in_the_optimizer_without_copies_the_training_is_torn_where_something_changed(name: str) -> None:
    before = operators_before_the_update(name)
    check_run(name, {1: (before + 1,)})  # the first operator of the update: nothing is changed yet
    with pytest.raises(OutOfMemoryError, match=r"step 2 .* while the optimizer changed the weights") as caught:
        run(name, {1: (before + 40,)})
    assert caught.value.is_torn and caught.value.step == 2 and caught.value.exit_status == 6


class DataOptimizer(torch.optim.Optimizer):
    """Changes weights through `.data`, which no version counter sees."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


def test_an_optimizer_whose_changes_cannot_be_seen_is_taken_to_have_changed_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    data = torch.randn(8, 4), torch.randn(8, 4)
    workload = Workload(model, data, models.squared_error, DataOptimizer(model.parameters()))
    with applied(Levers(microbatch_size=8), workload) as step:
        back = Rollback(step)
        for has_room in (True, False):
            monkeypatch.setattr(Rollback, "has_room", lambda *given, is_there=has_room: is_there)
            before = [p.clone() for p in model.parameters()]
            back.mark()
            with pytest.raises(torch.OutOfMemoryError):
                with Bomb() as bomb:
                    hook = workload.optimizer.register_step_pre_hook(lambda *_: bomb.at.add(bomb.count + 5))
                    step(data)
            hook.remove()
            changed = [p for p, b in zip(model.parameters(), before, strict=True) if not torch.equal(p, b)]
            assert changed
            assert back.restore() is not has_room
            assert has_room or all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        back.close()


def test_no_frame_holds_tensors_when_the_next_plan_is_taken() -> None:
    workload = BUILDERS["transformer"]()
    alive: list[weakref.ref[torch.Tensor]] = []

    def remember(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        alive.append(weakref.ref(output))

    plan, seen = plan_of("transformer"), list[list[bool]]()
    with applied(plan.levers, workload) as step, contextlib.closing(Switch(step, plan.levers)) as switch:

        def lower_and_look(plan: Plan) -> Plan | None:
            seen.append([reference() is not None for reference in alive])
            assert all(p.grad is None for p in workload.model.parameters())
            return switch.lower(plan)

        with contextlib.closing(Recovery(step, plan, lower_and_look)) as recovery:
            step.change(recovery=recovery)
            for module in workload.model.modules():
                module.register_forward_hook(remember)
            with Bomb(operators_before_the_update("transformer") - 30):
                step(workload.batch)
    assert len(seen) == 1 and len(seen[0]) > 10 and not any(seen[0])


def test_after_the_lowest_plan_the_step_stops_as_if_it_had_not_begun() -> None:
    name = "convnet"
    workload = BUILDERS[name]()
    seed()
    with memfit.apply(plan_of(name), workload, recover=True) as step:
        step(workload.batch)
        before = state_of(step)
        seed()
        handle = workload.model.register_forward_hook(lambda *_: raises(MemoryError()))
        with pytest.raises(OutOfMemoryError, match="under its plan and under 2 with a lower peak") as caught:
            step(workload.batch)
        handle.remove()
        seed()
        assert not caught.value.is_torn and caught.value.__context__ is None
        assert_same({**state_of(step), "draws": before["draws"]}, before)
        assert isinstance(step.recovery, Recovery)
        assert [e.lower is None for e in step.recovery.events] == [False, False, True]
        with pytest.raises(ValueError, match="another error"):
            step.recovery(lambda batch: raises(ValueError("another error")), workload.batch)


def raises(error: Exception) -> Any:
    raise error


def test_lower_plans_are_of_the_same_precision_and_an_allowed_class() -> None:
    plan = plan_of("transformer")
    own, middle, lowest = plan.frontier
    other = replace(middle, levers=replace(middle.levers, precision="bf16-mixed"))
    cut = replace(middle.levers, microbatch_size=2)
    freer = replace(middle, levers=cut, numerics="reordered", peak_bytes=middle.peak_bytes - 5)
    plan = replace(plan, frontier=[lowest, other, own, freer, middle])
    assert lower_candidates(plan) == [middle, lowest]
    assert lower_candidates(replace(plan, allowed="reordered")) == [middle, lowest, freer]
    assert lower_candidates(replace(plan, levers=middle.levers)) == [lowest]
    assert lower_candidates(replace(plan, levers=lowest.levers)) == []


def test_a_training_run_logs_what_ran_out_and_goes_on_with_the_lower_plan(tmp_path: Path) -> None:
    workload, plan = BUILDERS["transformer"](), plan_of("transformer")
    bombs: list[int] = []
    original = workload.loss_fn

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        with Bomb(*(bombs.pop() for _ in bombs[:1])):
            return original(model, batch)

    def arm(progress: StepRecord) -> None:
        bombs.extend([40] if progress.step == 1 else [])

    object.__setattr__(workload, "loss_fn", loss_fn)
    record = memfit.train(plan, workload, out=tmp_path / "run", steps=3, checkpoint_every=1, on_step=arm)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    events = [line for line in lines if "event" in line]
    assert [(event["step"], event["event"]["kind"]) for event in events] == [(2, "out of memory")]
    assert [event.text for event in record.events] == [event["event"]["text"] for event in events]
    assert ir.codec.read(tmp_path / "run/run.json", RunRecord).events == record.events
    taken = memfit.Plan.load(tmp_path / "run/plan.json")
    newest = latest(tmp_path / "run")
    assert newest is not None and memfit.Plan.load(newest / "plan.json") == taken
    assert taken.levers == plan.frontier[1].levers
    page = memfit.write_report(tmp_path / "run").read_text()
    texts = ("Tried to allocate 2.00 MiB", "ran its batch again under the plan of", ": 1 region")
    assert all(text in page for text in (*texts, "predicted memory snapshot: out-of-memory-2.pickle"))
    memfit.train(plan, BUILDERS["transformer"](), out=tmp_path / "run", steps=1, overwrite=True)
    assert list((tmp_path / "run").glob("*.pickle")) == []


@pytest.mark.parametrize(
    "how", ["recover", *(pytest.param(how, marks=pytest.mark.ci) for how in ("adaptive", "no recovery"))]
)
@pytest.mark.ci
def test_the_snapshot_is_of_the_plan_that_ran_out(how: str, tmp_path: Path) -> None:
    """Its live bytes peak at the predicted peak, by the ledger's categories; a run without recovery has one too."""
    workload = models.transformer()
    plan = exact(workload, "90%", points=3)
    run: dict[str, Any] = {"recover": how == "recover", "adaptive": how == "adaptive"}
    limit_bytes = plan.predicted.peak_bytes - 1
    with pytest.raises(MemoryLimitError) if how == "no recovery" else contextlib.nullcontext() as caught:
        memfit.train(plan, workload, out=tmp_path, steps=2, limit_bytes=limit_bytes, **run)
    if caught is not None:
        assert "predicted memory snapshot: out-of-memory-2.pickle" in caught.value.__notes__[0]
    record = ir.codec.read(tmp_path / "run.json", RunRecord)
    assert "out-of-memory-2.pickle" in record.events[0].text
    with (tmp_path / "out-of-memory-2.pickle").open("rb") as file:
        (entries,) = pickle.load(file)["device_traces"]
    assert {"parameters", "optimizer state", "activations"} <= {e["category"] for e in entries}
    changes = [e["size"] * {"alloc": 1, "free_completed": -1}.get(e["action"], 0) for e in entries]
    rounded = 512 * sum(change > 0 for change in changes)
    peak_bytes = max(itertools.accumulate(changes))
    assert plan.predicted.peak_bytes <= peak_bytes <= plan.predicted.peak_bytes + rounded


def test_the_snapshot_is_never_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")  # where the folder of snapshots would be
    plan, workload = plan_of("transformer"), BUILDERS["transformer"]()
    seed()
    with memfit.apply(plan, workload, recover=True, snapshots=tmp_path / "file") as step:
        for index in range(STEPS):
            with Bomb(*(40,) * (index == 1)):
                step(workload.batch)
        assert isinstance(step.recovery, Recovery)
        assert "no memory snapshot (" in str(step.recovery.events[0])
        assert_same(state_of(step), expected("transformer", 1)[0])


LIMITED = """
import resource, sys, torch, memfit
from msgspec.structs import replace
from torch import nn
from memfit.ir import Candidate, Levers, Region
from memfit.workload.description import fingerprint

def workload(samples):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), *[nn.GELU() for _ in range(5)]) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(64, 4))
    batch = (torch.randn(samples, 64), torch.randn(samples, 4))
    loss_fn = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
    return memfit.Workload(model, batch, loss_fn, torch.optim.AdamW(model.parameters()))

def point(names, peak_bytes, seconds):
    levers = Levers(microbatch_size=8192, regions=tuple(Region((name,)) for name in names))
    return Candidate(levers=levers, numerics="exact", budget_bytes=0, peak_bytes=peak_bytes, step_seconds=seconds,
                     status="feasible", bound_seconds=1.0)

def weights(limited):
    mine, plan = workload(8192), replace(small, fingerprint=fingerprint(workload(8192)))
    points = [point([], 400, 1.0), point([str(i) for i in range(8)], 150, 2.0)]
    plan = replace(plan, batch_size=8192, levers=points[not limited].levers, frontier=points)
    with memfit.apply(plan, mine, recover=True) as step:
        torch.manual_seed(1)
        if limited:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 105 * 2**20, -1))
        losses = [step(mine.batch).loss for _ in range(2)]
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        print([(e.step, e.error.kind, e.error.text[:60]) for e in step.recovery.events])
        return losses, [p.detach() for p in mine.model.parameters()]

small = memfit.plan(workload(8), budget="8GiB", numerics="exact", precisions=["32-true"], points=1)
limited, free = weights(True), weights(False)
print(limited[0] == free[0] and all(torch.equal(a, b) for a, b in zip(limited[1], free[1])))
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_memory_that_really_runs_out() -> None:
    # glibc keeps large tensors in its heap once larger ones have been freed, and how the heap is then split depends on
    # which operators were measured before. A fixed threshold gives each tensor pages of its own, so that the limit is
    # one on what tensors hold.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    events, free, same = done.stdout.splitlines()
    assert events.startswith("[(1, 'allocator', 'RuntimeError: [enforce fail at alloc_cpu") and events.count("(") == 1
    assert (free, same) == ("[]", "True")


@pytest.mark.parametrize("kind", ["seeded", "shuffled"])
@pytest.mark.parametrize("at", [2, 4])
def test_a_run_that_no_plan_saves_stops_with_a_checkpoint_that_is_gone_on_from(
    kind: str, at: int, tmp_path: Path
) -> None:
    """The checkpoint is of before the batch, so that it is the first one after resuming; 4 begins the second epoch."""

    def run_of(out: str, broken: bool, **options: Any) -> dict[str, Any]:
        workload = trained_on(kind)
        with memfit.apply(plan, workload, recover=True) as step:
            handle = None

            def arm(progress: StepRecord) -> None:
                nonlocal handle
                if broken and progress.step == at - 1:
                    handle = workload.model.register_forward_hook(lambda *_: raises(MemoryError()))

            seed()
            Trainer(step, plan, RunOptions(out=tmp_path / out, steps=6, on_step=arm, **options)).fit()
            return state_of(step)

    plan = exact(trained_on(kind), "90%")
    whole = run_of("whole", False)
    with pytest.raises(OutOfMemoryError) as caught:
        run_of("stopped", True)
    assert caught.value.step == at and f"checkpoint-{at - 1}" in caught.value.__notes__[0]
    assert_same(run_of("stopped", False, resume=True), whole)


def trained_on(kind: str) -> Workload:
    """A workload of three batches an epoch, with a position or shuffled by the global generator."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    samples = TensorDataset(torch.randn(24, 4), torch.randn(24, 4))

    def make(generator: torch.Generator) -> Any:
        return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)

    batches: Any = DataLoader(samples, 8, shuffle=True) if kind == "shuffled" else SeededBatches(make, 3, seed=1)
    return Workload(model, samples[:8], models.squared_error, torch.optim.Adam(model.parameters()), batches=batches)
