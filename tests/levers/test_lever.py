"""Every lever through its interface: told, applied once, charged, known nowhere else; and the table of conflicts."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import memfit
from memfit.errors import BudgetError, PlanError
from memfit.ir import Candidate, ChunkedLoss, Levers, Plan, Region, Sharding, at_point
from memfit.levers import (
    CONFLICTS,
    LeversOn,
    applied,
    candidates_of,
    check_lever_names,
    host_bytes_of,
    lever_names,
    met,
    registry,
)
from memfit.levers.chunked_loss import HEAD_INSIDE
from memfit.levers.lever import Lever
from memfit.levers.registry import conflict_table
from memfit.workload import Workload
from tests.workloads import tiny

SRC = Path(memfit.__file__).parent
PLAIN = Levers(microbatch_size=4)
USED: dict[str, dict[str, Any]] = {
    "precision": {"precision": "bf16-true"},
    "microbatches": {"microbatch_size": 2},
    "chunked loss": {"chunked_loss": ChunkedLoss(head="head", rows=4)},
    "lean norms and activations": {"lean": ("*",)},
    "activation checkpointing": {"regions": (Region(("blocks.0",)),)},
    "activation offload": {"regions": (Region(("blocks.0",), offload=True),)},
    **{lever.name: {"optimizer": lever.value} for lever in registry.UPDATES},
    "sharding": {"sharding": Sharding(world_size=2, mode="ddp")},
    "compilation": {"compiler": "inductor"},
}

_LEFT_OUT = ("microbatches", "compilation", "sharding")


def unclipped() -> Workload:
    return dataclasses.replace(tiny(), max_grad_norm=None, bf16_updates="master-weights")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(unclipped(), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)


def under(plan: Plan, **changes: Any) -> Plan:
    """Return a plan of other levers, told as they are."""
    levers = replace(plan.levers, **changes)
    return replace(plan, levers=levers, uses=registry.lever_uses(LeversOn(levers, 4)), allowed="changed")


def test_each_is_registered_once() -> None:
    names = [lever.name for lever in registry.LEVERS]
    assert sorted(names) == sorted(USED) == sorted(set(names))


@pytest.mark.parametrize("lever", registry.LEVERS, ids=lambda lever: lever.name)
def test_each_tells_its_use_and_goes_without_it(lever: Lever) -> None:
    on = LeversOn(replace(PLAIN, **USED[lever.name]), 4)
    assert lever.is_used(on) and not lever.is_used(LeversOn(PLAIN, 4))
    assert not lever.is_used(LeversOn(lever.without(on), 4))
    use = lever.use(on)
    assert use.name == lever.name and use.setting and use.brief and use in registry.lever_uses(on)
    assert lever.names(on.levers) <= registry.lever_names(on)


@pytest.mark.parametrize("name", [name for name in USED if name not in _LEFT_OUT])
def test_none_is_applied_twice(name: str, plan: Plan) -> None:
    """But microbatches and compilation, which leave the model as it is, and sharding, which needs ranks."""
    if name == "AdamW with 8-bit states":
        pytest.importorskip("bitsandbytes")
    workload, edited = unclipped(), under(plan, **USED[name])
    with memfit.apply(edited, workload):
        with pytest.raises(PlanError, match=r"is applied to the workload already.*close\(\)"):
            memfit.apply(edited, workload)
        with pytest.raises(PlanError, match="is applied to the workload already"):
            memfit.estimate(workload)
    with memfit.apply(edited, workload) as step:
        step(workload.batch)


@pytest.mark.parametrize(
    ("changes", "host_budget_bytes", "expected"),
    [
        ({}, 2**30, {}),
        ({"optimizer": "offloaded"}, 0, {"optimizer states in host memory": 100}),
        ({"regions": (Region(("a",), offload=True),)}, 500, {"activation offload": 500}),
        (
            {"optimizer": "offloaded", "regions": (Region(("a",), offload=True),)},
            500,
            {"optimizer states in host memory": 100, "activation offload": 400},
        ),
    ],
)
def test_the_host_memory_of_each_is_counted(
    changes: dict[str, Any], host_budget_bytes: int, expected: dict[str, int], plan: Plan
) -> None:
    plain = replace(plan.plain, by_category={"optimizer state": 100, "activations": 7})
    assert host_bytes_of(replace(under(plan, **changes), plain=plain, host_budget_bytes=host_budget_bytes)) == expected


def test_offloaded_states_are_checked_against_the_host(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = under(plan, optimizer="offloaded")
    memfit.apply(offloaded, unclipped()).close()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1, total=2**34))
    memfit.apply(plan, unclipped()).close()  # nothing of it is in the host's memory by a lever
    with pytest.raises(BudgetError, match="optimizer states in host memory: "):
        memfit.apply(offloaded, unclipped())


@pytest.mark.parametrize("couples_batch", [False, True])
def test_another_point_has_the_classes_that_it_was_planned_with(couples_batch: bool, plan: Plan) -> None:
    """As of Adafactor with microbatches, which is of class changed whether samples are coupled or not."""
    levers = replace(plan.levers, microbatch_size=2, optimizer="adafactor")
    uses = registry.lever_uses(LeversOn(levers, 4, couples_batch))
    point = replace(plan.frontier[0], levers=levers, uses=uses, numerics="changed")
    assert at_point(plan, point, "").classes == {
        "Adafactor": "changed",
        "microbatches": "changed" if couples_batch else "reordered",
    }


def test_a_running_step_keeps_what_does_not_switch(plan: Plan) -> None:
    def may_follow(**changes: Any) -> bool:
        point: Candidate = replace(plan.frontier[0], levers=replace(plan.levers, **changes))
        return bool(candidates_of(replace(plan, frontier=[point], allowed="changed")))

    assert {lever.name for lever in registry.LEVERS if may_follow(**USED[lever.name])} == {
        lever.name for lever in registry.LEVERS if lever.switchable
    }


def named_levers(source: str) -> list[str]:
    """Return where code names a lever: a field of `Levers` that one alone sets, or a value of it."""
    words = {"precision", "microbatches", "fused", "sharding"}  # which mean other things too
    values = ({lever.value for lever in registry.UPDATES} | {lever.name for lever in registry.LEVERS}) - words
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("chunked_loss", "lean"):
            names.append(f"{ast.unparse(node)}, line {node.lineno}")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("optimizer", "compiler")
            and "levers" in ast.unparse(node.value)
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
    files = [p for p in SRC.rglob("*.py") if p.parent.name != "levers" and p != SRC / "ir" / "plan.py"]
    named = {str(p.relative_to(SRC)): names for p in files if (names := named_levers(p.read_text()))}
    assert named == {}


def test_an_updated_optimizer_is_let_go_of() -> None:
    workload = unclipped()
    (lever,) = (x for x in registry.UPDATES if x.value == "in-backward")
    assert not lever.is_applied(workload)
    with applied(replace(PLAIN, optimizer="in-backward"), workload):
        assert lever.is_applied(workload)
        other = dataclasses.replace(workload, optimizer=torch.optim.SGD(workload.model.parameters()))
        assert not lever.is_applied(other)
    assert not lever.is_applied(workload)


NAMES = sorted({name for row in CONFLICTS for name in (row.one, row.other)})


@given(used=st.sets(st.sampled_from(NAMES)), allowed=st.sampled_from(["exact", "changed"]))
def test_what_is_refused_is_what_the_table_names(used: set[str], allowed: str) -> None:
    named = [row for row in CONFLICTS if {row.one, row.other} <= used and not (row.unless and allowed == row.unless)]
    assert met(CONFLICTS, used, allowed) == named  # type: ignore[arg-type]
    if not named:
        check_lever_names(used, allowed)  # type: ignore[arg-type]
    else:
        with pytest.raises(PlanError) as error:
            check_lever_names(used, allowed, where="here: ")  # type: ignore[arg-type]
        first = named[0]
        assert all(part in str(error.value) for part in ("here: ", first.one, first.other, first.why, first.row()))
        assert first.row() in conflict_table()


def test_pairs_are_named_once() -> None:
    pairs = [frozenset((row.one, row.other)) for row in CONFLICTS]
    assert len(set(pairs)) == len(pairs)
    assert all(conflict.why and conflict.instead for conflict in CONFLICTS)


def test_levers_have_the_names_of_the_table() -> None:
    assert lever_names(LeversOn(Levers(microbatch_size=4), 4)) == set()
    regions = (Region(("body",), offload=True), Region(("body.last",)))
    used = Levers(
        precision="tf32",
        microbatch_size=2,
        regions=regions,
        chunked_loss=ChunkedLoss(head="head", rows=1),
        optimizer="in-backward",
    )
    assert lever_names(LeversOn(used, 4)) == {
        "tf32",
        *("precision", "microbatches", "activation checkpointing", "activation offload", "chunked loss"),
        "optimizer in the backward pass",
    }


@pytest.mark.parametrize(("head", "inside"), [("body.head", True), ("body", True), ("body2.head", False), ("x", False)])
def test_regions_around_the_head_are_found(head: str, inside: bool) -> None:
    for modules, expected in ((("body",), inside), (("",), True)):
        levers = Levers(microbatch_size=1, regions=(Region(modules),), chunked_loss=ChunkedLoss(head=head, rows=1))
        assert (HEAD_INSIDE in lever_names(LeversOn(levers, 1))) == expected
