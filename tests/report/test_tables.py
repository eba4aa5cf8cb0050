"""Plans, predictions, comparisons, devices and runs in words and as tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from msgspec.structs import replace

from memfit import report
from memfit.foundations import options
from memfit.hardware import known_devices
from memfit.ir import (
    ChunkedLoss,
    Comparison,
    Device,
    Levers,
    OptimizerLever,
    PeakPart,
    Plan,
    Prediction,
    Region,
    Solution,
    Views,
)
from memfit.levers import LeversOn, lever_uses
from memfit.report import (
    comparison_table,
    device_page,
    device_table,
    estimate_page,
    frontier_table,
    plan_table,
    ratio_text,
)
from memfit.report.summary import (
    change_text,
    chosen_index,
    comparison_lines,
    lever_rows,
    levers_text,
    loss_text,
    offers,
    region_groups,
    share_text,
    solver_text,
)
from tests.report.conftest import GIB, SPEED, line_with, run_before, shown

MM = ("aten.mm.default#0",)


def with_levers(plan: Plan, levers: Levers, batch_size: int = 16) -> Plan:
    return replace(plan, levers=levers, uses=lever_uses(LeversOn(levers, batch_size)))


# Words


@pytest.mark.parametrize(
    ("fqns", "names"),
    [
        ([], []),
        ([""], ["(the whole model)"]),
        (["blocks.0"], ["blocks.0"]),
        ([f"blocks.{i}" for i in range(6)], ["blocks 0 to 5"]),
        ([f"blocks.{i}" for i in (0, 1, 2, 5, 9, 10)], ["blocks 0 to 2, 5, 9 to 10"]),
        (
            [f"blocks.{i}.{part}" for i in range(3) for part in ("attn", "mlp")],
            ["attn in blocks 0 to 2", "mlp in blocks 0 to 2"],
        ),
        ([f"stages.{i}.{j}" for i in range(3) for j in range(2)], ["0 to 1 in stages 0 to 2"]),
        (["stages.0.0", "stages.0.1", "stages.1.0"], ["stages.0 0 to 1", "stages.1.0"]),
        (["head", "blocks.1", "blocks.0"], ["head", "blocks 0 to 1"]),
        (["a.1", "b.1"], ["a.1", "b.1"]),
        (["0", "1", "3"], ["modules 0 to 1, 3"]),
    ],
)
def test_repeated_siblings_are_folded(fqns: list[str], names: list[str]) -> None:
    groups = region_groups(Region((fqn,)) for fqn in fqns)
    assert [group.name for group in groups] == names
    assert sum(group.modules for group in groups) == len(fqns)


@pytest.mark.parametrize(
    ("regions", "groups"),
    [
        (
            [Region(("b.0",)), Region(("b.1",), MM), Region(("b.2",), MM), Region(("b.3",))],
            [("b 0, 3", 2, "recomputed"), ("b 1 to 2", 2, "recomputed, keeps mm")],
        ),
        (
            [
                *(Region((f"blocks.{i}.norm", f"blocks.{i}.mlp")) for i in range(3)),
                Region(("head.0", "head.1", "head.2")),
                Region(("tail",)),
            ],
            [
                ("norm to mlp in blocks 0 to 2", 3, "recomputed together"),
                ("head 0 to 2", 1, "recomputed together"),
                ("tail", 1, "recomputed"),
            ],
        ),
        (
            [Region(("a",), ("aten.mm.default#0", "aten.mm.default#2", "aten.max.dim#0", "mine.attention.default#0"))],
            [("a", 1, "recomputed, keeps mm ×2, max.dim, mine.attention")],
        ),
    ],
)
def test_modules_that_are_recomputed_otherwise_are_told_apart(
    regions: list[Region], groups: list[tuple[str, int, str]]
) -> None:
    assert region_groups(regions) == groups


@pytest.mark.parametrize(
    ("new", "old", "ratio", "change"),
    [
        (1.18, 1.0, "×1.18", "+18 %"),
        (0.5, 1.0, "×0.50", "−50 %"),
        (1.0, 1.0, "×1.00", "0 %"),
        (1.0123, 1.0, "×1.01", "+1.2 %"),
        (1.000001, 1.0, "×1.00", "+<0.01 %"),
        (12_345.0, 1.0, "×12,345", "+1,234,400 %"),
        (1.0, 0.0, "—", "—"),
        (float("nan"), 1.0, "—", "—"),
    ],
)
def test_ratio_and_change(new: float, old: float, ratio: str, change: str) -> None:
    assert (ratio_text(new, old), change_text(new, old)) == (ratio, change)
    assert share_text(1, 0) == "—" and share_text(0, 10) == "0 %"


def test_levers_are_told_with_their_classes(plan: Plan) -> None:
    levers = Levers(
        precision="tf32",
        microbatch_size=6,
        regions=(Region(("a",), offload=True), Region(("b",))),
        chunked_loss=ChunkedLoss(head="head", rows=128),
        lean=("*",),
        optimizer="adamw-8bit",
    )
    plan = with_levers(plan, levers)
    assert [(row.name, row.setting, row.numerics) for row in lever_rows(plan)] == [
        ("precision", "tf32", "reduced"),
        ("AdamW with 8-bit states", "adamw-8bit", "reduced"),
        ("microbatches", "6 of 16 samples, 3 microbatches, the last of 4", "reordered"),
        ("chunked loss", "128 rows of head at a time", "reordered"),
        ("lean norms and activations", "outputs of all recomputed, inputs kept", "exact"),
        ("activation checkpointing", "2 modules recomputed", "exact"),
        ("activation offload", "1 of them offloaded to host memory", "exact"),
    ]
    text = shown(plan_table(plan), width=160)
    assert all(text.count(row.setting) == 1 for row in lever_rows(plan))
    together = replace(levers, optimizer="as-is", update="in-backward", optimizer_state="offloaded")
    assert levers_text(with_levers(plan, together)) == (
        "tf32, optimizer offloaded, optimizer in-backward, microbatch 6, chunked loss, norms recomputed, 2 regions,"
        " 1 offloaded"
    )


def test_different_points_are_told_apart(plan: Plan) -> None:
    """Each of these changes one lever; frontier tables and figures show each otherwise."""
    changes: list[dict[str, Any]] = [
        {},
        {"precision": "tf32"},
        {"microbatch_size": 4},
        {"regions": (Region(("a",)),)},
        {"regions": (Region(("a",), offload=True),)},
        {"chunked_loss": ChunkedLoss(head="head", rows=128)},
        {"lean": ("*",)},
        *({"optimizer": name} for name in get_args(OptimizerLever) if name != "as-is"),
        {"update": "in-backward"},
        {"optimizer_state": "offloaded"},
        {"update": "in-backward", "optimizer_state": "offloaded"},
    ]
    every = [replace(Levers(microbatch_size=16), **change) for change in changes]
    points = [replace(plan.frontier[0], levers=x, uses=lever_uses(LeversOn(x, 16))) for x in every]
    texts = {levers_text(point) for point in points}
    assert len(texts) == len(every) and levers_text(points[0]) == "plain"
    table = shown(frontier_table(replace(plan, frontier=points)), width=160)
    assert all(text in table for text in texts)


def comparison(plain: list[float], planned: list[float], notes: tuple[str, ...] = ()) -> Comparison:
    return Comparison(
        plain_peak_bytes=1,
        planned_peak_bytes=1,
        plain_step_seconds=1.0,
        planned_step_seconds=1.0,
        plain_losses=plain,
        planned_losses=planned,
        notes=notes,
    )


@pytest.mark.parametrize(
    ("plain", "planned", "words"),
    [
        ([], [], "no losses were compared"),
        ([2.0, 1.0], [2.0, 1.0], "identical over 2 steps"),
        ([2.0, 1.0], [2.0, 1.5], "largest difference over 2 steps: 5.0e-01, 5.0e-01 of the loss, at step 2"),
        ([1.0], [float("nan")], "a loss among 1 step is not finite"),
    ],
)
def test_losses(plain: list[float], planned: list[float], words: str) -> None:
    found = comparison(plain, planned, ("this machine was busy",))
    assert loss_text(found) == words
    assert comparison_lines(found) == [f"Losses on the same data: {words}.", "This machine was busy."]
    assert "This machine was busy." in shown(comparison_table(None, found), 100)


@pytest.mark.parametrize(
    ("seconds", "notes", "said"),
    [
        (0.161, (), []),
        (
            0.24,
            (),
            [
                "The plain step took 49 % longer than predicted, more than the stated error of 30%.",
                "only 3 steps of each",
            ],
        ),
        (1.61, (), ["The plain step took 10.0 times as long as predicted", "compare more steps"]),
        (0.08, (), ["The plain step took 50 % less than predicted", "compare more steps"]),
        (0.24, ("other programs were using this machine",), ["took 49 % longer", "Other programs were using"]),
    ],
)
def test_a_time_unlike_the_predicted_one_is_said_with_its_reason(
    plan: Plan, views: Views, seconds: float, notes: tuple[str, ...], said: list[str]
) -> None:
    assert views.comparison is not None
    plain = replace(plan.plain, step_seconds=0.161, throughput=SPEED)
    found = replace(views.comparison, plain_step_seconds=seconds, notes=notes)
    _, *lines = comparison_lines(found, replace(plan, plain=plain))
    assert len(lines) == len(said) and all(text in line for text, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    ("status", "gap", "words"),
    [
        ("optimal", 0.0, "no faster plan fits"),
        ("optimal", 0.012, "at most 1.2 % slower than the best possible plan"),
        ("feasible", 1.0, "no lower bound"),
        ("feasible", 0.17, "at most 20 % slower than the best possible plan"),
    ],
)
def test_the_solvers_words_never_promise_more_than_its_gap(
    plan: Plan, status: Literal["optimal", "feasible"], gap: float, words: str
) -> None:
    assert words in solver_text(replace(plan, solution=replace(plan.solution, status=status, gap=gap)))


# The plan


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_terminal_and_cut_nothing(plan: Plan, views: Views, width: int) -> None:
    assert views.comparison is not None
    estimate = estimate_page(plan.plain, "Plain step")
    for table in (plan_table(plan), frontier_table(plan), estimate, comparison_table(plan, views.comparison)):
        text = shown(table, width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width and "…" not in text


def test_plan_table_says_the_figures(plan: Plan) -> None:
    ours = replace(plan.predicted, peak_bytes=4 * GIB, peak_upper_bytes=5 * GIB, step_seconds=0.25)
    plain = replace(plan.plain, peak_bytes=10 * GIB, step_seconds=0.2)
    share = "50% of the 24.0 GiB that rtx-3090 has for a step"
    plan = replace(plan, budget_bytes=6 * GIB, plain=plain, predicted=ours, budget_share=share)
    text = shown(plan_table(plan), 100)
    line_with(text, "Peak", "4.0 GiB predicted, at most 5.0 GiB: fits, 1.0 GiB free")
    line_with(text, "plain 10.0 GiB, −60 %")
    line_with(text, "Step", "250.0 ms predicted, 25 % slower than plain")
    line_with(text, "blocks 0 to 7", "recomputed")
    line_with(text, "blocks 8 to 9", "recomputed, keeps mm")
    line_with(text, "bound 196.4 ms, gap 2.8 %, solved in 1.34 s")
    line_with(text, "microbatch", "8 of 16 samples, 2 microbatches", "reordered")
    assert all(note in text for note in plan.notes) and share in " ".join(text.split())
    over = replace(plan, predicted=replace(ours, peak_upper_bytes=7 * GIB))
    assert "1.0 GiB over" in line_with(shown(plan_table(over), 100), "Peak")


def test_plans_that_were_run_are_listed_and_the_chosen_one_is_marked(plan: Plan) -> None:
    assert "Measured" not in shown(plan_table(plan), 100) and plan.measured_seconds is None
    plan = run_before(plan)
    text = shown(plan_table(plan), 100)
    line_with(text, "Measured", "▶ 190.0 ms", "predicted 210.0 ms", "microbatch 8")
    line_with(text, "  250.0 ms", "predicted 200.0 ms", "10 regions")
    assert plan.measured_seconds == 0.19
    edited = replace(plan, levers=Levers(microbatch_size=1))
    assert edited.measured_seconds is None and "▶ 190" not in shown(plan_table(edited), 100)


def test_a_plan_that_changes_nothing_is_readable(plan: Plan) -> None:
    solution = Solution(status="optimal", bound_seconds=0.161, gap=0.0, solve_seconds=2e-5)
    same = {"levers": Levers(microbatch_size=16), "uses": (), "predicted": plan.plain, "solution": solution}
    text = str(replace(plan, frontier=[], notes=[], **same))
    assert "Regions" not in text and "Notes" not in text
    for part in ("none: the step runs as it is", "as fast as plain", "no faster plan fits", "gap 0 %"):
        assert part in text
    assert "The plan has no frontier." in text


def test_numbers_of_every_size_are_readable(plan: Plan) -> None:
    tiny = Prediction(peak_bytes=0, peak_upper_bytes=0, step_seconds=0.0, by_category={}, where="")
    huge = replace(tiny, peak_bytes=3 * 1024**5, peak_upper_bytes=4 * 1024**5, step_seconds=1e6, where="x" * 300)
    text = str(replace(plan, plain=tiny, predicted=huge, batch_size=1, budget_bytes=1))
    assert "3072.00 TiB" in text and "plain 0 B, —" in text and "predicted, —" in text
    for prediction in (tiny, huge):
        assert max(len(line.rstrip()) for line in shown(estimate_page(prediction, "t")).splitlines()) <= 80


def test_plan_text_is_plain_and_100_wide(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "37")
    text = str(plan)
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}
    assert 80 < max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "memfit plan for recipes.byte_lm:byte_lm on rtx-3090" in text and "Frontier" in text
    # names are never read as markup or control codes
    text = str(replace(plan, workload="a\x1b[31m[bold]b[/bold]", device=":smile:", notes=["[link=x]y[/link]\nz"]))
    assert "\x1b" not in text
    assert "[bold]b[/bold]" in text and ":smile:" in text and "[link=x]y[/link] z" in text


# The frontier


def marks(plan: Plan) -> list[str]:
    text = shown(frontier_table(plan), 100)
    return [line[:3].strip() for line in text.splitlines() if "GiB" in line and "×" in line]


def test_the_plans_own_point_is_marked(plan: Plan) -> None:
    assert chosen_index(plan) == 4
    line_with(shown(frontier_table(plan)), "▶", "4.9 GiB", "202.0 ms", "×1.25")
    elsewhere = replace(plan, levers=Levers(microbatch_size=1))
    assert chosen_index(elsewhere) is None
    assert "this plan is not a point of the frontier" in shown(frontier_table(elsewhere))
    far = replace(plan.frontier[4], peak_bytes=1)  # of points with the same levers the nearest
    assert chosen_index(replace(plan, frontier=[far, *plan.frontier])) == 5


def test_plans_that_fit_come_first_and_what_is_not_allowed_is_a_line_below(plan: Plan) -> None:
    text = shown(frontier_table(plan), 100)
    assert marks(plan) == ["▶", "", "▲", "▲", "▲", "▲"] and text.count("bf16-mixed") == 1
    line_with(text, "numerics='reduced' would need 5.4 GiB, 49 % faster (bf16-mixed, 5 regions)")
    words = options({"numerics": "--numerics"})
    line_with(shown(frontier_table(plan, words.of), 100), "--numerics reduced would need 5.4 GiB")
    allowed = replace(plan, allowed="reduced")
    assert marks(allowed) == ["", "", "▶", "", "▲", "▲", "▲", "▲", "▲"]
    assert "would need" not in shown(frontier_table(allowed), 100)


def test_what_is_held_against_the_budget_decides_whether_a_point_fits(plan: Plan) -> None:
    upper = [replace(c, peak_upper_bytes=2 * c.peak_bytes) for c in plan.frontier]
    over = replace(plan, frontier=upper, budget_bytes=upper[4].held_bytes - 1)
    line_with(shown(frontier_table(over)), "▶▲", "9.8 GiB", "4.9 GiB")
    fits = replace(over, budget_bytes=upper[4].held_bytes)
    assert "▲" not in line_with(shown(frontier_table(fits)), "▶", "×")
    assert offers(plan) == ["numerics='reduced' would need 5.4 GiB, 49 % faster (bf16-mixed, 5 regions)"]
    for none in ({"allowed": "reduced"}, {"budget_bytes": 3 * GIB}):
        assert offers(replace(plan, **none)) == []
    assert offers(replace(over, budget_bytes=upper[7].peak_bytes)) == []


def test_rows_say_whether_they_were_captured(plan: Plan) -> None:
    first, *others = plan.frontier
    rival = replace(plan, frontier=[replace(first, is_captured=True), *others])
    assert "✓" in line_with(shown(frontier_table(rival)), "161.0 ms") and "✓" not in shown(frontier_table(plan))


# Predictions and comparisons


def test_a_peak_by_category_has_shares_and_bars() -> None:
    prediction = Prediction(
        peak_bytes=4 * GIB,
        peak_upper_bytes=5 * GIB,
        step_seconds=0.5,
        by_category={"parameters": GIB, "activations": 3 * GIB, "buffers": 0, "inputs": 1024},
        where="end of the forward pass, in head (mm)",
        largest=(
            PeakPart(kind="logits", text="logits of 8 × 48 × 16,384", nbytes=2 * GIB),
            PeakPart(kind="parameters", text="parameters", nbytes=GIB),
        ),
    )
    text = shown(estimate_page(prediction, "Planned step"))
    rows = [line for line in text.splitlines() if "%" in line and "of this peak" not in line]
    assert [row.split()[0] for row in rows] == ["activations", "parameters", "inputs"]
    assert "75 %" in rows[0] and "25 %" in rows[1] and "<0.01 %" in rows[2]
    assert rows[0].count("█") == 24 and rows[1].count("█") == 8
    line_with(text, "peak allocated", "4.0 GiB")
    assert "at the end of the forward pass, in head (mm)" in text
    told = " ".join(text.split())
    assert "logits of 8 × 48 × 16,384: 50 % of this peak (smaller with a chunked loss, microbatches)" in told
    assert "parameters: 25 % of this peak" in told and told.count("smaller with") == 1


def test_predicted_against_measured(plan: Plan, views: Views) -> None:
    assert views.comparison is not None
    peaks = {"plain_peak_bytes": plan.plain.peak_bytes * 2, "planned_peak_bytes": plan.predicted.peak_bytes}
    measured = replace(views.comparison, **peaks, plain_step_seconds=0.2, planned_step_seconds=0.3)
    text = shown(comparison_table(plan, measured))
    assert line_with(text, "Prediction error").split()[-4:] == ["−50", "%", "0", "%"]
    assert line_with(text, "Step, measured").split()[-5:] == ["200.0", "ms", "300.0", "ms", "×1.50"]
    line_with(text, "Budget 6.0 GiB", "over", "free")
    assert line_with(text, "5.1 ").split() == ["2", "5.1", "5.1", "+4.0e-07"]
    assert "largest difference over 4 steps: 1.0e-06" in text
    losses = [float(i) for i in range(1, 101)]
    text = shown(comparison_table(plan, comparison(losses, losses)))
    steps = [line.split()[0] for line in text.splitlines() if line.strip().endswith(" 0") or "…" in line]
    assert steps == ["1", "2", "3", "4", "5", "6", "7", "…", "100"]


ON_A_GPU = Prediction(
    peak_bytes=20 * GIB,
    peak_reserved_bytes=22 * GIB,
    peak_upper_bytes=23 * GIB,
    step_seconds=0.5,
    by_category={"activations": 20 * GIB},
    where="start of the backward pass, in head (mm)",
    device_bytes=24 * GIB,
    throughput=SPEED,
    notes=["attention on rtx-3090: 6 calls take the [flash] kernel"],
)
BARE = Prediction(peak_bytes=GIB, peak_upper_bytes=2 * GIB, step_seconds=0.25, by_category={}, where="")
CONTEXT = {"context_bytes": GIB // 2}


@pytest.mark.parametrize(
    ("base", "changes", "parts", "others"),
    [
        (
            ON_A_GPU,
            {},
            [
                "22.0 GiB by PyTorch's allocator, at most 23.0 GiB",
                "24.0 GiB for a step: fits, 1.0 GiB free",
                "500.0 ms ± 30%",
                "nothing was measured on the device",
                "16 samples/s, 32,768 tokens/s",
                "41 % of 312 TFLOP/s in bfloat16",
                "the [flash] kernel",
            ],
            ["nvidia-smi"],
        ),
        (
            ON_A_GPU,
            {"device_bytes": 16 * GIB, "retries": 3},
            ["16.0 GiB for a step: 7.0 GiB over", "empties its cache 3 times in two steps"],
            [],
        ),
        (ON_A_GPU, CONTEXT, ["22.5 GiB, including 512.0 MiB for the driver's context"], ["every kernel"]),
        (ON_A_GPU, {**CONTEXT, "context_upper_bytes": GIB}, ["at most 24.0 GiB, with every kernel loaded"], []),
        (BARE, {}, ["1.0 GiB, at most 2.0 GiB", "250.0 ms predicted"], ["Device", "samples/s"]),
    ],
)
def test_an_estimate_says_what_is_needed_and_what_the_device_has(
    base: Prediction, changes: dict[str, Any], parts: list[str], others: list[str]
) -> None:
    text = " ".join(shown(estimate_page(replace(base, **changes), "t"), 100).split())
    assert [part for part in parts if part not in text] == [] == [part for part in others if part in text]


def test_time_by_class_adds_up() -> None:
    text = shown(estimate_page(ON_A_GPU, "t"), 100)
    lines = [line for line in text.splitlines() if "class" in line and "%" in line]
    assert len(lines) == 7 and lines[-1].strip().startswith("3 other classes")
    assert abs(sum(float(line.split("%")[0].split()[-1]) for line in lines) - 100) < 1.0


# Devices


CPU = Device(
    name="cpu", kind="cpu", vendor="cpu", description="a [red]CPU", memory_bytes=2**35, usable_bytes=2**34, cores=2
)


def test_every_name_and_figure_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_DEVICES", "/nowhere/devices.toml")
    text = shown(device_table([*known_devices().values(), CPU]))
    line_with(text, "rtx-2080-ti", "11.0", "10.6", "616", "–", "13.4", "7.5")
    line_with(text, "a100-40gb", "40.0", "39.0", "1555", "312", "19.5", "8.0")
    line_with(text, "mi250x", "64.0", "63.5", "1638", "191.5", "47.85", "–")
    assert all(name in text for name in known_devices()) and "…" not in text
    # what is not known is a dash and not zero, and long names leave room for the figures
    assert line_with(text, "cpu", "a [red]CPU").split()[-6:] == ["32.0", "16.0", "–", "–", "–", "–"]
    probed = replace(CPU, name="intel-r-xeon-r-platinum-8481c-cpu-2-70ghz-16cores", matrix_flops={"float32": 1.5e12})
    assert "1.5" in shown(device_table([probed, *known_devices().values()]))
    text = shown(device_page(known_devices()["t4"], ["Use this.", "Not [that]."]), 200)
    line_with(text, "float16, matrix", "65 TFLOP/s", "datasheet")
    line_with(text, "usable", "14.6 GiB", "14.75 GiB")
    line_with(text, "launch", "5.0 µs", "estimate")
    line_with(text, "cuBLAS workspace", "8.1 MiB")
    assert "• Use this." in text and "• Not [that]." in text


def test_a_page_of_a_cpu_has_no_gpu_figures() -> None:
    text = shown(device_page(CPU, []), 120)
    line_with(text, "threads", "2")
    assert "capability" not in text and "cuBLAS" not in text


def test_the_report_imports_no_torch_and_no_other_stage() -> None:
    """The package's own `__init__`, which brings the public API, is left out."""
    code = (
        "import sys, types\n"
        "sys.modules['memfit'] = package = types.ModuleType('memfit')\n"
        f"package.__path__ = [{str(Path(report.__file__).parents[1])!r}]\n"
        "import memfit.report.html, memfit.report.tables, memfit.report.charts\n"
        "mine = {'errors', 'foundations', 'ir', 'report', 'version'}\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'plotly', 'jinja2')])\n"
        "print([m for m in sys.modules if m.startswith('memfit.') and m.split('.')[1] not in mine])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
