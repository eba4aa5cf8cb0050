"""A step's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format" (Google, 2016), in its JSON object form: complete events ("X"), counters ("C"),
names ("M").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from memfit.ir import Timeline, write_atomic
from memfit.version import __version__

_PROCESS = 1


def write_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline: operators in a lane for each phase, and counters of the bytes alive by category.

    Raises:
        OutputError: The file can't be written.
    """
    return write_atomic(path, msgspec.json.encode(chrome_trace(timeline)) + b"\n")


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the JSON of `write_chrome_trace`. Times are microseconds from the start of the step, to the nanosecond."""
    lanes = {phase: lane for lane, phase in enumerate(dict.fromkeys(timeline.phases), 1)}
    events = [_metadata("process_name", 0, name="predicted step")]
    events += [_metadata("thread_name", lane, name=name) for name, lane in lanes.items()]
    events += [_metadata("thread_sort_index", lane, sort_index=lane) for lane in lanes.values()]
    drawn = {name: values for name, values in timeline.live_bytes.items() if any(values)}
    now = 0
    for point, phase in enumerate(timeline.phases):
        # viewers show only the last of several counters at one time: no operator is shorter than their resolution
        nanoseconds = max(round(timeline.seconds[point] * 1e9), 1)
        events += [*_counters(drawn, point, now), _operator(timeline, point, lanes[phase], now, nanoseconds)]
        now += nanoseconds
    if timeline.phases:
        events += _counters(drawn, -1, now)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "memfit": __version__,
            "peak_bytes": timeline.peak_bytes,
            "peak_at": timeline.where(),
            "step_seconds": timeline.step_seconds,
        },
    }


def _metadata(kind: str, lane: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": arguments}


def _operator(timeline: Timeline, point: int, lane: int, start: int, nanoseconds: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": timeline.labels[point].rpartition(" · ")[2],
        "cat": timeline.phases[point],
        "pid": _PROCESS,
        "tid": lane,
        "ts": start / 1000,
        "dur": nanoseconds / 1000,
        "args": {"module": timeline.modules[point], "point": point},
    }


def _counters(live_bytes: dict[str, list[int]], point: int, start: int) -> list[dict[str, Any]]:
    alive = {name: values[point] for name, values in live_bytes.items()}
    return [
        {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": start / 1000, "args": values}
        for name, values in (("bytes by category", alive), ("bytes", {"alive": sum(alive.values())}))
    ]
