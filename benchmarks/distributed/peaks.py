"""Predicted peaks of each rank against measured ones, by engine and levers."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.common import Case
from benchmarks.distributed.models import BATCH, MODELS
from benchmarks.distributed.ranks import of_all_ranks, on_ranks
from memfit.hardware import allocated, find_device
from memfit.ir import Levers, Region, Sharding, simulate
from memfit.levers import applied
from memfit.planner import capture_levers, costs_of, predict
from memfit.ranks import shard

UNITS = tuple(f"blocks.{i}" for i in range(4))
_STEPS = 3
FAR = (8, 64)
"""Ranks for which the search's replay on paper is held against a capture of the engine."""


def engines(world_size: int) -> dict[str, Sharding]:
    """Return the engines that are compared."""
    resharded = Sharding(world_size=world_size, mode="zero3", units=UNITS)
    found = {
        "ddp": Sharding(world_size=world_size, mode="ddp", gradient_as_bucket_view=True),
        "resharded": resharded,
        "kept": replace(resharded, mode="zero2"),
        "mixed": replace(resharded, param_dtype="bfloat16", reduce_dtype="float32"),
    }
    return found | ({"hybrid": replace(resharded, replicas=2)} if world_size == 4 else {})


def levers_of(sharding: Sharding) -> dict[str, Levers]:
    """Return the levers that each engine runs with."""
    size = BATCH // sharding.world_size
    half = max(1, size // 2)
    plain = Levers(microbatch_size=size, sharding=sharding)
    cut = replace(plain, microbatch_size=half)
    return {
        "plain": plain,
        "recomputed": replace(plain, regions=tuple(Region((unit,)) for unit in UNITS)),
        "microbatches": cut,
        "reduced at the last": replace(cut, sharding=replace(sharding, reduces="last")),
    }


def measured_peak(name: str, levers: Levers) -> int:
    """Return this rank's peak of a steady step: all that the allocator reported since before the model was made."""
    with allocated(but_in="before") as meter:
        with torch.profiler.record_function("before"):
            workload = MODELS[name](BATCH)
            stack = applied(levers, workload)
            step = stack.__enter__()
            for _ in range(_STEPS - 1):
                step(workload.batch)
            gc.collect()
        step(workload.batch)
        stack.__exit__(None, None, None)
    return meter.peak_bytes


def _as_rank(names: list[str], world_size: int) -> Iterator[tuple[str, str, str, list[int]]]:
    for name in names:
        for engine, sharding in engines(world_size).items():
            for kind, levers in levers_of(sharding).items():
                best: list[int] = []
                for _ in range(3):  # what other threads still hold is there now and then
                    found = of_all_ranks(measured_peak(name, levers))
                    best = found if not best else [min(a, b) for a, b in zip(best, found, strict=True)]
                yield name, engine, kind, best


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each model, number of ranks, engine and levers."""
    cpu = find_device("cpu")
    torch.set_num_threads(1)
    names = ["transformer", "convolutions"] if quick else list(MODELS)
    for world_size in (2,) if quick else (2, 4):
        for name, engine, kind, peaks in on_ranks(world_size, _as_rank, names, world_size):
            levers = levers_of(engines(world_size)[engine])[kind]
            trace = capture_levers(MODELS[name](BATCH), levers, cpu)
            predicted, _ = predict(trace, costs_of([trace], cpu), cpu)
            row = {
                "part": "peaks",
                "model": name,
                "world_size": world_size,
                "engine": engine,
                "levers": kind,
                "predicted_peak_bytes": predicted.peak_bytes,
                "peak_upper_bytes": predicted.peak_upper_bytes,
                "measured_peak_bytes": peaks,
                "error": predicted.peak_bytes / max(peaks) - 1,
                "where": predicted.where,
            }
            print(
                f"{name:<13}{world_size} {engine:<10}{kind:<20} predicted {predicted.peak_bytes:>10}"
                f"  measured {max(peaks):>10}  {row['error']:+.3%}"
                f"{'  ABOVE' if max(peaks) > predicted.peak_upper_bytes else ''}",
                file=sys.stderr,
                flush=True,
            )
            yield row


def replays(quick: bool) -> Iterator[Case]:
    """Yield how far the search's replay on paper is from a capture of the engine, for many ranks."""
    for name in ["transformer"] if quick else MODELS:
        yield from replays_of(name, FAR)


def replays_of(name: str, world_sizes: Sequence[int], only: Collection[str] = ()) -> Iterator[Case]:
    """Yield the same of a model, by number of ranks, and by engine where it is among `only`."""
    cpu = find_device("cpu")
    for world_size in world_sizes:
        for engine, sharding in engines(world_size).items():
            if sharding.param_dtype or (only and engine not in only):
                continue  # with a dtype of their own they are captured, not replayed
            for size, reduces in ((2, "each"), (1, "each"), (1, "last")):
                shared = replace(sharding, reduces=reduces)
                workload = MODELS[name](2 * world_size)
                levers = Levers(microbatch_size=size, sharding=shared)
                captured = capture_levers(workload, levers, cpu)
                alone = capture_levers(MODELS[name](2), replace(levers, sharding=None), cpu)
                paper = shard(alone, shared)
                costs = costs_of([captured, paper], cpu)
                held = 0  # the whole batch is held on a CPU
                for trace, sign in ((captured, 1), (alone, -1)):
                    held += sign * sum(s.nbytes for s in trace.storages if s.category == "inputs" and s.birth < 0)
                difference = simulate(paper, costs).peak_bytes + held
                yield {
                    "part": "replays",
                    "model": name,
                    "world_size": world_size,
                    "engine": engine,
                    "microbatch_size": size,
                    "reduces": reduces,
                    "difference_bytes": difference - simulate(captured, costs).peak_bytes,
                }


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    errors = sorted(abs(row["error"]) for row in rows if row["part"] == "peaks")
    far = [abs(row["difference_bytes"]) for row in rows if row["part"] == "replays"]
    return {
        "peaks": len(errors),
        "peak_median_abs_error": statistics.median(errors) if errors else None,
        "peak_largest_abs_error": errors[-1] if errors else None,
        "above_upper_end": sum(
            max(row["measured_peak_bytes"]) > row["peak_upper_bytes"] for row in rows if row["part"] == "peaks"
        ),
        "replay_largest_difference_bytes": max(far, default=None),
    }
