from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from rich.console import Console, RenderableType

from memfit import report
from memfit.foundations import options
from memfit.ir import (
    NUMERICS,
    ChunkedLoss,
    Comparison,
    Levers,
    OptimizerLever,
    Plan,
    Precision,
    Prediction,
    Region,
    Solution,
    Views,
)
from memfit.ir.plan import PeakPart
from memfit.levers import LEVERS, LeversOn, UpdateLever, lever_uses
from memfit.report import comparison_table, frontier_table, plan_table, ratio_text
from memfit.report.summary import (
    change_text,
    chosen_index,
    comparison_lines,
    keep_text,
    lever_rows,
    levers_text,
    loss_text,
    region_groups,
    share_text,
    solver_text,
)
from memfit.report.tables import prediction_table
from memfit.report.verdict import offers
from tests.report.conftest import SPEED, line_with, run_before, shown

GIB = 1024**3


def styled(renderable: RenderableType) -> list[str]:
    console = Console(width=100, file=io.StringIO(), color_system="standard", force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


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


def test_siblings_that_keep_different_operators_are_not_folded() -> None:
    mm = ("aten.mm.default#0",)
    groups = region_groups([Region(("b.0",)), Region(("b.1",), mm), Region(("b.2",), mm), Region(("b.3",))])
    assert [(g.name, g.modules, g.action) for g in groups] == [
        ("b 0, 3", 2, "recomputed"),
        ("b 1 to 2", 2, "recomputed, keeps mm"),
    ]


def test_modules_that_are_recomputed_together_are_told_from_modules_recomputed_one_by_one() -> None:
    together = [Region((f"blocks.{i}.norm", f"blocks.{i}.mlp")) for i in range(3)]
    groups = region_groups([*together, Region(("head.0", "head.1", "head.2")), Region(("tail",))])
    assert [(g.name, g.modules, g.action) for g in groups] == [
        ("norm to mlp in blocks 0 to 2", 3, "recomputed together"),
        ("head 0 to 2", 1, "recomputed together"),
        ("tail", 1, "recomputed"),
    ]


def test_kept_operators_are_counted() -> None:
    keep = ("aten.mm.default#0", "aten.mm.default#2", "aten.max.dim#0", "mine.attention.default#0")
    assert keep_text(keep) == "recomputed, keeps mm ×2, max.dim, mine.attention"


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
    assert ratio_text(new, old) == ratio
    assert change_text(new, old) == change


def test_share_of_nothing_is_no_number() -> None:
    assert share_text(1, 0) == "—"
    assert share_text(0, 10) == "0 %"


def test_levers_are_told_with_their_classes(plan: Plan) -> None:
    levers = Levers(
        precision="tf32",
        microbatch_size=6,
        regions=(Region(("a",), offload=True), Region(("b",))),
        chunked_loss=ChunkedLoss(head="head", rows=128),
        lean=("*",),
        optimizer="adamw-8bit",
    )
    plan = msgspec.structs.replace(plan, levers=levers, uses=lever_uses(LeversOn(levers, 16)))
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


@pytest.mark.parametrize("precision", ["32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["as-is", "in-backward", "offloaded", "adamw-8bit", "adafactor"])
def test_no_lever_is_told_without_its_class(precision: Precision, optimizer: OptimizerLever, plan: Plan) -> None:
    levers = Levers(precision=precision, microbatch_size=16, optimizer=optimizer)
    rows = lever_rows(msgspec.structs.replace(plan, levers=levers, uses=lever_uses(LeversOn(levers, 16))))
    assert [row.setting for row in rows] == [x for x in (precision, optimizer) if x not in ("32-true", "as-is")]
    assert all(row.numerics in NUMERICS for row in rows)


def test_different_points_are_told_apart(plan: Plan) -> None:
    """Each of these changes one lever; frontier tables and figures show each otherwise."""
    base = Levers(microbatch_size=16)
    changes: list[dict[str, Any]] = [
        {"precision": "tf32"},
        {"microbatch_size": 4},
        {"regions": (Region(("a",)),)},
        {"regions": (Region(("a",), offload=True),)},
        {"chunked_loss": ChunkedLoss(head="head", rows=128)},
        {"lean": ("*",)},
        *({"optimizer": lever.value} for lever in LEVERS if isinstance(lever, UpdateLever)),
    ]
    every = [base, *(msgspec.structs.replace(base, **change) for change in changes)]
    points = [msgspec.structs.replace(plan.frontier[0], levers=x, uses=lever_uses(LeversOn(x, 16))) for x in every]
    texts = {levers_text(point) for point in points}
    assert len(texts) == len(every) and levers_text(points[0]) == "plain"
    table = shown(frontier_table(msgspec.structs.replace(plan, frontier=points)), width=160)
    assert all(text in table for text in texts)


def test_losses() -> None:
    def words(plain: list[float], planned: list[float]) -> str:
        return loss_text(comparison(plain, planned))

    assert words([], []) == "no losses were compared"
    assert words([2.0, 1.0], [2.0, 1.0]) == "identical over 2 steps"
    assert words([2.0, 1.0], [2.0, 1.5]) == "largest difference over 2 steps: 5.0e-01, 5.0e-01 of the loss, at step 2"
    assert "not finite" in words([1.0], [float("nan")])


def test_what_is_to_be_said_of_the_times_stands_below_them() -> None:
    found = msgspec.structs.replace(comparison([1.0], [1.0]), notes=("this machine was busy",))
    assert comparison_lines(found) == ["Losses on the same data: identical over 1 step.", "This machine was busy."]
    assert "This machine was busy." in shown(comparison_table(None, found), 100)


def comparison(plain: list[float], planned: list[float]) -> Comparison:
    return Comparison(
        plain_peak_bytes=1,
        planned_peak_bytes=1,
        plain_step_seconds=1.0,
        planned_step_seconds=1.0,
        plain_losses=plain,
        planned_losses=planned,
    )


# The plan


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_terminal_and_cut_nothing(plan: Plan, views: Views, width: int) -> None:
    assert views.comparison is not None
    tables = (
        plan_table(plan),
        frontier_table(plan),
        prediction_table(plan.plain, "Plain step"),
        comparison_table(plan, views.comparison),
    )
    for table in tables:
        text = shown(table, width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        assert "…" not in text.replace("blocks.0…7", "").replace("blocks.8…9", "")


def test_plan_table_says_the_figures(plan: Plan) -> None:
    plan = msgspec.structs.replace(
        plan,
        budget_bytes=6 * GIB,
        plain=msgspec.structs.replace(plan.plain, peak_bytes=10 * GIB, step_seconds=0.2),
        predicted=msgspec.structs.replace(
            plan.predicted, peak_bytes=4 * GIB, peak_upper_bytes=5 * GIB, step_seconds=0.25
        ),
    )
    text = shown(plan_table(plan), 100)
    assert "4.0 GiB predicted, at most 5.0 GiB: fits, 1.0 GiB free" in line_with(text, "Peak")
    line_with(text, "plain 10.0 GiB, −60 %")
    assert "250.0 ms predicted, 25 % slower than plain" in line_with(text, "Step")
    line_with(text, "blocks 0 to 7", "recomputed")
    line_with(text, "blocks 8 to 9", "recomputed, keeps mm")
    line_with(text, "bound 196.4 ms, gap 2.8 %, solved in 1.34 s")
    line_with(text, "microbatch", "8 of 16 samples, 2 microbatches", "reordered")
    for note in plan.notes:
        assert note in text


def test_plans_that_were_run_are_listed_and_the_chosen_one_is_marked(plan: Plan) -> None:
    assert "Measured" not in shown(plan_table(plan), 100) and plan.measured_seconds is None
    plan = run_before(plan)
    text = shown(plan_table(plan), 100)
    line_with(text, "Measured", "▶ 190.0 ms", "predicted 210.0 ms", "microbatch 8")
    line_with(text, "  250.0 ms", "predicted 200.0 ms", "10 regions")
    assert plan.measured_seconds == 0.19
    edited = msgspec.structs.replace(plan, levers=Levers(microbatch_size=1))
    assert edited.measured_seconds is None and "▶ 190" not in shown(plan_table(edited), 100)


def test_a_plan_over_the_budget_says_so(plan: Plan) -> None:
    plan = msgspec.structs.replace(
        plan, predicted=msgspec.structs.replace(plan.predicted, peak_upper_bytes=plan.budget_bytes + GIB)
    )
    assert "1.0 GiB over" in line_with(shown(plan_table(plan), 100), "Peak")


def test_a_plan_that_changes_nothing_is_readable(plan: Plan) -> None:
    plan = msgspec.structs.replace(
        plan,
        levers=Levers(microbatch_size=16),
        uses=(),
        frontier=[],
        notes=[],
        predicted=plan.plain,
        solution=Solution(status="optimal", bound_seconds=0.161, gap=0.0, solve_seconds=2e-5),
    )
    text = str(plan)
    assert "Regions" not in text and "Notes" not in text
    assert "none: the step runs as it is" in text
    assert "as fast as plain" in text and "no faster plan fits" in text and "gap 0 %" in text
    assert "The plan has no frontier." in text


def test_numbers_of_every_size_are_readable(plan: Plan) -> None:
    tiny = Prediction(peak_bytes=0, peak_upper_bytes=0, step_seconds=0.0, by_category={}, where="")
    huge = Prediction(
        peak_bytes=3 * 1024**5, peak_upper_bytes=4 * 1024**5, step_seconds=1e6, by_category={}, where="x" * 300
    )
    text = str(msgspec.structs.replace(plan, plain=tiny, predicted=huge, batch_size=1, budget_bytes=1))
    assert "3072.00 TiB" in text and "plain 0 B, —" in text and "predicted, —" in text
    for prediction in (tiny, huge):
        assert max(len(line.rstrip()) for line in shown(prediction_table(prediction, "t")).splitlines()) <= 80


def test_names_are_never_read_as_markup_or_control_codes(plan: Plan) -> None:
    plan = msgspec.structs.replace(
        plan, workload="a\x1b[31m[bold]b[/bold]", device=":smile:", notes=["[link=x]y[/link]\nz"]
    )
    text = str(plan)
    assert "\x1b" not in text
    assert "[bold]b[/bold]" in text and ":smile:" in text and "[link=x]y[/link] z" in text


def test_plan_text_is_plain_and_100_wide(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "37")
    text = str(plan)
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}
    assert 80 < max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "memfit plan for recipes.byte_lm:byte_lm on rtx-3090" in text and "Frontier" in text


# The frontier


def test_the_plans_own_point_is_marked(plan: Plan) -> None:
    assert chosen_index(plan) == 4
    text = shown(frontier_table(plan))
    assert "4.9 GiB" in line_with(text, "▶", "×") and "202.0 ms" in line_with(text, "▶", "×")
    assert "×1.25" in line_with(text, "▶", "×")
    elsewhere = msgspec.structs.replace(plan, levers=Levers(microbatch_size=1))
    assert chosen_index(elsewhere) is None
    assert "this plan is not a point of the frontier" in shown(frontier_table(elsewhere))


def test_of_points_with_the_same_levers_the_nearest_is_the_plans(plan: Plan) -> None:
    far = msgspec.structs.replace(plan.frontier[4], peak_bytes=1)
    assert chosen_index(msgspec.structs.replace(plan, frontier=[far, *plan.frontier])) == 5


def test_plans_that_fit_come_first_and_what_is_not_allowed_is_a_line_below(plan: Plan) -> None:
    text = shown(frontier_table(plan), 100)
    rows = [line for line in text.splitlines() if "GiB" in line and "×" in line]
    assert [row[:2].strip() for row in rows] == ["▶", "", "▲", "▲", "▲", "▲"]
    assert "bf16-mixed" not in "".join(rows)
    line_with(text, "numerics='reduced' would need 5.4 GiB, 49 % faster (bf16-mixed, 5 regions)")
    assert "○" not in text
    allowed = msgspec.structs.replace(plan, allowed="reduced")
    text = shown(frontier_table(allowed), 100)
    rows = [line for line in text.splitlines() if "GiB" in line and "×" in line]
    assert [row[:2].strip() for row in rows] == ["", "", "▶", "", "▲", "▲", "▲", "▲", "▲"] and "would need" not in text


def test_a_line_below_the_frontier_is_in_the_words_of_the_interface(plan: Plan) -> None:
    words = options({"numerics": "--numerics"})
    line_with(shown(frontier_table(plan, words.of), 100), "--numerics reduced would need 5.4 GiB")


def test_what_is_held_against_the_budget_decides_whether_a_point_fits(plan: Plan) -> None:
    upper = [msgspec.structs.replace(c, peak_upper_bytes=2 * c.peak_bytes) for c in plan.frontier]
    marked = shown(frontier_table(msgspec.structs.replace(plan, frontier=upper, budget_bytes=upper[4].held_bytes - 1)))
    row = line_with(marked, "▶", "×")
    assert "▲" in row and "9.8 GiB" in row and "4.9 GiB" in row
    fits = msgspec.structs.replace(plan, frontier=upper, budget_bytes=upper[4].held_bytes)
    assert "▲" not in line_with(shown(frontier_table(fits)), "▶", "×")
    assert offers(plan) and not offers(msgspec.structs.replace(plan, frontier=upper, budget_bytes=upper[7].peak_bytes))


def test_rows_name_their_levers_and_whether_they_were_captured(plan: Plan) -> None:
    levers = Levers(
        precision="bf16-mixed",
        microbatch_size=4,
        regions=(Region(modules=("a",)), Region(modules=("b",), offload=True)),
        lean=("*",),
        chunked_loss=ChunkedLoss(head="head", rows=8),
        optimizer="in-backward",
    )
    point = msgspec.structs.replace(plan.frontier[0], levers=levers, uses=lever_uses(LeversOn(levers, 8)))
    assert levers_text(point) == (
        "bf16-mixed, optimizer in-backward, microbatch 4, chunked loss, norms recomputed, 2 regions, 1 offloaded"
    )
    first, *others = plan.frontier
    rival = msgspec.structs.replace(plan, frontier=[msgspec.structs.replace(first, is_captured=True), *others])
    assert "✓" in line_with(shown(frontier_table(rival)), "161.0 ms") and "✓" not in shown(frontier_table(plan))


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
    solution = msgspec.structs.replace(plan.solution, status=status, gap=gap)
    assert words in solver_text(msgspec.structs.replace(plan, solution=solution))


def test_a_share_says_what_it_is_of(plan: Plan) -> None:
    share = "50% of the 24.0 GiB that rtx-3090 has for a step"
    assert share in " ".join(shown(plan_table(msgspec.structs.replace(plan, budget_share=share))).split())


def test_what_a_freer_class_would_buy(plan: Plan) -> None:
    assert offers(plan) == ["numerics='reduced' would need 5.4 GiB, 49 % faster (bf16-mixed, 5 regions)"]
    assert offers(msgspec.structs.replace(plan, allowed="reduced")) == []
    assert offers(msgspec.structs.replace(plan, budget_bytes=3 * GIB)) == []


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
    text = shown(prediction_table(prediction, "Planned step"))
    rows = [line for line in text.splitlines() if "%" in line and "of this peak" not in line]
    assert [row.split()[0] for row in rows] == ["activations", "parameters", "inputs"]
    assert "75 %" in rows[0] and "25 %" in rows[1] and "<0.01 %" in rows[2]
    assert rows[0].count("█") == 24 and rows[1].count("█") == 8
    assert "4.0 GiB" in line_with(text, "peak allocated", "GiB")
    assert "at the end of the forward pass, in head (mm)" in text
    told = " ".join(text.split())
    assert "logits of 8 × 48 × 16,384: 50 % of this peak (smaller with a chunked loss, microbatches)" in told
    assert "parameters: 25 % of this peak" in told and told.count("smaller with") == 1


def test_predicted_against_measured(plan: Plan, views: Views) -> None:
    assert views.comparison is not None
    measured = msgspec.structs.replace(
        views.comparison,
        plain_peak_bytes=plan.plain.peak_bytes * 2,
        planned_peak_bytes=plan.predicted.peak_bytes,
        plain_step_seconds=0.2,
        planned_step_seconds=0.3,
    )
    text = shown(comparison_table(plan, measured))
    assert line_with(text, "Prediction error").split()[-4:] == ["−50", "%", "0", "%"]
    assert line_with(text, "Step, measured").split()[-5:] == ["200.0", "ms", "300.0", "ms", "×1.50"]
    assert "over" in line_with(text, "Budget 6.0 GiB") and "free" in line_with(text, "Budget 6.0 GiB")
    assert line_with(text, "5.1 ").split() == ["2", "5.1", "5.1", "+4.0e-07"]
    assert "largest difference over 4 steps: 1.0e-06" in text


def test_many_losses_are_shortened(plan: Plan) -> None:
    losses = [float(i) for i in range(1, 101)]
    text = shown(comparison_table(plan, comparison(losses, losses)))
    steps = [line.split()[0] for line in text.splitlines() if line.strip().endswith(" 0") or "…" in line]
    assert steps == ["1", "2", "3", "4", "5", "6", "7", "…", "100"]


def test_the_report_imports_no_torch_and_no_other_stage() -> None:
    """The package's own `__init__`, which brings the public API, is left out."""
    code = (
        "import sys, types\n"
        "sys.modules['memfit'] = package = types.ModuleType('memfit')\n"
        f"package.__path__ = [{str(Path(report.__file__).parents[1])!r}]\n"
        "import memfit.report.html, memfit.report.tables, memfit.report.figures, memfit.report.charts\n"
        "mine = {'errors', 'foundations', 'ir', 'report', 'version'}\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'plotly', 'jinja2')])\n"
        "print([m for m in sys.modules if m.startswith('memfit.') and m.split('.')[1] not in mine])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


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
    plain = msgspec.structs.replace(plan.plain, step_seconds=0.161, throughput=SPEED)
    found = msgspec.structs.replace(views.comparison, plain_step_seconds=seconds, notes=notes)
    _, *lines = comparison_lines(found, msgspec.structs.replace(plan, plain=plain))
    assert len(lines) == len(said) and all(text in line for text, line in zip(said, lines, strict=True))
