"""Levers that a step fails with are left out of plans with a note; only the plain step's failure is the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit._torch import DataDependentOutputException
from memfit.cost import missing_kernel
from memfit.errors import CaptureError, InfeasibleError
from memfit.ir import Levers, Plan, Region, Trace
from memfit.planner import StepVariant, captured_through, first_line
from memfit.planner.confirmation import failing, refusal_notes
from memfit.workload import Workload

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@torch.library.custom_op("memfit_tests::only_in_fp32", mutates_args=())
def only_in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Double a tensor, in fp32 alone."""
    if x.dtype != torch.float32:
        raise NotImplementedError(f'"only_in_fp32" not implemented for {str(x.dtype)[6:]!r}')
    return 2 * x


@only_in_fp32.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


only_in_fp32.register_autograd(lambda ctx, gradient: 2 * gradient)


class Model(nn.Module):
    """Two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.two = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def _adversarial(model: Any, batch: torch.Tensor) -> torch.Tensor:
    made = model.one(batch)
    model.two.requires_grad_(False)
    fooled = -model.two(made).mean()
    model.two.requires_grad_(True)
    return fooled + model.two(made.detach()).mean() - model.two(batch).mean()


def _with_detached_weights(model: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(model.two[0](batch), model.one[0].weight.detach().t())
    return model(hidden).square().mean()


def _whole_batches_only(model: Any, batch: torch.Tensor) -> torch.Tensor:
    if len(batch) != 32:
        raise ValueError(f"pairs of 32 samples are compared, not of {len(batch)}")
    return model(batch).square().mean()


def _in_fp32(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return only_in_fp32(model(batch)).float().square().mean()


def workload(loss_fn: Loss) -> Workload:
    torch.manual_seed(0)
    model = Model()
    return Workload(model, torch.randn(32, 8), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


FAILING: dict[str, tuple[Loss, dict[str, Any], str]] = {
    "weights that another loss needs": (
        _adversarial,
        {"numerics": "exact", "optimizers": ["as-is", "in-backward"]},
        "optimizer in-backward: left out, since the step fails with it (RuntimeError: one of the variables needed",
    ),
    "weights without their history": (
        _with_detached_weights,
        {"numerics": "exact", "optimizers": ["as-is", "in-backward"]},
        "optimizer in-backward: left out, since the step fails with it (RuntimeError: one of the variables needed",
    ),
    "half a batch": (
        _whole_batches_only,
        {"numerics": "reordered", "optimizers": ["as-is"]},
        "microbatch 16: left out, since the step fails with it (ValueError: pairs of 32 samples are compared",
    ),
    "an operator without a kernel": (
        _in_fp32,
        {"numerics": "reduced", "precisions": ["32-true", "bf16-mixed"], "optimizers": ["as-is"]},
        'bf16-mixed: left out, since the step fails with it (NotImplementedError: "only_in_fp32" not',
    ),
}


def planned(made: Workload, budget: int | str, **options: Any) -> Plan:
    return memfit.plan(made, budget=budget, points=1, **options)


MORE = ("weights without their history", "weights that another loss needs")
"""What fails as another does: CI takes it."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci) if n in MORE else n for n in FAILING])
def test_a_lever_that_the_step_fails_with_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn, options, note = FAILING[name]
    monkeypatch.setattr("memfit.planner.assembly._CHEAP", -1.0)  # every way of updating the parameters is tried
    plan = planned(workload(loss_fn), "1GiB", **options)
    assert plan.levers == Levers(microbatch_size=32)
    assert any(text.startswith(note) for text in plan.notes), plan.notes
    with pytest.raises(InfeasibleError, match="^Does not fit: needs"):
        planned(workload(loss_fn), "1KiB", **options)


def test_the_plain_step_is_left_where_all_that_was_asked_for_fails() -> None:
    options: Any = {"numerics": "reduced", "precisions": ["bf16-mixed"], "optimizers": ["as-is"]}
    assert planned(workload(_in_fp32), "1GiB", **options).levers == Levers(microbatch_size=32)


def test_the_failure_of_the_plain_step_is_the_users() -> None:
    def broken(model: Any, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such label")

    with pytest.raises(CaptureError, match="no such label"):
        planned(workload(broken), "1GiB")


def _planned(made: Workload, is_refused: Callable[[Levers], bool], numerics: str) -> Plan:
    """Return a plan within less than the plain step takes, where some steps can't be captured by themselves."""

    def refusing(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        if variant.explores and is_refused(variant.levers):
            raise CaptureError("these do not go together")
        return capture(variant)

    budget = int(0.7 * memfit.estimate(made).peak_bytes)
    with captured_through(refusing):
        plan = planned(made, budget, numerics=numerics, optimizers=["as-is"])
    assert plan.predicted.peak_upper_bytes <= budget
    return plan


def _wide() -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.randn(256, 16), lambda model, batch: model(batch).square().mean(), optimizer)


@pytest.mark.ci
def test_regions_that_a_planned_step_fails_with_are_left_out() -> None:
    made = _wide()
    culprit = _planned(made, lambda levers: False, "exact").levers.regions[0].modules[0]
    plan = _planned(made, lambda levers: any(culprit in region.modules for region in levers.regions), "exact")
    assert not any(culprit in region.modules for region in plan.levers.regions)
    assert any(f"{culprit} is not recomputed: with it the step fails" in note for note in plan.notes), plan.notes


@pytest.mark.ci
def test_levers_that_fail_once_regions_are_chosen_are_left_out() -> None:
    refused: list[Levers] = []

    def is_refused(levers: Levers) -> bool:
        refused.extend([levers] if levers.lean or levers.microbatch_size < 256 else [])
        return levers in refused

    plan = _planned(_wide(), is_refused, "reordered")
    assert plan.levers.regions and not plan.levers.lean and plan.levers.microbatch_size == 256
    told = any("left out, since the step fails with it (these do not go together)" in note for note in plan.notes)
    assert told == bool(refused), plan.notes


@pytest.mark.parametrize(
    ("culprits", "most", "found"),
    [({"3"}, 7, ["3"]), ({"0", "6"}, 7, ["0", "6"]), (set[str](), 4, list("0123456"))],
    ids=["one", "two", "only many together"],
)
def test_failing_regions_are_found_by_halves(culprits: set[str], most: int, found: list[str]) -> None:
    regions = tuple(Region((str(i),)) for i in range(7))

    def attempt(levers: Levers) -> None:
        if len(levers.regions) > most or culprits & {fqn for region in levers.regions for fqn in region.modules}:
            raise ValueError

    levers = Levers(microbatch_size=1, regions=regions)
    assert [region.modules[0] for region in failing(levers, regions, attempt)] == found


def test_notes_are_one_line_each() -> None:
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert len(first_line(ValueError("x" * 10_000))) < 300
    unread = CaptureError("the step can't be captured at train.py:3: x.item() (of unknown values). Replace it")
    unread.__cause__ = DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    assert first_line(unread) == "the step can't be captured at train.py:3: x.item() (of unknown values)"
    assert refusal_notes({"": "x", "a": "reads b", "c": "writes d"}) == [
        "a is not recomputed: it reads b",
        "c is not recomputed: it writes d",
    ]
    many = refusal_notes({str(i): "reads b" for i in range(9)})
    assert many == ["0, 1, 2 and 6 more are not recomputed: each reads b"]


def test_kernels_that_are_missing_are_told_from_other_failures() -> None:
    text = '{"op":"memfit_tests.only_in_fp32.default","args":[{"t":["DTYPE",[2],[1]]}]}'
    assert "not implemented for" in str(missing_kernel(text.replace("DTYPE", "bfloat16")))
    assert missing_kernel(text.replace("DTYPE", "float32")) is None
    assert missing_kernel('{"op":"aten.view.default","args":[{"t":["float32",[2],[1]]},{"l":[3]}]}') is None
    assert missing_kernel('{"op":"memfit_tests.nothing.default"}') is None
