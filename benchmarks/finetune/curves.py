"""The recipes of fine-tuning, trained: the loss under each lever beside the plain one, and beside other seeds'."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from benchmarks.common import Case
from memfit import recipes
from memfit.errors import PlanError
from memfit.ir import Levers, Numerics
from memfit.levers import applied
from memfit.workload import Workload, batch_size_of

STEPS, SEEDS = 300, 5
POINTS = 12
"""Of a curve: each is the mean of as many steps."""
PLAIN = "plain"
QLORA = "QLoRA: frozen weights in NF4"

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Lever:
    """A lever by itself, as a plan's file has it; later forms are for memfits that have not the earlier ones."""

    name: str
    numerics: Numerics
    forms: tuple[Settings, ...]
    every_seed: bool = False  # trained with each seed of the plain step, and not the first alone


@dataclass(frozen=True)
class Training:
    """A recipe, the FQNs that its levers name, and the figure that it is judged by."""

    name: str
    make: Callable[..., Workload]
    blocks: tuple[str, ...]
    mlp: str  # of a block, which is computed in tiles
    figure: str
    head: str = ""
    seeds: int = SEEDS


FINETUNE = Training(
    "finetune",
    functools.partial(recipes.finetune, n_layer=2, context=128, batch_size=8, base_steps=300, batches_per_epoch=STEPS),
    tuple(f"base_model.model.model.layers.{index}" for index in range(2)),
    "mlp",
    "validation_loss",
    head="base_model.model.lm_head",
)
ENCODER = Training(
    "sentence_encoder",
    functools.partial(recipes.sentence_encoder, tokens=32, batch_size=8, batches_per_epoch=STEPS),
    tuple(f"encoder.base_model.model.encoder.layer.{index}" for index in range(6)),
    "intermediate",
    "accuracy",
    seeds=1,
)


def levers_of(training: Training) -> Iterator[Lever]:
    """Yield the levers that are tried on a recipe, those of a language model only where it is one."""
    regions = [{"modules": [block]} for block in training.blocks]
    yield Lever("activation checkpointing", "exact", ({"regions": regions},))
    yield Lever("updates in the backward pass", "exact", ({"update": "in-backward"}, {"optimizer": "in-backward"}))
    if training.head:
        yield Lever("microbatches", "reordered", ({"microbatch_size": 2},))
        yield Lever("chunked loss", "reordered", ({"chunked_loss": {"head": training.head, "rows": 64}},))
    tiles = {"modules": [f"{block}.{training.mlp}" for block in training.blocks], "tokens": 128}
    yield Lever("token tiles", "reordered", ({"tiles": tiles},))
    yield Lever("8-bit AdamW", "reduced", ({"optimizer": "adamw-8bit"},))
    yield Lever("4-bit AdamW", "reduced", ({"optimizer": "adamw-4bit"},))
    kept = [training.head] if training.head else []
    nf4, int8 = ({"frozen_weights": {"quantizer": quantizer, "kept": kept}} for quantizer in ("nf4", "int8"))
    yield Lever(QLORA, "reduced", (nf4,), every_seed=True)
    yield Lever("frozen weights in int8", "reduced", (int8,))
    yield Lever("bf16-mixed", "reduced", ({"precision": "bf16-mixed"},))


def settings_of(lever: Lever, batch_size: int) -> Levers | None:
    """Return a lever as this memfit has it; None where it has not."""
    for form in lever.forms:
        try:
            return msgspec.convert({"microbatch_size": batch_size, **form}, Levers)
        except (msgspec.ValidationError, PlanError):
            continue
    return None


def rows(training: Training, steps: int = STEPS) -> Iterator[Case]:
    """Yield a row for each seed of the plain step, and for each lever with the first seed, or with all."""
    torch.use_deterministic_algorithms(True)
    losses: list[list[float]] = []
    for seed in range(training.seeds):
        row, found = _trained(training, seed, None, steps)
        losses.append(found)
        yield {**row, "lever": PLAIN, "numerics": "exact", "bitwise": True}
    for lever in levers_of(training):
        settings = settings_of(lever, batch_size_of(training.make(seed=0).batch))
        for seed in range(training.seeds if lever.every_seed else 1) if settings is not None else ():
            row, found = _trained(training, seed, settings, steps)
            off = max(abs(a - b) for a, b in zip(found, losses[seed], strict=True))
            facts = {"lever": lever.name, "numerics": lever.numerics, "bitwise": found == losses[seed]}
            yield {**row, **facts, "largest_difference": off}


def _trained(training: Training, seed: int, levers: Levers | None, steps: int) -> tuple[Case, list[float]]:
    """Train, and return the row and the loss of each step."""
    workload = training.make(seed=seed)
    started = time.process_time()
    torch.manual_seed(seed)
    with applied(levers or Levers(microbatch_size=batch_size_of(workload.batch)), workload) as step:
        batches = iter(workload.batches or ())
        losses = [float(step(next(batches)).loss) for _ in range(steps)]
        assert workload.evaluate is not None
        with torch.no_grad():
            figures = dict(workload.evaluate(step.workload.model.eval()))
    size = max(1, steps // POINTS)
    row = {
        "recipe": training.name,
        "seed": seed,
        "steps": steps,
        "curve": [statistics.fmean(losses[start : start + size]) for start in range(0, steps, size)],
        "figure": training.figure,
        "reached": figures[training.figure],
        "cpu_seconds": time.process_time() - started,
    }
    return row, losses


def report(row: Case) -> None:
    """Say on standard error how a training went."""
    equal = "same bits" if row["bitwise"] else f"differs by {row['largest_difference']:.1e}"
    start = f"{row['recipe']:<18}{row['lever']:<32}seed {row['seed']}"
    print(f"{start}  {row['curve'][-1]:.4f}  {row['reached']:.4f}  {equal}", file=sys.stderr, flush=True)


def summary_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how many exact runs had the plain one's bits, and where QLoRA ends beside the seeds of LoRA.

    QLoRA is within LoRA's spread where its mean over the seeds is: a seed of its own may well be the best or the worst.
    """
    exact = [case for case in cases if case["numerics"] == "exact" and case["lever"] != PLAIN]

    def reached(lever: str) -> list[float]:
        return [case["reached"] for case in cases if (case["recipe"], case["lever"]) == (FINETUNE.name, lever)]

    seeds, quantised = reached(PLAIN), reached(QLORA)
    mean = statistics.fmean(quantised) if quantised else None
    spread = [min(seeds), max(seeds)] if seeds else None
    return {
        "exact_runs": len(exact),
        "exact_runs_with_the_same_bits": sum(case["bitwise"] for case in exact),
        "lora_validation_loss": spread,
        "qlora_validation_loss": mean,
        "qlora_seeds": len(quantised),
        "qlora_within_the_spread": None if mean is None or spread is None else spread[0] <= mean <= spread[1],
    }
