"""A predicted program for other tools: a memory snapshot, and a trace of events.

`write_snapshot` has the format of `torch.cuda.memory._dump_snapshot`, which pytorch.org/memory_viz and
`python -m torch.cuda._memory_viz` read. The keys are those of torch 2.13 (`torch/csrc/cuda/Module.cpp`, and
`TraceEntry` and `Segment` in the docstring of `torch.cuda.memory._snapshot`), and `category`, which the viewer colours
by.

`write_chrome_trace` has the Trace Event Format (Google, 2016), which ui.perfetto.dev and chrome://tracing open, in its
JSON object form: complete events ("X"), counters ("C"), names ("M").
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memfit.ir import (
    AllocationEvent,
    AllocatorSettings,
    MemoryBlock,
    Timeline,
    replay,
    write_atomic,
)
from memfit.version import __version__

_PICKLE_PROTOCOL = 4
"""The newest protocol that the viewer reads."""
_NO_CATEGORY = "unknown"
"""Category of actions on segments. The viewer fails if no category is "unknown"."""

Frames = list[dict[str, Any]]


def write_snapshot(
    events: Iterable[AllocationEvent],
    settings: AllocatorSettings,
    path: str | Path,
    *,
    capacity_bytes: int | None = None,
    total_bytes: int | None = None,
    seconds: Sequence[float] = (),
) -> Path:
    """Write the history of a simulated allocator, and its state after the last event, as a pickle of plain records.

    Where the device runs out of memory, the history ends, as in a real program.

    Args:
        settings: The settings of `PYTORCH_ALLOC_CONF`.
        capacity_bytes: Most bytes that the device gives; None for no limit.
        total_bytes: The device's memory, of which `settings.memory_fraction` is a share.
        seconds: The duration of each point; if empty, each event takes a microsecond.

    Raises:
        OutputError: The file can't be written.
        ValueError: A storage is allocated twice, or freed while not allocated.
    """
    record = snapshot(events, settings, capacity_bytes=capacity_bytes, total_bytes=total_bytes, seconds=seconds)
    return write_atomic(path, pickle.dumps(record, protocol=_PICKLE_PROTOCOL))


def snapshot(
    events: Iterable[AllocationEvent],
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    total_bytes: int | None = None,
    seconds: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the records of `write_snapshot`."""
    history = _History(seconds)
    limits: dict[str, Any] = {"capacity_bytes": capacity_bytes, "total_bytes": total_bytes}
    allocator = replay(history.of(events), settings, **limits, trace=history.record)
    expandable = settings.expandable_segments
    return {
        "segments": [record for head in allocator.segments.values() for record in _segments(head, history, expandable)],
        "device_traces": [history.entries],
        "allocator_settings": _settings(settings),
        "external_annotations": [],
    }


class _History:
    """The history of the allocator: each action with its operator.

    Attributes:
        frames: The stack of each block in use, by address.
        segment_frames: The stack of the first request for each range of device memory, by address.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.entries: list[dict[str, Any]] = []
        self.frames: dict[int, Frames] = {}
        self.segment_frames: dict[int, Frames] = {}
        self._starts = [0.0, *itertools.accumulate(seconds)]
        self._earlier_steps = 0.0
        self._stacks: dict[str, Frames] = {}
        self._event: AllocationEvent | None = None
        self._events = 0

    def of(self, events: Iterable[AllocationEvent]) -> Iterator[AllocationEvent]:
        """Yield events, each the one of the next actions."""
        for event in events:
            if self._event is not None and event.point < self._event.point:
                self._earlier_steps += self._starts[-1]
            self._event = event
            self._events += 1
            yield event

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Record an action; see `allocator.caching_allocator.Tracer`."""
        event = self._event
        assert event is not None  # the allocator acts on events only
        frames = self._stack(event)
        on_segment = action.startswith("segment")
        if action == "alloc":
            self.frames[address] = frames
        elif action in ("segment_alloc", "segment_map"):
            self.segment_frames.setdefault(address, frames)
        self.entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": self._microseconds(event),
                "compile_context": "N/A",
                "user_metadata": event.label,
                "category": _NO_CATEGORY if on_segment else event.category,
                "pool_id": (0, 0),
                "frames": frames,
            }
        )

    def _microseconds(self, event: AllocationEvent) -> int:
        if len(self._starts) == 1:
            return self._events
        start = self._starts[min(max(event.point, 0), len(self._starts) - 1)]
        return round((self._earlier_steps + start) * 1e6)

    def _stack(self, event: AllocationEvent) -> Frames:
        if event.label not in self._stacks:
            self._stacks[event.label] = stack(event.label)
        return self._stacks[event.label]


def stack(label: str) -> Frames:
    """Return the frames of a label "phase · module FQN · operator", innermost first: operator, modules, phase.

    A frame's name is the operator, module or phase, and its file is the enclosing module, or else the phase.
    """
    phase, *further = label.split(" · ")
    fqn = further[0] if len(further) > 1 else ""
    parts = fqn.split(".") if fqn else []
    frames = [{"name": further[-1], "filename": fqn or phase, "line": 0}] if further else []
    frames += [{"name": ".".join(parts[:n]), "filename": phase, "line": 0} for n in range(len(parts), 0, -1)]
    return [*frames, {"name": phase, "filename": "step", "line": 0}]


def _segments(head: MemoryBlock, history: _History, expandable: bool) -> list[dict[str, Any]]:
    """Return the records of a segment: one, or one for each mapped range of an expandable segment."""
    ranges = itertools.groupby(head.through_end(), key=lambda block: block.mapped)
    return [_segment(list(group), history) | {"is_expandable": expandable} for mapped, group in ranges if mapped]


def _segment(blocks: list[MemoryBlock], history: _History) -> dict[str, Any]:
    first, used = blocks[0], [block for block in blocks if block.allocated]
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in used),
        "active_size": sum(block.size for block in used),
        "requested_size": sum(block.requested for block in used),
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": (0, 0),
        "frames": history.segment_frames.get(first.address, []),
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": history.frames[block.address] if block.allocated else [],
            }
            for block in blocks
        ],
    }


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf(),
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(settings.divisions())},
    }


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
