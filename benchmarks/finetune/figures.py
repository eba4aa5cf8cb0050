"""The benchmark's summary and the docs' tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import Case
from benchmarks.finetune import combinations, curves, measured, paper
from benchmarks.markdown import head, made_by, row
from memfit.foundations import format_bytes


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    return {
        **measured.summary_of([case for case in cases if "stack" in case]),
        **paper.summary_of([case for case in cases if "setup" in case]),
        **curves.summary_of([case for case in cases if "recipe" in case]),
        **combinations.summary_of(cases),
        "published_rows": sum("published" in case and "error" in case for case in cases),
        "failed": sum("part" in case for case in cases),
    }


def stacks_table(result: dict[str, Any]) -> str:
    """Return the small Llama's stacks and plans: peaks, and times where they were taken in turns."""
    lines = head(("step", "by", "peak, measured", "of plain", "CPU time", "loss of the first step", "levers"))
    cases = [case for case in result["cases"] if "stack" in case]
    plains = {case["model"]: case["peak_bytes"] for case in cases if case["stack"] == "plain"}
    for model in dict.fromkeys(case["model"] for case in cases):
        lines.append(row((f"**{model}**", *[""] * 6)))
        for case in (case for case in cases if case["model"] == model):
            lines.append(row(_stack_cells(case, plains.get(model))))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def _stack_cells(case: Case, plain_bytes: int | None) -> list[str]:
    name = case["stack"]
    if "peak_bytes" not in case:
        return [name, case["by"], case["error_message"], *[""] * 4]
    share = "" if plain_bytes is None else f"{case['peak_bytes'] / plain_bytes:.1%}"
    seconds = f"{case['cpu_seconds']:.2f} s" if "cpu_seconds" in case else ""
    if "time_ratio" in case:
        off = f"{abs(case['time_ratio'] - 1):.0%}".replace("%", " %")
        seconds += f", {off} {'more' if case['time_ratio'] > 1 else 'less'} than {case['beside'].partition(':')[0]}"
    peak = f"{case['peak_bytes'] / 2**20:.1f} MiB"
    return [name, case["by"], peak, share, seconds, f"{case['first_loss']:.6f}", case.get("levers", "")]


def paper_table(result: dict[str, Any]) -> str:
    """Return the lowest peaks of 8 B on paper, beside the bars."""
    lines = head(("8 B, batch of 1", "card", "class", "layers planned", "lowest peak", "bar", "processor time"))
    for case in result["cases"]:
        if "setup" in case and "share" not in case and case["layers"] == paper.LAYERS:
            lines.append(row(_paper_cells(case)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def _paper_cells(case: Case) -> list[str]:
    kind = {"lowest": "32", "fits": "32, for the card"}.get(case["kind"], case["kind"])
    size = case.get("peak_bytes", case.get("lowest_peak_bytes"))
    found = case["error_message"] if size is None else format_bytes(size)
    if case["kind"] == "fits" and size is not None:
        found += ": fits" if case["fits"] else ": does not fit"
    bar = "" if case["most_gib"] is None else f"{case['most_gib']:.1f} GiB"
    return [case["setup"], case["device"], case["numerics"], kind, found, bar, f"{case['plan_cpu_seconds']:.0f} s"]


def contexts_table(result: dict[str, Any]) -> str:
    """Return the context that fits each card, beside those that Unsloth publishes."""
    lines = head(("card", "memfit: tokens that fit", "Unsloth, published", "transformers with FlashAttention 2"))
    for device, tokens in paper.UNSLOTH.items():
        rows = [case for case in result["cases"] if case.get("device") == device and "share" in case]
        fitting = [case["tokens"] for case in rows if case.get("fits")]
        tried = f"none of {', '.join(str(case['tokens']) for case in rows)}" if rows else "not planned"
        found = f"{max(fitting):,}" if fitting else tried
        lines.append(row((device, found, f"{tokens:,}", f"{paper.HF[device]:,}")))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def curves_table(result: dict[str, Any]) -> str:
    """Return how the recipes train under each lever, beside the plain step with several seeds."""
    lines = head(
        ("recipe", "lever", "class", "seed", "loss: first steps", "last steps", "reached", "to the plain step")
    )
    for case in (case for case in result["cases"] if "recipe" in case):
        first, last = case["curve"][0], case["curve"][-1]
        reached = f"{case['figure'].replace('_', ' ')} {case['reached']:.4f}"
        equal = "" if case["lever"] == curves.PLAIN else "bit-identical" if case["bitwise"] else _off(case)
        losses = (f"{first:.4f}", f"{last:.4f}")
        lines.append(row((case["recipe"], case["lever"], case["numerics"], str(case["seed"]), *losses, reached, equal)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def combinations_table(result: dict[str, Any]) -> str:
    """Return the peaks and the numbers of levers, in a table for each step alone, and in one of combinations."""
    tables: dict[str, list[str]] = {}
    for case in (case for case in result["cases"] if "combination" in case):
        title = f"Alone: {case['base']}" if case["alone"] else "Together"
        names = ("step", "levers", "class", "predicted", "measured", "error", "gradients off by", "as its class says")
        lines = tables.setdefault(title, head(names))
        cells = [case["base"], case["combination"], case["numerics"]]
        if "error_message" in case:
            lines.append(row([*cells, case["error_message"], *[""] * 4]))
            continue
        sizes = (f"{case[name] / 2**20:.2f} MiB" for name in ("predicted_peak_bytes", "peak_bytes"))
        off = "bit-identical" if case["bitwise"] else f"{case['gradient_difference']:.1e}"
        if (rounded := case["rounding_difference"]) is not None:
            off += f" (by rounded weights {rounded:.1e})"
        lines.append(row([*cells, *sizes, f"{case['error']:+.4%}", off, "yes" if case["holds"] else "no"]))
    parts = [line for title in sorted(tables) for line in (f"{title}:", "", *tables[title], "")]
    return "\n".join([*parts, f"{made_by(result)}."])


def published_table(result: dict[str, Any]) -> str:
    """Return published peaks of fine-tuning beside predicted ones."""
    lines = head(("row", "step", "card", "published", "predicted", "error", "differs from the source"))
    for case in (case for case in result["cases"] if "published" in case):
        cells = [case["published"], case["what"], case["device"], format_bytes(case["published_bytes"])]
        if "error_message" in case:
            lines.append(row([*cells, case["error_message"], "", case["differs"]]))
            continue
        lines.append(row([*cells, format_bytes(case["peak_bytes"]), f"{case['error']:+.1%}", case["differs"]]))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def _off(case: Case) -> str:
    return f"at most {case['largest_difference']:.1e} off in a step's loss"
