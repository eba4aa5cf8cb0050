"""Files for other tools: PyTorch's own find what the simulator counted in snapshots; traces hold the timeline."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import pickletools
import random
import re
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.cuda import _memory_viz as viz

from memfit.errors import OutputError
from memfit.ir import TIMELINE_CATEGORIES, AllocationEvent, AllocatorSettings, Timeline, replay
from memfit.report import write_chrome_trace, write_snapshot
from tests.report.conftest import make_timeline

MIB = 2**20
CONFS = ["", "expandable_segments:True", "max_split_size_mb:32,roundup_power2_divisions:4"]
VIEWER_READS = {  # the cases of `unpickle` in torch/utils/viz/MemoryViz.js
    *("PROTO", "APPEND", "APPENDS", "LIST", "TUPLE", "NEWFALSE", "NEWTRUE", "NONE", "BINGET", "BININT", "BININT1"),
    *("BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "BINPUT"),
    *("LONG_BINPUT", "SETITEMS", "SETITEM", "DICT", "SHORT_BINUNICODE", "BINUNICODE", "STOP", "EMPTY_TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "BINFLOAT"),
}


def program(steps: int = 2) -> list[AllocationEvent]:
    """Return a program whose parameters stay and whose activations come and go, each step alike."""
    events = [AllocationEvent(-1, i, (i + 1) * MIB + 4, True, "parameters", "parameters") for i in range(8)]
    for _ in range(steps):
        numbers = random.Random(3)
        live: dict[int, int] = {}  # bytes by storage

        def free(storage: int, point: int, where: str, live: dict[int, int] = live) -> None:
            events.append(AllocationEvent(point, storage, live.pop(storage), False, "activations", where))

        for point in range(120):
            phase = "forward" if point < 60 else "backward"
            where = f"{phase} · net.layers.{point % 4}.mlp · aten.mm.default"
            if point < 60 or numbers.random() < 0.3:
                live[100 + point] = int(2 ** numbers.uniform(8, 25))
                events.append(AllocationEvent(point, 100 + point, live[100 + point], True, "activations", where))
            if point > 90 or numbers.random() < 0.3:
                for _ in range(min(len(live), 2)):
                    free([*live][numbers.randrange(len(live))], point, where)
        for dead in [*live]:
            free(dead, 119, "optimizer · step")
    return events


def snapshot(events: list[AllocationEvent], settings: AllocatorSettings, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_snapshot(events, settings, Path(folder) / "s.pickle", **options)
        return dict(pickle.loads(path.read_bytes()))


@pytest.fixture(params=CONFS)
def settings(request: pytest.FixtureRequest) -> AllocatorSettings:
    return AllocatorSettings.parse(request.param)


def sizes(lines: str) -> int:
    """Return the sum of the last column of a flame graph's input."""
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines.splitlines())


@pytest.mark.parametrize("count", [70, 400, 10_000])
def test_pytorch_finds_what_the_simulator_counted(settings: AllocatorSettings, count: int) -> None:
    events = program()[:count]
    report = replay(events, settings)
    data = snapshot(events, settings)
    segments = data["segments"]
    assert sum(viz.calc_active(segment) for segment in segments) == report.allocated_bytes > 0
    summary = viz.segsum(data)  # checks the sums of each segment itself
    requested = sum(segment["requested_size"] for segment in segments)
    assert f"segments: {len(segments)}\n" in summary
    assert f"total_reserved: {viz.Bytes(report.reserved_bytes)}\n" in summary
    assert f"total_allocated: {viz.Bytes(requested)}\n" in summary
    for listing in (viz.memory(data, str), viz.segments(data, str)):
        assert sizes(listing) == report.reserved_bytes
        assert sizes("\n".join(line for line in listing.splitlines() if ";active_allocated;" in line)) == (
            report.allocated_bytes
        )
        assert ";active_allocated;step:0:parameters " in listing
    text = viz.trace(data)
    assert f"{len(data['device_traces'][0])} entries" in text


def test_the_history_has_the_peaks_and_ends_in_the_state(settings: AllocatorSettings) -> None:
    events = program()
    report = replay(events, settings)
    data = snapshot(events, settings)
    change = {"alloc": (1, 0), "free_completed": (-1, 0)}
    change |= {"segment_alloc": (0, 1), "segment_map": (0, 1), "segment_free": (0, -1), "segment_unmap": (0, -1)}
    requested = reserved = 0
    peaks = [0, 0]
    for entry in data["device_traces"][0]:
        for_blocks, for_segments = change.get(entry["action"], (0, 0))
        requested += for_blocks * entry["size"]
        reserved += for_segments * entry["size"]
        peaks = [max(peaks[0], requested), max(peaks[1], reserved)]
    assert peaks == [report.peak_requested_bytes, report.peak_reserved_bytes]
    assert reserved == sum(segment["total_size"] for segment in data["segments"])
    in_use = [b for segment in data["segments"] for b in segment["blocks"] if b["state"] == "active_allocated"]
    left = viz.filter_alloc_free_pairs(copy.deepcopy(data))["device_traces"][0]
    assert {(e["addr"], e["size"]) for e in left if e["action"] == "alloc"} == {
        (b["address"], b["requested_size"]) for b in in_use
    }
    assert [b["frames"][0]["name"] for b in in_use] == ["parameters"] * 8


def test_segments_are_as_pytorch_describes_them(settings: AllocatorSettings) -> None:
    for segment in snapshot(program()[:150], settings)["segments"]:
        assert segment["is_expandable"] == settings.expandable_segments
        requests = {b["requested_size"] <= MIB for b in segment["blocks"] if b["state"] == "active_allocated"}
        assert requests <= {segment["segment_type"] == "small"}
        assert segment["total_size"] == sum(b["size"] for b in segment["blocks"])
        addresses = [segment["address"]]
        addresses += [b["address"] + b["size"] for b in segment["blocks"]]
        assert [b["address"] for b in segment["blocks"]] == addresses[:-1]
        assert all(b["size"] >= b["requested_size"] for b in segment["blocks"])
        assert segment["frames"], "what the segment was made for"


def test_plots_embed_the_snapshot(settings: AllocatorSettings) -> None:
    data = snapshot(program(), settings)
    plots: list[Callable[[Any], str]] = [viz.trace_plot, viz.segment_plot]
    for plot in plots:
        embedded = json.loads(re.findall(r"const local_files = (.*)", plot(data))[0])[0]["base64"]
        assert pickle.loads(base64.b64decode(embedded)) == data


def test_the_command_line_reads_the_file(
    tmp_path: Path, settings: AllocatorSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_snapshot(program(), settings, tmp_path / "s.pickle")
    script = tmp_path / ".cache" / "flamegraph.pl"  # which the tool would download
    script.parent.mkdir()
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = tmp_path / "output"

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["_memory_viz.py", *map(str, arguments)])
        runpy.run_path(viz.__file__, run_name="__main__")
        return capsys.readouterr().out

    report = replay(program(), settings)
    assert f"total_reserved: {viz.Bytes(report.reserved_bytes)}" in run("stats", path)
    assert " entries" in run("trace", path)
    for kind in ("memory", "segments"):
        run(kind, path, "-o", output)
        assert sizes(output.read_text()) == report.reserved_bytes
    for options in (["trace_plot"], ["trace_plot", "-s"], ["trace_plot", "-f"], ["segment_plot"]):
        run(*options, path, "-o", output)
        assert "MemoryViz.js" in output.read_text()
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(output)]
    subprocess.run(command, check=True)
    assert "Active Memory Timeline" in output.read_text()


def test_two_snapshots_are_compared(settings: AllocatorSettings, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (snapshot(program()[:n], settings)["segments"] for n in (40, 10_000))
    listing = viz.compare(first, last, str)
    known = {(segment["address"], segment["total_size"]) for segment in first}
    added = [segment for segment in last if (segment["address"], segment["total_size"]) not in known]
    assert f"only_after = {sorted(segment['address'] for segment in added)}" in re.sub(
        r"\[.*\]", lambda found: str(sorted(json.loads(found[0]))), capsys.readouterr().out
    )
    after = "\n".join(line for line in listing.splitlines() if line.startswith("only_after"))
    assert sizes(after) == sum(segment["total_size"] for segment in added) > 0


def test_the_viewer_can_read_the_pickle(tmp_path: Path) -> None:
    path = write_snapshot(
        program(), AllocatorSettings(memory_fraction=0.9), tmp_path / "s.pickle", seconds=[0.25] * 120
    )
    assert {op.name for op, _, _ in pickletools.genops(path.read_bytes())} <= VIEWER_READS
    data = pickle.loads(path.read_bytes())
    categories = {entry["category"] for entry in data["device_traces"][0]}
    assert categories == {"parameters", "activations", "unknown"}  # it fails where none is "unknown"
    assert categories - {"unknown"} <= set(TIMELINE_CATEGORIES)
    assert data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "per_process_memory_fraction:0.9"


def test_times_go_on_over_the_steps() -> None:
    trace = snapshot(program(), AllocatorSettings(), seconds=[0.25] * 120)["device_traces"][0]
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == 30_000_000 + program()[-1].point * 250_000
    counted = [entry["time_us"] for entry in snapshot(program(), AllocatorSettings())["device_traces"][0]]
    assert counted == sorted(counted)
    assert counted[-1] == len(program())


def test_running_out_of_memory_ends_the_history() -> None:
    events, settings = program(), AllocatorSettings()
    report = replay(events, settings, 60 * MIB)
    data = snapshot(events, settings, capacity_bytes=60 * MIB)
    last = data["device_traces"][0][-1]
    assert report.oom is not None
    assert (last["action"], last["user_metadata"]) == ("oom", report.oom.label)
    assert last["device_free"] == 60 * MIB - report.reserved_bytes
    assert "raise OutOfMemoryError" in viz.trace(data)


@pytest.mark.parametrize(
    ("label", "frames"),
    [
        (
            "forward · h.0.attn · aten.mm.default",
            [
                ("h.0.attn", "aten.mm.default"),
                ("forward", "h.0.attn"),
                ("forward", "h.0"),
                ("forward", "h"),
                ("step", "forward"),
            ],
        ),
        ("optimizer · aten.add_.Tensor", [("optimizer", "aten.add_.Tensor"), ("step", "optimizer")]),
        ("parameters", [("step", "parameters")]),
    ],
)
def test_stacks_lead_from_the_operator_to_the_phase(label: str, frames: list[tuple[str, str]]) -> None:
    data = snapshot([AllocationEvent(0, 0, MIB, True, "activations", label)], AllocatorSettings())
    (block,) = (block for block in data["segments"][0]["blocks"] if block["frames"])
    assert [(frame["filename"], frame["name"]) for frame in block["frames"]] == frames


def test_a_place_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OutputError, match="can't write"):
        write_snapshot(program(), AllocatorSettings(), tmp_path / "file" / "s.pickle")
    assert (tmp_path / "file").read_text() == "kept"


# Traces of events

TIMELINE = make_timeline(recompute=True)
EMPTY = Timeline(
    live_bytes={}, labels=[], modules=[], phases=[], seconds=[], peak_bytes=0, peak_index=0, step_seconds=0.0
)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return dict(json.loads(write_chrome_trace(timeline, Path(folder) / "trace.json").read_text()))


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


def test_a_trace_says_where_the_peak_is() -> None:
    assert chrome_trace(TIMELINE)["otherData"]["peak_at"] == TIMELINE.where()
    assert by_kind(chrome_trace(EMPTY)).keys() == {"M"}
