"""Tables for the terminal.

Nothing here reads Rich's markup: names come from the user's model and may hold brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes
from memfit.ir import Candidate, Comparison, Plan, Prediction
from memfit.report.rendering import text_of
from memfit.report.summary import (
    budget_text,
    change_text,
    chosen_index,
    clean,
    comparison_lines,
    comparison_rows,
    fit_text,
    is_allowed,
    lever_rows,
    levers_text,
    loss_rows,
    measured_plan_rows,
    measured_rows,
    place_lines,
    proof_text,
    ratio_text,
    region_groups,
    seconds_text,
    share_text,
    solver_text,
)
from memfit.report.verdict import beside_text, comparison_verdict, offers, plan_verdict

_BAR_CELLS = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LOSS_ROWS = 8
_NUMERICS_STYLE = {"exact": "green", "reordered": "cyan", "reduced": "yellow", "changed": "red"}
_CHOSEN, _OVER, _CAPTURED = "▶", "▲", "✓"


def plan_table(plan: Plan) -> Table:
    """Return a plan: its verdict, what it costs, what it sets, and how sure that is."""
    plan_name = f"memfit plan for {clean(plan.workload)} on {clean(plan.device)}"
    table = Table(
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 3, 0, 0),
        title=Text.assemble(verdict_text(plan_verdict(plan)), "\n", (plan_name, "dim")),
        title_justify="left",
        title_style="",
    )
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for block in (_cost_block(plan), _lever_block(plan), _measured_block(plan), _solver_block(plan)):
        if block:
            table.add_row("", "")
        for name, value in block:
            table.add_row(name, value)
    return table


def verdict_text(verdict: str) -> Text:
    """Return a verdict in the colour of what it says."""
    colours = {"Fits": "green", "Verified": "green", "Does": "red", "Verification": "red", "May": "yellow"}
    return Text(verdict, f"bold {colours.get(verdict.split(':')[0].split()[0], '')}".strip())


def _cost_block(plan: Plan) -> list[tuple[str, RenderableType]]:
    plain, ours = plan.plain, plan.predicted
    fits = ours.peak_upper_bytes <= plan.budget_bytes
    return [
        ("Budget", Text(budget_text(plan))),
        (
            "Peak",
            Text.assemble(
                (format_bytes(ours.peak_bytes), "bold green" if fits else "bold red"),
                f" predicted, at most {format_bytes(ours.peak_upper_bytes)}: ",
                fit_text(ours.peak_upper_bytes, plan.budget_bytes),
            ),
        ),
        ("", _dim(f"plain {format_bytes(plain.peak_bytes)}, {change_text(ours.peak_bytes, plain.peak_bytes)}")),
        *(("", _dim(line)) for line in place_lines(ours)),
        (
            "Step",
            Text.assemble(
                (seconds_text(ours.step_seconds), "bold"),
                " predicted, ",
                (beside_text(ours.step_seconds, plain.step_seconds, "plain"), "bold"),
            ),
        ),
        ("", _dim(f"plain {seconds_text(plain.step_seconds)}")),
    ]


def _lever_block(plan: Plan) -> list[tuple[str, RenderableType]]:
    levers = Table.grid(Column(no_wrap=True), Column(), Column(no_wrap=True), padding=(0, 3, 0, 0))
    rows = lever_rows(plan)
    if not rows:
        levers.add_row("none: the step runs as it is", "", "")
    for row in rows:
        levers.add_row(row.name, Text(row.setting), _numerics(row.numerics))
    block: list[tuple[str, RenderableType]] = [
        ("Numerics", Text.assemble(_numerics(plan.numerics), f", allowed: {plan.allowed}")),
        ("Levers", levers),
    ]
    groups = region_groups(plan.levers.regions)
    if groups:
        regions = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 3, 0, 0))
        for group in groups:
            regions.add_row(Text(group.name), _dim(group.action))
        block.append(("Regions", regions))
    return block


def _measured_block(plan: Plan) -> list[tuple[str, RenderableType]]:
    rows = measured_plan_rows(plan)
    if not rows:
        return []
    steps = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for row in rows:
        style = "bold" if row.is_this else "dim"
        mark = f"{_CHOSEN} " if row.is_this else "  "
        steps.add_row(f"{mark}{row.measured}", f"predicted {row.predicted}", Text(row.levers), style=style)
    return [("Measured", steps)]


def _solver_block(plan: Plan) -> list[tuple[str, RenderableType]]:
    solution = plan.solution
    bound = f"bound {seconds_text(solution.bound_seconds)}, gap {share_text(solution.gap, 1)}"
    block: list[tuple[str, RenderableType]] = [
        ("Solver", Text(solver_text(plan))),
        ("", _dim(f"{bound}, solved in {seconds_text(solution.solve_seconds)}")),
    ]
    proof = proof_text(plan)
    block += [("Proof", Text(proof))] if proof else []
    for i, note in enumerate(plan.notes):
        block.append(("" if i else "Notes", Text(clean(note))))
    versions = f"memfit {plan.memfit_version}, torch {plan.torch_version}, fingerprint {plan.fingerprint[:12]}"
    return [*block, ("Made by", _dim(clean(versions)))]


def frontier_table(plan: Plan, say: Callable[[str], str] = str) -> Table | Text:
    """Return the frontier: the plans that are allowed, first those that fit, each from the fastest to the slowest.

    What stands under "at most" is held against the budget. The plan's own point is marked. Of the classes that the user
    did not allow, a line below the table says what each would buy.

    Args:
        say: Puts a line in the words of the interface.
    """
    if not plan.frontier:
        return _dim("The plan has no frontier.")
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=Text("Frontier", "bold"), title_justify="left"
    )
    right = ("at most", "peak", "step", "of\nplain")
    for name in ("", "at most", "peak", "step", "of\nplain", "levers", "numerics"):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != "levers")
    own = chosen_index(plan)
    chosen = None if own is None else plan.frontier[own]
    shown = [c for c in plan.frontier if is_allowed(c, plan.allowed) or c is chosen]
    shown.sort(key=lambda c: (c.held_bytes > plan.budget_bytes, c.step_seconds))
    for candidate in shown:
        is_over = candidate.held_bytes > plan.budget_bytes
        style = "bold" if candidate is chosen else "dim" if is_over else ""
        table.add_row(*_frontier_cells(plan, candidate, candidate is chosen), style=style)
    lines = ["", _marks(plan, shown, chosen), *(say(line) for line in offers(plan))]
    table.caption = Text("\n".join(lines))
    table.caption_justify = "left"
    return table


def _frontier_cells(plan: Plan, candidate: Candidate, is_chosen: bool) -> list[RenderableType]:
    over = candidate.held_bytes > plan.budget_bytes
    marks = _CHOSEN * is_chosen + _OVER * over + _CAPTURED * _is_rival(candidate, is_chosen)
    return [
        marks,
        format_bytes(candidate.held_bytes),
        format_bytes(candidate.peak_bytes),
        seconds_text(candidate.step_seconds),
        ratio_text(candidate.step_seconds, plan.plain.step_seconds),
        Text(levers_text(candidate)),
        _numerics(candidate.numerics),
    ]


def _is_rival(candidate: Candidate, is_chosen: bool) -> bool:
    """Tell whether a point was captured and not taken."""
    return candidate.is_captured and not is_chosen


def _marks(plan: Plan, shown: Sequence[Candidate], chosen: Candidate | None) -> str:
    """Return what the marks in use mean."""
    marks = [f"{_CHOSEN} this plan"] if chosen is not None else ["this plan is not a point of the frontier"]
    if any(c.held_bytes > plan.budget_bytes for c in shown):
        marks.append(f"{_OVER} over the budget of {format_bytes(plan.budget_bytes)}")
    if any(_is_rival(c, c is chosen) for c in shown):
        marks.append(f"{_CAPTURED} captured with its own levers, like this plan")
    return "   ".join(marks)


def prediction_table(prediction: Prediction, title: str) -> Table:
    """Return a predicted peak by category, the largest first, and what runs there."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, show_footer=True, title=Text(clean(title), "bold"), title_justify="left"
    )
    table.add_column("at the peak", Text("peak allocated"), no_wrap=True)
    table.add_column("bytes", Text(format_bytes(prediction.peak_bytes)), justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    largest = max(prediction.by_category.values(), default=0)
    for name, count in sorted(prediction.by_category.items(), key=lambda item: -item[1]):
        if count > 0:
            share = share_text(count, prediction.peak_bytes)
            table.add_row(Text(clean(name)), format_bytes(count), share, Text(_bar(count, largest), "cyan"))
    table.caption = Text("\n".join(place_lines(prediction)))
    table.caption_justify = "left"
    return table


def _bar(value: float, largest: float) -> str:
    """Return a bar of block characters; anything above nothing is seen."""
    eighths = max(1, round(8 * _BAR_CELLS * value / largest))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def comparison_table(plan: Plan | None, comparison: Comparison) -> Group:
    """Return the verdict, what was measured of both steps beside what a plan predicts, and the losses."""
    name = "Predicted and measured" if plan else "Plain and planned step"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(name, "bold"), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("plain", "planned", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison_rows(plan, comparison) if plan else measured_rows(comparison):
        table.add_row(*(Text(cell) for cell in row))
    summary = Text("\n".join(comparison_lines(comparison, plan)))
    verdict = verdict_text(plan_verdict(plan, comparison) if plan else comparison_verdict(comparison))
    rows = loss_rows(comparison)
    return Group(verdict, table, _loss_table(rows), summary) if rows else Group(verdict, table, summary)


def _loss_table(rows: list[tuple[int, str, str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss, plain", "loss, planned", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    hidden = len(rows) - _LOSS_ROWS
    for step, *losses in rows:
        if hidden <= 1 or step < _LOSS_ROWS or step == len(rows):
            table.add_row(f"{step:,}", *losses)
        elif step == _LOSS_ROWS:
            table.add_row("…", "…", "…", "…")
    return table


def plan_text(plan: Plan) -> str:
    """Return a plan and its frontier as plain text, 100 wide, for `print(plan)`."""
    return text_of(plan_table(plan), "", frontier_table(plan))


def _numerics(numerics: str) -> Text:
    return Text(numerics or "not used", _NUMERICS_STYLE.get(numerics, "dim"))


def _dim(text: str) -> Text:
    return Text(text, "dim")
