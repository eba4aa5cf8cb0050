"""Commands about this machine, or with measurements on it: `ladder`, `devices`, `probe-devices`, `doctor`, `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.loading import load
from memfit.cli.options import (
    AsJson,
    DeviceHere,
    DoctorFramework,
    NumericsName,
    NumericsOption,
    Overwrite,
    WorkloadName,
    check_inputs,
    check_new,
)
from memfit.cli.output import out, print_json, stages
from memfit.hardware.host import check_device
from memfit.ir import codec
from memfit.units import read_budget


def ladder(
    workload: WorkloadName,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes, or a share as in `memfit plan`; by default the plain step's peak."),
    ] = None,
    numerics: NumericsOption = NumericsName.reduced,
    seconds: Annotated[float, typer.Option(help="Least time to run each step for, in seconds.", min=0.01)] = 2.0,
    device: DeviceHere = None,
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
    check_inputs(workload, device=device)
    check_new("--output", output, overwrite)
    check_new("--html", page, overwrite)
    if budget is not None:
        read_budget(budget)
    from memfit.report.ladders import ladder_table, write_ladder
    from memfit.tools import ladder as climb

    loaded = load(workload)
    with stages() as progress:
        climbed = climb(
            loaded,
            budget=budget,
            device=device,
            numerics=numerics.value,
            min_run_seconds=seconds,
            progress=progress,
        )
    if output is not None:
        codec.write_atomic(output, codec.encode(climbed))
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
    from memfit.cli.devices import list_devices, show_device

    if name is None:
        list_devices(as_json)
    else:
        show_device(name, as_json)


def probe_devices(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File of devices to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's devices, and keep the figures for predictions."""
    from memfit.cli.devices import measure_devices

    measure_devices(output, as_json)


def doctor(
    framework: Annotated[DoctorFramework, typer.Argument(help="Framework to check.", show_default=False)],
    prepare: Annotated[
        bool, typer.Option(help="Compile it, if that was not done yet; this takes minutes, once.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a second framework on this machine, and prepare it."""
    from memfit.cli.jittor_commands import examine

    examine(prepare, as_json)


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
    codec.check_writable(output / "plan.json")
    from memfit.cli.demo import run_demo

    run_demo(output, steps, budget, device or "cpu", overwrite)
