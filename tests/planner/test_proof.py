"""Plans are proven before they are returned where the step can run, and by their first step elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

import memfit
from benchmarks.steps.data import seed_all
from benchmarks.steps.loop import difference, plain_steps, trained_by_plan, trained_plainly
from memfit.errors import RecomputationError
from memfit.hardware import find_device
from memfit.ir import Levers, Plan, Region, levers_key
from memfit.levers import recomputes
from memfit.pipeline import apply, verify
from memfit.planner import confirmation
from memfit.planner.confirmation import CaptureFailures, why_not_proven
from memfit.recomputation import checking, checkpointed
from memfit.recomputation.probe import Expected, _sums, checksum, report
from memfit.report.summary import proof_text
from memfit.workload import Workload
from tests.update_settings import update_settings


class Opaque:
    """Numbers that no code names: an iterator is the same object after it has moved on."""

    def __init__(self) -> None:
        self.numbers = iter(range(1, 10**9))

    def __deepcopy__(self, memo: Any) -> Opaque:
        return Opaque()

    def __call__(self) -> float:
        return 1 + next(self.numbers) / 8


class Layer(nn.Module):
    """A block whose activations are large."""

    def __init__(self, factor: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return (x * self.factor()).sin() if self.factor is not None else x.sin()


def made_of(model: nn.Module) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.randn(256, 16), lambda model, batch: model(batch).square().mean(), optimizer)


def workload(*odd: int) -> Workload:
    torch.manual_seed(0)
    return made_of(nn.Sequential(*(Layer(Opaque() if i in odd else None) for i in range(6))))


def planned(made: Workload, share: float = 0.6) -> Plan:
    plain = memfit.estimate(made).peak_bytes
    return memfit.plan(made, budget=int(share * plain), numerics="exact", optimizers=["as-is"], points=1)


def is_exact(plan: Plan, make: Callable[[], Workload]) -> bool:
    return difference(trained_plainly(make), trained_by_plan(make, plan)) is None


def test_a_plan_is_proven_and_what_differs_is_left_out() -> None:
    plan = planned(workload(1, 4))
    assert plan.levers.regions and plan.is_proven
    assert plan.proof.levers == levers_key(plan.levers)
    multiplied = {fqn for r in plan.levers.regions if "aten.mul.Tensor#0" not in r.keep for fqn in r.modules}
    assert not multiplied & {"1", "4"}
    assert any("is not recomputed: its second run differs from the first" in note for note in plan.notes)
    assert "bit for bit" in proof_text(plan) and "Proof" in str(plan)
    assert is_exact(plan, lambda: workload(1, 4))
    assert verify(plan, workload(), steps=0).bitwise


@pytest.mark.ci
def test_layers_dropped_by_python_are_planned_exactly() -> None:
    class Dropped(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if random.random() < 0.5 else 0.5)

    def make() -> Workload:
        seed_all(0)
        return made_of(nn.Sequential(*(Dropped() for _ in range(3))))

    plan = planned(make())
    assert plan.levers.regions and plan.is_proven and is_exact(plan, make)
    assert verify(plan, make(), steps=0).holds


def unproven(made: Workload, regions: tuple[Region, ...], **levers: Any) -> Plan:
    """Return a plan that nothing was tried of."""
    plan = memfit.plan(made, budget="1GiB", numerics="exact", points=1)
    assert plan.is_proven and not recomputes(plan.levers)
    return replace(plan, levers=replace(plan.levers, regions=regions, **levers))


@pytest.mark.parametrize("optimizer", ["as-is", "in-backward"])
def test_the_first_step_refuses_what_differs_and_updates_nothing(optimizer: str) -> None:
    plan = unproven(workload(2), (Region(("1", "2")), Region(("4",))), **update_settings(optimizer))
    assert not plan.is_proven
    made = workload(2)
    before = [p.detach().clone() for p in made.model.parameters()]
    with apply(plan, made) as step, pytest.raises(RecomputationError, match="'2' can't be recomputed"):
        step(made.batch)
    assert all(map(torch.equal, before, made.model.parameters()))
    assert all(p.grad is None for p in made.model.parameters())


class Later(Opaque):
    """What is the same in the first step, whose forward pass runs twice."""

    def __deepcopy__(self, memo: Any) -> Later:
        return Later()

    def __call__(self) -> float:
        return max(0.0, super().__call__() - 1.25) + 1


@pytest.mark.parametrize("optimizer", ["as-is", "in-backward"])
def test_only_the_first_step_is_checked_and_it_changes_nothing(optimizer: str) -> None:
    plan = unproven(workload(), (Region(("1", "2")), Region(("4",))), **update_settings(optimizer))
    assert is_exact(plan, workload)

    def later() -> Workload:
        made = workload()
        made.model[2].factor = Later()  # type: ignore[index,union-attr]
        return made

    trained_by_plan(later, plan)  # the second step is not checked
    trained_by_plan(lambda: workload(2), replace(plan, proof=replace(plan.proof, levers=levers_key(plan.levers))))


def test_what_can_not_run_here_is_not_proven() -> None:
    made = workload()
    plain = memfit.estimate(made)
    cpu = memfit.devices()[0]
    assert why_not_proven(made, cpu, plain, 1.0) == ""
    assert "GPU" in why_not_proven(made, replace(cpu, kind="cuda", name="a GPU"), plain, 1.0)
    assert "a step is predicted to take" in why_not_proven(made, cpu, plain, 61.0)
    assert "free here" in why_not_proven(made, cpu, replace(plain, peak_bytes=2**60), 1.0)
    meta = dataclasses.replace(made, batch=made.batch.to("meta"))
    assert "has no data" in why_not_proven(meta, cpu, plain, 1.0)
    plan = planned(meta)
    assert plan.levers.regions and not plan.is_proven
    assert "the first step compares" in proof_text(plan)


def test_a_step_that_fails_with_data_is_planned_without_a_proof() -> None:
    made = workload()

    def loss_fn(model: Any, batch: torch.Tensor) -> Any:
        if not isinstance(batch, FakeTensor):
            raise ValueError("no such file")
        return made.loss_fn(model, batch)

    plan = planned(dataclasses.replace(made, loss_fn=loss_fn))
    assert plan.levers.regions
    assert plan.proof.why == "the step can't be run here (ValueError: no such file)"


def test_a_checksum_sees_where_numbers_are() -> None:
    one = torch.arange(100.0)
    other = one.clone()
    other[[3, 50]] = one[[50, 3]]
    assert checksum(one) != checksum(other)
    assert _sums(one) != _sums(other)


VIEWS: dict[str, torch.Tensor] = {
    "empty": torch.randn(0, 3),
    "a scalar": torch.tensor(2.0),
    "transposed": torch.randn(30, 40).t(),
    "strided": torch.randn(50)[::2],
    "expanded": torch.randn(1).expand(5, 7),
    "complex": torch.randn(7, dtype=torch.complex64),
    "conjugated": torch.randn(7, dtype=torch.complex128).conj(),
    "boolean": torch.tensor([True, False, True]),
    "halves": torch.randn(9).bfloat16(),
    "not a number": torch.tensor([torch.nan, -0.0, torch.inf]),
    "large": torch.randn(1024, 1100, 2).transpose(0, 1),
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS)
def test_a_checksum_sees_every_bit_and_its_place(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone()) != None  # noqa: E711
    bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    assert _sums(bits) == _sums(bits.clone(memory_format=torch.preserve_format))
    if tensor.numel() > 2 and not tensor.is_complex():
        moved = tensor.clone().flatten()
        moved[0] = 7 if moved.dtype != torch.bool else ~moved[0]
        assert checksum(moved.view(tensor.shape)) != checksum(tensor)
        assert _sums(moved.view(tensor.shape)) != _sums(tensor.contiguous())


def test_differences_of_other_kernels_are_warned_of_unless_they_are_to_be_the_same() -> None:
    error = RecomputationError(("a",), "a", "other values")
    with pytest.warns(RuntimeWarning, match="deterministic_algorithms"):
        report(error, torch.device("cuda"))
    for device, deterministic in (("cpu", False), ("cuda", True)):
        with pytest.raises(RecomputationError), deterministically(deterministic):
            report(error, torch.device(device))


@contextlib.contextmanager
def deterministically(are_used: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(are_used)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_kept_of_tensors_where_nothing_is_checked() -> None:
    made = workload()
    with checkpointed(made.model, [Region(("1",))]), warnings.catch_warnings():
        with checking():
            assert isinstance(Expected(torch.ones(2)).checksum, int)
            assert Expected(torch.ones(2)).original is None
            list(plain_steps(made, 1))
        assert Expected(torch.ones(2)).checksum is None


def test_a_proof_is_of_the_levers_alone() -> None:
    plan = planned(workload())
    changed = replace(plan, levers=Levers(microbatch_size=plan.levers.microbatch_size, regions=(Region(("0",)),)))
    assert plan.is_proven
    assert not changed.is_proven
    assert "the levers changed after the proof" in proof_text(changed)


def test_layers_that_differ_alike_are_found_together() -> None:
    """The attention of a language model that caches keys, as Transformers' models do unless they are told not to."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    made = Workload(
        model=model,
        batch=torch.randint(0, 64, (8, 64)),
        loss_fn=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plain, device = Levers(microbatch_size=8), find_device("cpu")
    found = confirmation.Confirmation(made, CaptureFailures(made, device, plain))
    layers = {f"transformer.h.{i}.attn" for i in range(4)}
    for keep in ((), ("aten.cat.default#0",)):
        last = Region(("transformer.h.3.attn",), keep=keep)
        with pytest.raises(confirmation.Excluded) as left:
            found.confirmed(replace(plain, regions=(last,)))
        assert layers <= left.value.modules and {note.split()[0] for note in left.value.notes} == layers
        assert "transformer.h.0.mlp" not in left.value.modules
