"""What does not combine is refused by every verb, with the row of the table."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from memfit.errors import InfeasibleError, PlanError
from memfit.hardware import find_device
from memfit.ir import ChunkedLoss, Levers, Plan, Region, Sharding
from memfit.levers import (
    ACTIVATION_OFFLOAD,
    COMPILATION,
    CONFLICTS,
    LIMIT,
    MICROBATCHES,
    SHARDING,
    Circumstance,
    candidates_of,
    check_combination,
    circumstances,
)
from memfit.levers.checkpointing import LEAN
from memfit.levers.chunked_loss import CHUNKED_LOSS, HEAD_INSIDE
from memfit.levers.compilation import OWN_LOOP
from memfit.levers.lever import Conflict
from memfit.levers.optimizer_in_backward import IN_BACKWARD
from memfit.levers.parameter_updates import FUSED, NO_FUSED, OFFLOADED
from memfit.levers.precision import NO_TF32, NO_UPDATES
from memfit.levers.replaced_optimizer import ADAFACTOR, ADAMW_8BIT, NO_BITSANDBYTES, NOT_ADAMW
from memfit.levers.shared_by_ranks import OF_WEIGHTS, ON_HOST
from memfit.recipes import byte_lm
from memfit.training import Optimizers
from memfit.workload import LoopWorkload, Workload
from tests.workloads import lean


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(lean(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)


def unclipped() -> Workload:
    return dataclasses.replace(lean(), max_grad_norm=None)


def with_batch_norm() -> Workload:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return Workload(model, torch.randn(4, 4), lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()))


def with_two_optimizers() -> Workload:
    workload = unclipped()
    first, *others = workload.model.parameters()
    several = Optimizers([torch.optim.SGD([first]), torch.optim.SGD(others)])
    return dataclasses.replace(workload, optimizer=several)


class Foreign(torch.optim.SGD):
    pass


def compiled() -> Workload:
    workload = lean()
    workload.model._compiled_call_impl = workload.model.forward  # as model.compile() leaves it
    return workload


def looped() -> Workload:
    workload = unclipped()
    return LoopWorkload(**{field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)})


def foreign() -> Workload:
    workload = unclipped()
    return dataclasses.replace(workload, optimizer=Foreign(workload.model.parameters()))


def hooked() -> Workload:
    workload = unclipped()
    workload.optimizer.register_step_post_hook(lambda *_: None)
    return workload


def with_hooks_of_gradients() -> Workload:
    workload = unclipped()
    next(workload.model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    return workload


MADE: dict[str, Callable[[], Workload]] = {
    Circumstance.BATCH_NORM: with_batch_norm,
    Circumstance.CLIPPING: lean,
    Circumstance.COMPILED: compiled,
    Circumstance.FOREIGN_OPTIMIZER: foreign,
    Circumstance.GRADIENT_HOOKS: with_hooks_of_gradients,
    NO_FUSED: foreign,
    NO_UPDATES: lean,
    NOT_ADAMW: with_batch_norm,
    Circumstance.OPTIMIZER_HOOKS: hooked,
    OWN_LOOP: looped,
    Circumstance.SEVERAL_OPTIMIZERS: with_two_optimizers,
}
SET: dict[str, dict[str, Any]] = {
    ACTIVATION_OFFLOAD: {"regions": (Region(("blocks.0",), offload=True),)},
    ADAFACTOR: {"optimizer": "adafactor"},
    ADAMW_8BIT: {"optimizer": "adamw-8bit"},
    CHUNKED_LOSS: {"chunked_loss": ChunkedLoss(head="head", rows=1)},
    COMPILATION: {"compiler": "inductor"},
    FUSED: {"optimizer": "fused"},
    HEAD_INSIDE: {"regions": (Region(("",)),)},
    IN_BACKWARD: {"optimizer": "in-backward"},
    LEAN: {"lean": ("*",)},
    MICROBATCHES: {"microbatch_size": 2},
    OF_WEIGHTS: {"microbatch_size": 2, "sharding": Sharding(world_size=2, mode="zero3")},
    OFFLOADED: {"optimizer": "offloaded"},
    ON_HOST: {"microbatch_size": 2, "sharding": Sharding(world_size=2, mode="zero3", offload=True)},
    SHARDING: {"microbatch_size": 2, "sharding": Sharding(world_size=2, mode="ddp")},
    **{name: {"precision": name} for name in ("tf32", "16-mixed", "bf16-true")},
}
# tested with an environment of its own, in test_batch_coupling.py, below, in test_adapt.py, test_out_of_memory.py, and
# test_compilation.py
ELSEWHERE = {Circumstance.JITTOR, Circumstance.COUPLING_LOSS, NO_BITSANDBYTES, Circumstance.ADAPTING, LIMIT}


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.one} x {row.other}")
def test_each_row_is_refused(row: Conflict) -> None:
    if not ELSEWHERE.isdisjoint((row.one, row.other)):
        return
    assert row.one in SET and (row.other in SET or row.other in MADE or row.other in (Circumstance.NO_LINK, NO_TF32))
    workload = MADE.get(row.other, unclipped)()
    if row.other == "bf16-true":
        workload = dataclasses.replace(workload, bf16_updates="master-weights")
    levers = replace(Levers(microbatch_size=4), **SET[row.one], **SET.get(row.other, {}))
    device = find_device("cpu" if row.other in (Circumstance.NO_LINK, NO_TF32) else "rtx-3090")
    with pytest.raises(PlanError) as error:
        check_combination(levers, workload, device, allowed="reduced")
    assert row.row() in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"bitsandbytes not installed.*pip install 'memfit\[optimizers\]'"):
        check_combination(Levers(microbatch_size=4, optimizer="adamw-8bit"), lean())


@pytest.mark.parametrize(
    ("kind", "options", "is_adamw"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.Adam, {}, True),
        (torch.optim.Adam, {"weight_decay": 0.1}, False),
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, True),
        (torch.optim.AdamW, {"amsgrad": True}, False),
        (torch.optim.AdamW, {"maximize": True}, False),
        (torch.optim.RMSprop, {}, False),
    ],
)
def test_what_does_the_mathematics_of_adamw_is_known(kind: Any, options: dict[str, Any], is_adamw: bool) -> None:
    workload = lean()
    workload = dataclasses.replace(workload, optimizer=kind(workload.model.parameters(), **options))
    assert (NOT_ADAMW in circumstances(workload)) != is_adamw


@pytest.mark.parametrize("kind", ["a step of its own", "a hook of all optimizers", "one of several", "a scheduler"])
def test_code_that_runs_with_a_step_is_a_circumstance_and_a_schedulers_count_is_none(kind: str) -> None:
    workload = with_two_optimizers() if kind == "one of several" else unclipped()
    optimizer: Any = workload.optimizer
    remove: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "a step of its own":
        optimizer.step = types.MethodType(type(optimizer).step, optimizer)
    elif kind == "a hook of all optimizers":
        remove = register_optimizer_step_pre_hook(lambda *_: None).remove
    elif kind == "one of several":
        optimizer.optimizers[1].register_step_pre_hook(lambda *_: None)
    else:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        assert (Circumstance.OPTIMIZER_HOOKS in circumstances(workload)) == (kind != "a scheduler")
    finally:
        remove()


def test_batch_norm_is_allowed_microbatches_under_changed() -> None:
    check_combination(Levers(microbatch_size=2), with_batch_norm(), allowed="changed")


def test_an_ordinary_step_meets_no_circumstance_but_what_the_cpu_lacks() -> None:
    found = circumstances(dataclasses.replace(unclipped(), bf16_updates="master-weights"), find_device("cpu"))
    assert found == {NO_TF32, Circumstance.NO_LINK}
    assert Circumstance.NO_LINK not in circumstances(unclipped(), find_device("rtx-3090"))


def test_a_link_must_be_known_or_measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies whose time nothing tells would look as if they cost nothing."""
    unknown = replace(find_device("rtx-3090"), link_bytes_per_second=0.0)
    assert Circumstance.NO_LINK in circumstances(unclipped(), unknown)
    for pins in (True, False):
        monkeypatch.setattr("memfit.levers.registry.pins_memory", lambda kind, pins=pins: pins)
        here = replace(unknown, name="xpu:0", kind="xpu")
        assert (Circumstance.NO_LINK in circumstances(unclipped(), here)) != pins


@pytest.mark.parametrize(
    "levers",
    [
        {"optimizer": "in-backward"},
        {"chunked_loss": ChunkedLoss(head="head", rows=1), "regions": (Region(("",)),)},
        {"precision": "bf16-true"},
    ],
)
def test_verbs_refuse_plans_made_by_hand(plan: Plan, levers: dict[str, Any]) -> None:
    edited = replace(plan, levers=replace(plan.levers, **levers))
    for verb in (memfit.apply, memfit.verify, functools.partial(memfit.apply, adaptive=True)):
        with pytest.raises(PlanError, match="can't be combined with .* The row in docs/reference/combinations.md: "):
            verb(edited, lean())  # type: ignore[operator]


def test_arguments_are_named() -> None:
    with pytest.raises(PlanError, match="^precision='tf32' on cpu: tf32 can't be combined with a device without TF32"):
        memfit.estimate(lean(), precision="tf32")
    with pytest.raises(
        PlanError, match="^host_budget='1GiB' on cpu: activation offload can't be combined with a device"
    ):
        memfit.plan(lean(), budget="1GiB", host_budget="1GiB")


@pytest.mark.ci
def test_the_optimizer_is_changed_where_nothing_else_is_cheap(captures: list[Levers]) -> None:
    sizes = {"n_layer": 2, "d_model": 128, "n_head": 2, "context": 32, "batch_size": 1}
    workload = byte_lm(max_grad_norm=None, max_bytes=200_000, dropout=0.0, **sizes)  # type: ignore[arg-type]
    plain_bytes = memfit.estimate(workload).peak_bytes
    gradient_bytes = sum(p.nbytes for p in workload.model.parameters())
    roomy = memfit.plan(workload, budget=2 * plain_bytes, numerics="exact", precisions=["32-true"], points=1)
    assert roomy.levers.optimizer == "as-is" and {levers.optimizer for levers in captures} == {"as-is"}
    captures.clear()
    with pytest.raises(InfeasibleError) as lowest:
        memfit.plan(dataclasses.replace(workload, max_grad_norm=1.0), budget="1MiB", numerics="exact", points=1)
    # Clipping needs whole gradients. What else is captured is for the advice.
    assert "in-backward" not in {levers.optimizer for levers in captures}
    budget = int(lowest.value.lowest_peak_bytes - 0.2 * gradient_bytes)
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, numerics="exact", precisions=["32-true"], optimizers=(), points=1)
    captures.clear()
    tight = memfit.plan(workload, budget=budget, numerics="exact", precisions=["32-true"], points=1)
    assert tight.levers.optimizer == "in-backward" and tight.classes[IN_BACKWARD] == "exact"
    bare = {replace(levers, regions=()) for levers in captures if levers.optimizer != "as-is"}
    assert bare == {Levers(microbatch_size=1, optimizer="in-backward")}
    assert "optimizer" in str(tight) and "in-backward" in str(tight)
    verification = memfit.verify(tight, workload, steps=0)
    assert verification.holds and verification.bitwise, verification.failures


def test_a_running_step_keeps_its_optimizer(plan: Plan) -> None:
    (point, *_) = plan.frontier
    levers = [replace(plan.levers, optimizer=x) for x in ("as-is", "in-backward", "adafactor")]
    frontier = [replace(point, levers=x, peak_bytes=100 - n) for n, x in enumerate(levers)]
    for chosen in levers[:2]:
        mixed = replace(plan, levers=chosen, frontier=frontier)
        assert [c.levers for c in candidates_of(mixed)] == [chosen]
