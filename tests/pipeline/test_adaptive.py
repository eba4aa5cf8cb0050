"""Batches of varying shapes, and larger ones: each is predicted before it runs, none exceeds the budget."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import memfit
from memfit._torch import FakeTensor
from memfit.capture import measure_peak_bytes
from memfit.errors import PlanError, UsageError
from memfit.foundations import format_bytes
from memfit.ir import Levers, Plan
from memfit.levers import applied
from memfit.levers.precision import casts_of
from memfit.training import Step, latest
from memfit.workload import Workload, fingerprint, tensors_of
from tests.models import transformer
from tests.pipeline.plans import exact, have_same_weights

TOKENS = 64


def workload() -> memfit.Workload:
    return without_state(transformer(batch=4, tokens=TOKENS, dim=32, layers=2, dropout=0.0))


def without_state(made: memfit.Workload) -> memfit.Workload:
    """Of fewer operators than with AdamW: each shape is captured."""
    return dataclasses.replace(made, optimizer=torch.optim.SGD(made.model.parameters(), lr=1e-3))


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = workload()
    budget = int(0.75 * memfit.estimate(made).peak_bytes)
    return exact(made, budget, points=3, time_limit_seconds=1)


def cut(work: memfit.Workload, tokens: int, samples: int = 4) -> Any:
    return {name: tensor[:samples, :tokens].contiguous() for name, tensor in work.batch.items()}


def adaptive_of(step: Step) -> Any:
    return step.recovery


@pytest.mark.ci
def test_every_batch_stays_within_the_budget_and_its_prediction(plan: Plan) -> None:
    work, rng = workload(), random.Random(1)
    with memfit.apply(plan, work, limit_bytes=plan.budget_bytes, adaptive=True) as step:
        adaptive = adaptive_of(step)
        for _ in range(8):
            batch = cut(work, rng.randrange(4, TOKENS + 1, 20), rng.choice([4, 4, 4, 1]))
            step(batch)
            predicted = step.options.predicted_peak_bytes
            measured = step.memory_summary().peak_bytes
            assert predicted is not None and measured is not None and measured <= 1.001 * predicted
        assert adaptive.events == [] and adaptive.controller.correction < 1.001
        assert sum(adaptive.taken.values()) == 8
        buckets = {arm: {b for b, a in adaptive.taken if a == arm} for _, arm in adaptive.taken}
        assert 0 in buckets and len(buckets) > 1  # short batches run plain, long ones don't
        assert "batches, from the smallest shapes" in str(adaptive)


@pytest.mark.ci
def test_weights_are_those_of_the_plain_step_whatever_was_taken(plan: Plan) -> None:
    lengths = [64, 8, 64, 20]
    planned, plain = workload(), workload()
    with memfit.apply(plan, planned, adaptive=True) as step:
        losses = [step(cut(planned, tokens)).loss for tokens in lengths]
    single = Step(plain)
    assert losses == [single(cut(plain, tokens)).loss for tokens in lengths]
    assert have_same_weights(planned, plain)


def test_a_batch_that_runs_out_all_the_same_is_run_again_under_a_lower_plan(plan: Plan) -> None:
    planned, plain = workload(), workload()
    with memfit.apply(plan, planned, adaptive=True) as step:
        adaptive = adaptive_of(step)
        step(cut(planned, 48))
        failures = iter([True])

        def fail(*_: object) -> None:
            if next(failures, False):
                raise MemoryError

        handle = planned.model.register_forward_hook(fail)
        step(cut(planned, 48))
        handle.remove()
        (event,) = adaptive.events
        assert event.lower is not None and event.lower.predicted.peak_bytes < event.plan.predicted.peak_bytes
        assert adaptive.plan is plan
    single = Step(plain)
    for _ in range(2):
        single(cut(plain, 48))
    assert have_same_weights(planned, plain)


def test_a_batch_larger_than_the_workloads_is_refused_before_it_runs(plan: Plan) -> None:
    work = workload()
    larger = {name: torch.cat([tensor, tensor], 1) for name, tensor in work.batch.items()}
    with memfit.apply(plan, work, adaptive=True) as step:
        with pytest.raises(UsageError, match=r"\(4, 128\).* is not within the largest"):
            step(larger)
        with pytest.raises(UsageError, match="is not within"):
            step({"x": work.batch["x"]})
        assert step.steps == 0


def test_a_batch_is_placed_by_each_dimension_that_varies_and_no_larger_one_is_predicted_to_take_less() -> None:
    """Places are from the smallest shapes that are captured, 0, to the largest."""
    plan, work = exact(workload(), points=2), workload()
    with memfit.apply(plan, work, adaptive=True) as step:
        adaptive = adaptive_of(step)
        for tokens, samples in ((40, 4), (40, 2), (64, 4), (3, 1), (41, 4), (64, 4)):
            step(cut(work, tokens, samples))
        peaks = [adaptive.expected_at(place)[0].peak_bytes for place in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0)]
        assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
        buckets = Counter({bucket: 0 for bucket, _ in adaptive.taken})
        for (bucket, _), count in adaptive.taken.items():
            buckets[bucket] += count
        assert buckets == {4: 1, 2: 1, 7: 3, 0: 1}  # 41 of 64 tokens of all samples: of the largest, once both vary


@pytest.mark.ci
def test_modules_in_fp32_stay_so_while_plans_change() -> None:
    """Another shape is predicted from the modules as they were made; what runs is cast as before."""

    def mixed() -> memfit.Workload:
        made = without_state(transformer(batch=1, tokens=TOKENS, dim=32, layers=2, dropout=0.0))
        return dataclasses.replace(made, fp32_modules=("head", "blocks.0.mlp.*"))

    budget = int(0.95 * memfit.estimate(mixed(), precision="bf16-mixed").peak_bytes)
    options: dict[str, Any] = {"numerics": "reduced", "precisions": ["bf16-mixed"], "optimizers": ()}
    made = memfit.plan(mixed(), budget=budget, points=2, time_limit_seconds=1, **options)
    planned, plain = mixed(), mixed()
    lengths = [64, 20]
    with memfit.apply(made, planned, adaptive=True) as step:
        losses = [step(cut(planned, tokens, 1)).loss for tokens in lengths]
        assert casts_of(planned.model)
    assert not casts_of(planned.model)
    with applied(Levers(precision="bf16-mixed", microbatch_size=1), plain) as single:
        assert losses == pytest.approx([single(cut(plain, tokens, 1)).loss for tokens in lengths], rel=1e-3)


def test_weights_in_bf16_are_refused_with_the_table_s_row(plan: Plan) -> None:
    work = dataclasses.replace(workload(), bf16_updates="master-weights")
    lower = msgspec.structs.replace(plan.levers, precision="bf16-true")
    other = msgspec.structs.replace(plan, levers=lower, fingerprint=fingerprint(work), allowed="reduced")
    with pytest.raises(PlanError, match="predictions for other shapes need the original model"):
        memfit.apply(other, work, adaptive=True)
    assert not casts_of(work.model)


def normalised() -> nn.Module:
    """Return a model that normalises over the batch, so that a batch in two parts is another training."""
    layers = [nn.Linear(16, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 5)]
    return nn.Sequential(*layers)


def rows(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 16, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def reading() -> nn.Module:
    """Return a model that reads tokens, as many as there are."""
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 50))


def tokens(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {"tokens": torch.randint(0, 50, (8, length), generator=generator)}


class Crowds(nn.Module):
    """Compares each box of an image to as many anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, images: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        anchors = self.inner(images)
        found = [(a.tanh() @ t["boxes"].T).softmax(1).square().mean() for a, t in zip(anchors, targets, strict=True)]
        return torch.stack(found).mean()


def crowded(boxes: int) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(boxes)
    counts = [boxes, max(1, boxes // 3), 1, max(1, boxes // 2)]
    return torch.randn(4, 128, 16, generator=generator), [
        {"boxes": torch.randn(n, 64, generator=generator)} for n in counts
    ]


Case = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[nn.Module, Any], torch.Tensor], int, int]
CASES: dict[str, Case] = {
    "samples": (normalised, rows, lambda m, b: F.cross_entropy(m(b[0]), b[1]), 128, 256),
    "length": (reading, tokens, lambda m, b: F.cross_entropy(m(b["tokens"]).mT, b["tokens"]), 32, 96),
    "boxes": (Crowds, crowded, lambda m, b: m(*b), 20, 400),
}


def made(name: str) -> Workload:
    model, batch, loss, planned, _ = CASES[name]
    torch.manual_seed(0)
    built = model()
    return Workload(built, batch(planned), loss, torch.optim.AdamW(built.parameters(), lr=1e-2), name=name)


def plain(name: str, sizes: list[int]) -> list[torch.Tensor]:
    """Return the weights and statistics after a loop without memfit."""
    _, batch, loss, _, _ = CASES[name]
    workload = made(name)
    for size in sizes:
        loss(workload.model, batch(size)).backward()  # type: ignore[arg-type]
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    return list(workload.model.state_dict().values())


@pytest.mark.parametrize("name", CASES)
def test_a_larger_batch_is_run_whole_and_predicted_where_the_budget_holds_it(name: str) -> None:
    _, batch, _, small, large = CASES[name]
    workload = made(name)
    plan = exact(workload, "64MiB")
    with memfit.apply(plan, workload) as step:
        step(batch(small))
        assert not step.events
        step(batch(large))
        given = batch(large)
        peak_bytes = measure_peak_bytes(step, given) + sum(t.nbytes for t in tensors_of(given))
        assert step.last is not None and step.last.predicted_peak_bytes is not None
        assert step.last.predicted_peak_bytes > plan.predicted.peak_bytes
        assert abs(peak_bytes / step.last.predicted_peak_bytes - 1) < 0.02
        assert step(batch(small)).predicted_peak_bytes == plan.predicted.peak_bytes
    found = list(workload.model.state_dict().values())
    assert all(map(torch.equal, found, plain(name, [small, large, large, small])))
    assert not all(map(torch.equal, found, plain(name, [small, large, small, large])))
    assert [kind for kind, _ in step.events] == ["larger batch"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci) if n == "length" else n for n in CASES])
def test_a_batch_that_the_budget_does_not_hold_is_refused_before_anything_runs(name: str) -> None:
    _, batch, _, small, large = CASES[name]
    workload = made(name)
    plan = exact(workload, "1.1x")
    with memfit.apply(plan, workload) as step:
        step(batch(small))
        before = copy.deepcopy(workload.model.state_dict())
        with pytest.raises(UsageError, match=str(large)) as caught:
            step(batch(large))
        assert "Workload.batch" in str(caught.value) and format_bytes(plan.budget_bytes) in str(caught.value)
        assert all(map(torch.equal, before.values(), workload.model.state_dict().values()))
        step(batch(small))
    assert step.steps == 2


def test_batches_that_grow_a_little_each_time_take_few_captures(capsys: pytest.CaptureFixture[str]) -> None:
    workload = made("samples")
    own = workload.loss_fn

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch[0], FakeTensor):
            print(len(batch[0]))  # what it writes to variables is set back after a capture
        return own(model, batch)

    object.__setattr__(workload, "loss_fn", loss_fn)
    plan = exact(workload, "64MiB")
    capsys.readouterr()
    with memfit.apply(plan, workload) as step:
        for size in range(130, 300, 8):
            result = step(rows(size))
            assert result.predicted_peak_bytes is not None
            assert result.predicted_peak_bytes > plan.predicted.peak_bytes
    assert 2 <= len(set(capsys.readouterr().out.splitlines())) <= 5


@pytest.mark.ci
def test_a_plan_with_microbatches_cuts_a_larger_batch_into_more() -> None:
    workload = made("length")
    plan = memfit.plan(workload, budget="0.6x", precisions=["32-true"], points=1)
    assert plan.levers.microbatch_size < plan.batch_size
    wider = {"tokens": torch.cat([tokens(32)["tokens"]] * 2)}
    with memfit.apply(plan, workload) as step:
        assert len(step.split(wider)) == 2 * len(step.split(workload.batch))
        result = step(wider)
        assert result.predicted_peak_bytes is not None
        assert plan.predicted.peak_bytes <= result.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(("budget", "ends"), [("64MiB", True), ("1.0x", False)])
def test_a_run_tells_of_larger_batches_or_ends_with_a_checkpoint_from_before(
    tmp_path: Path, budget: str, ends: bool
) -> None:
    workload = made("samples")
    plan = exact(workload, budget)
    object.__setattr__(workload, "batches", [rows(128), rows(128), rows(256), rows(128)])
    if ends:
        record = memfit.train(plan, workload, out=tmp_path / "run", steps=4)
        assert [event.kind for event in record.events] == ["larger batch"]
        assert all(map(torch.equal, workload.model.state_dict().values(), plain("samples", [128, 128, 256, 128])))
        return
    with pytest.raises(UsageError, match="256x16 instead of the planned 128x16") as caught:
        memfit.train(plan, workload, out=tmp_path / "run", steps=4)
    newest = latest(tmp_path / "run")
    assert newest is not None and newest.name.endswith("2")
    assert any("resume=True" in note for note in caught.value.__notes__)


def test_a_measured_peak_over_the_budget_is_an_event(tmp_path: Path) -> None:
    workload = made("samples")
    plan = exact(workload, "64MiB")
    record = memfit.train(replace(plan, budget_bytes=1000), workload, out=tmp_path / "run", steps=3)
    assert [event.kind for event in record.events] == ["over budget"]
    assert format_bytes(1000) in record.events[0].text
