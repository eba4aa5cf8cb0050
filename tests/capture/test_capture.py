"""Captures leave everything of the user's as it was, and say what they can't do."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture import real_copy, without_collector
from memfit.errors import CaptureError, WorkloadError
from memfit.ir import simulate
from memfit.workload import Workload, batch_size_of
from tests.capture.steps import squared
from tests.covering import each
from tests.models import BUILDERS, COSTS, captured, convnet, plain_trace, squared_error, step_of, transformer, twice
from tests.undisturbed import COUNT_FROZEN, changes, same, state_of


def trained(build: Callable[[], Workload]) -> Workload:
    """Return a workload after a step, with a left-over gradient and a frozen, evaluating part."""
    workload = build()
    scheduler = torch.optim.lr_scheduler.StepLR(workload.optimizer, 1)
    workload = dataclasses.replace(workload, scheduler=scheduler)
    with step_of(workload) as step:
        step(workload.batch)
    first = next(workload.model.parameters())
    first.grad = torch.ones_like(first)
    list(workload.model.children())[-1].eval()
    return workload


@pytest.mark.parametrize(("name", "real"), each(BUILDERS, [False, True]))
def test_nothing_of_the_users_changes(name: str, real: bool) -> None:
    workload = trained(BUILDERS[name])
    before = state_of(workload)
    captured(workload, real=real, regions={"head": ()}, precision="bf16-mixed", microbatch_size=1)
    assert not changes(before, state_of(workload))


def test_the_comparison_notices_each_change() -> None:
    workload = trained(convnet)
    before = state_of(workload)
    with torch.no_grad():
        workload.model.head.bias[0] += 1
    workload.model.stem[1].num_batches_tracked += 1
    workload.model.stem[0].weight.grad = None
    workload.model.pool.train()
    workload.model.head.train()
    workload.model.register_forward_hook(lambda *args: None)
    torch.rand(1)
    workload.optimizer.state[workload.model.head.bias]["momentum_buffer"] += 1
    found = changes(before, state_of(workload))
    assert {"state head.bias", "state stem.1.num_batches_tracked", "gradients", "training", "hooks"} <= set(found)
    assert {"random state", "identities"} <= set(found) and any(n.startswith("optimizer") for n in found)


def raising(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = squared_error(model, batch)
    torch.rand(3)
    raise KeyError("the user's own mistake")
    return loss


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_changes_when_the_step_fails(collecting: bool) -> None:
    workload = dataclasses.replace(trained(twice), loss_fn=raising)
    if not collecting:
        gc.disable()
    try:
        before = state_of(workload)
        with pytest.raises(CaptureError, match="the user's own mistake"):
            captured(workload, regions={"shared": ()})
        with pytest.raises(KeyError):
            captured(workload, real=True, regions={"shared": ()})
        assert not changes(before, state_of(workload))
    finally:
        gc.enable()


def test_objects_that_the_user_set_aside_stay_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    assert gc.get_freeze_count() > 0
    captured(twice())
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with without_collector():
            assert gc.get_freeze_count() > 0
            captured(twice())  # a capture within a plan leaves that to the plan
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
        captured(twice())
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()


@pytest.mark.parametrize("as_well", [False, True])
def test_a_loss_that_uses_the_model_from_outside_is_refused(as_well: bool) -> None:
    workload = trained(twice)
    outside = workload.model

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return squared_error(model if as_well else outside, batch) + outside.head.weight.square().sum()

    workload = dataclasses.replace(workload, loss_fn=loss_fn)
    before = state_of(workload)
    refusals = {False: "use the model that loss_fn gets as its first argument", True: "2 parameters|1 parameters"}
    for real in (False, True) if as_well else (False,):
        match = refusals[real] if as_well else r"loss_fn|no parameter"
        with pytest.raises((WorkloadError, CaptureError), match=match):
            captured(workload, real=real)
        assert not changes(before, state_of(workload))


def repeated(model: nn.Module, batch: Any) -> torch.Tensor:
    x, _ = batch
    out = model(x).flatten()
    return out.repeat_interleave(out.detach().abs().long(), 0).sum()  # the line that repeats


def test_shapes_that_nothing_bounds_are_refused_with_the_line() -> None:
    workload = dataclasses.replace(twice(), loss_fn=repeated)
    with pytest.raises(CaptureError, match="A shape depends on the values of a tensor") as caught:
        captured(workload)
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line that repeats" in text
    )
    assert f"{__file__}:{line}: return out.repeat_interleave(" in str(caught.value)


def test_of_a_step_that_does_something_else_each_time_the_worst_of_several_is_recorded() -> None:
    calls = iter(range(100))

    def fickle(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = squared_error(model, batch)
        return loss if next(calls) % 2 else loss * 2

    trace = captured(dataclasses.replace(twice(), loss_fn=fickle))
    assert any("other operators each time" in note for note in trace.notes)
    assert not trace.saves and sum(op.phase == "forward" and "mul" in op.name for op in trace.ops)


class Asks(nn.Module):
    """Reads values in its forward pass, as gradient scalers and position counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for split in torch.arange(3).tolist():
            x = x + split
        if self.seen.item() > 10**6 or torch.isnan(x).any().item():
            raise ValueError("never")
        self.seen += 1
        out: torch.Tensor = self.inner(x) * float(torch.tensor(2.0).item())
        return out


def test_code_that_reads_values_is_captured() -> None:
    model = nn.Sequential(Asks())
    batch = (torch.randn(2, 4), torch.randn(2, 4))
    workload = squared(model, batch, torch.optim.Adam(model.parameters()), loss_fn=squared_error)
    fake, real = captured(workload), captured(workload, real=True)
    forward = [Counter(op.name for op in t.ops if op.phase == "forward") for t in (fake, real)]
    assert forward[1] <= forward[0]
    assert set(forward[0] - forward[1]) <= {"aten.unbind.int", "aten._local_scalar_dense.default"}
    assert model[0].seen.item() == 0


Pair = namedtuple("Pair", "x y")

BATCHES: dict[str, tuple[Any, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": ((torch.ones(6, 4), torch.ones(6, 4)), lambda b: b),
    "list": ([torch.ones(6, 4), torch.ones(6, 4)], lambda b: (b[0], b[1])),
    "dict": ({"x": torch.ones(6, 4), "y": torch.ones(6, 4), "id": "abc"}, lambda b: (b["x"], b["y"])),
    "named tuple": (Pair(torch.ones(6, 4), torch.ones(6, 4)), lambda b: (b.x, b.y)),
    "nested": ({"in": [{"x": torch.ones(6, 4)}], "out": (torch.ones(6, 4),)}, lambda b: (b["in"][0]["x"], b["out"][0])),
    "a tensor": (torch.ones(6, 4), lambda b: (b, b)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_kind_are_captured(kind: str) -> None:
    batch, take = BATCHES[kind]
    workload = squared(nn.Linear(4, 4), batch, loss_fn=lambda m, b: squared_error(m, take(b)))
    for size in (None, 2):
        fake, real = (captured(workload, real=really, microbatch_size=size) for really in (False, True))
        inputs = [sum(s.nbytes for s in t.storages if s.category == "inputs") for t in (fake, real)]
        expected = 6 * 4 * 4 * (1 if kind == "a tensor" else 2)
        assert inputs == [expected, expected]
        assert fake.scale_microbatches == (1 if size is None else 3) and fake.batch_size == 6


def test_a_left_over_gradient_changes_nothing_in_the_trace() -> None:
    workload = transformer()
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trace, plain = captured(workload), plain_trace("transformer")
    assert simulate(trace, COSTS).peak_bytes == simulate(plain, COSTS).peak_bytes
    assert [op.name for op in trace.ops] == [op.name for op in plain.ops]


def test_a_large_model_is_captured_without_its_memory() -> None:
    big = (torch.zeros(1).expand(1 << 16, 8), torch.zeros(1).expand(1 << 16, 8))
    workload = squared(nn.Sequential(nn.Linear(8, 8)), big, loss_fn=squared_error)
    assert simulate(captured(workload), COSTS).peak_bytes > (1 << 16) * 8 * 4


def test_a_real_copy_is_equal_independent_and_shares_what_was_shared() -> None:
    workload = trained(lambda: BUILDERS["tied"]())
    copied = real_copy(workload)
    assert copied.model.head.weight is copied.model.embed.weight
    for one, other in zip(workload.model.parameters(), copied.model.parameters(), strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
        assert one.requires_grad == other.requires_grad
    parameters = [p for g in copied.optimizer.param_groups for p in g["params"]]
    assert [id(p) for p in parameters] == [id(p) for p in copied.model.parameters()]
    assert set(copied.optimizer.state) <= set(parameters)
    for one, other in zip(workload.optimizer.state.values(), copied.optimizer.state.values(), strict=True):
        assert all(same(one[k], other[k]) for k in one) and one.keys() == other.keys()
    before = state_of(workload)
    with step_of(copied) as step:
        step(copied.batch)
    torch.set_rng_state(before["random state"])
    assert not changes(before, state_of(workload))


def test_captures_are_repeatable() -> None:
    assert captured(twice()) == captured(twice())
    assert captured(convnet(), microbatch_size=2) == captured(convnet(), microbatch_size=2)


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_and_state_are_linked_to_their_parameters(name: str) -> None:
    workload = BUILDERS[name]()
    trace = captured(workload, microbatch_size=batch_size_of(workload.batch) // 2)
    named = dict(workload.model.named_parameters())
    assert [(p.fqn, p.shape) for p in trace.parameters] == [(n, tuple(p.shape)) for n, p in named.items()]
    linked = {(s.category, s.parameter) for s in trace.storages if s.parameter >= 0}
    adam = isinstance(workload.optimizer, torch.optim.Adam | torch.optim.AdamW)
    for index, parameter in enumerate(trace.parameters):
        assert ("parameters", index) in linked and ("gradients", index) in linked
        assert (("optimizer state", index) in linked) == (adam or name == "convnet")
        assert all(
            s.nbytes == parameter.nbytes
            for s in trace.storages
            if s.parameter == index and s.category in ("parameters", "gradients")
        )


def test_a_norm_hands_on_a_contiguous_gradient_whatever_it_gets() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    loss_fn = lambda model, batch: model(batch).transpose(1, 2).contiguous().square().mean()  # noqa: E731
    workload = squared(model, torch.randn(2, 6, 8), loss_fn=loss_fn)
    fake, real = captured(workload), captured(workload, real=True)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert fake.signatures == real.signatures


def test_gradients_are_normed_and_clipped_as_a_list_as_with_data() -> None:
    names = [{op.name for op in captured(transformer(), real=real).ops} for real in (False, True)]
    assert names[0] == names[1] and {"aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor"} <= names[0]


class Experts(nn.Module):
    """Four experts, each with a quarter of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        out: torch.Tensor = torch.nn.functional.grouped_mm(self.first(x).to(self.weight.dtype), self.weight, offs=ends)
        return out


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_grouped_products_of_any_dtype_are_captured(precision: str) -> None:
    workload = squared(Experts(), (torch.randn(64, 16), torch.randn(64, 32)), loss_fn=squared_error)
    fake, real = (captured(workload, real=real, precision=precision) for real in (False, True))
    assert fake.signatures == real.signatures
    assert sum("_grouped_mm" in op.name for op in fake.ops) == 3
    assert [(s.nbytes, s.birth, s.death) for s in fake.storages] == [
        (s.nbytes, s.birth, s.death) for s in real.storages
    ]


class Warming(nn.Module):
    """Keeps larger activations in its first steps than later."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Linear(64, 64), nn.Linear(64, 1)
        self.steps, self.calls = steps, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layers(x).tanh()
        if self.calls <= self.steps:
            x = torch.cat([x, x.sin()]).chunk(2)[0]
        y: torch.Tensor = self.head(x)
        return y


@pytest.mark.parametrize("steps", [0, 1, 2])  # the second step is the one that is recorded first
def test_a_step_that_settles_is_captured_as_it_is_then(steps: int) -> None:
    """An earlier step that takes more is within the interval."""
    trace, settled = (captured(squared(Warming(n), torch.randn(32, 64))) for n in (steps, 0))
    assert not any("other operators each time" in note for note in trace.notes)
    assert [op.name for op in trace.ops] == [op.name for op in settled.ops]
    assert [storage.release for storage in trace.storages] == [storage.release for storage in settled.storages]
    assert (trace.slack > 0.1) == (steps == 2)
