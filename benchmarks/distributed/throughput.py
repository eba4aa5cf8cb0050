"""memfit's step among ranks against a loop written by hand with the same engine and checkpoints, in turns."""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Case
from benchmarks.distributed.models import MODELS
from benchmarks.distributed.peaks import UNITS, engines
from benchmarks.distributed.ranks import on_ranks
from memfit.ir import Levers, Region
from memfit.levers import applied

RANKS, MICROBATCHES, BATCH = 2, 2, 32
STEPS, QUICK_STEPS = 240, 40
_RESAMPLES = 2000

OneStep = Callable[[Any], tuple[float, float]]
"""Runs one update on a global batch, and returns its mean loss over all ranks and its gradient norm."""


@dataclass(frozen=True)
class ByHand:
    """A step as a careful user of PyTorch writes it.

    Attributes:
        batch: The global batch.
        shared: What the engine made of the model.
    """

    step: OneStep
    batch: Any
    shared: Any
    optimizer: torch.optim.Optimizer


def by_hand(engine: str, microbatches: int = MICROBATCHES) -> ByHand:
    """Return the step with an engine."""
    workload = MODELS["transformer"](BATCH)
    model: Any = workload.model
    for fqn in UNITS:
        block = model.get_submodule(fqn)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if engine == "ddp":
        shared: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        for fqn in UNITS:
            fully_shard(model.get_submodule(fqn), mesh=mesh, reshard_after_forward=engine == "resharded")
        shared = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = BATCH // RANKS // microbatches

    def waiting(is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if engine == "ddp":
            return contextlib.nullcontext() if is_last else shared.no_sync()
        shared.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        first = dist.get_rank() * (BATCH // RANKS)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for index in range(microbatches):
            start = first + index * size
            part = {name: tensor[start : start + size] for name, tensor in batch.items()}
            with waiting(index == microbatches - 1):
                mean: Any = workload.loss_fn(shared, part)
                loss = mean / microbatches
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(total) / RANKS, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return ByHand(step, workload.batch, shared, optimizer)


def _as_rank(engine: str, steps: int) -> Iterator[tuple[list[float], list[float], float]]:
    """Yield the seconds of both steps in each round, and how far their losses are apart at most."""
    hand = by_hand(engine)
    workload = MODELS["transformer"](BATCH)
    sharding = replace(engines(RANKS)[engine], reduces="last")
    levers = Levers(
        microbatch_size=BATCH // RANKS // MICROBATCHES,
        sharding=sharding,
        regions=tuple(Region((unit,)) for unit in UNITS),
    )
    with applied(levers, workload) as planned:

        def ours(given: Any) -> tuple[float, float]:
            result = planned(given)
            return result.loss, result.grad_norm

        both = {"by hand": hand.step, "memfit": ours}
        seconds: dict[str, list[float]] = {name: [] for name in both}
        losses: dict[str, list[float]] = {name: [] for name in both}
        order = random.Random(0)  # the same on each rank
        for index in range(steps + 5):
            for name in order.sample(sorted(both), 2):
                dist.barrier()
                started = time.perf_counter()
                loss, _ = both[name](hand.batch)
                if index >= 5:
                    seconds[name].append(time.perf_counter() - started)
                losses[name].append(loss)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["memfit"], losses["by hand"], strict=True))
    yield seconds["memfit"], seconds["by hand"], apart


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each engine."""
    steps = QUICK_STEPS if quick else STEPS
    for engine in ("ddp", "resharded", "kept"):
        for ours, hand, apart in on_ranks(RANKS, _as_rank, engine, steps):
            ratios = [a / b for a, b in zip(ours, hand, strict=True)]
            low, high = interval(ratios)
            row = {
                "part": "throughput",
                "engine": engine,
                "steps": steps,
                "memfit_seconds": statistics.median(ours),
                "by_hand_seconds": statistics.median(hand),
                "ratio": statistics.median(ratios),
                "ratio_lower": low,
                "ratio_upper": high,
                "largest_loss_difference": apart,
            }
            print(
                f"{engine:<10} memfit {row['memfit_seconds']:.4f} s  by hand {row['by_hand_seconds']:.4f} s"
                f"  ratio {row['ratio']:.4f} [{low:.4f}, {high:.4f}]",
                file=sys.stderr,
                flush=True,
            )
            yield row


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, by the bootstrap (Efron 1979)."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figure that the docs quote."""
    uppers = [row["ratio_upper"] for row in rows if row["part"] == "throughput"]
    return {"throughput_ratio_upper": max(uppers, default=None)}
