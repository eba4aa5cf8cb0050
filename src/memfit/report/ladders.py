"""A ladder as a table, and as one HTML file with its plot: no script, nothing loaded."""

from __future__ import annotations

import html
import io
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.codec import write_atomic
from memfit.ir.ladder import Ladder, Rung
from memfit.report.axes import byte_unit, second_unit
from memfit.report.summary import MISSING, clean, ratio_text, seconds_text
from memfit.units import format_bytes

_COLUMNS = ("rung", "peak", "", "step", "", "largest batch", "samples/s there", "numerics", "outcome")
_STYLES = {"kept": "green", "does not pay": "yellow", "proposed": "cyan", "not available": "dim"}
_COLOURS = {"kept": "#0a7d4f", "does not pay": "#b06d00", "proposed": "#2563c9"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 380, 80, 50


def ladder_table(ladder: Ladder) -> Group:
    """Return a ladder, a row for each rung, and why for those that have no figures."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=Text.assemble(
            ("memfit ladder", "bold"), f" for {clean(ladder.workload)} on {ladder.device}, {_budget(ladder)}"
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
    said: list[RenderableType] = [
        Text(clean(f"{rung.name}: {rung.outcome}; {rung.why}"), "dim") for rung in _rest(ladder)
    ]
    kept = [Text(clean(f"{rung.name}: {rung.why}")) for rung in ladder.rungs if rung.is_measured]
    return Group(table, Text(), *kept, *said)


def ladder_text(ladder: Ladder) -> str:
    """Return a ladder as plain text, 120 wide, for `print(ladder)`."""
    console = Console(width=120, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(ladder_table(ladder))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def write_ladder(path: str | Path, ladder: Ladder) -> Path:
    """Write a ladder's page to a file.

    Raises:
        OutputError: The file can't be written.
    """
    return write_atomic(path, ladder_page(ladder).encode())


def ladder_page(ladder: Ladder) -> str:
    """Return one HTML file with the plot and the table."""
    title = html.escape(clean(f"memfit ladder: {ladder.workload}"))
    head = "".join(f"<th scope=col>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(clean(cell))}</td>" for cell in (*_cells(rung), rung.why)) + "</tr>"
        for rung in ladder.rungs
        if rung.is_measured
    )
    rest = "".join(f"<li><b>{html.escape(r.name)}</b>: {html.escape(clean(r.why))}</li>" for r in _rest(ladder))
    threads = f"{ladder.threads} thread{'s' * (ladder.threads > 1)}"
    made = f"memfit {ladder.memfit_version}, torch {ladder.torch_version}, {threads}"
    budget = _budget(ladder)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1d2433; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #dde2ea; text-align: left; }}
.scroll {{ overflow-x: auto; }} svg {{ max-width: 100%; height: auto; }} text {{ font: 12px system-ui, sans-serif; }}
</style></head><body><main>
<h1>{title}</h1>
<p>Batch of {ladder.batch_size:,} on {html.escape(ladder.device)}, {budget}.</p>
{ladder_plot(ladder)}
<div class="scroll"><table><thead><tr>{head}<th scope=col>what it does</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<h2>Not measured here</h2><ul>{rest}</ul>
</main><footer><p>Measured with {html.escape(made)}.</p></footer></body></html>
"""


def ladder_plot(ladder: Ladder) -> str:
    """Return an SVG of peak against step time: a point for each rung, the kept ones joined in their order."""
    rungs = [(r, r.peak_bytes, r.step_seconds) for r in ladder.rungs if r.peak_bytes and r.step_seconds]
    most_bytes, most_seconds = max(b for _, b, _ in rungs), max(s for _, _, s in rungs)
    unit, unit_bytes = byte_unit(most_bytes)
    time_unit, unit_seconds = second_unit(most_seconds)
    x_end, y_end = 1.25 * most_bytes, 1.15 * most_seconds

    def at(nbytes: float, seconds: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT) * nbytes / x_end
        return x, (_HEIGHT - _BOTTOM) * (1 - seconds / y_end)

    marks = []
    for rung, nbytes, seconds in rungs:
        x, y = at(nbytes, seconds)
        name = html.escape(f"{rung.name} ({rung.outcome})" if rung.outcome != "kept" else rung.name)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOURS[rung.outcome]}"/>')
        marks.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{name}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(b, s) for r, b, s in rungs if r.outcome == "kept"))
    ticks = []
    for part in range(5):
        x, y = at(x_end * part / 4, y_end * part / 4)
        ticks.append(f'<text x="{x:.1f}" y="{_HEIGHT - 30}">{x_end * part / 4 / unit_bytes:.3g}</text>')
        ticks.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_end * part / 4 / unit_seconds:.3g}</text>'
        )
    floor = _HEIGHT - _BOTTOM
    return f"""<svg viewBox="-10 -12 {_WIDTH + 120} {_HEIGHT + 12}" role="img" aria-label="Peak against step time">
<path d="M{_LEFT} 0V{floor}H{_WIDTH}" fill="none" stroke="#8a93a5"/>{"".join(ticks)}
<text x="{_WIDTH - 90}" y="{_HEIGHT - 8}">peak ({unit})</text><text x="0" y="-1">step ({time_unit})</text>
<polyline points="{line}" fill="none" stroke="{_COLOURS["kept"]}" stroke-opacity=".5"/>{"".join(marks)}</svg>"""


def _budget(ladder: Ladder) -> str:
    return (
        f"budget {format_bytes(ladder.budget_bytes)}{'' if ladder.is_budget_given else ', the peak of the plain step'}"
    )


def _rest(ladder: Ladder) -> list[Rung]:
    return [rung for rung in ladder.rungs if not rung.is_measured]


def _cells(rung: Rung) -> tuple[str, ...]:
    assert rung.peak_bytes is not None
    assert rung.step_seconds is not None
    largest = (
        MISSING
        if rung.samples_per_second is None
        else "any"
        if rung.largest_batch is None
        else f"{rung.largest_batch:,}"
    )
    return (
        rung.name,
        format_bytes(rung.peak_bytes),
        "" if rung.peak_ratio is None else ratio_text(rung.peak_ratio, 1),
        seconds_text(rung.step_seconds),
        "" if rung.step_ratio is None else ratio_text(rung.step_ratio, 1),
        largest,
        MISSING if rung.samples_per_second is None else f"{rung.samples_per_second:,.4g}",
        rung.numerics or MISSING,
        rung.outcome,
    )
