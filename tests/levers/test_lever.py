"""Every lever through its interface: told, applied once, charged, known nowhere else; and what does not combine."""

from __future__ import annotations

import ast
import dataclasses
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memfit
from memfit.errors import BudgetError, InfeasibleError, PlanError
from memfit.hardware import find_device
from memfit.ir import (
    Candidate,
    ChunkedLoss,
    FrozenWeights,
    HostWeights,
    Levers,
    Plan,
    Region,
    Sharding,
    Tiles,
    at_point,
)
from memfit.levers import (
    CONFLICTS,
    LEVERS,
    LIMIT,
    Circumstance,
    LeversOn,
    UpdateLever,
    applied,
    candidates_of,
    check_combination,
    check_lever_names,
    circumstances,
    conflict_table,
    host_bytes_of,
    lever_names,
    lever_uses,
    met,
)
from memfit.recipes import byte_lm
from memfit.training import Optimizers
from memfit.workload import LoopWorkload, Workload
from tests.update_settings import update_settings
from tests.workloads import lean, tiny

SRC = Path(memfit.__file__).parent
PLAIN = Levers(microbatch_size=4)
UPDATES = {lever.name: lever.value for lever in LEVERS if isinstance(lever, UpdateLever)}
CUT = {"microbatch_size": 2}
USED: dict[str, dict[str, Any]] = {
    "precision": {"precision": "bf16-true"},
    "microbatches": CUT,
    "chunked loss": {"chunked_loss": ChunkedLoss(head="head", rows=4)},
    "tiles over tokens": {"tiles": Tiles(modules=("blocks.0.mlp",), tokens=8)},
    "lean norms and activations": {"lean": ("*",)},
    "frozen weights in fewer bits": {"frozen_weights": FrozenWeights(quantizer="int8")},
    "products in float8": {"float8": ("blocks.0.mlp.fc",)},
    "weights in host memory": {"host_weights": HostWeights(modules=("blocks.0",), host_bytes=300)},
    "activation checkpointing": {"regions": (Region(("blocks.0",)),)},
    "activation offload": {"regions": (Region(("blocks.0",), offload=True),)},
    **{name: update_settings(value) for name, value in UPDATES.items()},
    "sharding": {**CUT, "sharding": Sharding(world_size=2, mode="ddp")},
    "compilation": {"compiler": "inductor"},
    "own gradient checkpointing": {"own_checkpointing": "off"},
    "expandable segments": {"allocator": "expandable-segments"},
}
"""For each lever, what it is used by."""
HEAD_INSIDE = "a region around the head of the logits"
SET: dict[str, dict[str, Any]] = {
    **USED,
    HEAD_INSIDE: {"regions": (Region(("",)),)},
    "sharding of weights": {**CUT, "sharding": Sharding(world_size=2, mode="zero3")},
    "shards in host memory": {**CUT, "sharding": Sharding(world_size=2, mode="zero3", offload=True)},
    **{name: {"precision": name} for name in ("tf32", "16-mixed", "bf16-true")},
}
"""For each lever and setting that rows of the table name, what it is used by."""


def unclipped(**changes: Any) -> Workload:
    return dataclasses.replace(lean(), max_grad_norm=None, **changes)


def with_optimizer(kind: Any, **options: Any) -> Workload:
    workload = unclipped()
    return dataclasses.replace(workload, optimizer=kind(workload.model.parameters(), **options))


def with_batch_norm() -> Workload:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return Workload(model, torch.randn(4, 4), lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()))


def with_two_optimizers() -> Workload:
    workload = unclipped()
    first, *others = workload.model.parameters()
    return dataclasses.replace(workload, optimizer=Optimizers([torch.optim.SGD([first]), torch.optim.SGD(others)]))


def compiled() -> Workload:
    workload = lean()
    workload.model._compiled_call_impl = workload.model.forward  # as model.compile() leaves it
    return workload


def looped() -> Workload:
    workload = unclipped()
    return LoopWorkload(**{field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)})


def hooked() -> Workload:
    workload = unclipped()
    workload.optimizer.register_step_post_hook(lambda *_: None)
    return workload


def with_hooks_of_gradients() -> Workload:
    workload = unclipped()
    next(workload.model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    return workload


foreign = functools.partial(with_optimizer, type("Foreign", (torch.optim.SGD,), {"__module__": __name__}))
NOT_ADAMW, NO_TF32 = "an optimizer other than AdamW, or Adam without weight decay", "a device without TF32"
ON_DEVICE = {Circumstance.NO_LINK: "cpu", NO_TF32: "cpu", "a device without float8 products": "rtx-3090"}
"""For each circumstance of a device, one that has it."""
MADE: dict[str, Callable[[], Workload]] = {
    Circumstance.BATCH_NORM: with_batch_norm,
    Circumstance.CLIPPING: lean,
    Circumstance.COMPILED: compiled,
    Circumstance.FOREIGN_OPTIMIZER: foreign,
    Circumstance.GRADIENT_HOOKS: with_hooks_of_gradients,
    "an optimizer without a fused step, or fused already": foreign,
    "Workload.bf16_updates=None": lean,
    NOT_ADAMW: with_batch_norm,
    Circumstance.OPTIMIZER_HOOKS: hooked,
    "your own training loop (`memfit.fit`)": looped,
    Circumstance.SEVERAL_OPTIMIZERS: with_two_optimizers,
}
"""For each circumstance, a workload that it is one of."""
# tested with an environment of its own, in test_batch_coupling.py, below, in test_adapt.py, test_out_of_memory.py, and
# test_compilation.py
ELSEWHERE = {
    *(Circumstance.JITTOR, Circumstance.COUPLING_LOSS, Circumstance.ADAPTING),
    *("bitsandbytes not installed", LIMIT),
}


def planned() -> Workload:
    return dataclasses.replace(tiny(), max_grad_norm=None, bf16_updates="master-weights")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(planned(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)


def under(plan: Plan, **changes: Any) -> Plan:
    """Return a plan of other levers, told as they are."""
    levers = replace(plan.levers, **changes)
    return replace(plan, levers=levers, uses=lever_uses(LeversOn(levers, 4)), allowed="changed")


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
def test_each_tells_its_use_and_goes_without_it(lever: Any) -> None:
    assert [other.name for other in LEVERS].count(lever.name) == 1 and len(LEVERS) == len(USED)
    on = LeversOn(replace(PLAIN, **USED[lever.name]), 4)
    assert lever.is_used(on) and not lever.is_used(LeversOn(PLAIN, 4))
    assert not lever.is_used(LeversOn(lever.without(on), 4))
    use = lever.use(on)
    assert use.name == lever.name and use.setting and use.brief and use in lever_uses(on)
    assert lever.names(on.levers) <= lever_names(on)


NOT_ON_THIS_MODEL = {
    *("microbatches", "compilation", "sharding", "own gradient checkpointing", "expandable segments"),
    *("frozen weights in fewer bits", "weights in host memory"),
}


@pytest.mark.parametrize("name", [name for name in USED if name not in NOT_ON_THIS_MODEL])
def test_none_is_applied_twice(name: str, plan: Plan) -> None:
    """But those that leave a model as it is, or this one, where nothing is frozen; sharding needs ranks."""
    if name == "AdamW with 8-bit states":
        pytest.importorskip("bitsandbytes")
    workload, edited = planned(), under(plan, **USED[name])
    with memfit.apply(edited, workload):
        with pytest.raises(PlanError, match=r"is applied to the workload already.*close\(\)"):
            memfit.apply(edited, workload)
        with pytest.raises(PlanError, match="is applied to the workload already"):
            memfit.estimate(workload)
    with memfit.apply(edited, workload) as step:
        step(workload.batch)


@pytest.mark.parametrize(
    ("used", "host_budget_bytes", "expected"),
    [
        ((), 2**30, {}),
        (("optimizer states in host memory",), 0, {"optimizer states in host memory": 100}),
        (("activation offload",), 500, {"activation offload": 500}),
        (
            ("weights in host memory", "activation offload"),
            500,
            {"weights in host memory": 300, "activation offload": 200},
        ),
        (
            ("optimizer states in host memory", "activation offload"),
            500,
            {"optimizer states in host memory": 100, "activation offload": 400},
        ),
    ],
)
def test_the_host_memory_of_each_is_counted(
    used: tuple[str, ...], host_budget_bytes: int, expected: dict[str, int], plan: Plan
) -> None:
    changed = under(plan, **{field: value for name in used for field, value in USED[name].items()})
    plain = replace(plan.plain, by_category={"optimizer state": 100, "activations": 7})
    assert host_bytes_of(replace(changed, plain=plain, host_budget_bytes=host_budget_bytes)) == expected


def test_offloaded_states_are_checked_against_the_host(plan: Plan) -> None:
    offloaded, huge = (
        under(plan, optimizer_state="offloaded"),
        replace(plan.plain, by_category={"optimizer state": 2**60}),
    )
    memfit.apply(offloaded, planned()).close()
    memfit.apply(replace(plan, plain=huge), planned()).close()  # nothing of it is in the host's memory by a lever
    with pytest.raises(BudgetError, match="optimizer states in host memory: "):
        memfit.apply(replace(offloaded, plain=huge), planned())


@pytest.mark.parametrize("couples_batch", [False, True])
def test_another_point_has_the_classes_that_it_was_planned_with(couples_batch: bool, plan: Plan) -> None:
    """As of Adafactor with microbatches, which is of class changed whether samples are coupled or not."""
    levers = replace(plan.levers, microbatch_size=2, optimizer="adafactor")
    uses = lever_uses(LeversOn(levers, 4, couples_batch))
    point = replace(plan.frontier[0], levers=levers, uses=uses, numerics="changed")
    assert at_point(plan, point, "").classes == {
        "Adafactor": "changed",
        "microbatches": "changed" if couples_batch else "reordered",
    }


def test_a_running_step_keeps_what_does_not_switch(plan: Plan) -> None:
    def may_follow(base: Plan, **changes: Any) -> bool:
        point: Candidate = replace(plan.frontier[0], levers=replace(plan.levers, **changes))
        return bool(candidates_of(replace(base, frontier=[point], allowed="changed")))

    assert {lever.name for lever in LEVERS if may_follow(plan, **USED[lever.name])} == {
        lever.name for lever in LEVERS if lever.switchable
    }
    in_backward = replace(plan, levers=replace(plan.levers, update="in-backward"))
    others: list[dict[str, Any]] = [{}, {"update": "in-backward"}, {"update": "in-backward", "optimizer": "adafactor"}]
    assert [may_follow(in_backward, **changes) for changes in others] == [False, True, False]


def named_levers(source: str) -> list[str]:
    """Return where code names a lever: a field of `Levers` that one alone sets, or a value of it."""
    words = {"precision", "microbatches", "fused", "sharding"}  # which mean other things too
    values = ({*UPDATES.values(), *USED}) - words
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (
            node.attr in ("chunked_loss", "lean", "frozen_weights", "float8", "tiles", "host_weights")
            or (
                node.attr in ("optimizer", "compiler", "update", "optimizer_state")
                and "levers" in ast.unparse(node.value)
            )
        ):
            names.append(f"{ast.unparse(node)}, line {node.lineno}")
        if isinstance(node, ast.Constant) and node.value in values:
            names.append(f"{node.value!r}, line {node.lineno}")
    return names


@pytest.mark.parametrize(
    "source",
    ["x = plan.levers.lean", "if levers.optimizer == 'as-is': pass", "y = 'in-backward'", "z = 'chunked loss'"],
)
def test_a_name_of_a_lever_is_found(source: str) -> None:
    assert named_levers(source) and not named_levers("x = workload.optimizer; y = levers.regions")


def test_nothing_but_the_levers_names_one() -> None:
    files = [p for p in SRC.rglob("*.py") if p.parent.name != "levers" and p != SRC / "ir" / "levers.py"]
    named = {str(p.relative_to(SRC)): names for p in files if (names := named_levers(p.read_text()))}
    assert named == {}


def test_an_updated_optimizer_is_let_go_of() -> None:
    workload = unclipped()
    (lever,) = (x for x in LEVERS if isinstance(x, UpdateLever) and x.value == "in-backward")
    assert not lever.is_applied(workload)
    with applied(replace(PLAIN, update="in-backward"), workload):
        assert lever.is_applied(workload)
        other = dataclasses.replace(workload, optimizer=torch.optim.SGD(workload.model.parameters()))
        assert not lever.is_applied(other)
    assert not lever.is_applied(workload)


# What does not combine


NAMES = sorted({name for row in CONFLICTS for name in (row.one, row.other)})


@given(used=st.sets(st.sampled_from(NAMES)), allowed=st.sampled_from(["exact", "changed"]))
def test_what_is_refused_is_what_the_table_names(used: set[str], allowed: Any) -> None:
    named = [row for row in CONFLICTS if {row.one, row.other} <= used and not (row.unless and allowed == row.unless)]
    assert met(CONFLICTS, used, allowed) == named
    if not named:
        check_lever_names(used, allowed)
    else:
        with pytest.raises(PlanError) as error:
            check_lever_names(used, allowed, where="here: ")
        first = named[0]
        assert all(part in str(error.value) for part in ("here: ", first.one, first.other, first.why, first.row()))
        assert first.row() in conflict_table()


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.one} x {row.other}")
def test_each_row_is_there_once_and_refused(row: Any) -> None:
    assert sum({row.one, row.other} == {other.one, other.other} for other in CONFLICTS) == 1
    assert row.why and row.instead
    if not ELSEWHERE.isdisjoint((row.one, row.other)):
        return
    assert row.one in SET and any(row.other in known for known in (SET, MADE, ON_DEVICE))
    workload = MADE.get(row.other, unclipped)()
    if row.other == "bf16-true":
        workload = dataclasses.replace(workload, bf16_updates="master-weights")
    levers = replace(PLAIN, **SET[row.one], **SET.get(row.other, {}))
    device = find_device(ON_DEVICE.get(row.other, "rtx-4090"))
    with pytest.raises(PlanError) as error:
        check_combination(levers, workload, device, allowed="reduced")
    assert row.row() in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"bitsandbytes not installed.*pip install 'memfit\[optimizers\]'"):
        check_combination(replace(PLAIN, optimizer="adamw-8bit"), lean())


def test_levers_have_the_names_of_the_table() -> None:
    assert lever_names(LeversOn(PLAIN, 4)) == set()
    names = ("microbatches", "activation offload", "chunked loss", "optimizer in the backward pass")
    used = Levers(precision="tf32", **{field: value for name in names for field, value in USED[name].items()})
    assert lever_names(LeversOn(used, 4)) == {"tf32", "precision", "activation checkpointing", *names}


@pytest.mark.parametrize(("head", "inside"), [("body.head", True), ("body", True), ("body2.head", False), ("x", False)])
def test_regions_around_the_head_are_found(head: str, inside: bool) -> None:
    for modules, expected in ((("body",), inside), (("",), True)):
        levers = Levers(microbatch_size=1, regions=(Region(modules),), chunked_loss=ChunkedLoss(head=head, rows=1))
        assert (HEAD_INSIDE in lever_names(LeversOn(levers, 1))) == expected


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
    assert (NOT_ADAMW in circumstances(with_optimizer(kind, **options))) != is_adamw


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
    found = circumstances(unclipped(bf16_updates="master-weights"), find_device("cpu"))
    assert found == {NO_TF32, Circumstance.NO_LINK}


@pytest.mark.parametrize(
    ("changes", "linked"),
    [
        ({}, True),
        ({"link_bytes_per_second": 0.0}, False),
        ({"link_bytes_per_second": 0.0, "name": "cuda:0"}, True),  # which is here, and measured
        ({"link_bytes_per_second": 0.0, "name": "mps:0", "kind": "mps"}, False),  # whose memory is the host's
    ],
)
def test_a_link_must_be_known_or_measurable(changes: dict[str, Any], linked: bool) -> None:
    """Copies whose time nothing tells would look as if they cost nothing."""
    device = replace(find_device("rtx-3090"), **changes)
    assert (Circumstance.NO_LINK in circumstances(unclipped(), device)) != linked


@pytest.mark.parametrize(
    "levers", [{"update": "in-backward"}, {**USED["chunked loss"], **SET[HEAD_INSIDE]}, {"precision": "bf16-true"}]
)
def test_verbs_refuse_plans_made_by_hand(levers: dict[str, Any]) -> None:
    plan = memfit.plan(lean(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
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
    options: dict[str, Any] = {"numerics": "exact", "precisions": ["32-true"], "points": 1}
    plain_bytes = memfit.estimate(workload).peak_bytes
    gradient_bytes = sum(p.nbytes for p in workload.model.parameters())
    roomy = memfit.plan(workload, budget=2 * plain_bytes, **options)
    assert {(x.optimizer, x.update) for x in (roomy.levers, *captures)} == {("as-is", "after")}
    captures.clear()
    with pytest.raises(InfeasibleError) as lowest:
        memfit.plan(dataclasses.replace(workload, max_grad_norm=1.0), budget="1MiB", numerics="exact", points=1)
    # Clipping needs whole gradients. What else is captured is for the advice.
    assert {levers.update for levers in captures} == {"after"}
    budget = int(lowest.value.lowest_peak_bytes - 0.2 * gradient_bytes)
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, optimizers=(), **options)
    captures.clear()
    tight = memfit.plan(workload, budget=budget, **options)
    assert tight.levers.update == "in-backward" and tight.classes["optimizer in the backward pass"] == "exact"
    bare = {replace(levers, regions=()) for levers in captures if levers.update != "after"}
    assert bare == {Levers(microbatch_size=1, update="in-backward")}
    assert "optimizer" in str(tight) and "in-backward" in str(tight)
    verification = memfit.verify(tight, workload, steps=0)
    assert verification.holds and verification.bitwise, verification.failures
