"""The three tables of the page of results: how right, how fast, how safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.markdown import head, row

Results = Callable[[str], dict[str, Any]]
"""Returns the newest committed result of a benchmark."""


def right_table(results: Results) -> str:
    """Return how far predictions are off: on published GPUs first, then on this CPU."""
    gpu, cpu = results("published")["summary"], results("prediction")["summary"]
    packages, ranks, roofline = (results(name)["summary"] for name in ("packages", "distributed", "roofline"))
    lines = head(("prediction", "compared with", "number", "result"))
    page = "[published GPU measurements](published.md)"
    for what, key in (("allocated bytes", "allocated"), ("reserved and whole-process bytes", "device")):
        errors = [_percent(gpu[f"{key}_{share}_abs_error"], 2) for share in ("median", "p90")]
        found = f"within {errors[0]} in half of them, within {errors[1]} in 9 of 10"
        lines.append(row((f"GPU: {what}", page, str(gpu[f"{key}_figures"]), found)))
    shares = (
        ("bytes within the stated error bar", "byte_figures", "within_interval"),
        ("fits, or does not fit", "fit_figures", "fit_right"),
        ("step time within 30 %", "times", "time_within_30_percent"),
    )
    for what, count, share in shares:
        lines.append(row((f"GPU: {what}", page, str(gpu[count]), f"right in {_percent(gpu[share], 0)}")))
    largest = f"largest error {_percent(cpu['largest_abs_error'], 2)}"
    lines.append(row(("CPU: peak", "[measured peaks](prediction.md)", str(cpu["cases"]), largest)))
    over = f"{packages['above_upper_end']} above the upper end, 95 % within {_percent(packages['p95_abs_error'], 2)}"
    lines.append(
        row(("CPU: peak, other people's packages", "[measured peaks](packages.md)", str(packages["steps"]), over))
    )
    largest = f"largest error {_percent(ranks['peak_largest_abs_error'], 3)}"
    lines.append(row(("CPU: peak of ranks", "[measured peaks](distributed.md)", str(ranks["peaks"]), largest)))
    half = f"half within {_percent(roofline['median_abs_error'], 0)}"
    lines.append(
        row(("CPU: modelled step time", "[measured times](roofline.md)", str(len(results("roofline")["cases"])), half))
    )
    return "\n".join(lines)


def fast_table(results: Results) -> str:
    """Return how fast planned steps are beside what others reach."""
    frontier = results("frontier")["summary"]
    lines = head(("comparison, at the same memory", "median", "worst", "page"))
    for what, kind in (("eager", "eager"), ("compiled", "compiled"), ("eager and compiled together", "all")):
        ratios = [frontier[kind][f"{which}_ratio_to_best_peer"] for which in ("median", "worst")]
        said = [slower(ratio) for ratio in ratios]
        lines.append(row((f"memfit and the best alternative, {what}", *said, "[The frontier](frontier.md)")))
    overhead, adaptive = results("overhead")["summary"], results("adaptive")["summary"]
    for what, key in (("with", "ratio_tiny"), ("without", "ratio_tiny_without_checkpointing")):
        step = f"memfit's small step and one written by hand, {what} checkpointing"
        lines.append(row((step, slower(overhead[key]), "", "[Overhead](overhead.md)")))
    gain = f"{_percent(adaptive['throughput_ratio_to_best_fixed'] - 1, 0)} more throughput"
    lines.append(row(("adaptive plans and the best fixed plan", gain, "", "[Adaptive plans](adaptive.md)")))
    return "\n".join(lines)


def slower(ratio: float) -> str:
    """Return a ratio of times as a person says it."""
    return f"{_percent(abs(ratio - 1), 1)} {'slower' if ratio > 1 else 'faster'}"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def safe_table(results: Results) -> str:
    """Return what was disturbed or compared bit by bit, and how often it held."""
    exact, parity, faults, verbs = (
        results(name)["summary"] for name in ("exactness", "parity", "faults", "faults.verbs")
    )
    ranks, field, prediction = (results(name)["summary"] for name in ("distributed", "field", "prediction"))
    interrupted = ranks["kills"] + ranks["out_of_memory"]
    survived = ranks["kills_survived"] + ranks["out_of_memory_survived"]
    rows = (
        (
            "exact plans with bit-identical losses and gradients",
            exact["models_bitwise_equal"],
            exact["models"],
            "exactness",
        ),
        ("whole trainings under exact plans, bit-identical", parity["exact_bitwise"], parity["exact_runs"], "parity"),
        (
            "planned steps within their budget",
            prediction["planned"] - prediction["over_budget"],
            prediction["planned"],
            "prediction",
        ),
        ("scripts under `memfit run` with equal parameters", field["same_parameters"], field["scripts"], "field"),
        (
            "trainings that survived a fault: kill, full disk, damaged file",
            faults["survived"],
            faults["injected"],
            "faults",
        ),
        ("interrupted commands", verbs["interrupt_unharmed"], verbs["interrupt_injected"], "faults"),
        ("trainings of several ranks, after a kill or out of memory", survived, interrupted, "distributed"),
    )
    lines = head(("test", "passed", "page"))
    for what, passed, of, page in rows:
        lines.append(row((what, f"{passed:,} of {of:,}", f"[{page}]({page}.md)")))
    return "\n".join(lines)
