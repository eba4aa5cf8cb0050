"""The tables of the examples that are trained in one budget, from their result files."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import head, made_by, row
from memfit.foundations import format_bytes

NOT_TRAINED = "does not fit"
SHORT = " The large patch does not win in so short a run, in which it has fewer steps."


def brain_segmentation_table(result: dict[str, Any]) -> str:
    """Return Dice, peak and time of each training, and the planned ones against the plain one."""
    headings = ("training", "patch", "parameters", "peak, predicted", "measured", "steps", "CPU seconds")
    cases, summary = result["cases"], result["summary"]
    lines = head([*headings, "Dice, grey", "Dice, white", "levers"])
    for case in cases:
        cells = [case["training"], "×".join(map(str, case["patch"])), f"{case['parameters']:,}", *_peaks(case)]
        if "curve" in case:
            last = case["curve"][-1]
            cells += [str(case["steps"]), f"{case['cpu_seconds']:.0f}"]
            cells += [f"{last['dice/grey']:.3f}", f"{last['dice/white']:.3f}", "; ".join(case["levers"]) or "none"]
        lines.append(row([*cells, *[NOT_TRAINED] * (len(cells) == 5), *[""] * (9 - len(cells))]))
    _, plain, *others = cases
    compared = (f"{case['training']}: {_against(plain, case)}" for case in others)
    loses = all(_mean_dice(case) <= _mean_dice(plain) for case in others)
    return "\n".join(lines) + (
        f"\n\nBudget {format_bytes(summary['budget_bytes'])}; about {summary['voxels'] / 1e6:.1f} million voxels each,"
        f" batches of {summary['batch_size']} patches at {summary['resolution']} mm. Against plain with the small"
        f" patch: {'; '.join(compared)}. The lighter structure has ×{summary['multiply_adds_ratio_structured']:.2f} the"
        f" multiply-adds.{SHORT if loses else ''}\n\n{_sources(result)}"
    )


def language_model_table(result: dict[str, Any]) -> str:
    """Return bits per byte, peak and time of each training, at as many bytes and at as many seconds."""
    headings = ("training", "context", "peak, predicted", "measured", "steps", "bytes seen", "CPU seconds")
    (unfit, plain, planned), summary = result["cases"], result["summary"]
    lines = head([*headings, "bits per byte", "first quarter", "last quarter"])
    lines.append(row([unfit["training"], f"{unfit['context']:,}", *_peaks(unfit), NOT_TRAINED, *[""] * 5]))
    for case, point, more in (
        *((plain, point, ", as many steps") for point in plain["curve"] if point["steps"] == planned["steps"]),
        (plain, plain["curve"][summary["evaluations"] - 1], ", as many bytes"),
        (plain, plain["curve"][-1], ", as many seconds"),
        (planned, planned["curve"][-1], ""),
    ):
        bits = [point[f"bits_per_byte{part}"] for part in ("", "_first_quarter", "_last_quarter")]
        seen = [f"{point['steps']:,}", f"{point['steps'] * case['context']:,}", f"{point['cpu_seconds']:.0f}"]
        seen += [f"{b:.3f}" for b in bits]
        lines.append(row([case["training"] + more, f"{case['context']:,}", *_peaks(case), *seen]))
    return "\n".join(lines) + (
        f"\n\nBudget {format_bytes(summary['budget_bytes'])}. The plan: {'; '.join(planned['levers'])}."
        f" {_verdict(summary)} A quarter is one of windows of {planned['context']:,} bytes.\n\n{_sources(result)}"
    )


def _peaks(case: dict[str, Any]) -> list[str]:
    return [format_bytes(case[key]) for key in ("predicted_peak_bytes", "measured_peak_bytes")]


def _mean_dice(case: dict[str, Any]) -> float:
    dice: float = case["curve"][-1]["dice/mean"]
    return dice


def _against(plain: dict[str, Any], case: dict[str, Any]) -> str:
    ratio = case["cpu_seconds"] / plain["cpu_seconds"]
    return f"mean Dice {_mean_dice(case) - _mean_dice(plain):+.3f} in ×{ratio:.2f} the CPU seconds"


def _verdict(summary: dict[str, Any]) -> str:
    """Return who wins, and by how much."""
    long = summary["bits_per_byte_planned"]
    said = []
    for what in ("bytes", "seconds"):
        lead = summary[f"bits_per_byte_equal_{what}"] - long
        said.append(f"at as many {what} by {abs(lead):.3f} bits per byte{' (the long one wins)' if lead > 0 else ''}")
    if all(summary[f"bits_per_byte_equal_{what}"] <= long for what in ("bytes", "seconds")):
        return f"The long context does not win in so short a run: the short one is ahead {' and '.join(said)}."
    return f"The two are apart {' and '.join(said)}."


def _sources(result: dict[str, Any]) -> str:
    return f"{made_by(result)}; {result['summary']['timing']}."
