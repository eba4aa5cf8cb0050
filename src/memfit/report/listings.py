"""Tables of estimates, devices, verifications, runs and ranges of numbers, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memfit.foundations import format_bytes, format_seconds
from memfit.ir import Device, Prediction, RangeReport, RunRecord, Verification
from memfit.report.summary import clean, fit_text, retries_text, seconds_text, share_text, waiting_text
from memfit.report.tables import comparison_table, prediction_table, verdict_text
from memfit.report.verdict import beside_text, prediction_verdict, verification_verdict

_CLASSES_SHOWN, _GRADIENTS_SHOWN, _LINES = 6, 5, 8
_NO_FIGURE = "–"


def estimate_page(prediction: Prediction, title: str) -> Group:
    """Return a prediction: its verdict, bytes at the peak, their share of the device, speed, and notes."""
    facts = Table.grid(Column(no_wrap=True, style="bold"), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for name, value in (*_memory(prediction), *_speed(prediction)):
        facts.add_row(name, value if isinstance(value, Text) else Text(value))
    verdict = verdict_text(prediction_verdict(prediction))
    parts: list[RenderableType] = [verdict, prediction_table(prediction, title), facts]
    if prediction.throughput is not None:
        figures = (Column(name, justify="right", no_wrap=True) for name in ("seconds", "share"))
        table = Table(Column("time by class", no_wrap=True), *figures, box=SIMPLE_HEAD, pad_edge=False)
        by_class = prediction.throughput.seconds_by_class
        rows = list(by_class.items())
        shown, further = rows[:_CLASSES_SHOWN], rows[_CLASSES_SHOWN:]
        if further:
            shown.append((f"{len(further)} other classes", sum(seconds for _, seconds in further)))
        for name, seconds in shown:
            table.add_row(name, seconds_text(seconds), share_text(seconds, sum(by_class.values())))
        parts += [Text(), table]
    return Group(*parts, *(Text(clean(note), "dim") for note in prediction.notes))


def _memory(prediction: Prediction) -> Iterator[tuple[str, Text | str]]:
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


def _speed(prediction: Prediction) -> Iterator[tuple[str, str]]:
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

    def number(figure: float) -> str:
        return f"{figure:.4g}" if figure else _NO_FIGURE

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nname", min_width=11, max_width=24, overflow="fold")
    table.add_column("\ndescription")
    for heading in ("memory\nGiB", "usable\nGiB", "memory\nGB/s", "bf16\nTFLOP/s", "fp32\nTFLOP/s", "capa-\nbility"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices:
        matrix, vector = device.matrix_flops, device.vector_flops
        float32_flops = max(matrix.get("float32", 0.0), vector.get("float32", 0.0))
        table.add_row(
            device.name,
            Text(device.description),
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.usable_bytes / 2**30:.1f}",
            number(device.bandwidth_bytes_per_second / 1e9),
            number(matrix.get("bfloat16", 0.0) / 1e12),  # which needs units of its own
            number(float32_flops / 1e12),
            _capability(device),
        )
    return table


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
    gradients = "bitwise equal" if verification.bitwise else _apart(verification.gradient_difference)
    table = _facts("Plain step and planned step")
    table.add_row("class", verification.numerics)
    table.add_row("loss", f"{losses}, {_apart(verification.loss_difference)}")
    table.add_row("gradients", gradients)
    table.add_row("predicted peak", format_bytes(verification.predicted_peak_bytes))
    table.add_row("measured peak", f"{format_bytes(verification.measured_peak_bytes)} ({', '.join(besides)})")
    parts: list[RenderableType] = [verdict_text(verification_verdict(verification)), table]
    if not verification.bitwise:
        shown = verification.gradients[:_GRADIENTS_SHOWN]
        title = f"The {len(shown)} gradients furthest apart, of {len(verification.gradients)}"
        table = Table("parameter", Column("relative difference", justify="right"), title=title, title_justify="left")
        for gradient in shown:
            table.add_row(gradient.parameter, f"{gradient.relative:.2e}")
        parts.append(table)
    if verification.comparison is not None:
        parts.append(comparison_table(None, verification.comparison))
    parts += [Text(note, style="dim") for note in verification.notes]
    parts += [Text(f"failed: {failure}", style="red") for failure in verification.failures]
    return Group(*parts)


def _facts(title: str | Text) -> Table:
    return Table(Column(style="bold"), Column(), title=title, title_justify="left", show_header=False)


def _apart(relative: float) -> str:
    return "equal" if relative == 0 else f"relative difference {relative:.2e}"


def run_table(run: RunRecord) -> Group:
    """Return a run as tables: steps, losses, measurements, evaluations and events."""
    facts = {"steps": f"{run.steps:,}, {run.status}"}
    if run.first_loss is not None and run.last_loss is not None:
        facts["loss"] = f"{run.first_loss:.5g} → {run.last_loss:.5g}"
    if run.measured_peak_bytes is not None:
        facts["measured peak"] = format_bytes(run.measured_peak_bytes)
    if run.step_seconds is not None:
        facts["step"] = seconds_text(run.step_seconds)
    if waiting := waiting_text(run):
        facts["data"] = waiting
    facts["started"] = f"{run.started} on {run.machine}"
    facts["made by"] = f"memfit {run.memfit_version}, torch {run.torch_version}"
    table = _facts(Text(clean(f"Run of {run.workload}")))
    for name, value in facts.items():
        table.add_row(name, Text(clean(value)))
    parts: list[RenderableType] = [table]
    if run.evaluations:
        last = run.evaluations[-_LINES:]
        keys = sorted({key for evaluation in last for key in evaluation.values})
        table = Table(title=f"Evaluations, the last {len(last)} of {len(run.evaluations):,}", title_justify="left")
        for name in ("step", *keys):
            table.add_column(Text(clean(name)), justify="right")
        for evaluation in last:
            figures = [f"{evaluation.values[key]:.5g}" if key in evaluation.values else _NO_FIGURE for key in keys]
            table.add_row(f"{evaluation.step:,}", *figures)
        parts.append(table)
    if retries := retries_text(run):
        parts.append(Text(retries, style="yellow"))
    parts += [Text(clean(f"after step {event.step}, {event.kind}: {event.text}")) for event in run.events[-_LINES:]]
    parts += [Text(clean(f"failed: {run.error}"), style="red")] if run.error else []
    return Group(*parts)


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
