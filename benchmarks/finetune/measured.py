"""The small Llama on the CPU: hand-made stacks and memfit's plans, with measured peaks and interleaved times."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import memfit
from benchmarks.common import Case
from benchmarks.finetune.models import Shape, llama
from benchmarks.finetune.stacks import ALST, LIGER, PLAIN, Stack, stacked
from memfit.capture import measure_peak_bytes, real_copy
from memfit.ir import Numerics, Plan, uses_text
from memfit.levers import applied
from memfit.workload import StepProgram, Workload

CLASSES: tuple[Numerics, ...] = ("exact", "reordered", "reduced")
ROUNDS = 5
_LEAST_BYTES = 2**20  # a budget that nothing fits: the error names the lowest peak
_ROOM = 1.005  # above the lowest peak, which is that of a step that is not confirmed
_PLAN: dict[str, Any] = {"device": "cpu", "points": 1, "measure": False}


def rows(
    shape: Shape,
    tokens: int,
    stacks: Sequence[Stack],
    *,
    lora: bool = False,
    classes: Sequence[Numerics] = CLASSES,
    rounds: int = ROUNDS,
) -> list[Case]:
    """Return a row for each hand-made stack and for memfit's plans: the lowest of each class, and at stacks' peaks.

    All run in this process, in turns. Each has a copy of the same workload, so that losses are comparable.

    Args:
        rounds: Timed steps of each; 0 for none.
    """
    plain = llama(shape, tokens, lora=lora)
    start = {"model": plain.name, "tokens": tokens, "method": "LoRA" if lora else "full"}
    found: list[Case] = []
    with contextlib.ExitStack() as applications:
        steps: dict[str, StepProgram] = {}
        for stack in stacks:
            step: StepProgram = applications.enter_context(stacked(stack, real_copy(plain)))  # type: ignore[assignment]
            found.append({**start, "stack": stack.name, "by": "hand", **_measured(step)})
            steps[stack.name] = step
            _report(found[-1])
        by_hand = {row["stack"]: row["peak_bytes"] for row in found}
        for row, plan in _plans(plain, by_hand, classes):
            if plan is not None:
                step = applications.enter_context(applied(plan.levers, real_copy(plain)))
                row |= _measured(step)
                row["error"] = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
                steps[row["stack"]] = step
            found.append({**start, **row})
            _report(found[-1])
        seconds = interleaved(steps, rounds)
    for row in found:
        own, other = seconds.get(row["stack"], []), seconds.get(row.get("beside", ""), [])
        if own:
            row |= {"cpu_seconds": statistics.median(own), "rounds": rounds}
        if own and other:
            row["time_ratio"] = statistics.median(ours / theirs for ours, theirs in zip(own, other, strict=True))
    return found


def _plans(plain: Workload, by_hand: Mapping[str, int], classes: Sequence[Numerics]) -> list[tuple[Case, Plan | None]]:
    """Return rows to be measured with their plans: the lowest of each class, and one at the peak of each rival."""
    made: list[tuple[Case, Plan | None]] = []
    lowest: dict[str, int] = {}
    for numerics in classes:
        lowest[numerics], facts = lowest_peak(plain, numerics)
        row = {"stack": f"memfit, {numerics}, lowest", "numerics": numerics, "beside": ALST.name, **facts}
        made.append(_planned(plain, row, int(lowest[numerics] * _ROOM)))
    for stack in (LIGER, ALST):
        row = {"stack": f"memfit at the peak of: {stack.name}", "numerics": "reordered", "beside": stack.name}
        if stack.name in by_hand and "reordered" in classes:
            if lowest["reordered"] > by_hand[stack.name]:
                message = "no plan fits: memfit's lowest is higher"
                made.append(({**row, "by": "memfit", "error_message": message}, None))
            else:
                made.append(_planned(plain, row, by_hand[stack.name]))
    return made


def lowest_peak(workload: Workload, numerics: Numerics) -> tuple[int, Case]:
    """Return the lowest peak that memfit finds in a class, and what it says of it."""
    started = time.process_time()
    try:
        memfit.plan(workload, budget=_LEAST_BYTES, numerics=numerics, **_PLAN)
    except memfit.InfeasibleError as error:
        facts = {"lowest_peak_bytes": error.lowest_peak_bytes, "where": error.where, "proven": error.proven}
        return error.lowest_peak_bytes, {**facts, "plan_cpu_seconds": time.process_time() - started}
    raise RuntimeError(f"a plan fits {_LEAST_BYTES} bytes: {workload}")


def _planned(workload: Workload, row: Case, budget: int) -> tuple[Case, Plan | None]:
    """Return a plan for a budget, or none, with its row."""
    row = {**row, "by": "memfit", "budget_bytes": budget}
    try:
        plan = memfit.plan(workload, budget=budget, numerics=row["numerics"], **_PLAN)
    except memfit.InfeasibleError as error:
        return {**row, "error_message": str(error).splitlines()[0]}, None
    return {**row, "levers": uses_text(plan.uses), "predicted_peak_bytes": plan.predicted.peak_bytes}, plan


def _measured(step: StepProgram) -> Case:
    """Return the loss of the first step, and the peak of the second."""
    first = step(step.workload.batch)
    loss = first if isinstance(first, float) else first.loss
    return {"first_loss": loss, "peak_bytes": measure_peak_bytes(step, step.workload.batch)}


def interleaved(steps: Mapping[str, Callable[[Any], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of steps that run in turns, in another order each round."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in order.sample(sorted(steps), len(steps)):
            step: Any = steps[name]
            gc.collect()
            gc.disable()
            try:
                started = time.process_time()
                step(step.workload.batch)
                seconds[name].append(time.process_time() - started)
            finally:
                gc.enable()
    return seconds


def _report(row: Case) -> None:
    size = f"{row['peak_bytes'] / 2**20:9.1f} MiB" if "peak_bytes" in row else row["error_message"]
    error = f"  {row['error']:+.3%}" if "error" in row else ""
    print(f"{row['model']:<28}{row['stack']:<92}{size}{error}", file=sys.stderr, flush=True)


def summary_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote: of the full fine-tune at the least tokens that were run."""
    full = [case for case in cases if case["method"] == "full"]
    tokens = min((case["tokens"] for case in full), default=0)
    rows = {case["stack"]: case for case in full if case["tokens"] == tokens}

    def mib(stack: str) -> float | None:
        peak = rows.get(stack, {}).get("peak_bytes")
        return None if peak is None else peak / 2**20

    return {
        "small_tokens": tokens,
        "small_plain_mib": mib(PLAIN.name),
        "small_hand_mib": mib(ALST.name),
        "small_liger_mib": mib(LIGER.name),
        **{f"small_{numerics}_mib": mib(f"memfit, {numerics}, lowest") for numerics in CLASSES},
        "time_ratio": rows.get(f"memfit at the peak of: {ALST.name}", {}).get("time_ratio"),
        "time_ratio_at_the_lowest": rows.get("memfit, reordered, lowest", {}).get("time_ratio"),
        "time_ratio_to_liger": rows.get(f"memfit at the peak of: {LIGER.name}", {}).get("time_ratio"),
        "largest_abs_error": max((abs(case["error"]) for case in cases if "error" in case), default=None),
        "threads": torch.get_num_threads(),
    }
