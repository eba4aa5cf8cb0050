"""What else shares a step among ranks, on the same step: DeepSpeed's ZeRO stages, accelerate's FSDP2, a loop by hand.

And `FSDPMemTracker`, PyTorch's own prediction for `fully_shard`, beside memfit's. Each shares the Transformer's step of
two microbatches with recomputed blocks between two ranks over gloo, as its documentation says; DeepSpeed takes part
where it is installed (`pip install deepspeed`; it compiles an operator at its first use).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Case
from benchmarks.distributed.models import MODELS, loss_of
from benchmarks.distributed.peaks import UNITS, engines
from benchmarks.distributed.ranks import of_all_ranks, on_ranks
from benchmarks.distributed.throughput import BATCH, MICROBATCHES, RANKS, by_hand
from memfit.hardware import allocated, find_device
from memfit.ir import Levers, Region
from memfit.levers import applied
from memfit.planner import capture_levers, costs_of, predict

ROUNDS, QUICK_ROUNDS, STEPS = 5, 2, 12
_SIZE = BATCH // RANKS // MICROBATCHES
OneStep = Callable[[], float]
"""Runs one update on this rank's part of the batch; returns the last loss that it saw."""


def levers_of(engine: str) -> Levers:
    """Return memfit's levers for the step."""
    sharding = replace(engines(RANKS)[engine], reduces="last")
    return Levers(microbatch_size=_SIZE, sharding=sharding, regions=tuple(Region((unit,)) for unit in UNITS))


def _parts(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    first = dist.get_rank() * (BATCH // RANKS)
    starts = range(first, first + BATCH // RANKS, _SIZE)
    return [{name: tensor[start : start + _SIZE] for name, tensor in batch.items()} for start in starts]


def _recomputed(model: Any) -> None:
    for fqn in UNITS:
        block = model.get_submodule(fqn)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


@contextlib.contextmanager
def _memfit(engine: str) -> Iterator[OneStep]:
    workload = MODELS["transformer"](BATCH)
    with applied(levers_of(engine), workload) as step:
        yield lambda: step(workload.batch).loss


@contextlib.contextmanager
def _by_hand(engine: str) -> Iterator[OneStep]:
    hand = by_hand(engine)
    yield lambda: hand.step(hand.batch)[0]


@contextlib.contextmanager
def _accelerate(reshards: bool) -> Iterator[OneStep]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from benchmarks.distributed.accelerate_on_cpus import fully_sharded_on_cpus

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshards,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    with fully_sharded_on_cpus():
        accelerator: Any = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICROBATCHES)
    workload = MODELS["transformer"](BATCH)
    model, optimizer = accelerator.prepare(workload.model, workload.optimizer)

    def step() -> float:
        for part in _parts(workload.batch):
            with accelerator.accumulate(model):
                loss = loss_of(model, part)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return float(loss)

    yield step


@contextlib.contextmanager
def _deepspeed(stage: int) -> Iterator[OneStep]:
    import deepspeed

    workload = MODELS["transformer"](BATCH)
    _recomputed(workload.model)
    settings = {
        "train_micro_batch_size_per_gpu": _SIZE,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 1.0,
        # Its buckets hold 500 million elements by default: 2 GB, whatever the model.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=workload.model, optimizer=workload.optimizer, config=settings, dist_init_required=False
    )

    def step() -> float:
        for part in _parts(workload.batch):
            loss = loss_of(engine, part)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    yield step


PEERS: dict[str, Callable[[], contextlib.AbstractContextManager[OneStep]]] = {
    "memfit, ddp": functools.partial(_memfit, "ddp"),
    "memfit, kept": functools.partial(_memfit, "kept"),
    "memfit, resharded": functools.partial(_memfit, "resharded"),
    "by hand, ddp": functools.partial(_by_hand, "ddp"),
    "by hand, kept": functools.partial(_by_hand, "kept"),
    "by hand, resharded": functools.partial(_by_hand, "resharded"),
    "accelerate FSDP2, kept": functools.partial(_accelerate, False),
    "accelerate FSDP2, resharded": functools.partial(_accelerate, True),
}
DEEPSPEED = {f"DeepSpeed ZeRO-{stage}": functools.partial(_deepspeed, stage) for stage in (1, 2, 3)}


def peers() -> dict[str, Callable[[], contextlib.AbstractContextManager[OneStep]]]:
    """Return what can run here."""
    return PEERS | (DEEPSPEED if importlib.util.find_spec("deepspeed") else {})


def _as_rank(rounds: int) -> Iterator[tuple[str, list[int], list[float]]]:
    """Yield each peer's peak of a steady step on all ranks, and the seconds of its steps, in turns."""
    if importlib.util.find_spec("deepspeed"):
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
        import deepspeed

        deepspeed.init_distributed("gloo")
    with contextlib.ExitStack() as stack:
        steps, peaks = {}, {}
        for name, made in peers().items():
            with allocated(but_in="before") as meter:
                with torch.profiler.record_function("before"):
                    steps[name] = stack.enter_context(made())
                    for _ in range(2):
                        steps[name]()
                    gc.collect()
                steps[name]()
            peaks[name] = of_all_ranks(meter.peak_bytes)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(sorted(steps), len(steps)):
                steps[name]()  # the first after another one's
                for _ in range(STEPS):
                    dist.barrier()
                    started = time.perf_counter()
                    steps[name]()
                    seconds[name].append(time.perf_counter() - started)
        for name in steps:
            yield name, peaks[name], seconds[name]


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each peer, and one for each prediction of FSDPMemTracker."""
    for name, peaks, seconds in on_ranks(RANKS, _as_rank, QUICK_ROUNDS if quick else ROUNDS):
        row = {
            "part": "peers",
            "peer": name,
            "measured_peak_bytes": peaks,
            "seconds": statistics.median(seconds),
            "steps": len(seconds),
        }
        print(f"{name:<28} {max(peaks):>10} bytes  {row['seconds']:.4f} s", file=sys.stderr, flush=True)
        yield row
    cpu = find_device("cpu")
    for engine in ("kept", "resharded"):
        levers = replace(levers_of(engine), microbatch_size=BATCH // RANKS)
        trace = capture_levers(MODELS["transformer"](BATCH), levers, cpu)
        predicted, _ = predict(trace, costs_of([trace], cpu), cpu)
        ((measured, tracked),) = on_ranks(RANKS, _tracked, engine, levers)
        yield {
            "part": "predictions",
            "engine": engine,
            "memfit_peak_bytes": predicted.peak_bytes,
            "measured_by_memfit_bytes": measured[0],
            "fsdp_mem_tracker_peak_bytes": tracked,
            "measured_by_hand_bytes": measured[1],
        }


def _tracked(engine: str, levers: Levers) -> Iterator[tuple[list[int], int]]:
    """Yield the measured peaks of memfit's step and of the loop by hand, and what FSDPMemTracker says of the latter.

    In one microbatch: it refuses several.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    measured = []
    step: Callable[[], Any]
    for kind in ("memfit", "by hand"):
        with allocated(but_in="before") as meter, contextlib.ExitStack() as stack:
            with torch.profiler.record_function("before"):
                if kind == "memfit":
                    workload = MODELS["transformer"](BATCH)
                    planned = stack.enter_context(applied(levers, workload))
                    step = functools.partial(planned, workload.batch)
                else:
                    hand = by_hand(engine, 1)
                    step = functools.partial(hand.step, hand.batch)
                for _ in range(2):
                    step()
                gc.collect()
            step()
        measured.append(max(of_all_ranks(meter.peak_bytes)))
        del step
    tracker: Any = FSDPMemTracker(hand.shared, hand.optimizer)
    tracker.track_inputs((hand.batch,))
    with tracker:
        hand.step(hand.batch)
    yield measured, int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
