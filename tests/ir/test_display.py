"""Records are short to look at, however long they are, and lists that are shown as tables are lists all the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from memfit import ir
from memfit.ir import Candidate, Devices, Frontier, Levers, Plan, Prediction, Region, Solution, View, show_with
from memfit.report import show_records


class Long(ir.codec.Shown, frozen=True, kw_only=True):
    """A record with fields of every length."""

    name: str
    values: list[int] = []
    inner: Levers | None = None
    table: dict[str, int] = {}


@pytest.fixture
def views() -> Iterator[None]:
    yield
    show_records()


def a_plan(points: int = 3) -> Plan:
    levers = Levers(microbatch_size=4, regions=(Region(("a",)),))
    prediction = Prediction(peak_bytes=9, peak_upper_bytes=10, step_seconds=1.0, by_category={}, where="")
    frontier = [
        Candidate(
            levers=levers,
            numerics="exact",
            budget_bytes=10 + i,
            peak_bytes=9 + i,
            step_seconds=1.0,
            status="optimal",
            bound_seconds=1.0,
        )
        for i in range(points)
    ]
    return Plan(
        memfit_version="0",
        torch_version="0",
        workload="w",
        fingerprint="f",
        device="cpu",
        batch_size=4,
        budget_bytes=10,
        levers=levers,
        numerics="exact",
        uses=(),
        allowed="exact",
        plain=prediction,
        predicted=prediction,
        solution=Solution(status="optimal", bound_seconds=1.0, gap=0.0, solve_seconds=0.0),
        frontier=frontier,
    )


def test_a_record_is_a_line_without_its_defaults() -> None:
    assert repr(Long(name="a")) == "Long(name='a')" == str(Long(name="a"))
    many = Levers(microbatch_size=1, regions=tuple(Region((f"blocks.{i}",), ("x",) * 50) for i in range(500)))
    long = Long(name="n" * 5000, values=list(range(10_000)), inner=many, table={str(i): i for i in range(1000)})
    assert len(repr(long)) < 800 and "\n" not in repr(long)
    assert "values=[0, 1, 2, ...]" in repr(long) and "Region(modules=('blocks.0',)" in repr(many)
    assert long._repr_html_() is None


def test_a_record_is_shown_as_was_said(views: None) -> None:
    show_with(Long, View(lambda r: f"called {r.name}", lambda r: "a table", lambda r: "<b>a table</b>"))
    found = Long(name="x")
    assert (repr(found), str(found), found._repr_html_()) == ("<Long called x>", "a table", "<b>a table</b>")
    show_with(Long, View(lambda r: "short"))
    assert (str(found), found._repr_html_()) == ("<Long short>", None)


def test_a_frontier_is_the_list_that_it_was(views: None) -> None:
    plan = a_plan()
    show_with(Frontier, View(None, lambda f: f"{len(f)} points of {f.plan.workload}", lambda f: "<table>"))
    assert type(plan.frontier) is Frontier and isinstance(plan.frontier, list)
    assert plan.frontier == list(plan.frontier) and type(plan.frontier[:2]) is list
    assert str(plan.frontier) == "3 points of w" and repr(plan.frontier).startswith("[")
    assert plan.frontier._repr_html_() == "<table>"
    assert a_plan(0).frontier._repr_html_() is None and str(a_plan(0).frontier) == "[]"


@pytest.mark.parametrize(
    "again",
    [
        lambda plan: ir.codec.decode(ir.codec.encode(plan), Plan, source="a test"),
        lambda plan: pickle.loads(pickle.dumps(plan)),
        copy.deepcopy,
        copy.copy,
        lambda plan: msgspec.structs.replace(plan, notes=[]),
    ],
    ids=["json", "pickle", "deepcopy", "copy", "replace"],
)
def test_a_plan_that_was_copied_has_a_frontier_of_its_own(again: Any) -> None:
    plan = a_plan()
    found = again(plan)
    assert found == plan and type(found.frontier) is Frontier
    assert msgspec.to_builtins(found) == msgspec.to_builtins(plan)
    assert plan.frontier.plan is plan
    assert found.frontier.plan == found


def test_a_list_to_show_is_empty_without_a_table(views: None) -> None:
    show_with(Devices, View(None, lambda d: "a table", lambda d: "<table>"))
    assert str(Devices([])) == "[]" and Devices([])._repr_html_() is None
    assert str(ir.codec.ShownList([1, 2])) == "[1, 2]"
