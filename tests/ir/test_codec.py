"""Records as files and on the screen: round trips, refusals, atomic writes, and views."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import ir
from memfit.errors import OutputError, PlanError, UsageError
from memfit.ir import (
    Candidate,
    Devices,
    Frontier,
    Levers,
    LeverUse,
    Plan,
    Prediction,
    Region,
    Solution,
    Trace,
    simulate,
)
from memfit.report import show_records
from tests.models import COSTS, plain_trace, regions_of

PREDICTION = Prediction(
    peak_bytes=100, peak_upper_bytes=101, step_seconds=0.5, by_category={"activations": 60}, where="here"
)


def plan_of(levers: Levers, notes: list[str] | None = None) -> Plan:
    return Plan(
        memfit_version="0",
        torch_version="0",
        workload="w",
        fingerprint="f",
        device="cpu",
        batch_size=8,
        budget_bytes=200,
        levers=levers,
        numerics="exact",
        uses=(LeverUse(name="activation checkpointing", setting="2 modules", brief="2 regions", numerics="exact"),),
        allowed="reordered",
        plain=PREDICTION,
        predicted=PREDICTION,
        solution=Solution(status="optimal", bound_seconds=0.5, gap=0.0, solve_seconds=1.0),
        notes=notes or [],
    )


PLAN = plan_of(Levers(microbatch_size=8, regions=(Region(("a.b",), ("aten.mm.default#0",)), Region(("c",)))))

regions = st.builds(
    Region, st.lists(st.text(max_size=8), max_size=3).map(tuple), st.lists(st.text(max_size=8), max_size=3).map(tuple)
)
levers = st.builds(
    Levers,
    precision=st.sampled_from(["32-true", "bf16-mixed", "16-mixed"]),
    microbatch_size=st.integers(1, 1 << 40),
    regions=st.lists(regions, max_size=3).map(tuple),
)


@given(levers, st.lists(st.text(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_plan_survives_the_round_trip(levers: Levers, notes: list[str]) -> None:
    plan = plan_of(levers, notes)
    data = ir.codec.encode(plan)
    assert ir.codec.decode(data, Plan, source="x") == plan and data.startswith(b'{\n "schema": "memfit.plan/1"')


def test_a_trace_survives_the_round_trip(tmp_path: Path) -> None:
    trace = plain_trace("twice")
    ir.codec.write_atomic(tmp_path / "trace.json", ir.codec.encode(trace))
    again = ir.codec.read(tmp_path / "trace.json", Trace)
    assert again == trace
    assert simulate(again, COSTS, regions_of({"shared": ()})) == simulate(trace, COSTS, regions_of({"shared": ()}))


def changed(**values: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(PLAN), **values})


def without(field: str) -> bytes:
    return msgspec.json.encode({k: v for k, v in msgspec.to_builtins(PLAN).items() if k != field})


BROKEN = {
    "empty": (b"", "must be a JSON object"),
    "truncated": (ir.codec.encode(PLAN)[:-40], "must be a JSON object"),
    "binary": (bytes(range(256)), "must be a JSON object"),
    "not utf-8": (b'{"schema": "\xff\xfe"}', "must be a JSON object"),
    "a list": (b"[1, 2]", "it must be a JSON object"),
    "deeply nested": (b"[" * 100_000, "must be a JSON object"),
    "a number": (b"3", "it must be a JSON object"),
    "another schema": (changed(schema="memfit.plan/2"), "its schema is 'memfit.plan/2', not 'memfit.plan/1'"),
    "a trace": (ir.codec.encode(plain_trace("twice")), "its schema is 'memfit.trace/1'"),
    "no schema": (without("schema"), "its schema is None"),
    "unknown field": (changed(colour="red"), "colour"),
    "wrong type": (changed(budget_bytes="much"), r"\$\.budget_bytes"),
    "missing field": (without("levers"), "levers"),
    "unknown precision": (changed(levers={"precision": "int4", "microbatch_size": 1}), r"\$\.levers\.precision"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_plan_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, message = BROKEN[name]
    path = tmp_path / "my-plan.json"
    path.write_bytes(data)
    with pytest.raises(PlanError, match=message) as caught:
        ir.codec.read(path, Plan)
    assert str(path) in str(caught.value)


@given(st.integers(0, len(ir.codec.encode(PLAN)) - 1), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_any_damaged_byte_gives_a_plan_or_a_plan_error(position: int, byte: int) -> None:
    data = bytearray(ir.codec.encode(PLAN))
    data[position] = byte
    try:
        assert isinstance(ir.codec.decode(bytes(data), Plan, source="x"), Plan)
    except PlanError:
        pass


@pytest.mark.parametrize(("name", "message"), [("nowhere.json", "No such file"), ("", "can't read")])
def test_what_can_not_be_read_is_named(name: str, message: str, tmp_path: Path) -> None:
    class Mine(UsageError):
        pass

    for error in (PlanError, Mine):
        with pytest.raises(error, match=message) as caught:
            ir.codec.read(tmp_path / name, Plan, error=error)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(Mine):
        ir.codec.decode(b"", Plan, source="x", error=Mine)


def test_writing_makes_folders_and_ordinary_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = ir.codec.write_atomic(tmp_path / "a" / "b.json", b"data")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    ("failing", "error", "seen"),
    [
        *((name, OSError(28, "No space left on device"), OutputError) for name in ("replace", "fsync", "chmod")),
        ("fsync", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    failing: str,
    error: BaseException,
    seen: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(seen) as caught:
        ir.codec.write_atomic(path, b"new")
    assert seen is KeyboardInterrupt or f"can't write {path}: No space left on device" == str(caught.value)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.fixture(params=["missing", "there", "below missing folders"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file that can be written."""
    path: Path = tmp_path / "new" / "er" / "file" if request.param == "below missing folders" else tmp_path / "file"
    if request.param == "there":
        path.write_bytes(b"mine")
    return path


def test_a_place_that_can_be_written_is_left_as_it_is(place: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ir.codec.check_writable(place)
    assert sorted(tmp_path.rglob("*")) == before
    assert not place.exists() or place.read_bytes() == b"mine"
    ir.codec.write_atomic(place, b"new")


@pytest.mark.parametrize(
    ("name", "message"),
    [("file/plan.json", "file is a file"), ("folder", "it is a folder"), ("/proc/plan.json", "/proc/plan.json")],
)
def test_a_place_that_can_not_be_written_is_named_and_left_as_it_is(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=message):
        ir.codec.check_writable(tmp_path / name)
    with pytest.raises(OutputError):
        ir.codec.write_atomic(tmp_path / name, b"new")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Of 4 KiB, which take a folder and no file."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "memfit-test", str(tmp_path)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(OutputError, match="No space left"):
            ir.codec.check_writable(tmp_path / "new" / "plan.json")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# What records look like: short, however long they are; lists that are shown as tables are lists all the same


View, show_with = ir.codec.View, ir.codec.show_with


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
    point = Candidate(
        levers=PLAN.levers,
        numerics="exact",
        budget_bytes=10,
        peak_bytes=9,
        step_seconds=1.0,
        status="optimal",
        bound_seconds=1.0,
    )
    return msgspec.structs.replace(PLAN, frontier=[msgspec.structs.replace(point, peak_bytes=i) for i in range(points)])


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
