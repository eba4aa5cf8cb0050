"""Ladders and fleets as tables, and as one HTML file with its plot."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from memfit.foundations import format_bytes, format_hours
from memfit.ir import Fleet, FleetRow, Ladder, Rung, uses_text
from memfit.report.charts import GRID, Axis, Chart, ChartRule, Mark, Shape, byte_axis, second_axis
from memfit.report.html import render_page
from memfit.report.next_steps import NextStep, budget_argument
from memfit.report.summary import MISSING, clean, ratio_text, seconds_text
from memfit.report.tables import listing

_RUNG_COLUMNS = ("rung", "peak", "", "step", "", "largest batch", "samples/s there", "numerics", "outcome")
_LOOKS = {
    "kept": ("green", "circle", "var(--good)"),
    "does not pay": ("yellow", "triangle", "var(--chosen)"),
    "proposed": ("cyan", "diamond", "var(--accent)"),
}
"""By outcome of a measured rung: its style in the terminal, and the symbol and colour of its mark."""
_COLUMNS = ("", "card", "ranks", "nodes", "needs at most", "step", "training", "cost", "plan")
_NUMBERS = ("ranks", "nodes", "needs at most", "step", "training", "cost")
_FRONT, _COST_FRONT, _ANSWER = "·", "$", "➤"


def ladder_table(ladder: Ladder) -> Group:
    """Return a ladder as a table with a row for each measured rung, and the reasons why others were not measured."""
    for_what = f" for {clean(ladder.workload)} on {ladder.device}, {_budget(ladder)}"
    title = Text.assemble(("memfit tools ladder", "bold"), for_what)
    table = listing(title, _RUNG_COLUMNS, ("", "peak", "step", "largest batch", "samples/s there"), wraps="outcome")
    measured = [rung for rung in ladder.rungs if rung.is_measured]
    for rung in measured:
        *cells, outcome = _rung_cells(rung)
        table.add_row(*map(Text, cells), Text(outcome, _LOOKS[outcome][0]))
    said = (Text(clean(f"{rung.name}: {rung.why}")) for rung in measured)
    unmeasured = (Text(clean(f"{rung.name}: {rung.outcome}; {rung.why}"), "dim") for rung in _rest(ladder))
    return Group(table, Text(), *said, *unmeasured)


def ladder_page(ladder: Ladder) -> str:
    """Return one HTML file with the plot and the table."""
    return render_page(
        "ladder.html.j2",
        {"ladder": ladder_chart(ladder)},
        ladder=ladder,
        budget=_budget(ladder),
        columns=_RUNG_COLUMNS,
        rows=[(rung, _rung_cells(rung)) for rung in ladder.rungs if rung.is_measured],
        rest=_rest(ladder),
        steps=_after_ladder(ladder),
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
            *_LOOKS[rung.outcome][1:],
            hollow=rung.outcome != "kept",
            tip=clean(f"{rung.name}: {rung.outcome}") + f"\n{format_bytes(nbytes)}, {seconds_text(seconds)}",
            text=clean(rung.name),
            series=rung.outcome,
        )
        for rung, nbytes, seconds in rungs
    ]
    kept = [(x.at(nbytes), y.at(seconds)) for rung, nbytes, seconds in rungs if rung.outcome == "kept"]
    budget = ChartRule("budget", x.at(ladder.budget_bytes), upright=True)
    rules = [budget] if ladder.is_budget_given and budget.at <= GRID else []
    return Chart(x=x, y=y, shapes=[Shape(kept, _LOOKS["kept"][2], name="kept")], rules=rules, marks=marks)


def _after_ladder(ladder: Ladder) -> list[NextStep]:
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


def _rung_cells(rung: Rung) -> tuple[str, ...]:
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


def fleet_table(fleet: Fleet) -> Group:
    """Return a fleet: its answers, a row for each card that is worth a look, and what was assumed."""
    title = Text.assemble(("memfit fleet", "bold"), f" for {clean(fleet.workload)}, {_asked(fleet)}")
    table = listing(title, _COLUMNS, _NUMBERS, wraps="plan")
    for row in shown_rows(fleet):
        late = fleet.within_hours is not None and row.hours > fleet.within_hours
        table.add_row(*map(Text, _cells(fleet, row)), style="bright_black" if late else "")
    marks = f"{_ANSWER} an answer   {_FRONT} no other row is better in cards and hours"
    marks += f"   {_COST_FRONT} no other row is better in cost and hours" if fleet.front_by_cost else ""
    table.caption = Text(marks if fleet.within_hours is None else f"{marks}   grey: too late")
    table.caption_justify = "left"
    notes = (Text(clean(note), "dim") for note in _notes(fleet))
    return Group(table, Text(), *map(Text, answer_lines(fleet)), *notes)


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
        nearest = f"{_said(fastest)}, in {_span(fleet, fastest)}"
        found.append(f"No fleet finishes within {format_hours(fleet.within_hours)}. Fastest: {nearest}")
    elif fewest is not None:
        found.append(f"Fewest cards: {_said(fewest)}, in {_span(fleet, fewest)}")
    if cheapest is not None:
        found.append(f"Cheapest: {_said(cheapest)}, for {_cost(cheapest)} in {_span(fleet, cheapest)}")
    if fastest is not None and fewest is not None:
        found.append(f"Fastest: {_said(fastest)}, in {_span(fleet, fastest)}")
    return found


def _cells(fleet: Fleet, row: FleetRow) -> tuple[str, ...]:
    marks = {_ANSWER: _answers(fleet), _FRONT: fleet.front, _COST_FRONT: fleet.front_by_cost}
    return (
        next((mark for mark, rows in marks.items() if row in rows), ""),
        clean(row.device),
        f"{row.ranks:,}",
        f"{row.nodes:,}",
        format_bytes(row.held_bytes),
        seconds_text(row.step_seconds),
        format_hours(row.hours),
        _cost(row),
        clean(_settings(row)),
    )


def _settings(row: FleetRow) -> str:
    """Return what a row's plan sets, without the number of its ranks."""
    kept = [use for use in row.uses if use.name not in ("sharding", "precision")]
    sharding = row.levers.sharding
    parts: list[str] = [row.levers.precision]
    if sharding is not None:
        parts.append(sharding.mode + (f" in {sharding.replicas} copies" if sharding.replicas > 1 else ""))
    return ", ".join([*parts, *([uses_text(kept)] if kept else [])])


def fleet_page(fleet: Fleet) -> str:
    """Return one HTML file with the plot and the table."""
    return render_page(
        "fleet.html.j2",
        {"fleet": fleet_chart(fleet)},
        fleet=fleet,
        asked=_asked(fleet),
        answers=answer_lines(fleet),
        columns=_COLUMNS,
        numbers=_NUMBERS,
        rows=[_cells(fleet, row) for row in shown_rows(fleet)],
        notes=_notes(fleet),
        steps=_after_fleet(fleet),
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
    limits = [fleet.within_hours] if fleet.within_hours is not None else []
    hours = [*(row.hours for row in fleet.rows), *limits]
    low, high = 0.8 * min(hours), 1.25 * max(hours)
    x = LogAxis(0.9, 1.1 * max(row.ranks for row in fleet.rows), "cards")
    y = LogAxis(low, high, "training (hours)", 1.0, 2.0 if high / low < 100 else 10.0)
    front, answers = fleet.front, _answers(fleet)

    def mark(row: FleetRow) -> Mark:
        name = clean(f"{row.ranks} × {row.device}")
        tip = f"{clean(f'{row.ranks} × {row.device}, {_settings(row)}')}\n{_span(fleet, row)}"
        at = x.at(row.ranks), y.at(row.hours)
        if row in answers:
            return Mark(*at, "star", "var(--chosen)", tip=tip, text=name, series="an answer")
        if row in front:
            return Mark(*at, "circle", "var(--accent)", tip=tip, series="Pareto front")
        return Mark(*at, "square", "var(--quiet)", hollow=True, tip=tip, series="others")

    marks = [mark(row) for row in sorted(fleet.rows, key=lambda row: (row in front, row in answers))]
    line = [(x.at(row.ranks), y.at(row.hours)) for row in front]
    rules = [ChartRule("budget", y.at(limit)) for limit in limits]
    return Chart(x=x, y=y, shapes=[Shape(line, "var(--accent)", name="front")], rules=rules, marks=marks)


def _answers(fleet: Fleet) -> list[FleetRow]:
    return [row for row in (fleet.fewest, fleet.cheapest, fleet.fastest) if row is not None]


def _after_fleet(fleet: Fleet) -> list[NextStep]:
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
    if row.cost is None:
        return MISSING
    return f"{row.cost:,.{0 if row.cost >= 100 else 2}f} {clean(row.currency)}"
