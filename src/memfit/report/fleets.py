"""A fleet as a table, and as one HTML file with its plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from memfit.foundations import format_bytes, format_hours
from memfit.ir import Fleet, FleetRow, uses_text, write_atomic
from memfit.report.axes import GRID, Axis
from memfit.report.charts import Chart, ChartRule, Mark, Shape
from memfit.report.next_steps import NextStep
from memfit.report.pages import render_page
from memfit.report.rendering import text_of
from memfit.report.summary import MISSING, clean, seconds_text

COLUMNS = ("", "card", "ranks", "nodes", "needs at most", "step", "training", "cost", "plan")
_NUMBERS = ("ranks", "nodes", "needs at most", "step", "training", "cost")
_FRONT, _COST_FRONT, _ANSWER = "·", "$", "➤"


def fleet_table(fleet: Fleet) -> Group:
    """Return a fleet: its answers, a row for each card that is worth a look, and what was assumed."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=Text.assemble(("memfit fleet", "bold"), f" for {clean(fleet.workload)}, {_asked(fleet)}"),
        title_justify="left",
        title_style="",
    )
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name != "plan")
    for row in shown_rows(fleet):
        late = fleet.within_hours is not None and row.hours > fleet.within_hours
        table.add_row(*(Text(cell) for cell in cells(fleet, row)), style="bright_black" if late else "")
    marks = f"{_ANSWER} an answer   {_FRONT} no other row is better in cards and hours"
    marks += f"   {_COST_FRONT} no other row is better in cost and hours" if fleet.front_by_cost else ""
    table.caption = Text(marks if fleet.within_hours is None else f"{marks}   grey: too late")
    table.caption_justify = "left"
    answers = (Text(line) for line in answer_lines(fleet))
    notes = (Text(clean(note), "dim") for note in _notes(fleet))
    return Group(table, Text(), *answers, *notes)


def fleet_text(fleet: Fleet) -> str:
    """Return a fleet as plain text, 140 wide, for `print(fleet)`."""
    return text_of(fleet_table(fleet), width=140)


def fleet_line(fleet: Fleet) -> str:
    """Return a fleet in a line."""
    return f"for {clean(fleet.workload)!r}: {len(fleet.rows)} rows, {answer_lines(fleet)[0]}"


def shown_rows(fleet: Fleet) -> list[FleetRow]:
    """Return the rows that are shown: the answers, the fronts, and of each card the fewest in time, or the fastest."""
    shown = [*_answers(fleet), *fleet.front, *fleet.front_by_cost]
    for name in dict.fromkeys(row.device for row in fleet.rows):
        of_card = [row for row in fleet.rows if row.device == name]
        in_time = [row for row in of_card if row in fleet.in_time]
        shown.append(min(in_time, key=lambda row: row.ranks) if in_time else min(of_card, key=lambda row: row.hours))
    return sorted({id(row): row for row in shown}.values(), key=lambda row: (row.ranks, row.hours))


def answer_lines(fleet: Fleet) -> list[str]:
    """Return the answers in sentences, and what comes nearest where nothing is in time."""
    found = []
    fewest, cheapest, fastest = fleet.fewest, fleet.cheapest, fleet.fastest
    if fewest is None and fastest is not None and fleet.within_hours is not None:
        found.append(
            f"No fleet finishes within {format_hours(fleet.within_hours)}. Fastest: {_said(fastest)}, in"
            f" {_span(fleet, fastest)}"
        )
    elif fewest is not None:
        found.append(f"Fewest cards: {_said(fewest)}, in {_span(fleet, fewest)}")
    if cheapest is not None:
        found.append(f"Cheapest: {_said(cheapest)}, for {_cost(cheapest)} in {_span(fleet, cheapest)}")
    if fastest is not None and fewest is not None:
        found.append(f"Fastest: {_said(fastest)}, in {_span(fleet, fastest)}")
    return found


def cells(fleet: Fleet, row: FleetRow) -> tuple[str, ...]:
    """Return the cells of a row, by `COLUMNS`."""
    marks = {_ANSWER: _answers(fleet), _FRONT: fleet.front, _COST_FRONT: fleet.front_by_cost}
    mark = next((mark for mark, rows in marks.items() if row in rows), "")
    return (
        mark,
        clean(row.device),
        f"{row.ranks:,}",
        f"{row.nodes:,}",
        format_bytes(row.held_bytes),
        seconds_text(row.step_seconds),
        format_hours(row.hours),
        _cost(row) if row.cost is not None else MISSING,
        clean(plan_text(row)),
    )


def plan_text(row: FleetRow) -> str:
    """Return what a row's plan sets, without the number of its ranks."""
    kept = [use for use in row.uses if use.name not in ("sharding", "precision")]
    sharding = row.levers.sharding
    parts: list[str] = [row.levers.precision]
    if sharding is not None:
        parts.append(sharding.mode + (f" in {sharding.replicas} copies" if sharding.replicas > 1 else ""))
    return ", ".join([*parts, *([uses_text(kept)] if kept else [])])


def write_fleet(path: str | Path, fleet: Fleet) -> Path:
    """Write a fleet's page to a file.

    Raises:
        OutputError: The file can't be written.
    """
    return write_atomic(path, fleet_page(fleet).encode())


def fleet_page(fleet: Fleet) -> str:
    """Return one HTML file with the plot and the table."""
    return render_page(
        "fleet.html.j2",
        {"fleet": fleet_chart(fleet)},
        fleet=fleet,
        asked=_asked(fleet),
        answers=answer_lines(fleet),
        columns=COLUMNS,
        numbers=_NUMBERS,
        rows=[cells(fleet, row) for row in shown_rows(fleet)],
        notes=_notes(fleet),
        steps=_next_steps(fleet),
    )


@dataclass(frozen=True)
class LogAxis(Axis):
    """A logarithmic axis, with a tick at each power of a base."""

    base: float = 2.0

    def at(self, value: float) -> float:
        return GRID * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[tuple[float, str]]:
        first = math.ceil(math.log(self.low / self.size, self.base) - 1e-9)
        last = math.floor(math.log(self.high / self.size, self.base) + 1e-9)
        values = [self.base**n * self.size for n in range(first, last + 1)]
        return [(self.at(value), f"{value / self.size:,.4g}") for value in values]


def fleet_chart(fleet: Fleet) -> Chart:
    """Return a chart of hours against cards, both logarithmic: a point a row, those of the front joined."""
    hours = [row.hours for row in fleet.rows]
    limits = [fleet.within_hours] if fleet.within_hours is not None else []
    x = LogAxis(0.9, 1.1 * max(row.ranks for row in fleet.rows), "cards")
    y = LogAxis(0.8 * min(hours + limits), 1.25 * max(hours + limits), "training (hours)", 1.0, 10.0)
    if y.high / y.low < 100:
        y = LogAxis(y.low, y.high, y.title, 1.0, 2.0)
    front, answers = fleet.front, _answers(fleet)
    marks = [
        Mark(
            x.at(row.ranks),
            y.at(row.hours),
            "star" if row in answers else "circle" if row in front else "square",
            "var(--chosen)" if row in answers else "var(--accent)" if row in front else "var(--quiet)",
            hollow=row not in front and row not in answers,
            tip=clean(f"{row.ranks} × {row.device}, {plan_text(row)}") + f"\n{_span(fleet, row)}",
            text=clean(f"{row.ranks} × {row.device}") if row in answers else "",
            series="an answer" if row in answers else "Pareto front" if row in front else "others",
        )
        for row in sorted(fleet.rows, key=lambda row: (row in front, row in answers))
    ]
    line = [(x.at(row.ranks), y.at(row.hours)) for row in front]
    rules = [ChartRule("budget", y.at(limit)) for limit in limits]
    return Chart(x=x, y=y, shapes=[Shape(line, "var(--accent)", name="front")], rules=rules, marks=marks)


def _answers(fleet: Fleet) -> list[FleetRow]:
    return [row for row in (fleet.fewest, fleet.cheapest, fleet.fastest) if row is not None]


def _next_steps(fleet: Fleet) -> list[NextStep]:
    row = fleet.fewest or fleet.fastest
    if row is None:
        return []
    why = f"Plan for {_said(row)} with every lever, and write the plan to a file:"
    ranks = f" --world-size {row.ranks}" if row.ranks > 1 else ""
    command = f"memfit plan WORKLOAD --device {row.device}{ranks} --budget {fleet.budget} --numerics {fleet.allowed}"
    return [NextStep(why, f"{command} -o plan.json")]


def _notes(fleet: Fleet) -> list[str]:
    misfits = [
        f"{each.device}: no plan fits; the smallest one found needs {format_bytes(each.held_bytes)} of"
        f" {format_bytes(each.budget_bytes)}, on {each.ranks} ranks"
        for each in fleet.misfits
    ]
    prices = [
        f"price of {name}: {price.per_hour:g} {price.currency} an hour on {price.date.isoformat()}, as you gave it"
        for name, price in fleet.prices.items()
    ]
    return [*misfits, *prices, *fleet.notes]


def _asked(fleet: Fleet) -> str:
    within = "" if fleet.within_hours is None else f" within {format_hours(fleet.within_hours)}"
    return f"{fleet.steps:,} steps of {fleet.batch_size:,} samples{within}, budget {clean(fleet.budget)} a card"


def _said(row: FleetRow) -> str:
    return f"{row.ranks:,} × {clean(row.device)}"


def _span(fleet: Fleet, row: FleetRow) -> str:
    low, high = row.hours * (1 - fleet.step_error), row.hours * (1 + fleet.step_error)
    return f"{format_hours(row.hours)} ({format_hours(low)} to {format_hours(high)})"


def _cost(row: FleetRow) -> str:
    assert row.cost is not None
    return f"{row.cost:,.0f} {clean(row.currency)}" if row.cost >= 100 else f"{row.cost:,.2f} {clean(row.currency)}"
