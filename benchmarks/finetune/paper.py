"""A Llama of 8 billion parameters on cards that are not here: memfit's lowest peaks, and the contexts that fit.

A row is of all 32 layers, or is extrapolated from 2 and 4 layers and called so: what a plan holds is affine in the
number of equal layers as long as the same levers are chosen.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import memfit
from benchmarks.common import Case
from benchmarks.finetune.models import eight_billion, llama, on_paper
from memfit.foundations import format_bytes
from memfit.hardware import find_device
from memfit.ir import Numerics, uses_text

LAYERS = 32
SLICES = (2, 4)
"""Layers that are planned where 32 would take too long."""
_LEAST_BYTES = 2**30  # a budget that nothing fits: the error names the lowest peak
HOST = "512GiB"


@dataclass(frozen=True)
class Setup:
    """A fine-tuning step of the 8 B model on a card.

    Attributes:
        name: In tables.
        key: In the summary; "" for none.
        lora: Whether adapters are trained, or everything in bf16.
        numerics: How far memfit may go. "reduced" lets it hold frozen weights in fewer bits.
        host_budget: The host's memory that it may use; None for none.
        most_gib: The bar that its lowest peak is held against: hand-made stacks, and sums of what must be there.
    """

    name: str
    key: str
    lora: bool
    tokens: int
    device: str
    numerics: Numerics = "reordered"
    host_budget: str | None = None
    most_gib: float | None = None


SETUPS = (
    Setup("LoRA, 8k tokens", "lora_8k_gib", True, 8192, "rtx-4090", most_gib=20.6),
    Setup("LoRA, 8k tokens, reduced, host", "qlora_8k_gib", True, 8192, "rtx-3060", "reduced", HOST, 11.0),
    Setup("full, 8k tokens, host", "full_8k_gib", False, 8192, "rtx-4090", host_budget=HOST, most_gib=21.0),
    Setup("LoRA, 128k tokens", "lora_128k_gib", True, 131_072, "a100-80gb", most_gib=66.0),
    Setup("LoRA, 128k tokens, host", "lora_128k_host_gib", True, 131_072, "a100-80gb", "reordered", HOST, 36.0),
    Setup("full, 128k tokens, host", "full_128k_gib", False, 131_072, "a100-80gb", "reordered", HOST, 45.0),
    Setup("full, 500k tokens, host", "full_500k_gib", False, 500_000, "h100", "reordered", "1900GiB"),
)

UNSLOTH = {"rtx-3060": 21_848, "rtx-4080": 40_724, "rtx-4090": 78_475, "a100-80gb": 342_733}
"""Tokens of 8 B in 4 bits, rank 32, that fit cards of 12, 16, 24 and 80 GB, as Unsloth publishes them (its
documentation, *Unsloth Benchmarks*: batch of 1, all linear layers, padded to the length); the cards are those of the
catalogue of that size."""
HF = {"rtx-3060": 932, "rtx-4080": 2_551, "rtx-4090": 5_789, "a100-80gb": 28_454}
"""The same of transformers with FlashAttention 2, from the same table."""
SHARES = (1.0, 0.5, 0.25, 0.1)
"""Shares of Unsloth's context that are tried, from the largest."""
CONTEXT = Setup("context of LoRA, reduced, host", "", True, 0, "", "reduced", HOST)


def lowest(setup: Setup, layers: int = LAYERS) -> Case:
    """Return the lowest peak that memfit finds for a setup, and what its error says of that plan."""
    workload = _workload(setup, layers)
    row = {**_start(setup), "layers": layers, "kind": "lowest"}
    before = _processor_seconds()
    try:
        plan = memfit.plan(workload, budget=_LEAST_BYTES, **_options(setup))
    except memfit.InfeasibleError as error:
        found = {"lowest_peak_bytes": error.lowest_peak_bytes, "where": error.where, "proven": error.proven}
        row |= {**found, "message": str(error)}
    except memfit.MemfitError as error:
        row["error_message"] = f"{type(error).__name__}: {error}"
    else:
        row |= {"lowest_peak_bytes": plan.predicted.peak_bytes, "message": uses_text(plan.uses)}
    return row | {"plan_cpu_seconds": _processor_seconds() - before}


def extrapolated(setup: Setup) -> Iterator[Case]:
    """Yield the lowest peaks of slices, and the one of all layers that their line gives."""
    slices = [lowest(setup, layers) for layers in SLICES]
    yield from slices
    row = {**_start(setup), "layers": LAYERS, "kind": f"extrapolated from {SLICES[0]} and {SLICES[1]} layers"}
    if any("error_message" in found for found in slices):
        yield row | {"error_message": next(found["error_message"] for found in slices if "error_message" in found)}
        return
    low, high = (found["lowest_peak_bytes"] for found in slices)
    each = (high - low) / (SLICES[1] - SLICES[0])
    row |= {"lowest_peak_bytes": round(low + each * (LAYERS - SLICES[0])), "layer_bytes": round(each)}
    yield row | {"plan_cpu_seconds": sum(found["plan_cpu_seconds"] for found in slices)}


def fitting(setup: Setup, layers: int = LAYERS) -> Case:
    """Return the fastest plan that fits the card with its error bar, or what is missing."""
    workload = _workload(setup, layers)
    row = {**_start(setup), "layers": layers, "kind": "fits"}
    before = _processor_seconds()
    try:
        plan = memfit.plan(workload, budget="100%", **_options(setup))
    except memfit.InfeasibleError as error:
        row |= {"fits": False, "lowest_peak_bytes": error.lowest_peak_bytes, "message": str(error)}
    except memfit.MemfitError as error:
        row["error_message"] = f"{type(error).__name__}: {error}"
    else:
        found = plan.predicted
        parts = {name: nbytes for name, nbytes in found.by_category.items() if nbytes}
        row |= {"fits": True, "peak_bytes": found.peak_bytes, "peak_upper_bytes": found.peak_upper_bytes}
        row |= {"levers": uses_text(plan.uses), "by_category": parts, "step_seconds": found.step_seconds}
    return row | {"plan_cpu_seconds": _processor_seconds() - before}


def context(device: str, layers: int = LAYERS) -> Iterator[Case]:
    """Yield plans of LoRA on a card, for shares of Unsloth's context from the largest until one fits."""
    for share in SHARES:
        tokens = int(UNSLOTH[device] * share)
        setup = replace(CONTEXT, tokens=tokens, device=device)
        row = {**fitting(setup, layers), "unsloth_tokens": UNSLOTH[device], "hf_tokens": HF[device], "share": share}
        yield row
        if row.get("fits") or "error_message" in row:
            return


def _workload(setup: Setup, layers: int) -> memfit.Workload:
    return on_paper(lambda: llama(eight_billion(layers), setup.tokens, lora=setup.lora))


def _start(setup: Setup) -> Case:
    usable_bytes = find_device(setup.device).usable_bytes
    return {
        "setup": setup.name,
        "key": setup.key,
        "tokens": setup.tokens,
        "device": setup.device,
        "usable_bytes": usable_bytes,
        "numerics": setup.numerics,
        "host_budget": setup.host_budget,
        "most_gib": setup.most_gib,
    }


def _options(setup: Setup) -> dict[str, Any]:
    chosen = {"numerics": setup.numerics, "host_budget": setup.host_budget}
    return {"device": setup.device, "points": 1, "measure": False, **chosen}


def _processor_seconds() -> float:
    """Return what this process and those that it waited for have taken: a plan for a GPU is made in one of its own."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in uses)


def report(row: Case) -> None:
    """Say on standard error what was found."""
    size = row.get("peak_bytes", row.get("lowest_peak_bytes"))
    said = row.get("error_message") or (format_bytes(size) if size is not None else "")
    start = f"8 B {row['setup']:<34}{row['tokens']:>8} {row['layers']:>3} layers {row['device']:<18}{row['kind']:<36}"
    print(f"{start}{str(said)[:120]} {'fits' if row.get('fits') else ''}", file=sys.stderr, flush=True)


def summary_of(cases: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote; those of rows of all layers before extrapolated ones."""
    figures: dict[str, Any] = {}
    for setup in SETUPS:
        rows = [c for c in cases if c["key"] == setup.key and c["layers"] == LAYERS and "lowest_peak_bytes" in c]
        rows = [c for c in rows if c["kind"] == "lowest"] or [c for c in rows if c["kind"] != "fits"]
        figures[setup.key] = rows[0]["lowest_peak_bytes"] / 2**30 if rows else None
    planned = [c for c in cases if c["key"] == "lora_8k_gib" and c["kind"] == "fits" and c["layers"] == LAYERS]
    figures["plan_cpu_seconds"] = planned[0]["plan_cpu_seconds"] if planned else None
    best = [max((c["share"] for c in cases if _fits_on(c, device)), default=0.0) for device in UNSLOTH]
    tried = {c["device"] for c in cases if "share" in c}
    figures["context_ratio_to_unsloth"] = min(best) if tried == set(UNSLOTH) else None
    whole = {c["key"] for c in cases if c["kind"] == "lowest" and c["layers"] == LAYERS and "lowest_peak_bytes" in c}
    figures["extrapolated"] = sorted({c["key"] for c in cases if c["kind"].startswith("extrapolated")} - whole)
    return figures


def _fits_on(case: Case, device: str) -> bool:
    return case["device"] == device and "share" in case and bool(case.get("fits"))
