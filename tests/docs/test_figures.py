"""The figures of the docs are those of the committed results, and the reference is that of the code."""

from __future__ import annotations

import math
import re

from benchmarks import reference
from benchmarks.pages import stale
from benchmarks.tables import PAGES, TABLES, results, with_tables
from benchmarks.worked_example_page import files
from memfit.foundations import format_bytes
from tests.docs.pages import DOCS, ROOT, words_of


def test_tables_are_those_of_the_result_files() -> None:
    marks = set()
    for page in PAGES:
        text = page.read_text()
        assert with_tables(text) == text, page
        tables = re.findall(
            r"^<!-- (\w+): [^>]*tables`[^>]*-->\n(.+?)^<!-- /\1 -->", text, flags=re.DOTALL | re.MULTILINE
        )
        marks |= {mark for mark, _ in tables}
        for _, table in tables:
            assert with_tables(text.replace(table, "| wrong |\n")) == text, page
    assert set(TABLES) == marks


def test_the_example_is_that_of_the_result_file() -> None:
    result = results("worked_example")
    assert stale(files(result)) == []
    plain, planned = result["cases"]
    summary, points = result["summary"], result["summary"]["frontier"]
    assert summary["holds"] and summary["bitwise"] and summary["status"] == "optimal"
    for case in (plain, planned):
        assert case["measured_peak_bytes"] == case["peak_bytes"]
    assert len(plain["live_bytes"]["activations"]) == 652 and "652 operators" in words_of(DOCS / "concepts/plan.md")
    assert [len(region) for region in summary["regions"]].count(2) == 5 and len(summary["regions"]) == 7
    ratio = {round(p["peak_bytes"] / 2**20): p["step_seconds"] / plain["step_seconds"] for p in points}
    said = {105: "2 %", 81: "14 %", 77: "18 %"}
    assert {peak: f"{ratio[peak] - 1:.0%}".replace("%", " %") for peak in said} == said
    for peak, more in said.items():
        assert re.search(rf"{peak} MiB[^.]* {more} more time", words_of(DOCS / "concepts/plan.md")), peak
    peaks = [format_bytes(case["peak_bytes"]) for case in (plain, planned)]
    readme = words_of(ROOT / "README.md")
    assert f"needs {peaks[0]} as written and {peaks[1]} under the plan, both measured" in readme
    held = {name: round(value / 2**20) for name, value in plain["by_category"].items()}
    assert (held["parameters"], held["optimizer state"], held["activations"], held["temporaries"]) == (16, 32, 78, 5)


def test_figures_of_the_readme_are_those_of_the_frontier() -> None:
    eager, words = results("frontier")["summary"]["eager"], words_of(ROOT / "README.md")
    median, worst = (eager[f"{which}_ratio_to_best_peer"] - 1 for which in ("median", "worst"))
    said = f"{-median:.0%} faster than the best alternative in the median, {worst:.1%} slower at worst"
    assert said.replace("%", " %") in words
    published = results("published")["summary"]
    within = f"within {published['allocated_p90_abs_error']:.1%} in 9 of 10".replace("%", " %")
    assert f"{published['rows']} published measurements" in words and within in words
    assert eager["not_bitwise"] == []


def test_figures_of_the_index_of_results() -> None:
    words = words_of(DOCS / "results" / "all.md")
    prediction, faults = results("prediction")["summary"], results("faults")["summary"]
    overhead, adaptive = results("overhead")["summary"], results("adaptive")["summary"]
    said = [
        f"{prediction['cases']} steps, the largest error {prediction['largest_abs_error']:.2%}".replace("%", " %"),
        f"{faults['survived']} of {faults['injected']} faults",
        f"{100 * (1 - overhead['ratio_tiny']):.0f} % faster to "
        f"{100 * (overhead['ratio_tiny_without_checkpointing'] - 1):.0f} % slower",
        f"{adaptive['throughput_ratio_to_best_fixed'] - 1:.0%} more throughput".replace("%", " %"),
        f"within {max(case['gap'] for case in results('solving')['cases']):.2%}".replace("%", " %"),
        f"half of the steps within {results('roofline')['summary']['median_abs_error']:.0%}".replace("%", " %"),
        f"over {results('allocator')['summary']['sequences']:,} sequences",
        f"0 of {results('fuzzing')['summary']['fuzzed']:,} were wrong",
    ]
    finetune = results("finetune")["summary"]
    sizes = [finetune[f"small_{name}_mib"] for name in ("reordered", "hand", "liger")]
    said.append("in {:.0f} MiB; by hand {:.0f} MiB with token tiles, {:.0f} MiB without".format(*sizes))
    assert [one for one in said if one not in words] == []
    assert prediction["underestimate_rate"] == 0 and results("allocator")["summary"]["differ"] == 0
    disturbed = f"{faults['survived']} of {faults['injected']} disturbed trainings"
    assert disturbed in words_of(DOCS / "guides" / "resume.md")


def test_figures_of_the_allocator() -> None:
    summary, words = results("allocator")["summary"], words_of(DOCS / "results" / "allocator.md")
    said = re.search(
        r"Over ([\d,]+) sequences of ([\d,]+) random requests in all \(([\d,]+) retries, ([\d,]+) out of", words
    )
    assert said is not None
    figures = [int(figure.replace(",", "")) for figure in said.groups()]
    assert figures == [summary[key] for key in ("sequences", "requests", "retries", "out_of_memory")]
    assert summary["differ"] == 0
    assert " 0 sequences differed" in words


def test_figures_of_random_programs() -> None:
    operators, page = results("operators")["summary"], words_of(DOCS / "results" / "operators.md")
    assert f"Over {operators['operator_calls']:,} calls of {operators['operators']} operators" in page
    assert f"{operators['operator_differences']} differed, but for {operators['operator_differences_listed']}" in page
    peaks = operators["operator_peaks"], operators["operator_peak_differences"]
    assert f"Of {peaks[0]} peaks {peaks[1]} differed, but for {operators['operator_peak_differences_listed']}" in page
    assert f"0 of {operators['operator_calls']:,} calls and {peaks[1]} of {peaks[0]} peaks" in words_of(
        DOCS / "results" / "all.md"
    )
    summary, words = results("fuzzing")["summary"], words_of(DOCS / "results" / "fuzzing.md")
    assert f"Over {summary['fuzzed']:,} programs {summary['fuzzed_wrong']} were wrong" in words


def test_figures_of_interrupts() -> None:
    summary = results("faults.verbs")["summary"]
    said = f"{summary['interrupt_unharmed']:,} of {summary['interrupt_injected']:,} interrupts of verbs"
    assert said in words_of(DOCS / "results" / "all.md")


def test_figures_of_steps_of_other_kinds() -> None:
    result, words = results("steps"), words_of(DOCS / "results" / "steps.md")
    summary = result["summary"]
    errors = [abs(case["error"]) for case in result["cases"] if "error" in case]
    said = [
        f"takes {summary['steps']} training steps",
        f"{len(errors)} made, {summary['refused']} refused",
        f"| {summary['median_abs_error']:.4%} |".replace("%", " %"),
        f"| {summary['p95_abs_error']:.4%} |".replace("%", " %"),
        f"above the stated upper end | {summary['above_upper_end']} |",
        f"over their budget | {summary['over_budget']} |",
        f"| {summary['exact_bitwise']} of {summary['exact_plans']} |",
        f"{sum(error > 1e-3 for error in errors)} predictions were off by more than 0.1 %",
    ]
    assert [one for one in said if one not in words] == []
    assert f"{summary['above_upper_end']} of {len(errors)} predictions" in words_of(DOCS / "results" / "all.md")
    more = results("steps.state")
    summary, worst = more["summary"], max(abs(case["error"]) for case in more["cases"])
    assert (
        f"{len(more['cases'])} predictions, {summary['refused']} refused, the largest error {worst:.3%}, "
        f"{summary['above_upper_end']} above their upper end, {summary['over_budget']} plans over their budget, and "
        f"{summary['exact_bitwise']} of {summary['exact_plans']} exact plans bitwise"
    ).replace("%", " %") in words


def test_figures_of_ranks() -> None:
    summary, words = results("distributed")["summary"], words_of(DOCS / "results" / "all.md")
    interrupted = summary["kills"] + summary["out_of_memory"]
    survived = summary["kills_survived"] + summary["out_of_memory_survived"]
    said = [
        f"{summary['peaks']} peaks within {math.ceil(summary['peak_largest_abs_error'] * 1e5) / 1e3:.3f} %",
        f"{summary['budget_violations']} of {summary['plans']} plans over their budget",
        f"{survived} of {interrupted} interruptions",
    ]
    assert [one for one in said if one not in words] == []
    assert summary["above_upper_end"] == summary["hangs"] == summary["wrongly_infeasible"] == 0


def test_figures_of_other_peoples_packages() -> None:
    result, words = results("packages"), words_of(DOCS / "results" / "all.md")
    summary, packages = result["summary"], {case["package"] for case in result["cases"]}
    assert f"{summary['steps']} steps of {len(packages)} packages, none over its budget" in words
    assert summary["refused"] == summary["above_upper_end"] == summary["over_budget"] == 0
    assert summary["exact_bitwise"] == summary["exact_plans"] == summary["steps"]


def test_figures_of_resident_memory() -> None:
    result, words = results("resident"), words_of(DOCS / "results" / "all.md")
    default, returned = (result["summary"][f"largest_resident_to_peak_{way}"] for way in ("default", "returned"))
    assert f"up to {default:.1f} times the plan, {returned:.1f} times where freed memory is returned" in words
    found = [case for case in result["cases"] if case["way"] == "default"]
    case = max(found, key=lambda case: case["resident_bytes"] / case["peak_bytes"])
    sizes = [f"{case[key] / 2**20:.0f}" for key in ("peak_bytes", "resident_bytes")]
    guide = words_of(DOCS / "guides" / "out-of-memory.md")
    assert f"the plan's {sizes[0]} MiB became {sizes[1]}" in guide
    assert f"more processor time: ×{result['summary']['largest_time_ratio_returned']:.1f}" in guide


def test_figures_of_large_models() -> None:
    cases = {case["case"]: case for case in results("large")["cases"]}
    one, seven, plan = (
        cases[f"{what}, A100{more}"]
        for what, more in (("estimate 1 B", ""), ("estimate 7 B", ""), ("plan 1 B", ", 40 GiB"))
    )
    words = words_of(DOCS / "guides" / "cards.md")
    assert f"takes {one['seconds']:.0f} seconds and {one['resident_bytes'] / 2**20:.0f} MiB of memory" in words
    assert f"7-billion-parameter one {seven['seconds']:.0f} seconds" in words
    assert f"a plan with its whole frontier takes {plan['seconds']:.0f} seconds" in words


def test_the_reference_describes_every_command_option_and_field() -> None:
    commands = reference.commands()
    for words in ("## memfit estimate", "`--budget`", "`--no-recover`", "`bf16-mixed`", "`WORKLOAD`", "must be given"):
        assert words in commands
    for table in (commands, reference.plan_file(), reference.error_table()):
        empty = [line for line in table.splitlines() if line.startswith("| `") and line.split(" | ")[-2].strip() == ""]
        assert empty == []
    assert "| `NonFiniteError` | `MemfitError` | 5 |" in reference.error_table()
