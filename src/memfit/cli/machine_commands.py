"""Commands about this machine, or with measurements on it: `ladder`, `devices`, `probe-devices`, `doctor`, `demo`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from memfit import ir
from memfit.cli.options import (
    AsJson,
    DeviceHere,
    LadderOptions,
    Overwrite,
    WorkloadName,
    check_inputs,
    check_new,
    load,
)
from memfit.cli.output import err, out, print_json, stages
from memfit.foundations import read_budget
from memfit.hardware import check_device, find_device
from memfit.hardware import devices as hosts_devices

if TYPE_CHECKING:
    from memfit.ir import Device


def ladder(
    workload: WorkloadName,
    options: LadderOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the ladder to this file, as JSON.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with table and plot to this file.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure the cost and the saving of each lever on this machine."""
    check_inputs(workload, device=options.device)
    check_new("--output", output, overwrite)
    check_new("--html", page, overwrite)
    if options.budget is not None:
        read_budget(options.budget)
    from memfit.report import ladder_table, write_ladder
    from memfit.tools import ladder as climb

    loaded = load(workload)
    with stages() as progress:
        climbed = climb(loaded, **vars(options), progress=progress)
    if output is not None:
        ir.codec.write_atomic(output, ir.codec.encode(climbed))
    if page is not None:
        write_ladder(page, climbed)
    if as_json:
        print_json(climbed)
    else:
        out.print(ladder_table(climbed))


def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show all data of one device.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine's devices and the catalogue of others."""
    from memfit.hardware import advice, known_devices
    from memfit.report import device_page, device_table

    if name is not None:
        found = find_device(name)
        if as_json:
            print_json(_with_advice(found))
        else:
            out.print(device_page(found, advice(found)))
        return
    here, others = hosts_devices(), list(known_devices().values())
    if as_json:
        print_json({"machine": here, "catalogue": others})
        return
    out.print(device_table(here))
    out.print(device_table(others, "Catalogue: vendors' peaks, and rates measured by probe-devices"))


def probe_devices(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File of devices to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's devices, and keep the figures for predictions."""
    import psutil

    from memfit.hardware import advice, keep_devices, missing_figures, probe_all, read, user_file
    from memfit.report import device_page

    read(output or user_file())  # an invalid file is refused before the measurements
    ir.codec.check_writable(output or user_file())
    if psutil.getloadavg()[0] > psutil.cpu_count() / 2:
        err.print(
            "Other programs are using this machine: the rates may be too low. Probe again when it is idle.",
            highlight=False,
        )
    with stages() as progress:
        probed = probe_all(progress)
    for device in probed:
        if missing := missing_figures(device):
            err.print(f"{device.name} is not saved: {', '.join(missing)} could not be measured", highlight=False)
    probed = [device for device in probed if not missing_figures(device)]
    written = keep_devices(probed, output)
    if as_json:
        print_json({"written": str(written), "devices": [_with_advice(device) for device in probed]})
        return
    for device in probed:
        out.print(device_page(device, advice(device)))
    out.print(f"Written to {written}", highlight=False, soft_wrap=True)


def _with_advice(device: Device) -> dict[str, Any]:
    from memfit.hardware import advice, precisions

    return {**msgspec.structs.asdict(device), "precisions": precisions(device), "advice": advice(device)}


def doctor(
    framework: Annotated[Literal["jittor"], typer.Argument(help="Framework to check.", show_default=False)],
    prepare: Annotated[
        bool, typer.Option(help="Compile it, if that was not done yet; this takes minutes, once.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a second framework on this machine, and prepare it."""
    from rich.markup import escape
    from rich.table import Table

    from memfit.frameworks import jittor

    seconds = prepare_jittor() if prepare else 0.0
    found = jittor.doctor.checks()
    if as_json:
        print_json({"checks": [dataclasses.asdict(check) for check in found], "prepare_seconds": seconds})
        return
    table = Table("", "needs", "found", "what to do", box=None, pad_edge=False)
    for check in found:
        mark = "ok" if check.ok else "no" if check.needed else "--"
        table.add_row(mark, check.name, escape(check.found), escape(check.remedy))
    out.print(table)


def prepare_jittor() -> float:
    """Compile Jittor if necessary, and show that; return the seconds.

    Raises:
        MissingExtraError: Jittor is not installed.
        UsageError: A requirement is missing.
    """
    from memfit.frameworks import jittor

    started = time.monotonic()
    with stages() as progress:
        jittor.doctor.prepare(progress)
    return time.monotonic() - started


def demo(
    output: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("runs/demo"),
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer updates; by default as many as fit in 15 seconds.", min=2),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory budget; the plain step needs about 573 MiB.")] = "128MiB",
    device: DeviceHere = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level GPT on Python's standard library under a budget too small for the plain step."""
    read_budget(budget)
    check_device(device or "cpu")
    ir.codec.check_writable(output / "plan.json")
    from memfit.cli.training import run_demo

    run_demo(output, steps, budget, device or "cpu", overwrite)
