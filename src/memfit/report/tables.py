"""Tables for the terminal, and Rich's tables and text as plain text and as HTML.

Nothing here reads Rich's markup: names come from the user's model and may hold brackets.
"""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.style import Style, StyleType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes, format_seconds
from memfit.ir import Comparison, Device, Plan, Prediction, RangeReport, RunRecord, Verification, allows
from memfit.report.summary import (
    beside_text,
    change_text,
    chosen_index,
    clean,
    comparison_lines,
    comparison_rows,
    comparison_verdict,
    fit_text,
    lever_rows,
    levers_text,
    loss_rows,
    measured_plan_rows,
    measured_rows,
    offers,
    place_lines,
    plan_verdict,
    prediction_verdict,
    proof_text,
    ratio_text,
    region_groups,
    retries_text,
    seconds_text,
    share_text,
    solver_text,
    verification_verdict,
    waiting_text,
)

_BAR_CELLS = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LOSS_ROWS = 8
_CLASSES_SHOWN, _GRADIENTS_SHOWN, _LINES = 6, 5, 8
_NO_FIGURE = "–"
_NUMERICS_STYLE = {"exact": "green", "reordered": "cyan", "reduced": "yellow", "changed": "red"}
_CHOSEN, _OVER, _CAPTURED = "▶", "▲", "✓"
_PLAIN: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False}
_Fact = tuple[str, RenderableType]


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
    if isinstance(part, Text | str):
        return f"<p>{_inline(part)}</p>" if str(part).strip() else ""
    if not isinstance(part, Table):
        raise TypeError(f"a {type(part).__name__} can't be shown as HTML")
    columns = part.columns

    def row(tag: str, cells: Iterable[RenderableType], look: StyleType | None = None) -> str:
        classes = (_class(*["right"] * (column.justify == "right"), *_names(column.style)) for column in columns)
        inside = (f"<{tag}{named}>{_inline(cell)}</{tag}>" for named, cell in zip(classes, cells, strict=True))
        return f"<tr{_class(*_names(look))}>{''.join(inside)}</tr>"

    cells = zip(*(column.cells for column in columns), strict=True)
    parts = {
        "thead": row("th", [column.header for column in columns]) if part.show_header else "",
        "tbody": "".join(row("td", each, own.style) for own, each in zip(part.rows, cells, strict=True)),
        "tfoot": row("td", [column.footer for column in columns]) if part.show_footer else "",
    }
    caption = f"<caption>{_inline(part.title)}</caption>" if part.title else ""
    inside = "".join(f"<{tag}>{rows}</{tag}>" for tag, rows in parts.items() if rows)
    after = f"<p>{_inline(part.caption)}</p>" if part.caption else ""
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


def table_of(columns: Iterable[str | Column], rows: Iterable[Iterable[RenderableType]] = (), **look: Any) -> Table:
    """Return a table of rows, its title and caption to the left.

    Args:
        look: As for `Table`.
    """
    table = Table(*columns, title_justify="left", caption_justify="left", **look)
    for row in rows:
        table.add_row(*row)
    return table


def figures(*names: str) -> list[Column]:
    """Return columns of numbers, which stand to the right."""
    return [Column(name, justify="right", no_wrap=True) for name in names]


def listing(title: Text, names: Iterable[str], numbers: Sequence[str], *, wraps: str, **look: Any) -> Table:
    """Return a table without rows yet: the columns of numbers stand to the right, and one column may wrap."""
    columns = (Column(n, justify="right" if n in numbers else "left", no_wrap=n != wraps) for n in names)
    look = {"title_style": "", **look}
    return table_of(columns, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, **look)


def _grid(rows: Iterable[Iterable[RenderableType]], *columns: Column) -> Table:
    grid = Table.grid(*columns, padding=(0, 3, 0, 0))
    for row in rows:
        grid.add_row(*row)
    return grid


def verdict_text(verdict: str) -> Text:
    """Return a verdict in the colour of what it says."""
    colours = {"Fits": "green", "Verified": "green", "Does": "red", "Verification": "red", "May": "yellow"}
    return Text(verdict, f"bold {colours.get(verdict.split(':')[0].split()[0], '')}".strip())


def plan_table(plan: Plan) -> Table:
    """Return a plan: its verdict, what it costs, what it sets, and how sure that is."""
    plain, ours, solution = plan.plain, plan.predicted, plan.solution
    fits = ours.peak_upper_bytes <= plan.budget_bytes
    share = f", {clean(plan.budget_share)}" if plan.budget_share else ""
    peak = Text.assemble(
        (format_bytes(ours.peak_bytes), "bold green" if fits else "bold red"),
        f" predicted, at most {format_bytes(ours.peak_upper_bytes)}: ",
        fit_text(ours.peak_upper_bytes, plan.budget_bytes),
    )
    speed = beside_text(ours.step_seconds, plain.step_seconds, "plain")
    cost: list[_Fact] = [
        ("Budget", Text(format_bytes(plan.budget_bytes) + share)),
        ("Peak", peak),
        ("", _dim(f"plain {format_bytes(plain.peak_bytes)}, {change_text(ours.peak_bytes, plain.peak_bytes)}")),
        *(("", _dim(line)) for line in place_lines(ours)),
        ("Step", Text.assemble((seconds_text(ours.step_seconds), "bold"), " predicted, ", (speed, "bold"))),
        ("", _dim(f"plain {seconds_text(plain.step_seconds)}")),
    ]

    used = [(row.name, Text(row.setting), _numerics(row.numerics)) for row in lever_rows(plan)]
    levers = _grid(used, Column(no_wrap=True), Column(), Column(no_wrap=True))
    if not used:
        levers.add_row("none: the step runs as it is", "", "")
    groups = [(Text(group.name), _dim(group.action)) for group in region_groups(plan.levers.regions)]
    settings: list[_Fact] = [
        ("Numerics", Text.assemble(_numerics(plan.numerics), f", allowed: {plan.allowed}")),
        ("Levers", levers),
        *([("Regions", _grid(groups, Column(overflow="fold"), Column(overflow="fold")))] if groups else []),
    ]

    steps = _grid((), Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"))
    for measured, predicted, uses, is_this in measured_plan_rows(plan):
        mark, style = (f"{_CHOSEN} ", "bold") if is_this else ("  ", "dim")
        steps.add_row(f"{mark}{measured}", f"predicted {predicted}", Text(uses), style=style)

    proof, bound = proof_text(plan), f"bound {seconds_text(solution.bound_seconds)}, gap {share_text(solution.gap, 1)}"
    versions = f"memfit {plan.memfit_version}, torch {plan.torch_version}, fingerprint {plan.fingerprint[:12]}"
    made: list[_Fact] = [
        ("Solver", Text(solver_text(plan))),
        ("", _dim(f"{bound}, solved in {seconds_text(solution.solve_seconds)}")),
        *([("Proof", Text(proof))] if proof else []),
        *(("" if i else "Notes", Text(clean(note))) for i, note in enumerate(plan.notes)),
        ("Made by", _dim(clean(versions))),
    ]
    tried: list[_Fact] = [("Measured", steps)] if steps.rows else []
    name = f"memfit plan for {clean(plan.workload)} on {clean(plan.device)}"
    title = Text.assemble(verdict_text(plan_verdict(plan)), "\n", (name, "dim"))
    return table_of(
        [Column(no_wrap=True, style="bold"), Column(overflow="fold")],
        [row for block in (cost, settings, tried, made) if block for row in (("", ""), *block)],
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 3, 0, 0),
        title=title,
        title_style="",
    )


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
    return table


def prediction_table(prediction: Prediction, title: str) -> Table:
    """Return a predicted peak by category, the largest first, and what runs there."""
    rows: list[tuple[RenderableType, ...]] = []
    largest = max(prediction.by_category.values(), default=0)
    for name, count in sorted(prediction.by_category.items(), key=lambda item: -item[1]):
        if count > 0:
            eighths = max(1, round(8 * _BAR_CELLS * count / largest))  # anything above nothing is seen
            bar = Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), "cyan")
            rows.append((Text(clean(name)), format_bytes(count), share_text(count, prediction.peak_bytes), bar))
    table = table_of(
        [Column("at the peak", Text("peak allocated"), no_wrap=True), *figures("bytes", "share"), Column(no_wrap=True)],
        rows,
        show_footer=True,
        title=Text(clean(title), "bold"),
        caption=Text("\n".join(place_lines(prediction))),
        **_PLAIN,
    )
    table.columns[1].footer = Text(format_bytes(prediction.peak_bytes))
    return table


def comparison_table(plan: Plan | None, comparison: Comparison) -> Group:
    """Return the verdict, what was measured of both steps beside what a plan predicts, and the losses."""
    name = "Predicted and measured" if plan else "Plain and planned step"
    measured = comparison_rows(plan, comparison) if plan else measured_rows(comparison)
    columns = [Column(no_wrap=True), *figures("plain", "planned", "ratio")]
    table = table_of(columns, (map(Text, row) for row in measured), title=Text(name, "bold"), **_PLAIN)
    rows = [(f"{step:,}", *texts) for step, *texts in loss_rows(comparison)]
    if len(rows) > _LOSS_ROWS + 1:
        rows[_LOSS_ROWS - 1 : -1] = [("…", "…", "…", "…")]
    losses = table_of(figures("step", "loss, plain", "loss, planned", "difference"), rows, **_PLAIN)
    verdict = verdict_text(plan_verdict(plan, comparison) if plan else comparison_verdict(comparison))
    summary = Text("\n".join(comparison_lines(comparison, plan)))
    return Group(verdict, table, *([losses] if rows else []), summary)


def estimate_page(prediction: Prediction, title: str) -> Group:
    """Return a prediction: its verdict, bytes at the peak, their share of the device, speed, and notes."""
    facts = ((name, Text(v) if isinstance(v, str) else v) for name, v in (*_memory(prediction), *_speed(prediction)))
    verdict = verdict_text(prediction_verdict(prediction))
    grid = _grid(facts, Column(no_wrap=True, style="bold"), Column(overflow="fold"))
    parts: list[RenderableType] = [verdict, prediction_table(prediction, title), grid]
    if prediction.throughput is not None:
        by_class = prediction.throughput.seconds_by_class
        rows = list(by_class.items())
        shown, further = rows[:_CLASSES_SHOWN], rows[_CLASSES_SHOWN:]
        if further:
            shown.append((f"{len(further)} other classes", sum(seconds for _, seconds in further)))
        total = sum(by_class.values())
        times = ((name, seconds_text(seconds), share_text(seconds, total)) for name, seconds in shown)
        columns = [Column("time by class", no_wrap=True), *figures("seconds", "share")]
        parts += [Text(), table_of(columns, times, **_PLAIN)]
    return Group(*parts, *(_dim(clean(note)) for note in prediction.notes))


def _memory(prediction: Prediction) -> Iterator[_Fact]:
    upper_bytes, room_bytes = prediction.peak_upper_bytes, prediction.device_bytes
    if prediction.peak_reserved_bytes is None:
        yield "Peak", f"{format_bytes(prediction.peak_bytes)}, at most {format_bytes(upper_bytes)}"
    else:
        reserved = f"{format_bytes(prediction.peak_reserved_bytes)} by PyTorch's allocator"
        yield "Reserved", f"{reserved}, at most {format_bytes(upper_bytes)}"
    if room_bytes is not None:
        fits = upper_bytes <= room_bytes
        verdict = (fit_text(upper_bytes, room_bytes), "green" if fits else "bold red")
        yield "Device", Text.assemble(f"{format_bytes(room_bytes)} for a step: ", verdict)
        if not fits and prediction.retries:
            often = f"it runs there if the allocator empties its cache {prediction.retries} times in two steps"
            yield "", f"{often}; each time the GPU waits"
    if prediction.process_bytes is not None:
        context = f"{format_bytes(prediction.context_bytes or 0)} for the driver's context, outside the allocator"
        text = f"{format_bytes(prediction.process_bytes)}, including {context}"
        if prediction.process_upper_bytes is not None:
            text += f"; at most {format_bytes(prediction.process_upper_bytes)}, with every kernel loaded"
        yield "nvidia-smi", text
    if prediction.after_step_bytes is not None:
        yield "Between steps", format_bytes(prediction.after_step_bytes)


def _speed(prediction: Prediction) -> Iterator[_Fact]:
    speed = prediction.throughput
    if speed is None:
        yield "Step", f"{seconds_text(prediction.step_seconds)} predicted"
    else:
        kind = "measured operators" if speed.measured else "estimated, nothing was measured on the device"
        yield "Step", f"{seconds_text(speed.step_seconds)} ± {speed.step_error:.0%} ({kind})"
        tokens = "" if speed.tokens_per_second is None else f", {speed.tokens_per_second:,.0f} tokens/s"
        yield "Throughput", f"{speed.samples_per_second:,.4g} samples/s{tokens}"
        if speed.model_utilisation is not None:
            peak = f"{speed.peak_flops / 1e12:,.4g} TFLOP/s in {speed.peak_dtype}"
            yield "MFU", f"{share_text(speed.model_utilisation, 1)} of {peak}"
    if prediction.phase_seconds:
        parts = (f"{phase} {seconds_text(seconds)}" for phase, seconds in prediction.phase_seconds.items())
        yield "Phases", ", ".join(parts)


def as_written_line(as_written: Prediction, chosen: Prediction, precision: str) -> str:
    """Return what a step takes in the dtype that its model is written in, beside one in another precision."""
    held = format_bytes(as_written.peak_reserved_bytes or as_written.peak_bytes)
    seconds = seconds_text(as_written.step_seconds)
    speed = beside_text(as_written.step_seconds, chosen.step_seconds, precision)
    return (
        f"In 32-true, the precision of the model's code: {held}, {seconds} a step, {speed}."
        " --precision 32-true shows this step; --precision tf32 shows it with matrix products in TF32"
    )


def device_table(devices: Sequence[Device], title: str = "Devices of this machine") -> Table:
    """Return a table of devices: memory, and known peak rates."""
    names = ("memory\nGiB", "usable\nGiB", "memory\nGB/s", "bf16\nTFLOP/s", "fp32\nTFLOP/s", "capa-\nbility")
    name = Column("\nname", min_width=11, max_width=24, overflow="fold")
    rows: list[tuple[RenderableType, ...]] = []
    for device in devices:
        matrix, vector = device.matrix_flops, device.vector_flops
        float32_flops = max(matrix.get("float32", 0.0), vector.get("float32", 0.0))
        # bfloat16 needs units of its own
        rates = device.bandwidth_bytes_per_second / 1e9, matrix.get("bfloat16", 0.0) / 1e12, float32_flops / 1e12
        sizes = f"{device.memory_bytes / 2**30:.1f}", f"{device.usable_bytes / 2**30:.1f}"
        numbers = (f"{figure:.4g}" if figure else _NO_FIGURE for figure in rates)
        rows.append((device.name, Text(device.description), *sizes, *numbers, _capability(device)))
    return table_of([name, "\ndescription", *figures(*names)], rows, title=title, padding=(0, 1, 0, 0), **_PLAIN)


def device_page(device: Device, advice: Sequence[str]) -> Group:
    """Return every figure of a device with its source, and advice."""
    columns = [Column("figure", style="bold", no_wrap=True), *figures("value"), Column("source", style="dim")]
    rows = ((name, value, Text(device.sources.get(attribute, ""))) for name, value, attribute in _figures(device))
    table = table_of(columns, rows, title=f"{device.name}: {device.description}")
    return Group(table, *(Text(f"• {sentence}") for sentence in advice))


def _figures(device: Device) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, attribute) of the known figures."""

    def rate(figure: float, unit: str) -> str:
        """Return a rate in decimal units ("936.2 GB/s")."""
        prefix, scale = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9)) if figure >= s), ("M", 1e6))
        return f"{figure / scale:.4g} {prefix}{unit}" if figure else _NO_FIGURE

    yield "memory", format_bytes(device.memory_bytes), "memory_bytes"
    yield "usable", format_bytes(device.usable_bytes), "usable_bytes"
    yield "threads" if device.kind == "cpu" else "multiprocessors", str(device.cores), "cores"
    yield "bandwidth", rate(device.bandwidth_bytes_per_second, "B/s"), "bandwidth_bytes_per_second"
    yield "cache", format_bytes(device.cache_bytes) if device.cache_bytes else _NO_FIGURE, "cache_bytes"
    for attribute, unit in (("matrix_flops", "matrix"), ("vector_flops", "vector")):
        for dtype, flops in getattr(device, attribute).items():
            yield f"{dtype}, {unit}", rate(flops, "FLOP/s"), attribute
    yield "launch", format_seconds(device.launch_seconds) if device.launch_seconds else _NO_FIGURE, "launch_seconds"
    if device.kind == "cuda":
        yield "capability", _capability(device), "capability"
        for name, to in (("host link", "link"), ("to its peers", "peer"), ("to other nodes", "node")):
            attribute = f"{to}_bytes_per_second"
            yield name, rate(getattr(device, attribute), "B/s"), attribute
        yield "context", format_bytes(device.context_bytes), "context_bytes"
        yield "cuBLAS workspace", format_bytes(device.cublas_workspace_bytes), "cublas_workspace_bytes"


def _capability(device: Device) -> str:
    return ".".join(map(str, device.capability)) if device.capability else _NO_FIGURE


def verification_table(verification: Verification) -> Group:
    """Return a verification: its verdict, numerics, peaks, times, and failures."""
    plain, peaks = verification.plain_measured_peak_bytes, verification.rank_peaks_bytes
    besides = [] if plain is None else [f"plain {format_bytes(plain)}"]
    besides.append(f"budget {format_bytes(verification.budget_bytes)}")
    if peaks:
        besides.append(f"rank {peaks.index(max(peaks))}, the highest of {len(peaks)} ranks")
    losses = f"plain {verification.plain_loss:.9g}, planned {verification.planned_loss:.9g}"
    facts = {
        "class": verification.numerics,
        "loss": f"{losses}, {_apart(verification.loss_difference)}",
        "gradients": "bitwise equal" if verification.bitwise else _apart(verification.gradient_difference),
        "predicted peak": format_bytes(verification.predicted_peak_bytes),
        "measured peak": f"{format_bytes(verification.measured_peak_bytes)} ({', '.join(besides)})",
    }
    table = _facts("Plain step and planned step", facts)
    parts: list[RenderableType] = [verdict_text(verification_verdict(verification)), table]
    if not verification.bitwise:
        shown = verification.gradients[:_GRADIENTS_SHOWN]
        title = f"The {len(shown)} gradients furthest apart, of {len(verification.gradients)}"
        rows = ((gradient.parameter, f"{gradient.relative:.2e}") for gradient in shown)
        parts.append(table_of(["parameter", Column("relative difference", justify="right")], rows, title=title))
    if verification.comparison is not None:
        parts.append(comparison_table(None, verification.comparison))
    parts += [Text(note, style="dim") for note in verification.notes]
    parts += [Text(f"failed: {failure}", style="red") for failure in verification.failures]
    return Group(*parts)


def _facts(title: str | Text, facts: dict[str, Any]) -> Table:
    return table_of([Column(style="bold"), Column()], facts.items(), title=title, show_header=False)


def _apart(relative: float) -> str:
    return "equal" if relative == 0 else f"relative difference {relative:.2e}"


def run_table(run: RunRecord) -> Group:
    """Return a run as tables: steps, losses, measurements, evaluations and events."""
    known = run.first_loss is not None and run.last_loss is not None
    facts = {
        "steps": f"{run.steps:,}, {run.status}",
        "loss": f"{run.first_loss:.5g} → {run.last_loss:.5g}" if known else None,
        "measured peak": None if run.measured_peak_bytes is None else format_bytes(run.measured_peak_bytes),
        "step": None if run.step_seconds is None else seconds_text(run.step_seconds),
        "data": waiting_text(run),
        "started": f"{run.started} on {run.machine}",
        "made by": f"memfit {run.memfit_version}, torch {run.torch_version}",
    }
    told = {name: Text(clean(value)) for name, value in facts.items() if value is not None}
    parts: list[RenderableType] = [_facts(Text(clean(f"Run of {run.workload}")), told)]
    if run.evaluations:
        last = run.evaluations[-_LINES:]
        keys = sorted({key for evaluation in last for key in evaluation.values})
        rows = (
            (f"{each.step:,}", *(f"{each.values[key]:.5g}" if key in each.values else _NO_FIGURE for key in keys))
            for each in last
        )
        columns = (Column(Text(clean(name)), justify="right") for name in ("step", *keys))
        parts.append(table_of(columns, rows, title=f"Evaluations, the last {len(last)} of {len(run.evaluations):,}"))
    if retries := retries_text(run):
        parts.append(Text(retries, style="yellow"))
    parts += [Text(clean(f"after step {event.step}, {event.kind}: {event.text}")) for event in run.events[-_LINES:]]
    parts += [Text(clean(f"failed: {run.error}"), style="red")] if run.error else []
    return Group(*parts)


def range_table(report: RangeReport) -> Group:
    """Return a table of the largest values by module and the share of gradients that fp16 flushes, with advice."""
    rows = []
    for module in report.modules:
        marks = ["overflows"] * (module.module in report.overflowing) + ["flushes"] * (module.module in report.flushing)
        gradients = module.gradients
        rows.append(
            (
                Text(clean(module.module) or "(the model and the loss)"),
                f"{module.activations.largest:.3g}",
                f"{gradients.largest:.3g}",
                f"{gradients.flushed():.1%}",
                f"{gradients.flushed(report.initial_scale):.1%}",
                Text(" ".join(marks), "red"),
            )
        )
    columns = [Column("module", overflow="fold"), *figures("activations", "gradients", "flushed", "scaled"), Column()]
    return Group(table_of(columns, rows, **_PLAIN), Text(report.advice()))


def _numerics(numerics: str) -> Text:
    return Text(numerics or "not used", _NUMERICS_STYLE.get(numerics, "dim"))


def _dim(text: str) -> Text:
    return Text(text, "dim")
