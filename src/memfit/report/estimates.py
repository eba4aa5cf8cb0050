"""An estimate for the terminal: memory, whether it fits, time by class of operator, and assumptions."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes
from memfit.ir import Prediction, Throughput
from memfit.report.summary import clean, fit_text, seconds_text, share_text
from memfit.report.tables import prediction_table, verdict_text
from memfit.report.verdict import beside_text, prediction_verdict

_CLASSES_SHOWN = 6


def estimate_page(prediction: Prediction, title: str) -> Group:
    """Return a prediction: its verdict, bytes at the peak, their share of the device, speed, and notes."""
    facts = Table.grid(Column(no_wrap=True, style="bold"), Column(overflow="fold"), padding=(0, 3, 0, 0))
    speed = _speed(prediction.throughput, prediction.step_seconds)
    for name, value in (*_memory(prediction), *speed, *_phases(prediction)):
        facts.add_row(name, value)
    verdict = verdict_text(prediction_verdict(prediction))
    parts: list[RenderableType] = [verdict, prediction_table(prediction, title), facts]
    if prediction.throughput is not None:
        parts += [Text(), _classes(prediction.throughput)]
    parts += [Text(clean(note), "dim") for note in prediction.notes]
    return Group(*parts)


def _memory(prediction: Prediction) -> list[tuple[str, Text]]:
    upper = format_bytes(prediction.peak_upper_bytes)
    if prediction.peak_reserved_bytes is None:
        lines = [("Peak", Text(f"{format_bytes(prediction.peak_bytes)}, at most {upper}"))]
    else:
        reserved = format_bytes(prediction.peak_reserved_bytes)
        lines = [("Reserved", Text(f"{reserved} by PyTorch's allocator, at most {upper}"))]
    if prediction.device_bytes is not None:
        fits = prediction.peak_upper_bytes <= prediction.device_bytes
        text = f"{format_bytes(prediction.device_bytes)} for a step: "
        verdict = (fit_text(prediction.peak_upper_bytes, prediction.device_bytes), "green" if fits else "bold red")
        lines.append(("Device", Text.assemble(text, verdict)))
        if not fits and prediction.retries:
            often = f"it runs there if the allocator empties its cache {prediction.retries} times in two steps"
            lines.append(("", Text(f"{often}; each time the GPU waits")))
    if prediction.process_bytes is not None:
        held = format_bytes(prediction.context_bytes or 0)
        text = (
            f"{format_bytes(prediction.process_bytes)}, including {held} for the driver's context, outside the"
            " allocator"
        )
        if prediction.process_upper_bytes is not None:
            text += f"; at most {format_bytes(prediction.process_upper_bytes)}, with every kernel loaded"
        lines.append(("nvidia-smi", Text(text)))
    if prediction.after_step_bytes is not None:
        lines.append(("Between steps", Text(format_bytes(prediction.after_step_bytes))))
    return lines


def _phases(prediction: Prediction) -> list[tuple[str, Text]]:
    """Return the time of each phase, in order of execution."""
    parts = [f"{phase} {seconds_text(seconds)}" for phase, seconds in prediction.phase_seconds.items()]
    return [("Phases", Text(", ".join(parts)))] if parts else []


def _speed(speed: Throughput | None, step_seconds: float) -> list[tuple[str, Text]]:
    if speed is None:
        return [("Step", Text(f"{seconds_text(step_seconds)} predicted"))]
    kind = "measured operators" if speed.measured else "estimated, nothing was measured on the device"
    step = f"{seconds_text(speed.step_seconds)} ± {speed.step_error:.0%} ({kind})"
    rate = f"{speed.samples_per_second:,.4g} samples/s"
    if speed.tokens_per_second is not None:
        rate += f", {speed.tokens_per_second:,.0f} tokens/s"
    lines = [("Step", Text(step)), ("Throughput", Text(rate))]
    if speed.model_utilisation is not None:
        peak = f"{speed.peak_flops / 1e12:,.4g} TFLOP/s in {speed.peak_dtype}"
        lines.append(("MFU", Text(f"{share_text(speed.model_utilisation, 1)} of {peak}")))
    return lines


def _classes(speed: Throughput) -> Table:
    """Return a table of the time by class of operator."""
    figures = (Column(name, justify="right", no_wrap=True) for name in ("seconds", "share"))
    table = Table(Column("time by class", no_wrap=True), *figures, box=SIMPLE_HEAD, pad_edge=False)
    total = sum(speed.seconds_by_class.values())
    rows = list(speed.seconds_by_class.items())
    shown, further = rows[:_CLASSES_SHOWN], rows[_CLASSES_SHOWN:]
    if further:
        shown.append((f"{len(further)} other classes", sum(seconds for _, seconds in further)))
    for name, seconds in shown:
        table.add_row(name, seconds_text(seconds), share_text(seconds, total))
    return table


def as_written_line(as_written: Prediction, chosen: Prediction, precision: str) -> str:
    """Return what a step takes in the dtype that its model is written in, beside one in another precision."""
    held = format_bytes(as_written.peak_reserved_bytes or as_written.peak_bytes)
    seconds = seconds_text(as_written.step_seconds)
    speed = beside_text(as_written.step_seconds, chosen.step_seconds, precision)
    return (
        f"In 32-true, the precision of the model's code: {held}, {seconds} a step, {speed}."
        " --precision 32-true shows this step; --precision tf32 shows it with matrix products in TF32"
    )
