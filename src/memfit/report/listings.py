"""Tables of estimates, devices, verifications, runs and ranges of numbers, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes, format_seconds
from memfit.ir import Device, Prediction, RangeReport, RunRecord, Throughput, Verification
from memfit.report.summary import clean, fit_text, retries_text, seconds_text, share_text, waiting_text
from memfit.report.tables import comparison_table, prediction_table, verdict_text
from memfit.report.verdict import beside_text, prediction_verdict, verification_verdict

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


_GRADIENTS_SHOWN = 5
_LINES = 8
_DTYPES_SHOWN = ("bfloat16", "float32")
_NO_FIGURE = "–"


def device_table(devices: Sequence[Device], title: str = "Devices of this machine") -> Table:
    """Return a table of devices: memory, and known peak rates."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nname", min_width=11, max_width=24, overflow="fold")
    table.add_column("\ndescription")
    for heading in ("memory\nGiB", "usable\nGiB", "memory\nGB/s", "bf16\nTFLOP/s", "fp32\nTFLOP/s", "capa-\nbility"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            device.name,
            Text(device.description),
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.usable_bytes / 2**30:.1f}",
            _number(device.bandwidth_bytes_per_second / 1e9),
            *(_number(_product_flops(device, dtype) / 1e12) for dtype in _DTYPES_SHOWN),
            _capability(device),
        )
    return table


def _number(figure: float) -> str:
    return f"{figure:.4g}" if figure else _NO_FIGURE


def device_page(device: Device, advice: Sequence[str]) -> Group:
    """Return every figure of a device with its source, and advice."""
    table = Table(title=f"{device.name}: {device.description}", title_justify="left")
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", style="dim")
    for name, value, attribute in _figures(device):
        table.add_row(name, value, Text(device.sources.get(attribute, "")))
    return Group(table, *(Text(f"• {sentence}") for sentence in advice))


def _figures(device: Device) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, attribute) of the known figures."""
    yield "memory", format_bytes(device.memory_bytes), "memory_bytes"
    yield "usable", format_bytes(device.usable_bytes), "usable_bytes"
    yield "threads" if device.kind == "cpu" else "multiprocessors", str(device.cores), "cores"
    yield "bandwidth", _rate(device.bandwidth_bytes_per_second, "B/s"), "bandwidth_bytes_per_second"
    yield "cache", format_bytes(device.cache_bytes) if device.cache_bytes else _NO_FIGURE, "cache_bytes"
    for dtype, flops in device.matrix_flops.items():
        yield f"{dtype}, matrix", _rate(flops, "FLOP/s"), "matrix_flops"
    for dtype, flops in device.vector_flops.items():
        yield f"{dtype}, vector", _rate(flops, "FLOP/s"), "vector_flops"
    yield "launch", format_seconds(device.launch_seconds) if device.launch_seconds else _NO_FIGURE, "launch_seconds"
    if device.kind == "cuda":
        yield "capability", _capability(device), "capability"
        yield "host link", _rate(device.link_bytes_per_second, "B/s"), "link_bytes_per_second"
        yield "to its peers", _rate(device.peer_bytes_per_second, "B/s"), "peer_bytes_per_second"
        yield "to other nodes", _rate(device.node_bytes_per_second, "B/s"), "node_bytes_per_second"
        yield "context", format_bytes(device.context_bytes), "context_bytes"
        yield "cuBLAS workspace", format_bytes(device.cublas_workspace_bytes), "cublas_workspace_bytes"


def _product_flops(device: Device, dtype: str) -> float:
    """Return the best rate for products of a dtype; bfloat16 needs units of its own."""
    vector = device.vector_flops.get(dtype, 0.0) if dtype == "float32" else 0.0
    return max(device.matrix_flops.get(dtype, 0.0), vector)


def _capability(device: Device) -> str:
    return ".".join(map(str, device.capability)) if device.capability else _NO_FIGURE


def _rate(figure: float, unit: str) -> str:
    """Return a rate as text, in decimal units ("936.2 GB/s")."""
    if not figure:
        return _NO_FIGURE
    prefix, scale = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9)) if figure >= s), ("M", 1e6))
    return f"{figure / scale:.4g} {prefix}{unit}"


def verification_table(verification: Verification) -> Group:
    """Return a verification: its verdict, numerics, peaks, times, and failures."""
    table = _facts("Plain step and planned step")
    table.add_row("class", verification.numerics)
    table.add_row(
        "loss",
        f"plain {verification.plain_loss:.9g}, planned {verification.planned_loss:.9g},"
        f" {_apart(verification.loss_difference)}",
    )
    table.add_row("gradients", "bitwise equal" if verification.bitwise else _apart(verification.gradient_difference))
    table.add_row("predicted peak", format_bytes(verification.predicted_peak_bytes))
    table.add_row("measured peak", _measured(verification))
    parts: list[RenderableType] = [verdict_text(verification_verdict(verification)), table]
    if not verification.bitwise:
        parts.append(_gradients(verification))
    if verification.comparison is not None:
        parts.append(comparison_table(None, verification.comparison))
    parts += [Text(note, style="dim") for note in verification.notes]
    parts += [Text(f"failed: {failure}", style="red") for failure in verification.failures]
    return Group(*parts)


def _facts(title: str | Text) -> Table:
    """Return a table of names and values, without rows yet."""
    return Table(Column(style="bold"), Column(), title=title, title_justify="left", show_header=False)


def _measured(verification: Verification) -> str:
    """Return the measured peak with what it is held against, and of several ranks where it is."""
    plain, peaks = verification.plain_measured_peak_bytes, verification.rank_peaks_bytes
    besides = [] if plain is None else [f"plain {format_bytes(plain)}"]
    besides.append(f"budget {format_bytes(verification.budget_bytes)}")
    if peaks:
        besides.append(f"rank {peaks.index(max(peaks))}, the highest of {len(peaks)} ranks")
    return f"{format_bytes(verification.measured_peak_bytes)} ({', '.join(besides)})"


def _apart(relative: float) -> str:
    return "equal" if relative == 0 else f"relative difference {relative:.2e}"


def _gradients(verification: Verification) -> Table:
    count = min(_GRADIENTS_SHOWN, len(verification.gradients))
    table = Table(title=f"The {count} gradients furthest apart, of {len(verification.gradients)}", title_justify="left")
    table.add_column("parameter")
    table.add_column("relative difference", justify="right")
    for gradient in verification.gradients[:count]:
        table.add_row(gradient.parameter, f"{gradient.relative:.2e}")
    return table


def run_table(run: RunRecord) -> Group:
    """Return a run as tables: steps, losses, measurements, evaluations and events."""
    table = _facts(Text(clean(f"Run of {run.workload}")))
    for name, value in _run_facts(run):
        table.add_row(name, Text(clean(value)))
    parts: list[RenderableType] = [table]
    if run.evaluations:
        parts.append(_evaluations(run))
    if retries := retries_text(run):
        parts.append(Text(retries, style="yellow"))
    parts += [Text(clean(f"after step {event.step}, {event.kind}: {event.text}")) for event in run.events[-_LINES:]]
    parts += [Text(clean(f"failed: {run.error}"), style="red")] if run.error else []
    return Group(*parts)


def _run_facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "steps", f"{run.steps:,}, {run.status}"
    if run.first_loss is not None and run.last_loss is not None:
        yield "loss", f"{run.first_loss:.5g} → {run.last_loss:.5g}"
    if run.measured_peak_bytes is not None:
        yield "measured peak", format_bytes(run.measured_peak_bytes)
    if run.step_seconds is not None:
        yield "step", seconds_text(run.step_seconds)
    waiting = waiting_text(run)
    if waiting:
        yield "data", waiting
    yield "started", f"{run.started} on {run.machine}"
    yield "made by", f"memfit {run.memfit_version}, torch {run.torch_version}"


def _evaluations(run: RunRecord) -> Table:
    """Return a table of the last evaluations."""
    last = run.evaluations[-_LINES:]
    keys = sorted({key for evaluation in last for key in evaluation.values})
    table = Table(title=f"Evaluations, the last {len(last)} of {len(run.evaluations):,}", title_justify="left")
    for name in ("step", *keys):
        table.add_column(Text(clean(name)), justify="right")
    for evaluation in last:
        figures = [f"{evaluation.values[key]:.5g}" if key in evaluation.values else _NO_FIGURE for key in keys]
        table.add_row(f"{evaluation.step:,}", *figures)
    return table


def range_table(report: RangeReport) -> Group:
    """Return a table of the largest values by module and the share of gradients that fp16 flushes, with advice."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", overflow="fold")
    for name in ("activations", "gradients", "flushed", "scaled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for module in report.modules:
        marks = ["overflows"] * (module.module in report.overflowing) + ["flushes"] * (module.module in report.flushing)
        gradients = module.gradients
        table.add_row(
            Text(clean(module.module) or "(the model and the loss)"),
            f"{module.activations.largest:.3g}",
            f"{gradients.largest:.3g}",
            f"{gradients.flushed():.1%}",
            f"{gradients.flushed(report.initial_scale):.1%}",
            Text(" ".join(marks), "red"),
        )
    return Group(table, Text(report.advice()))
