"""A predicted program for other tools: a memory snapshot, and a trace of events.

`write_snapshot` has the format of `torch.cuda.memory._dump_snapshot`, which pytorch.org/memory_viz and
`python -m torch.cuda._memory_viz` read. The keys are those of torch 2.13 (`torch/csrc/cuda/Module.cpp`, and
`TraceEntry` and `Segment` in the docstring of `torch.cuda.memory._snapshot`), and `category`, which the viewer colours
by.

`write_chrome_trace` has the Trace Event Format (Google, 2016), which ui.perfetto.dev and chrome://tracing open, in its
JSON object form: complete events ("X"), counters ("C"), names ("M").
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memfit.foundations import __version__
from memfit.ir import AllocationEvent, AllocatorSettings, MemoryBlock, Timeline, replay, write_atomic

_PROCESS = 1
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
    entries: list[dict[str, Any]] = []
    frames: dict[int, Frames] = {}  # the stack of each block in use, by address
    segment_frames: dict[int, Frames] = {}  # that of the first request for each range of device memory
    starts, earlier_steps, count = [0.0, *itertools.accumulate(seconds)], 0.0, 0
    now: AllocationEvent | None = None  # whose actions come next
    stack_of = functools.cache(stack)

    def told() -> Iterator[AllocationEvent]:
        nonlocal now, earlier_steps, count
        for event in events:
            count += 1
            if now is not None and event.point < now.point:
                earlier_steps += starts[-1]
            now = event
            yield event

    def record(action: str, address: int, size: int, stream: int) -> None:
        assert now is not None  # the allocator acts on events only
        if action == "alloc":
            frames[address] = stack_of(now.label)
        elif action in ("segment_alloc", "segment_map"):
            segment_frames.setdefault(address, stack_of(now.label))
        start = starts[min(max(now.point, 0), len(starts) - 1)]
        entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": round((earlier_steps + start) * 1e6) if len(starts) > 1 else count,
                "compile_context": "N/A",
                "user_metadata": now.label,
                "category": _NO_CATEGORY if action.startswith("segment") else now.category,
                "pool_id": (0, 0),
                "frames": stack_of(now.label),
            }
        )

    def segment(blocks: list[MemoryBlock]) -> dict[str, Any]:
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
            "frames": segment_frames.get(first.address, []),
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated" if block.allocated else "inactive",
                    "frames": frames[block.address] if block.allocated else [],
                }
                for block in blocks
            ],
            "is_expandable": settings.expandable_segments,
        }

    allocator = replay(told(), settings, capacity_bytes, total_bytes=total_bytes, trace=record)
    ranges = (itertools.groupby(head.through_end(), lambda block: block.mapped) for head in allocator.segments.values())
    snapshot = {
        "segments": [segment(list(blocks)) for of_head in ranges for mapped, blocks in of_head if mapped],
        "device_traces": [entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings.conf(),
            "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.expandable_segments,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
            "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(settings.divisions())},
        },
        "external_annotations": [],
    }
    return write_atomic(path, pickle.dumps(snapshot, protocol=_PICKLE_PROTOCOL))


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


def write_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline: operators in a lane for each phase, and counters of the bytes alive by category.

    Times are microseconds from the start of the step, to the nanosecond.

    Raises:
        OutputError: The file can't be written.
    """
    lanes = {phase: lane for lane, phase in enumerate(dict.fromkeys(timeline.phases), 1)}
    drawn = {name: values for name, values in timeline.live_bytes.items() if any(values)}

    def metadata(kind: str, lane: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": arguments}

    def counters(point: int, start: int) -> list[dict[str, Any]]:
        alive = {name: values[point] for name, values in drawn.items()}
        return [
            {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": start / 1000, "args": values}
            for name, values in (("bytes by category", alive), ("bytes", {"alive": sum(alive.values())}))
        ]

    events = [metadata("process_name", 0, name="predicted step")]
    events += [metadata("thread_name", lane, name=name) for name, lane in lanes.items()]
    events += [metadata("thread_sort_index", lane, sort_index=lane) for lane in lanes.values()]
    now = 0
    for point, phase in enumerate(timeline.phases):
        # viewers show only the last of several counters at one time: no operator is shorter than their resolution
        nanoseconds = max(round(timeline.seconds[point] * 1e9), 1)
        operator = {
            "ph": "X",
            "name": timeline.labels[point].rpartition(" · ")[2],
            "cat": phase,
            "pid": _PROCESS,
            "tid": lanes[phase],
            "ts": now / 1000,
            "dur": nanoseconds / 1000,
            "args": {"module": timeline.modules[point], "point": point},
        }
        events += [*counters(point, now), operator]
        now += nanoseconds
    if timeline.phases:
        events += counters(-1, now)
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "memfit": __version__,
            "peak_bytes": timeline.peak_bytes,
            "peak_at": timeline.where(),
            "step_seconds": timeline.step_seconds,
        },
    }
    return write_atomic(path, msgspec.json.encode(trace) + b"\n")
