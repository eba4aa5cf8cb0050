"""Tables for the terminal, and Rich's tables and text as plain text and as HTML.

Nothing here reads Rich's markup: names come from the user's model and may hold brackets.
"""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.style import Style, StyleType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes
from memfit.ir import Comparison, Plan, Prediction, allows
from memfit.report.summary import (
    budget_text,
    change_text,
    chosen_index,
    clean,
    comparison_lines,
    comparison_rows,
    fit_text,
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
_Block = list[tuple[str, RenderableType]]


def text_of(*parts: RenderableType, width: int = 100) -> str:
    """Return tables and text as plain text."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def html_of(part: RenderableType) -> str:
    """Return tables and text as HTML, with all markup escaped, Rich's and HTML's.

    Raises:
        TypeError: The part is not a Table, Text, Group or str.
    """
    if isinstance(part, Group):
        return "".join(map(html_of, part.renderables))
    if isinstance(part, Table):
        return _table_html(part)
    if isinstance(part, Text | str):
        return f"<p>{_inline(part)}</p>" if str(part).strip() else ""
    raise TypeError(f"a {type(part).__name__} can't be shown as HTML")


def _table_html(table: Table) -> str:
    columns = table.columns

    def row(tag: str, cells: Iterable[RenderableType], look: StyleType | None = None) -> str:
        classes = (_class(*["right"] * (column.justify == "right"), *_names(column.style)) for column in columns)
        inside = (f"<{tag}{named}>{_inline(cell)}</{tag}>" for named, cell in zip(classes, cells, strict=True))
        return f"<tr{_class(*_names(look))}>{''.join(inside)}</tr>"

    cells = zip(*(column.cells for column in columns), strict=True)
    parts = {
        "thead": row("th", [column.header for column in columns]) if table.show_header else "",
        "tbody": "".join(row("td", each, own.style) for own, each in zip(table.rows, cells, strict=True)),
        "tfoot": row("td", [column.footer for column in columns]) if table.show_footer else "",
    }
    caption = f"<caption>{_inline(table.title)}</caption>" if table.title else ""
    inside = "".join(f"<{tag}>{rows}</{tag}>" for tag, rows in parts.items() if rows)
    after = f"<p>{_inline(table.caption)}</p>" if table.caption else ""
    return f'<div class="scroll"><table>{caption}{inside}</table></div>{after}'


def _inline(part: RenderableType) -> str:
    """Return the HTML of a part inside a cell, with the styles of a text's parts."""
    if isinstance(part, str):
        return "<br>".join(html.escape(line) for line in part.strip("\n").split("\n"))
    if not isinstance(part, Text):
        return html_of(part)
    cuts = sorted({0, len(part.plain), *(at for span in part.spans for at in (span.start, span.end))})
    pieces = []
    for start, end in itertools.pairwise(cut for cut in cuts if cut <= len(part.plain)):
        over = [span.style for span in part.spans if span.start <= start and span.end >= end]
        named = _class(*dict.fromkeys(name for style in (part.style, *over) for name in _names(style)))
        piece = _inline(part.plain[start:end])
        pieces.append(f"<span{named}>{piece}</span>" if named else piece)
    return "".join(pieces)


def _class(*names: str) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _names(style: StyleType | None) -> Iterator[str]:
    """Yield the style sheet's classes for a style: bold, dim, and its colour."""
    parsed = style if isinstance(style, Style) else Style.parse(style or "none")
    if parsed.bold:
        yield "strong"
    if parsed.dim or (parsed.color and parsed.color.name == "bright_black"):
        yield "dim"
    if parsed.color and parsed.color.name in ("green", "red", "yellow", "cyan"):
        yield parsed.color.name


def listing(
    title: Text, names: Iterable[str], numbers: Collection[str], *, wraps: str, title_style: StyleType | None = ""
) -> Table:
    """Return a table without rows yet: the columns of numbers stand to the right, and one column may wrap."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.title_style = title_style
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != wraps)
    return table


def plan_table(plan: Plan) -> Table:
    """Return a plan: its verdict, what it costs, what it sets, and how sure that is."""
    plan_name = f"memfit plan for {clean(plan.workload)} on {clean(plan.device)}"
    title = Text.assemble(verdict_text(plan_verdict(plan)), "\n", (plan_name, "dim"))
    table = Table(
        Column(no_wrap=True, style="bold"),
        Column(overflow="fold"),
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 3, 0, 0),
        title=title,
        title_justify="left",
        title_style="",
    )
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


def _cost_block(plan: Plan) -> _Block:
    plain, ours = plan.plain, plan.predicted
    fits = ours.peak_upper_bytes <= plan.budget_bytes
    peak = Text.assemble(
        (format_bytes(ours.peak_bytes), "bold green" if fits else "bold red"),
        f" predicted, at most {format_bytes(ours.peak_upper_bytes)}: ",
        fit_text(ours.peak_upper_bytes, plan.budget_bytes),
    )
    speed = beside_text(ours.step_seconds, plain.step_seconds, "plain")
    return [
        ("Budget", Text(budget_text(plan))),
        ("Peak", peak),
        ("", _dim(f"plain {format_bytes(plain.peak_bytes)}, {change_text(ours.peak_bytes, plain.peak_bytes)}")),
        *(("", _dim(line)) for line in place_lines(ours)),
        ("Step", Text.assemble((seconds_text(ours.step_seconds), "bold"), " predicted, ", (speed, "bold"))),
        ("", _dim(f"plain {seconds_text(plain.step_seconds)}")),
    ]


def _lever_block(plan: Plan) -> _Block:
    levers = Table.grid(Column(no_wrap=True), Column(), Column(no_wrap=True), padding=(0, 3, 0, 0))
    for row in lever_rows(plan):
        levers.add_row(row.name, Text(row.setting), _numerics(row.numerics))
    if not levers.rows:
        levers.add_row("none: the step runs as it is", "", "")
    regions = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for group in region_groups(plan.levers.regions):
        regions.add_row(Text(group.name), _dim(group.action))
    return [
        ("Numerics", Text.assemble(_numerics(plan.numerics), f", allowed: {plan.allowed}")),
        ("Levers", levers),
        *([("Regions", regions)] if regions.rows else []),
    ]


def _measured_block(plan: Plan) -> _Block:
    steps = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for row in measured_plan_rows(plan):
        mark, style = (f"{_CHOSEN} ", "bold") if row.is_this else ("  ", "dim")
        steps.add_row(f"{mark}{row.measured}", f"predicted {row.predicted}", Text(row.levers), style=style)
    return [("Measured", steps)] if steps.rows else []


def _solver_block(plan: Plan) -> _Block:
    solution, proof = plan.solution, proof_text(plan)
    bound = f"bound {seconds_text(solution.bound_seconds)}, gap {share_text(solution.gap, 1)}"
    versions = f"memfit {plan.memfit_version}, torch {plan.torch_version}, fingerprint {plan.fingerprint[:12]}"
    return [
        ("Solver", Text(solver_text(plan))),
        ("", _dim(f"{bound}, solved in {seconds_text(solution.solve_seconds)}")),
        *([("Proof", Text(proof))] if proof else []),
        *(("" if i else "Notes", Text(clean(note))) for i, note in enumerate(plan.notes)),
        ("Made by", _dim(clean(versions))),
    ]


def frontier_table(plan: Plan, say: Callable[[str], str] = str) -> Table | Text:
    """Return the frontier: the plans that are allowed, first those that fit, each from the fastest to the slowest.

    What stands under "at most" is held against the budget. The plan's own point is marked. Of the classes that the user
    did not allow, a line below the table says what each would buy.

    Args:
        say: Puts a line in the words of the interface.
    """
    if not plan.frontier:
        return _dim("The plan has no frontier.")
    names = ("", "at most", "peak", "step", "of\nplain", "levers", "numerics")
    table = listing(Text("Frontier", "bold"), names, names[1:5], wraps="levers", title_style=None)
    own = chosen_index(plan)
    chosen = None if own is None else plan.frontier[own]
    shown = [c for c in plan.frontier if allows(plan.allowed, c.numerics) or c is chosen]
    shown.sort(key=lambda c: (c.held_bytes > plan.budget_bytes, c.step_seconds))
    meant = {_CHOSEN: "this plan"} if chosen is not None else {"": "this plan is not a point of the frontier"}
    for candidate in shown:
        marks = {
            _CHOSEN: candidate is chosen,
            _OVER: candidate.held_bytes > plan.budget_bytes,
            _CAPTURED: candidate.is_captured and candidate is not chosen,
        }
        table.add_row(
            "".join(mark for mark, is_set in marks.items() if is_set),
            format_bytes(candidate.held_bytes),
            format_bytes(candidate.peak_bytes),
            seconds_text(candidate.step_seconds),
            ratio_text(candidate.step_seconds, plan.plain.step_seconds),
            Text(levers_text(candidate)),
            _numerics(candidate.numerics),
            style="bold" if marks[_CHOSEN] else "dim" if marks[_OVER] else "",
        )
    if any(c.held_bytes > plan.budget_bytes for c in shown):
        meant[_OVER] = f"over the budget of {format_bytes(plan.budget_bytes)}"
    if any(c.is_captured and c is not chosen for c in shown):
        meant[_CAPTURED] = "captured with its own levers, like this plan"
    key = "   ".join(f"{mark} {text}".lstrip() for mark, text in meant.items())
    table.caption = Text("\n".join(["", key, *map(say, offers(plan))]))
    table.caption_justify = "left"
    return table


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
            eighths = max(1, round(8 * _BAR_CELLS * count / largest))  # anything above nothing is seen
            bar = Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), "cyan")
            table.add_row(Text(clean(name)), format_bytes(count), share_text(count, prediction.peak_bytes), bar)
    table.caption = Text("\n".join(place_lines(prediction)))
    table.caption_justify = "left"
    return table


def comparison_table(plan: Plan | None, comparison: Comparison) -> Group:
    """Return the verdict, what was measured of both steps beside what a plan predicts, and the losses."""
    name = "Predicted and measured" if plan else "Plain and planned step"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(name, "bold"), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("plain", "planned", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison_rows(plan, comparison) if plan else measured_rows(comparison):
        table.add_row(*map(Text, row))
    losses = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss, plain", "loss, planned", "difference"):
        losses.add_column(name, justify="right", no_wrap=True)
    rows = loss_rows(comparison)
    hidden = len(rows) - _LOSS_ROWS
    for step, *texts in rows:
        if hidden <= 1 or step < _LOSS_ROWS or step == len(rows):
            losses.add_row(f"{step:,}", *texts)
        elif step == _LOSS_ROWS:
            losses.add_row("…", "…", "…", "…")
    verdict = verdict_text(plan_verdict(plan, comparison) if plan else comparison_verdict(comparison))
    summary = Text("\n".join(comparison_lines(comparison, plan)))
    return Group(verdict, table, *([losses] if rows else []), summary)


def _numerics(numerics: str) -> Text:
    return Text(numerics or "not used", _NUMERICS_STYLE.get(numerics, "dim"))


def _dim(text: str) -> Text:
    return Text(text, "dim")
