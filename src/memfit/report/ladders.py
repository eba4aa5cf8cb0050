"""A ladder as a table, and as one HTML file with its plot."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from memfit.foundations import format_bytes
from memfit.ir import Ladder, Outcome, Rung, write_atomic
from memfit.report.axes import GRID, byte_axis, second_axis
from memfit.report.charts import Chart, ChartRule, Mark, Shape
from memfit.report.next_steps import NextStep, budget_argument
from memfit.report.pages import render_page
from memfit.report.rendering import text_of
from memfit.report.summary import MISSING, clean, ratio_text, seconds_text

_COLUMNS = ("rung", "peak", "", "step", "", "largest batch", "samples/s there", "numerics", "outcome")
_SYMBOLS: dict[Outcome, str] = {"kept": "circle", "does not pay": "triangle", "proposed": "diamond"}
_STYLES = {"kept": "green", "does not pay": "yellow", "proposed": "cyan", "not available": "dim"}
_COLOURS: dict[Outcome, str] = {
    "kept": "var(--good)",
    "does not pay": "var(--chosen)",
    "proposed": "var(--accent)",
}


def ladder_table(ladder: Ladder) -> Group:
    """Return a ladder as a table with a row for each measured rung, and the reasons why others were not measured."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=Text.assemble(
            ("memfit tools ladder", "bold"), f" for {clean(ladder.workload)} on {ladder.device}, {_budget(ladder)}"
        ),
        title_justify="left",
        title_style="",
    )
    for name in _COLUMNS:
        is_number = name in ("", "peak", "step", "largest batch", "samples/s there")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "outcome")
    for rung in ladder.rungs:
        if rung.is_measured:
            table.add_row(*(Text(cell, _STYLES[rung.outcome] if i == 8 else "") for i, cell in enumerate(_cells(rung))))
    measured = (Text(clean(f"{rung.name}: {rung.why}")) for rung in ladder.rungs if rung.is_measured)
    unmeasured = (Text(clean(f"{rung.name}: {rung.outcome}; {rung.why}"), "dim") for rung in _rest(ladder))
    return Group(table, Text(), *measured, *unmeasured)


def ladder_text(ladder: Ladder) -> str:
    """Return a ladder as plain text, 120 wide, for `print(ladder)`."""
    return text_of(ladder_table(ladder), width=120)


def write_ladder(path: str | Path, ladder: Ladder) -> Path:
    """Write a ladder's page to a file.

    Raises:
        OutputError: The file can't be written.
    """
    return write_atomic(path, ladder_page(ladder).encode())


def ladder_page(ladder: Ladder) -> str:
    """Return one HTML file with the plot and the table."""
    return render_page(
        "ladder.html.j2",
        {"ladder": ladder_chart(ladder)},
        ladder=ladder,
        budget=_budget(ladder),
        columns=_COLUMNS,
        rows=[(rung, _cells(rung)) for rung in ladder.rungs if rung.is_measured],
        rest=_rest(ladder),
        steps=_next_steps(ladder),
    )


def ladder_chart(ladder: Ladder) -> Chart:
    """Return a chart of peak against step time: a point for each rung, with the kept ones joined in order."""
    rungs = [(r, r.peak_bytes, r.step_seconds) for r in ladder.rungs if r.peak_bytes and r.step_seconds]
    x = byte_axis(1.08 * max(nbytes for _, nbytes, _ in rungs), "peak allocated")
    y = second_axis(1.12 * max(seconds for _, _, seconds in rungs), "step time")
    marks = [
        Mark(
            x.at(nbytes),
            y.at(seconds),
            _SYMBOLS[rung.outcome],
            _COLOURS[rung.outcome],
            hollow=rung.outcome != "kept",
            tip=clean(f"{rung.name}: {rung.outcome}") + f"\n{format_bytes(nbytes)}, {seconds_text(seconds)}",
            text=clean(rung.name),
            series=rung.outcome,
        )
        for rung, nbytes, seconds in rungs
    ]
    kept = [(x.at(nbytes), y.at(seconds)) for rung, nbytes, seconds in rungs if rung.outcome == "kept"]
    rules = [ChartRule("budget", x.at(ladder.budget_bytes), upright=True)] if ladder.is_budget_given else []
    rules = [rule for rule in rules if rule.at <= GRID]
    return Chart(x=x, y=y, shapes=[Shape(kept, _COLOURS["kept"], name="kept")], rules=rules, marks=marks)


def _next_steps(ladder: Ladder) -> list[NextStep]:
    """Return the next steps after a ladder: a plan, a larger batch, and the proposed levers."""
    plain, top = ladder.rungs[0], ladder.top
    steps = []
    if top.peak_bytes is not None and top.step_seconds is not None and top is not plain:
        levers = [rung.name for rung in ladder.rungs if rung.outcome == "kept"][1:]
        why = (
            f"The kept levers ({clean(', '.join(levers))}) need {format_bytes(top.peak_bytes)} and"
            f" {seconds_text(top.step_seconds)} a step. Let the planner choose among all combinations within that"
            " budget:"
        )
        budget = budget_argument(max(top.peak_bytes, ladder.budget_bytes if ladder.is_budget_given else 0))
        steps.append(NextStep(why, f"plan = memfit.plan(workload, budget={budget!r}, numerics={ladder.allowed!r})"))
    if top.largest_batch is not None and plain.largest_batch is not None and top.largest_batch > plain.largest_batch:
        steps.append(
            NextStep(
                f"With these levers a batch of {top.largest_batch:,} fits the budget, in place of"
                f" {plain.largest_batch:,}: give Workload.batch that many samples if your training allows it."
            )
        )
    proposed = (rung for rung in ladder.rungs if rung.outcome == "proposed")
    return [*steps, *(NextStep(clean(f"{rung.name} changes the model: {rung.why}")) for rung in proposed)]


def _budget(ladder: Ladder) -> str:
    whose = "" if ladder.is_budget_given else ", the peak of the plain step"
    return f"budget {format_bytes(ladder.budget_bytes)}{whose}"


def _rest(ladder: Ladder) -> list[Rung]:
    return [rung for rung in ladder.rungs if not rung.is_measured]


def _cells(rung: Rung) -> tuple[str, ...]:
    assert rung.peak_bytes is not None
    assert rung.step_seconds is not None
    largest = "any" if rung.largest_batch is None else f"{rung.largest_batch:,}"
    return (
        rung.name,
        format_bytes(rung.peak_bytes),
        "" if rung.peak_ratio is None else ratio_text(rung.peak_ratio, 1),
        seconds_text(rung.step_seconds),
        "" if rung.step_ratio is None else ratio_text(rung.step_ratio, 1),
        MISSING if rung.samples_per_second is None else largest,
        MISSING if rung.samples_per_second is None else f"{rung.samples_per_second:,.4g}",
        rung.numerics or MISSING,
        rung.outcome,
    )
