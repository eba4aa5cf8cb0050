"""Makes the tables in the README, the docs and the examples: `python -m benchmarks.tables [--check]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import overview, reference
from benchmarks.case_studies import brain_segmentation_table, language_model_table
from benchmarks.distributed import figures as ranks
from benchmarks.faults import figures as faults
from benchmarks.faults import verbs
from benchmarks.field import figures as field
from benchmarks.finetune import figures as finetune
from benchmarks.markdown import head, made_by, row
from benchmarks.packages.zoo import FAMILIES
from benchmarks.parity import figures as parity
from benchmarks.parity import in_jittor
from benchmarks.time_tables import (
    adaptive_table,
    keeping_table,
    large_table,
    overhead_table,
    resident_table,
    roofline_table,
    start_table,
    step_ratios_table,
    step_times_table,
)
from memfit import levers
from memfit.foundations import format_bytes, format_seconds
from memfit.ir import write_atomic

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "examples" / name / "README.md" for name in ("compress", "brain_segmentation", "language_model")),
)
RESULTS = ROOT / "benchmarks" / "results"


def newest(name: str) -> Path:
    """Return the file of the newest committed result of a benchmark on a CPU; accelerators have a page of their own."""
    found = {path: json.loads(path.read_text()) for path in RESULTS.glob(f"{name}-*.json")}
    here = [path for path, result in found.items() if not result["machine"].get("accelerator")]
    return max(here, key=lambda path: (str(found[path]["date"]), path.name))


def results(name: str) -> dict[str, Any]:
    """Return the newest committed result of a benchmark."""
    result: dict[str, Any] = json.loads(newest(name).read_text())
    return result


def summary_table(result: dict[str, Any]) -> str:
    """Return how far predictions are off, ours and others'."""
    return f"{_rivals(result)}\n\n{_sources(result)}"


def summary_table_in_chinese(result: dict[str, Any]) -> str:
    """Return how far predictions are off, ours and others', in Chinese."""
    table, summary = _rivals(result), result["summary"]
    for english, chinese in _CHINESE.items():
        table = table.replace(english, chinese)
    return (
        f"{table}\n\n{len({c['workload'] for c in result['cases']})} 个 workload 的 {summary['cases']} 个训练步（失败"
        f" {summary['failed']} 个）。“偏低”是实测峰值超过所述上限的比例（对其他方法：超过其数值的比例）。"
        f"{summary['planned']} 个按方案运行的训练步中，{summary['over_budget']} 个超出预算。{made_by(result)}。"
    )


_CHINESE = {
    "| prediction | steps | failed | median error |": "| 预测方法 | 训练步 | 失败 | 误差中位数 |",
    "| 95th percentile | largest | too low |": "| 第 95 百分位 | 最大 | 偏低 |",
    ", plain and planned": "，不改动与按方案",
    ", plain": "，不改动",
    "parameter count": "按参数量估算",
}
"""Words of the table of predictions, each before what is part of it."""


def cases_table(result: dict[str, Any]) -> str:
    """Return predicted against measured peaks, for each workload and precision."""
    cases = {(c["workload"], c["precision"], c["kind"]): c for c in result["cases"]}
    precisions = list(dict.fromkeys(c["precision"] for c in result["cases"]))
    headings = ["workload"]
    for precision in precisions:
        headings += [f"{precision}: plain, measured", "error", "planned, measured", "error"]
    lines = head(headings)
    for workload in dict.fromkeys(c["workload"] for c in result["cases"]):
        cells = [workload]
        for precision in precisions:
            for kind in ("plain", "planned"):
                cells += _compared(cases[workload, precision, kind])
        lines.append(row(cells))
    return "\n".join([*lines, "", _sources(result)])


def worked_example_table(result: dict[str, Any]) -> str:
    """Return what the plain and the planned step of the docs' example hold at their peaks."""
    lines = head(("at the peak", *(case["step"] for case in result["cases"])))
    for name in result["cases"][0]["by_category"]:
        held = [case["by_category"][name] for case in result["cases"]]
        if any(held):
            lines.append(row((name, *map(format_bytes, held))))
    said = {"peak_bytes": "**predicted peak**", "peak_upper_bytes": "… at most", "measured_peak_bytes": "measured peak"}
    for key, title in said.items():
        lines.append(row((title, *(format_bytes(case[key]) for case in result["cases"]))))
    lines.append(row(("predicted step", *(format_seconds(case["step_seconds"]) for case in result["cases"]))))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def packages_table(result: dict[str, Any]) -> str:
    """Return for each family of other people's packages how far predictions are off, and whether bits stayed."""
    lines = head(("packages", "steps", "plain steps, measured", "largest error", "exact plans with the same bits"))
    for names in FAMILIES.values():
        cases = [case for case in result["cases"] if case["workload"] in names]
        plain = [case["measured_peak_bytes"] for case in cases if case["kind"] == "plain" and "error" in case]
        exact = [case["bitwise"] for case in cases if case["kind"] == "exact" and "error" in case]
        largest = max((case["error"] for case in cases if "error" in case), key=abs)
        peaks = f"{format_bytes(min(plain))} to {format_bytes(max(plain))}"
        packages = ", ".join(dict.fromkeys(case["package"] for case in cases))
        lines.append(row((packages, str(len(names)), peaks, f"{largest:+.3%}", f"{sum(exact)} of {len(exact)}")))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def faults_table(result: dict[str, Any]) -> str:
    """Return what became of the trainings that were disturbed."""
    subjects = dict.fromkeys(case["subject"] for case in result["cases"])
    return f"{faults.table(result['cases'])}\n\nTrainings: {'; '.join(subjects)}. {made_by(result)}."


def verbs_table(result: dict[str, Any]) -> str:
    """Return how many disturbances of each verb left the process unharmed."""
    return f"{verbs.table(result['cases'])}\n\n{made_by(result)}."


def compress_table(result: dict[str, Any]) -> str:
    """Return what a digits ResNet takes and how good it is, before and after it is made smaller."""
    sizes_of = ("model", "multiply-adds", "parameters", "peak, predicted", "peak, measured", "step")
    headings = (*sizes_of, "accuracy with random weights", "at the start", "trained")
    lines, plain = head(headings), result["cases"][0]
    for case in result["cases"]:
        sizes = [f"{case[key]:,}" for key in ("multiply_adds", "parameters")]
        peaks = [format_bytes(case[key]) for key in ("predicted_peak_bytes", "measured_peak_bytes")]
        ratio = f"{case['step_seconds'] * 1e3:.0f} ms, ×{case['step_seconds'] / plain['step_seconds']:.2f}"
        found = [case[key] for key in ("random_accuracy", "start_accuracy", "accuracy")]
        shares = ["" if share is None else f"{share:.1%}" for share in found]
        lines.append(row([case["model"], *sizes, *peaks, ratio, *shares]))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def ladder_table(result: dict[str, Any]) -> str:
    """Return what each lever bought, one on top of those that paid."""
    headings = ("workload", "rung", "peak", "", "step", "", "largest batch", "samples/s there", "class", "outcome")
    lines = head(headings)
    for case in result["cases"]:
        if case.get("peak_bytes") is not None:
            lines.append(row([case["workload"], *_climbed(case)]))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def _climbed(case: dict[str, Any]) -> list[str]:
    ratios = ["" if case[key] is None else f"×{case[key]:.2f}" for key in ("peak_ratio", "step_ratio")]
    speed, largest = case["samples_per_second"], case["largest_batch"]
    batch = "" if speed is None else "any" if largest is None else f"{largest:,}"
    return [
        *(case["name"], format_bytes(case["peak_bytes"]), ratios[0], format_seconds(case["step_seconds"]), ratios[1]),
        *(batch, "" if speed is None else f"{speed:,.4g}", case["numerics"], case["outcome"]),
    ]


def solving_table(result: dict[str, Any]) -> str:
    """Return how near to its bound solving ends, for each model."""
    headings = ("model", "budgets solved for", "largest gap", "at a budget of", "time to plain's there", "longest")
    lines = head(headings)
    for model in dict.fromkeys(case["model"] for case in result["cases"]):
        cases = [case for case in result["cases"] if case["model"] == model]
        worst = max(cases, key=lambda case: case["gap"])
        longest = format_seconds(max(case["solve_seconds"] for case in cases))
        figures = (f"{worst['gap']:.2%}", f"{worst['share']:.1%}", f"{worst['time_ratio']:.3f}", longest)
        lines.append(row((model, str(len(cases)), *figures)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def exactness_table(result: dict[str, Any]) -> str:
    """Return in how many steps each model's exact plan gave the plain step's bits."""
    headings = ("model", "equal steps", "regions", "peak to plain's, predicted", "first loss", "last loss")
    lines = head(headings)
    for case in result["cases"]:
        equal = f"{case['equal_steps']} of {result['summary']['steps']}"
        share, losses = f"{case['predicted_share']:.1%}", (f"{case['first_loss']:.4f}", f"{case['last_loss']:.4f}")
        lines.append(row((case["model"], equal, str(case["regions"]), share, *losses)))
    return "\n".join([*lines, "", f"{made_by(result)}."])


def _compared(case: dict[str, Any]) -> list[str]:
    if "error_message" in case:
        return ["failed", case["error_message"].partition(":")[0]]
    return [format_bytes(case["measured_peak_bytes"]), f"{round(case['error'], 4) + 0.0:.2%}"]


def _rivals(result: dict[str, Any]) -> str:
    """Return how far each prediction of the plain steps is off, ours among them."""
    summary = result["summary"]
    headings = ("prediction", "steps", "failed", "median error", "95th percentile", "largest", "too low")
    lines = head(headings)
    rows = {
        "memfit, plain and planned": summary,
        **{f"{name}, plain": figures for name, figures in summary["rivals"].items()},
    }
    for name, figures in rows.items():
        if not figures["cases"]:
            lines.append(row([name, "0", str(figures["failed"]), "", "", "", ""]))
            continue
        errors = [f"{figures[key]:.2%}" for key in ("median_abs_error", "p95_abs_error", "largest_abs_error")]
        lines.append(
            row([name, str(figures["cases"]), str(figures["failed"]), *errors, f"{figures['underestimate_rate']:.1%}"])
        )
    return "\n".join(lines)


def _sources(result: dict[str, Any]) -> str:
    summary = result["summary"]
    return (
        f"{summary['cases']} steps of {len({c['workload'] for c in result['cases']})} workloads ({summary['failed']}"
        f' failed); "too low" is how often the measured peak was above the stated upper end (for the others: above'
        f" their figure). {summary['over_budget']} of {summary['planned']} planned steps went over their budget."
        f" {made_by(result)}."
    )


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prediction": ("prediction", summary_table),
    "prediction_zh": ("prediction", summary_table_in_chinese),
    "cases": ("prediction", cases_table),
    "faults": ("faults", faults_table),
    "verbs": ("faults.verbs", verbs_table),
    "ranks_peaks": ("distributed", ranks.peaks_table),
    "ranks_interruptions": ("distributed", ranks.interruptions_table),
    "ranks_throughput": ("distributed", ranks.throughput_table),
    "ranks_budgets": ("distributed", ranks.budgets_table),
    "ranks_choices": ("distributed", ranks.choices_table),
    "ranks_searches": ("distributed", ranks.searches_table),
    "ranks_peers": ("distributed", ranks.peers_table),
    "compress": ("compress", compress_table),
    "ladder": ("ladder", ladder_table),
    "solving": ("solving", solving_table),
    "exactness": ("exactness", exactness_table),
    "parity_trainings": ("parity", parity.trainings_table),
    "parity_verdicts": ("parity", parity.verdicts_table),
    "parity_peaks": ("parity", parity.peaks_table),
    "parity_scaling": ("parity", parity.scaling_table),
    "parity_dtypes": ("parity", parity.dtypes_table),
    "parity_uses": ("parity", parity.uses_table),
    "jittor_verdicts": ("parity_jittor", in_jittor.verdicts_table),
    "jittor_uses": ("parity_jittor", in_jittor.uses_table),
    "packages": ("packages", packages_table),
    "finetune_stacks": ("finetune", finetune.stacks_table),
    "finetune_paper": ("finetune", finetune.paper_table),
    "finetune_contexts": ("finetune", finetune.contexts_table),
    "finetune_combinations": ("finetune", finetune.combinations_table),
    "finetune_published": ("finetune", finetune.published_table),
    "finetune_curves": ("finetune", finetune.curves_table),
    "field": ("field", field.table),
    "resident": ("resident", resident_table),
    "brain_segmentation": ("brain_segmentation", brain_segmentation_table),
    "language_model": ("language_model", language_model_table),
    "adaptive": ("adaptive", adaptive_table),
    "roofline": ("roofline", roofline_table),
    "large": ("large", large_table),
    "overhead": ("overhead", overhead_table),
    "overhead_keeping": ("overhead_keeping", keeping_table),
    "start": ("start", start_table),
    "step_times": ("step_times", step_times_table),
    "step_ratios": ("step_times", step_ratios_table),
    "worked": ("worked_example", worked_example_table),
    "right": ("", lambda _: overview.right_table(results)),
    "fast": ("", lambda _: overview.fast_table(results)),
    "safe": ("", lambda _: overview.safe_table(results)),
    "combinations": ("", lambda _: levers.conflict_table()),
    "commands": ("", lambda _: reference.commands()),
    "plan_file": ("", lambda _: reference.plan_file()),
    "errors": ("", lambda _: reference.error_table()),
    "rooms": ("", lambda _: reference.rooms_table()),
}
"""For each mark on a page, the benchmark, if it needs one, and what makes its table."""


def with_tables(text: str) -> str:
    """Return a page with its tables made anew."""
    for mark, (name, table) in TABLES.items():
        if f"<!-- {mark}: " not in text:
            continue
        pattern = rf"(<!-- {mark}: [^>]*-->\n).*?(<!-- /{mark} -->)"
        made = table(results(name)) if name else table({})
        text = re.sub(pattern, lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> None:
    """Write the tables, or check that they are those of the result files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a page has other figures")
    check = parser.parse_args().check
    for page in PAGES:
        text = page.read_text()
        made = with_tables(text)
        if check and made != text:
            sys.exit(f"{page.name} has other figures than benchmarks/results: run benchmarks.tables")
        if not check:
            write_atomic(page, made.encode())


if __name__ == "__main__":
    main()
