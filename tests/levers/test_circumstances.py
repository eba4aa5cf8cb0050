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
    candidates_of,
    check_combination,
    circumstances,
    conflicts,
    fused_optimizer,
    offloaded_optimizer,
    optimizer_in_backward,
    precision,
    replaced_optimizer,
    shared_by_ranks,
)
from memfit.levers.chunked_loss import CHUNKED_LOSS, HEAD_INSIDE
from memfit.levers.compilation import OWN_LOOP
from memfit.levers.lean import LEAN
from memfit.levers.replaced_optimizer import ADAFACTOR, ADAMW_8BIT
from memfit.recipes import byte_lm
from memfit.training import Optimizers
from memfit.workload import LoopWorkload, Workload
from tests.workloads import lean


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(lean(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)


def row_of(pair: tuple[str, str]) -> str:
    """Return the row of the table for two things."""
    return next(conflict.row() for conflict in CONFLICTS if (conflict.one, conflict.other) == pair)


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


OFFLOADED = Levers(microbatch_size=4, optimizer="offloaded")
IN_BACKWARD = Levers(microbatch_size=4, optimizer="in-backward")
FUSED = Levers(microbatch_size=4, optimizer="fused")
DATA_PARALLEL = Levers(microbatch_size=2, sharding=Sharding(world_size=2, mode="ddp"))
COMPILED = Levers(microbatch_size=4, compiler="inductor")
FULLY_SHARDED = Levers(microbatch_size=2, sharding=Sharding(world_size=2, mode="zero3"))
CASES: dict[tuple[str, str], tuple[Callable[[], Workload], Levers]] = {
    (MICROBATCHES, conflicts.BATCH_NORM): (with_batch_norm, Levers(microbatch_size=2)),
    (MICROBATCHES, conflicts.GRADIENT_HOOKS): (with_hooks_of_gradients, Levers(microbatch_size=2)),
    (optimizer_in_backward.IN_BACKWARD, conflicts.GRADIENT_HOOKS): (with_hooks_of_gradients, IN_BACKWARD),
    (optimizer_in_backward.IN_BACKWARD, conflicts.OPTIMIZER_HOOKS): (hooked, IN_BACKWARD),
    (offloaded_optimizer.OFFLOADED, conflicts.OPTIMIZER_HOOKS): (hooked, OFFLOADED),
    **{
        (name, conflicts.OPTIMIZER_HOOKS): (hooked, Levers(microbatch_size=4, optimizer=value))
        for name, value in ((ADAMW_8BIT, "adamw-8bit"), (ADAFACTOR, "adafactor"))
    },
    ("bf16-true", precision.NO_UPDATES): (lean, Levers(precision="bf16-true", microbatch_size=4)),
    ("tf32", precision.NO_TF32): (lean, Levers(precision="tf32", microbatch_size=4)),
    (ACTIVATION_OFFLOAD, conflicts.NO_LINK): (
        lean,
        Levers(microbatch_size=4, regions=(Region(("blocks.0",), offload=True),)),
    ),
    (CHUNKED_LOSS, HEAD_INSIDE): (
        lean,
        Levers(microbatch_size=4, regions=(Region(("",)),), chunked_loss=ChunkedLoss(head="head", rows=1)),
    ),
    (CHUNKED_LOSS, conflicts.COMPILED): (
        compiled,
        Levers(microbatch_size=4, chunked_loss=ChunkedLoss(head="head", rows=1)),
    ),
    (optimizer_in_backward.IN_BACKWARD, MICROBATCHES): (unclipped, replace(IN_BACKWARD, microbatch_size=1)),
    (optimizer_in_backward.IN_BACKWARD, conflicts.CLIPPING): (lean, IN_BACKWARD),
    (optimizer_in_backward.IN_BACKWARD, "16-mixed"): (unclipped, replace(IN_BACKWARD, precision="16-mixed")),
    (optimizer_in_backward.IN_BACKWARD, "bf16-true"): (
        lambda: dataclasses.replace(unclipped(), bf16_updates="master-weights"),
        replace(IN_BACKWARD, precision="bf16-true"),
    ),
    (optimizer_in_backward.IN_BACKWARD, conflicts.SEVERAL_OPTIMIZERS): (with_two_optimizers, IN_BACKWARD),
    (offloaded_optimizer.OFFLOADED, conflicts.NO_LINK): (lean, OFFLOADED),
    (offloaded_optimizer.OFFLOADED, "bf16-true"): (
        lambda: dataclasses.replace(lean(), bf16_updates="master-weights"),
        replace(OFFLOADED, precision="bf16-true"),
    ),
    (offloaded_optimizer.OFFLOADED, conflicts.SEVERAL_OPTIMIZERS): (with_two_optimizers, OFFLOADED),
    (offloaded_optimizer.OFFLOADED, conflicts.FOREIGN_OPTIMIZER): (foreign, OFFLOADED),
    (ADAMW_8BIT, replaced_optimizer.NOT_ADAMW): (
        with_batch_norm,
        Levers(microbatch_size=4, optimizer="adamw-8bit"),
    ),
    (ADAMW_8BIT, "bf16-true"): (
        lambda: dataclasses.replace(lean(), bf16_updates="master-weights"),
        Levers(microbatch_size=4, precision="bf16-true", optimizer="adamw-8bit"),
    ),
    (ADAFACTOR, "bf16-true"): (
        lambda: dataclasses.replace(lean(), bf16_updates="master-weights"),
        Levers(microbatch_size=4, precision="bf16-true", optimizer="adafactor"),
    ),
    (ADAFACTOR, conflicts.SEVERAL_OPTIMIZERS): (
        with_two_optimizers,
        Levers(microbatch_size=4, optimizer="adafactor"),
    ),
    (optimizer_in_backward.IN_BACKWARD, conflicts.FOREIGN_OPTIMIZER): (foreign, IN_BACKWARD),
    (fused_optimizer.FUSED, fused_optimizer.NO_FUSED): (foreign, FUSED),
    (shared_by_ranks.SHARDING, conflicts.BATCH_NORM): (with_batch_norm, DATA_PARALLEL),
    (shared_by_ranks.SHARDING, optimizer_in_backward.IN_BACKWARD): (
        unclipped,
        replace(DATA_PARALLEL, optimizer="in-backward"),
    ),
    **{
        (shared_by_ranks.OF_WEIGHTS, other): (unclipped, replace(FULLY_SHARDED, optimizer=value))
        for other, value in (
            (offloaded_optimizer.OFFLOADED, "offloaded"),
            (ADAMW_8BIT, "adamw-8bit"),
            (ADAFACTOR, "adafactor"),
        )
    },
    (shared_by_ranks.OF_WEIGHTS, "bf16-true"): (
        lambda: dataclasses.replace(lean(), bf16_updates="master-weights"),
        replace(FULLY_SHARDED, precision="bf16-true"),
    ),
    (shared_by_ranks.OF_WEIGHTS, conflicts.SEVERAL_OPTIMIZERS): (with_two_optimizers, FULLY_SHARDED),
    (shared_by_ranks.ON_HOST, conflicts.NO_LINK): (
        lean,
        Levers(microbatch_size=2, sharding=Sharding(world_size=2, mode="zero3", offload=True)),
    ),
    (fused_optimizer.FUSED, "bf16-true"): (
        lambda: dataclasses.replace(lean(), bf16_updates="master-weights"),
        replace(FUSED, precision="bf16-true"),
    ),
    **{
        (COMPILATION, other): (make, replace(COMPILED, **changes))
        for other, make, changes in (
            (CHUNKED_LOSS, lean, {"chunked_loss": ChunkedLoss(head="head", rows=1)}),
            (LEAN, lean, {"lean": ("*",)}),
            (ACTIVATION_OFFLOAD, lean, {"regions": (Region(("blocks.0",), offload=True),)}),
            (optimizer_in_backward.IN_BACKWARD, unclipped, {"optimizer": "in-backward"}),
            (shared_by_ranks.SHARDING, unclipped, {"sharding": DATA_PARALLEL.sharding, "microbatch_size": 2}),
            (conflicts.COMPILED, compiled, {}),
            (OWN_LOOP, looped, {}),
        )
    },
}


@pytest.mark.parametrize("pair", CASES, ids=" x ".join)
def test_each_row_is_refused(pair: tuple[str, str]) -> None:
    make, levers = CASES[pair]
    device = find_device("cpu" if conflicts.NO_LINK in pair or precision.NO_TF32 in pair else "rtx-3090")
    with pytest.raises(PlanError) as error:
        check_combination(levers, make(), device, allowed="reduced")
    assert row_of(pair) in str(error.value)


def test_every_row_but_those_of_other_frameworks_is_tested() -> None:
    # tested with an environment of its own, in test_batch_coupling.py, below, in test_adaptive.py,
    # test_out_of_memory.py, and test_compilation.py
    elsewhere = {
        conflicts.JITTOR,
        conflicts.COUPLING_LOSS,
        replaced_optimizer.NO_BITSANDBYTES,
        conflicts.ADAPTING,
        LIMIT,
    }
    assert set(CASES) == {(r.one, r.other) for r in CONFLICTS if elsewhere.isdisjoint((r.one, r.other))}


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
    assert (replaced_optimizer.NOT_ADAMW in circumstances(workload)) != is_adamw


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
        assert (conflicts.OPTIMIZER_HOOKS in circumstances(workload)) == (kind != "a scheduler")
    finally:
        remove()


def test_batch_norm_is_allowed_microbatches_under_changed() -> None:
    check_combination(Levers(microbatch_size=2), with_batch_norm(), allowed="changed")


def test_an_ordinary_step_meets_no_circumstance_but_what_the_cpu_lacks() -> None:
    found = circumstances(dataclasses.replace(unclipped(), bf16_updates="master-weights"), find_device("cpu"))
    assert found == {precision.NO_TF32, conflicts.NO_LINK}
    assert conflicts.NO_LINK not in circumstances(unclipped(), find_device("rtx-3090"))


def test_a_link_must_be_known_or_measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies whose time nothing tells would look as if they cost nothing."""
    unknown = replace(find_device("rtx-3090"), link_bytes_per_second=0.0)
    assert conflicts.NO_LINK in circumstances(unclipped(), unknown)
    for pins in (True, False):
        monkeypatch.setattr("memfit.levers.registry.pins_memory", lambda kind, pins=pins: pins)
        here = replace(unknown, name="xpu:0", kind="xpu")
        assert (conflicts.NO_LINK in circumstances(unclipped(), here)) != pins


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
    assert tight.levers.optimizer == "in-backward" and tight.classes[optimizer_in_backward.IN_BACKWARD] == "exact"
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
