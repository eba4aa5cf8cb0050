"""Tables of benchmarks about time: plans that adapt, the roofline, large models, a step's overhead, and the heap."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import head, made_by, row
from memfit.foundations import format_bytes, format_seconds

CONDITIONS = {
    "quiet_1": "one thread",
    "quiet_2": "two threads",
    "busy_2": "two threads beside two programs",
}


def adaptive_table(result: dict[str, Any]) -> str:
    """Return what a plan for each batch's shape gained over the best plan for all of them."""
    headings = ("numerics", "budget", "largest measured peak", "batches", "best fixed plan", "adaptive", "throughput")
    lines = head((*headings, "out of memory"))
    for case in result["cases"]:
        peaks = [format_bytes(case[key]) for key in ("budget_bytes", "largest_measured_peak_bytes")]
        seconds = [format_seconds(value) for value in (min(case["fixed_seconds"]), case["adaptive_seconds"])]
        ratio = f"×{case['throughput_ratio_to_best_fixed']:.2f}"
        figures = (str(case["batches"]), *seconds, ratio, str(case["out_of_memory_events"]))
        lines.append(row((case["numerics"], *peaks, *figures)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def roofline_table(result: dict[str, Any]) -> str:
    """Return how far each model's time is off, when predicted from the other models."""
    lines = head(("workload", "precision", "measured", "predicted", "error"))
    for case in result["cases"]:
        seconds = [format_seconds(case[key]) for key in ("measured_seconds", "predicted_seconds")]
        lines.append(row((case["workload"], case["precision"], *seconds, f"{case['error']:+.0%}")))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def large_table(result: dict[str, Any]) -> str:
    """Return how long large models take to predict, and what is predicted."""
    lines = head(("command", "takes", "resident memory", "peak allocated", "reserved", "step"))
    for case in result["cases"]:
        peaks = [format_bytes(case[key]) for key in ("resident_bytes", "peak_bytes", "peak_reserved_bytes")]
        seconds = [format_seconds(case[key]) for key in ("seconds", "step_seconds")]
        lines.append(row((f"`{case['command']}`", seconds[0], *peaks, seconds[1])))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def overhead_table(result: dict[str, Any]) -> str:
    """Return the time of memfit's step over that of a loop written by hand."""
    lines = head(("case", "rounds", "by hand", "memfit", "ratio"))
    for case in result["cases"]:
        seconds = [format_seconds(case[key]) for key in ("by_hand_seconds", "memfit_seconds")]
        name = case["case"].replace("_without_", ", without ")
        lines.append(row((name, str(case["rounds"]), *seconds, f"×{case['ratio']:.3f}")))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def keeping_table(result: dict[str, Any]) -> str:
    """Return the time of a launch-bound step with checkpointed blocks, by what these keep, over the plain step's."""
    lines = head(("blocks keep", "PyTorch's checkpointing", "memfit"))
    for case in result["cases"]:
        lines.append(row((case["case"], f"×{case['by_hand_ratio']:.2f}", f"×{case['memfit_ratio']:.2f}")))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def start_table(result: dict[str, Any]) -> str:
    """Return what `memfit run` adds to the first two steps of a script, at its first start and at its second."""
    lines = head(("script", "budget", "plain step", "first start", "in plain steps", "started again"))
    for case in result["cases"]:
        step, first = case["plain_step_seconds"], case["first_costs_seconds"]
        costs = (f"+{first:.1f} s", f"{first / step:.0f}", f"+{case['second_costs_seconds']:.1f} s")
        lines.append(row((case["script"], case["budget"], f"{step:.2f} s", *costs)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def step_times_table(result: dict[str, Any]) -> str:
    """Return how right predicted ratios are, and whether the plan chosen by measuring is the fastest, by condition."""
    choice = ("choices", "within 2 % of the fastest", "slower by more than noise")
    lines = head(("condition", "plans", "median error of the ratio", "within 10 %", *choice))
    for condition, figures in result["summary"].items():
        errors = (f"{figures['ratio_median_abs_error']:.1%}", f"{figures['ratio_within_10_percent']:.0%}")
        shares = [figures[f"measured_choice_{name}"] for name in ("within_2_percent", "told_to_be_slower")]
        choices = (str(figures["choices"]), *("–" if share is None else f"{share:.0%}" for share in shares))
        lines.append(row((CONDITIONS[condition], str(figures["cells"]), *errors, *choices)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def step_ratios_table(result: dict[str, Any]) -> str:
    """Return the predicted and the measured ratio of each model's plans, by condition."""
    conditions = [name for name in CONDITIONS if name in result["summary"]]
    lines = head(("model", "budget", *(f"{CONDITIONS[name]}: predicted, measured" for name in conditions)))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for case in result["cases"]:
        if case["kind"] == "ratio":
            ratios = f"×{case['predicted_ratio']:.2f}, ×{case['measured_ratio']:.2f}"
            found.setdefault((case["model"], case["budget"]), {})[case["condition"]] = ratios
    for cell, ratios_of in found.items():
        lines.append(row((*cell, *(ratios_of.get(name, "–") for name in conditions))))
    return "\n".join(lines)


def resident_table(result: dict[str, Any]) -> str:
    """Return what planned steps have resident, by what the C library does with freed memory."""
    lines = head(("step", "plan", "freed memory", "resident", "resident to plan", "processor's time a step"))
    for case in result["cases"]:
        sizes = [format_bytes(case[key]) for key in ("peak_bytes", "resident_bytes")]
        way = {"default": "by default", "kept": "stays", "returned": "goes back"}[case["way"]]
        ratio = f"×{case['resident_bytes'] / case['peak_bytes']:.2f}"
        lines.append(row((case["case"], sizes[0], way, sizes[1], ratio, format_seconds(case["step_seconds"]))))
    return "\n".join([*lines, "", f"{made_by(result)}."])
