"""A plan that adapts against fixed ones, on batches whose lengths vary as those of real functions do.

The data are the functions of Python's standard library, as bytes, cut to a context. A batch is 8 of them, padded to
the longest; they are drawn at random and grouped by length, 50 batches at a time, as transformers' sampler does. The
budget is 3 % above the peak of the leanest plan, for the longest batch there is. Every batch is run by the plan that
adapts and by the four fixed plans that are predicted to be fastest and safe, in turns, each on a model of its own; the
best fixed one is known only afterwards. A second pass runs the plan that adapts under the budget as a hard limit,
and counts what ran out of memory.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from benchmarks.common import Case, main
from memfit.capture import real_copy
from memfit.levers import applied, candidates_of
from memfit.recipes import ByteLM, source_files

PAD, BATCH, ROUND = 0, 8, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "--threads": {"type": int, "default": torch.get_num_threads(), "help": "with 1, times are those of the process"},
}
NUMERICS = ("exact", "reordered")
"""Without and with microbatches."""
FIXED = 4
ABOVE_THE_LEANEST = 1.03
GROUPED = 50


def run(quick: bool, threads: int) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each case, and the smallest gain among them."""
    torch.set_num_threads(threads)
    context, batches = 2048, (GROUPED // 2 if quick else 4 * GROUPED)
    clock = time.process_time if threads == 1 else time.perf_counter
    rows = [compared(numerics, context, batches, clock) for numerics in NUMERICS]
    return rows, {
        "throughput_ratio_to_best_fixed": min(row["throughput_ratio_to_best_fixed"] for row in rows),
        "out_of_memory_events": sum(row["out_of_memory_events"] for row in rows),
        "batches": sum(row["batches"] for row in rows),
    }


def compared(numerics: Any, context: int, count: int, clock: Callable[[], float]) -> Case:
    """Run the stream of batches with the plan that adapts and with every fixed one that is safe."""
    functions = standard_functions(context)
    work = workload(context, functions)
    plain = memfit.estimate(work)
    make = partial(memfit.plan, work, numerics=numerics, precisions=["32-true"])
    leanest = min(c.peak_bytes for c in candidates_of(make(budget=2 * plain.peak_bytes)))
    plan = make(budget=int(ABOVE_THE_LEANEST * leanest))
    batches = list(itertools.islice(grouped_batches(functions, context, seed=1), count))
    safe = [c for c in candidates_of(plan) if c.peak_bytes <= plan.budget_bytes]
    fixed = sorted(safe, key=lambda c: c.step_seconds)[:FIXED]
    with contextlib.ExitStack() as stack:
        adaptive = stack.enter_context(memfit.apply(plan, real_copy(work), adaptive=True))
        steps = [adaptive, *(stack.enter_context(applied(c.levers, real_copy(work))) for c in fixed)]
        planning_seconds = timed(clock, partial(adaptive, shortened(work.batch, context // 2)))
        for step in steps:
            step(work.batch)
        seconds = [0.0] * len(steps)
        for index, batch in enumerate(batches):
            turn = index % len(steps)
            for which in [*range(turn, len(steps)), *range(turn)]:
                seconds[which] += timed(clock, partial(steps[which], batch))
    best = min(seconds[1:])
    events, taken, peak_bytes = limited(plan, work, batches)
    lengths = [batch["tokens"].shape[1] for batch in batches]
    return {
        "numerics": numerics,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "batches": len(batches),
        "lengths": {str(q): int(np.quantile(lengths, q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0)},
        "safe_fixed_plans": len(safe),
        "fixed_seconds": seconds[1:],
        "adaptive_seconds": seconds[0],
        "throughput_ratio_to_best_fixed": best / seconds[0],
        "planning_seconds": planning_seconds,
        "out_of_memory_events": events,
        "largest_measured_peak_bytes": peak_bytes,
        "plans_taken": taken,
    }


def limited(plan: memfit.Plan, work: memfit.Workload, batches: list[Any]) -> tuple[int, int, int]:
    """Run the batches under the budget as a limit; return what ran out, how many plans were taken, and the peak."""
    peak_bytes = 0
    with memfit.apply(plan, real_copy(work), limit_bytes=plan.budget_bytes, adaptive=True) as step:
        for batch in batches:
            step(batch)
            peak_bytes = max(peak_bytes, step.memory_summary().peak_bytes or 0)
        recovery: Any = step.recovery
        return len(recovery.events), len({arm for _, arm in recovery.taken}), peak_bytes


def timed(clock: Callable[[], float], call: Callable[[], object]) -> float:
    """Return what a call takes."""
    started = clock()
    call()
    return clock() - started


# The workload


def workload(context: int, functions: list[bytes]) -> memfit.Workload:
    """Return a byte-level GPT whose batch is the longest there is."""
    torch.manual_seed(0)
    model = ByteLM(4, 64, 4, context)
    longest = sorted(functions, key=len)[-BATCH:]
    return memfit.Workload(
        model=model,
        batch=padded(longest, context),
        loss_fn=loss_sum_and_count,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        name="functions",
        max_grad_norm=1.0,
    )


def loss_sum_and_count(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over the bytes that are not padding, and their number."""
    targets = batch["targets"].flatten()
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), targets, ignore_index=-1, reduction="sum")
    return loss, (targets >= 0).sum()


def standard_functions(context: int) -> list[bytes]:
    """Return the source of every function of the standard library, cut at a byte more than a context."""
    found = []
    for path in source_files("training"):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                    found.append("".join(lines[node.lineno - 1 : node.end_lineno]).encode()[: context + 1])
    return found


def grouped_batches(functions: list[bytes], context: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of functions drawn at random and grouped by length, in random order."""
    rng = np.random.default_rng(seed)
    while True:
        drawn = sorted((functions[i] for i in rng.integers(len(functions), size=GROUPED * BATCH)), key=len)
        for index in rng.permutation(GROUPED):
            group = drawn[index * BATCH : (index + 1) * BATCH]
            yield padded(group, min(context, -(-(len(group[-1]) - 1) // ROUND) * ROUND))


def padded(functions: list[bytes], length: int) -> dict[str, Tensor]:
    """Return functions as tokens and the bytes after them, padded to a length."""
    tokens = torch.full((len(functions), length), PAD)
    targets = torch.full((len(functions), length), -1)
    for row, function in enumerate(functions):
        values = torch.frombuffer(bytearray(function), dtype=torch.uint8).long()
        tokens[row, : len(values) - 1] = values[:-1]
        targets[row, : len(values) - 1] = values[1:]
    return {"tokens": tokens, "targets": targets}


def shortened(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return a batch cut to a length."""
    return {name: tensor[:, :length].clone() for name, tensor in batch.items()}


if __name__ == "__main__":
    main("adaptive", run, __doc__, options=OPTIONS)
