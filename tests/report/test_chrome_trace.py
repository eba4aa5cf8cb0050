"""Chrome traces follow the format's rules and hold the timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memfit.ir import Timeline
from memfit.report import write_chrome_trace
from memfit.report.exports import chrome_trace
from tests.report.conftest import make_timeline

TIMELINE = make_timeline(recompute=True)
EMPTY = Timeline(
    live_bytes={}, labels=[], modules=[], phases=[], seconds=[], peak_bytes=0, peak_index=0, step_seconds=0.0
)


def by_kind(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    kinds = defaultdict(list)
    for event in trace["traceEvents"]:
        kinds[event["ph"]].append(event)
    return kinds


def test_every_event_has_the_fields_of_its_kind() -> None:
    kinds = by_kind(chrome_trace(TIMELINE))
    assert set(kinds) == {"M", "X", "C"}
    common = {"ph", "name", "pid", "tid", "args"}
    assert all(set(e) == common for e in kinds["M"])
    assert all(set(e) == common | {"ts"} for e in kinds["C"])
    assert all(set(e) == common | {"ts", "dur", "cat"} for e in kinds["X"])
    names = {e["tid"]: e["args"]["name"] for e in kinds["M"] if e["name"] == "thread_name"}
    assert list(names.values()) == ["forward", "recompute", "backward", "optimizer"]
    assert all(names[e["tid"]] == e["cat"] for e in kinds["X"])


def test_operators_follow_one_another_and_last_as_long_as_predicted() -> None:
    operators = by_kind(chrome_trace(TIMELINE))["X"]
    assert operators[0]["ts"] == 0
    for before, after in pairwise(operators):
        assert before["dur"] > 0
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-6)
    assert sum(e["dur"] for e in operators) == pytest.approx(sum(TIMELINE.seconds) * 1e6)
    assert [e["args"]["module"] for e in operators] == TIMELINE.modules
    assert [e["cat"] for e in operators] == TIMELINE.phases
    assert operators[0]["name"] == "aten.native_layer_norm.default"


def test_counters_are_the_bytes_alive() -> None:
    counters = by_kind(chrome_trace(TIMELINE))["C"]
    for name in ("bytes", "bytes by category"):
        series = [e for e in counters if e["name"] == name]
        assert len(series) == len(TIMELINE.labels) + 1
        assert all(before["ts"] < after["ts"] for before, after in pairwise(series))
        assert max(sum(e["args"].values()) for e in series) == TIMELINE.peak_bytes
    parts = [e["args"] for e in counters if e["name"] == "bytes by category"]
    for category, values in TIMELINE.live_bytes.items():
        assert [part.get(category, 0) for part in parts[:-1]] == values


def test_operators_without_a_duration_still_show_their_memory() -> None:
    flat = msgspec.structs.replace(TIMELINE, seconds=[0.0] * len(TIMELINE.labels))
    times = [e["ts"] for e in by_kind(chrome_trace(flat))["C"] if e["name"] == "bytes"]
    assert all(before < after for before, after in pairwise(times))
    assert times[-1] < 1  # microsecond, for the whole step


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    path = write_chrome_trace(TIMELINE, tmp_path / "trace.json")
    read = json.loads(path.read_text())
    assert read == chrome_trace(TIMELINE)
    assert read["otherData"]["peak_at"] == TIMELINE.where()
    assert by_kind(chrome_trace(EMPTY)).keys() == {"M"}
