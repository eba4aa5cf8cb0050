"""The command line: one command for each verb of the library."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
import typer

from memfit import hardware, ir
from memfit.cli import commands
from memfit.cli import output as printed
from memfit.cli.commands import After, with_options
from memfit.cli.options import (
    AsJson,
    DeviceHere,
    LadderOptions,
    Overwrite,
    PageFile,
    PlanFile,
    PlanSource,
    ScriptOptions,
    WorkloadName,
    check_cards,
    check_inputs,
    check_new,
    given_budget,
    load,
    load_for,
    precisions_of,
    rank_numbers,
    read_plan,
    refuse_beside_a_plan,
    strays,
)
from memfit.cli.output import err, note, out, print_json, show, stage, stages, tell, tell_written
from memfit.errors import MemfitError, UsageError, VerificationError
from memfit.foundations import __version__, has_module, parse_budget, read_budget, users_frames
from memfit.hardware import check_device, find_device, free_bytes
from memfit.planner import MICROBATCH_HELP, EstimateOptions, FleetOptions, PlanOptions
from memfit.ranks import launched_rank
from memfit.training import RunOptions

if TYPE_CHECKING:
    from memfit.ir import Device, Plan

app = commands.Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Make PyTorch training fit the memory you have.\n\n"
        "Fit your training script, unchanged: memfit run --budget 6GiB train.py\n\n"
        "A WORKLOAD is file.py:function or package.module:function. The function has no arguments and returns"
        " a memfit.Workload.\n\n"
        "Exit status: 0 done, 1 your own code raised an error, 2 wrong use, or the step can't be captured,"
        " 3 no plan fits the budget, 4 a plan fails its checks, 5 the loss is not finite,"
        " 6 out of memory with no lower plan left, 75 stopped by SIGTERM with a checkpoint, 130 interrupted by Ctrl-C."
    ),
)

tools = commands.Commands(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure levers, number ranges and devices; join the shards of a model; prepare other frameworks.",
)
app.add_typer(tools, name="tools")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show memfit's version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    runs_steps=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT [ARGS]...", help="Your script, and its own options.", show_default=False)
    ],
    options: ScriptOptions,
    overwrite: Overwrite = False,
) -> None:
    """Run your training script, unchanged, within a memory budget.

    memfit's options stand before the script. The first step is recorded; the steps after it run under the plan made
    from it.
    """
    if script.startswith("-"):
        raise UsageError(
            f"memfit run has no option {script}: `memfit run --help` lists them. Give the script after them"
        )
    if options.is_module and not has_module(script.partition(".")[0]):
        raise UsageError(f"there is no module {script!r} in {Path.cwd()}, and none is installed")
    if not options.is_module and not Path(script).is_file():
        raise UsageError(f"there is no script {script!r}: give a file and its arguments, or -m and a module")
    budget, plan, host_budget = options.budget, options.plan, options.host_budget
    if budget is not None and plan is not None:
        raise UsageError("give --budget or --plan, not both: a plan has its own budget")
    for name, value in {"--numerics": options.numerics, "--host-budget": host_budget}.items():
        if plan is not None and value:
            refuse_beside_a_plan(name)
    if budget is not None:
        read_budget(budget)
    if host_budget is not None:
        parse_budget(host_budget, None, "host_budget")
    check_new("--output", options.path, overwrite)
    given = None if plan is None else read_plan(plan)
    from memfit.cli.training import ScriptCall, run_script

    run_script(ScriptCall(script, context.args, options.is_module, strays(context)), options, given)


@app.command()
def estimate(
    workload: WorkloadName, options: EstimateOptions, overwrite: Overwrite = False, as_json: AsJson = False
) -> None:
    """Predict the memory and the time of a training step, without running it."""
    asked = None if options.device is None else str(options.device)
    check_inputs(workload, device=asked)
    check_new("--snapshot", options.snapshot, overwrite)
    check_new("--chrome-trace", options.chrome_trace, overwrite)
    if options.sharding is not None and options.world_size == 1:
        raise UsageError(f"--sharding {options.sharding} needs several ranks: give --world-size above 1")
    from memfit import pipeline
    from memfit.report import as_written_line, estimate_page, prediction_verdict
    from memfit.workload import is_in_fp32, precision_label

    loaded = load_for(workload, asked)
    device = pipeline.device_named(asked, loaded)
    card = hardware.find_device(device)
    compares = options.precision is None and card.kind == "cuda" and not card.is_here and is_in_fp32(loaded)
    auto = compares or options.precision == "auto"
    chosen = hardware.precisions(card)[-1] if auto else options.precision or "32-true"
    options = replace(options, device=device, precision=chosen, sharding=options.sharding or "ddp")
    plain = replace(options, precision="32-true", snapshot=None, chrome_trace=None)
    with stages() as progress:
        prediction = pipeline.estimate(loaded, **vars(options), progress=progress)
        as_written = pipeline.estimate(loaded, **vars(plain), progress=progress) if compares else None
    if as_json:
        written_too = {} if as_written is None else {"precision": chosen, "as_written": as_written}
        print_json({"verdict": prediction_verdict(prediction), **msgspec.to_builtins(prediction), **written_too})
    elif printed.is_quiet:
        tell(prediction_verdict(prediction))
    else:
        ranks = f", one of {options.world_size} ranks" if options.world_size > 1 else ""
        ranks += f", {options.parallel} on paper" if options.parallel else ""
        title = f"{loaded.name} on {device}, {precision_label(loaded, chosen)}{ranks}"
        out.print(estimate_page(with_options(prediction), title))
        if as_written is not None:
            out.print(as_written_line(as_written, prediction, chosen), highlight=False, soft_wrap=True)
    tell_written(options.snapshot, as_json)
    tell_written(options.chrome_trace, as_json)


@app.command(runs_steps=True)
def plan(
    workload: WorkloadName,
    options: PlanOptions,
    path: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as JSON."), After("budget")
    ] = None,
    framework: Annotated[
        Literal["pytorch", "jittor"],
        typer.Option(help="Framework of the workload; a Jittor workload is measured on this machine."),
    ] = "pytorch",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Choose the fastest settings that fit a memory budget, by their predicted peak."""
    device = None if options.device is None else str(options.device)
    if framework == "pytorch":
        check_inputs(workload, device=device)
    check_new("--output", path, overwrite)
    budget = given_budget(options.budget, device)
    if options.host_budget is not None:
        parse_budget(options.host_budget, None, "host_budget")
    options = replace(options, precisions=precisions_of(options.precisions))
    if options.sharding != "auto" and options.world_size == 1:
        raise UsageError(f"--sharding {options.sharding} needs several ranks: give --world-size above 1")
    if options.world_size != 1 and framework == "jittor":
        raise UsageError("--world-size is for workloads in PyTorch: leave out --framework jittor")
    from memfit import pipeline
    from memfit.report import frontier_table, plan_table, plan_verdict

    if framework == "jittor":
        for option, is_given in (("--measure", options.measure != "auto"), ("--compile", options.compile)):
            if is_given:
                raise UsageError(f"{option} is for workloads in PyTorch: leave it out with --framework jittor")
        chosen = _planned_in_jittor(workload, options)
    else:
        loaded = load_for(workload, device)
        if pipeline.device_named(device, loaded) == "cpu" and read_budget(budget).of == "":
            hardware.heap.keep(read_budget(budget).nbytes(), free_bytes())  # measured steps run as in `memfit train`
        with stages() as progress:
            chosen = pipeline.plan(loaded, **vars(options), progress=progress)
    if path is not None:
        chosen.save(path)
    tables = plan_table(with_options(chosen)), frontier_table(chosen, commands.words.of)
    show(chosen, as_json, *tables, verdict=plan_verdict(chosen))
    tell_written(path, as_json)


def _planned_in_jittor(name: str, options: PlanOptions) -> Plan:
    """Return the plan for a workload in Jittor."""
    if options.device not in (None, "cpu"):
        raise UsageError(
            f"--device {options.device} can't be given with --framework jittor, since Jittor uses its own device:"
            " leave it out"
        )
    prepare_jittor()
    from memfit import jittor

    workload = jittor.load_workload(name)
    with stages() as progress:
        return jittor.plan(
            workload,
            budget=options.budget,
            numerics=options.numerics,
            precisions=options.precisions or ("32-true",),
            points=options.points,
            progress=progress,
        )


@app.command()
def fleet(
    workload: WorkloadName,
    options: FleetOptions,
    page: PageFile = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find the fewest, the cheapest and the fastest cards that train a workload in time."""
    check_inputs(workload)
    check_new("--html", page, overwrite)
    read_budget(options.budget)
    numbers, searched = rank_numbers(str(options.world_sizes)), precisions_of(options.precisions)
    cards = check_cards(options.devices, cast("Path | None", options.prices), options.within)
    options = replace(options, world_sizes=numbers, precisions=searched, devices=options.devices or None)
    from memfit import pipeline
    from memfit.report import fleet_page, fleet_table

    loaded = load_for(workload, cards[0])
    with stages() as progress:
        found = pipeline.fleet(loaded, **vars(options), progress=progress)
    if page is not None:
        ir.codec.write_atomic(page, fleet_page(found).encode())
    show({**msgspec.to_builtins(found), "answers": found.answers()}, as_json, fleet_table(with_options(found)))
    tell_written(page, as_json)


@app.command(runs_steps=True)
def verify(
    workload: WorkloadName,
    plan: PlanFile,
    steps: Annotated[int, typer.Option(help="Training steps of each to time; 0 times none and is faster.", min=0)] = 5,
    as_json: AsJson = False,
) -> None:
    """Run the plain and the planned step side by side: numerics, peak bytes, and seconds a step.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit verify ...
    """
    check_inputs(workload)
    read = read_plan(plan)
    from memfit import pipeline
    from memfit.cli.training import settle_memory
    from memfit.report import verification_table, verification_verdict

    pipeline.check_launched(read)
    if steps:
        settle_memory(read, runs_plain=True)
    loaded = load(workload)
    with pipeline.ranks_of(read) as ranks:
        with stages() as progress:
            verification = pipeline.verify(read, loaded, steps=steps, progress=progress)
        if ranks.rank == 0:  # the first shows it
            verdict = verification_verdict(verification)
            found = {"verdict": verdict, **msgspec.structs.asdict(verification), "holds": verification.holds}
            show(found, as_json, verification_table(verification), verdict=verdict)
        ranks.gathered(None)  # the others wait for it: torchrun ends all ranks when one has failed
    if not verification.holds and ranks.rank:
        raise SystemExit(VerificationError.exit_status)
    if not verification.holds:
        raise VerificationError(f"verification of {plan} failed: " + "; ".join(verification.failures))


@app.command(runs_steps=True)
def train(
    workload: WorkloadName,
    options: RunOptions,
    source: Annotated[PlanSource, After("output")],
    as_json: AsJson = False,
) -> None:
    """Train with a plan: metrics, checkpoints and a report in the run's folder.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit train ...
    """
    check_inputs(workload, device=source.device)
    if (options.steps is None) == (options.epochs is None):
        raise UsageError("give one of --steps and --epochs")
    if options.adaptive and options.recover is False:
        raise UsageError("--adaptive always reruns steps that run out of memory: leave out --no-recover")
    limit_bytes = None if options.limit_bytes is None else parse_budget(options.limit_bytes, None, "limit")
    if options.host_budget is not None:
        parse_budget(options.host_budget, free_bytes(), "host_budget")
    if source.plan is None:
        planning = source.options(given_budget(source.budget, source.device))
    else:
        if source.budget is not None:
            raise UsageError("give one of --plan and --budget")
        for name in ("device", "numerics", "precision", "compile"):
            if getattr(source, name):
                refuse_beside_a_plan(f"--{name}")
        read_plan(source.plan)
    ir.codec.check_writable(options.out / "plan.json")
    from memfit import pipeline
    from memfit.cli.training import plan_of, settle_memory, train_with_bar
    from memfit.report import retries_text, waiting_text
    from memfit.training import check_folder

    if source.plan is None and not launched_rank():  # before it is planned; others may come when the first has begun
        check_folder(options.out, overwrite=options.overwrite, resume=options.resume)
    if source.device is not None and pipeline.on_this_machine(hardware.find_device(source.device)) is None:
        raise UsageError(
            f"--device {source.device} is not on this machine, and training runs here: give cpu or cuda, or make a"
            f" plan for it with memfit plan --device {source.device} and train there"
        )
    read = plan_of(source.plan, options.out if options.resume else None)
    runs_plain = options.compare_steps > 0
    if read is not None:
        pipeline.check_launched(read)
        settle_memory(read, options.host_budget, runs_plain=runs_plain)
    loaded = load(workload)
    log = None if options.log is None or launched_rank() else pipeline.load_log(str(options.log))  # the first calls it
    if read is None:
        with stages() as progress, pipeline.joined_by(loaded):
            read = pipeline.plan(loaded, **vars(planning), progress=progress)
        settle_memory(read, options.host_budget, runs_plain=runs_plain)
    options = replace(options, limit_bytes=limit_bytes, log=log)
    record = train_with_bar(read, loaded, options)
    if launched_rank():  # the first shows it
        return
    if as_json:
        print_json(record)
    else:
        losses = f"{record.first_loss:.4g} → {record.last_loss:.4g}"
        out.print(f"{record.steps} steps, loss {losses}. `memfit report {options.out}` draws the run", highlight=False)
        for line in (waiting_text(record), retries_text(record)):
            if line:
                note(line)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; RUN/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML file that needs no network."""
    check_new("--output", output, overwrite=True)
    from memfit import pipeline

    with stage("draw"):
        written = pipeline.write_report(run, output)
    tell_written(written, as_json, "report")


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show all data of one device.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine's devices and the catalogue of others."""
    from memfit.report import device_page, device_table

    if name is not None:
        found = find_device(name)
        show(_with_advice(found), as_json, device_page(found, hardware.advice(found)))
        return
    here, others = hardware.devices(), list(hardware.known_devices().values())
    if as_json:
        print_json({"machine": here, "catalogue": others})
        return
    out.print(device_table(here))
    out.print(device_table(others, "Catalogue: vendors' peaks, and rates measured by probe-devices"))


@app.command(runs_steps=True)
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


@tools.command(runs_steps=True)
def ladder(
    workload: WorkloadName,
    options: LadderOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the ladder to this file, as JSON.")
    ] = None,
    page: PageFile = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure the cost and the saving of each lever on this machine."""
    check_inputs(workload, device=options.device)
    check_new("--output", output, overwrite)
    check_new("--html", page, overwrite)
    if options.budget is not None:
        read_budget(options.budget)
    from memfit.report import ladder_page, ladder_table
    from memfit.tools import ladder as climb

    loaded = load(workload)
    with stages() as progress:
        climbed = climb(loaded, **vars(options), progress=progress)
    if output is not None:
        ir.codec.write_atomic(output, ir.codec.encode(climbed))
    if page is not None:
        ir.codec.write_atomic(page, ladder_page(climbed).encode())
    show(climbed, as_json, ladder_table(climbed))


@tools.command("probe-range")
def probe_range(
    workload: WorkloadName,
    batches: Annotated[int, typer.Option(help="Number of batches to check, from the first.", min=1)] = 1,
    microbatch_size: Annotated[int | None, typer.Option(help=MICROBATCH_HELP, min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Find the modules with activations or gradients outside the range of fp16, and give advice."""
    check_inputs(workload)
    from memfit import tools

    loaded = load(workload)
    with stages() as progress:
        ranges = tools.probe_range(loaded, batches=batches, microbatch_size=microbatch_size, progress=progress)
    if as_json:
        print_json(ranges)
    else:
        tell(str(ranges))


@tools.command("probe-devices")
def probe_devices(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File of devices to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's devices, and keep the figures for predictions."""
    import psutil

    from memfit.report import device_page

    place = output or hardware.user_file()
    hardware.read(place)  # an invalid file is refused before the measurements
    ir.codec.check_writable(place)
    if psutil.getloadavg()[0] > psutil.cpu_count() / 2:
        err.print(
            "Other programs are using this machine: the rates may be too low. Probe again when it is idle.",
            highlight=False,
        )
    with stages() as progress:
        probed = hardware.probe_all(progress)
    for device in probed:
        if missing := hardware.missing_figures(device):
            err.print(f"{device.name} is not saved: {', '.join(missing)} could not be measured", highlight=False)
    probed = [device for device in probed if not hardware.missing_figures(device)]
    written = hardware.keep_devices(probed, output)
    if as_json:
        print_json({"written": str(written), "devices": [_with_advice(device) for device in probed]})
        return
    for device in probed:
        out.print(device_page(device, hardware.advice(device)))
    out.print(f"Written to {written}", highlight=False, soft_wrap=True)


def _with_advice(device: Device) -> dict[str, Any]:
    found = {"precisions": hardware.precisions(device), "advice": hardware.advice(device)}
    return {**msgspec.structs.asdict(device), **found}


@tools.command()
def consolidate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or of one checkpoint.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--out", help="The folder to write the model to.", show_default=False)],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as whole tensors in safetensors files, from the shards of all ranks."""
    from memfit import pipeline

    with stage("write"):
        written = pipeline.consolidate(run, output, overwrite=overwrite)
    tell_written(written, as_json, "model")


@tools.command()
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

    from memfit import hardware

    seconds = prepare_jittor() if prepare else 0.0
    found = hardware.jittor_doctor.checks()
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
    from memfit import hardware

    started = time.monotonic()
    with stages() as progress:
        hardware.jittor_doctor.prepare(progress)
    return time.monotonic() - started


def main() -> None:
    """Run the command line; errors end it with their exit status, and show the user's own frames only.

    The traceback of an error without user code is shown whole: it is memfit's own.
    """
    commands.is_whole = False
    if "torch" not in sys.modules:  # silences its notices about partly measured memory
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except MemfitError as e:
        printed.print_error(e, printed.takes_json(), commands.is_whole)
        raise SystemExit(e.exit_status) from None
    except KeyboardInterrupt as e:
        commands.print_ended("interrupted", e)
        raise SystemExit(130) from None
    except SystemExit as e:
        if getattr(e, "__notes__", []):
            commands.print_ended("stopped by SIGTERM", e)
        raise
    except Exception as e:
        if not users_frames(e):
            raise
        printed.print_error(e, printed.takes_json(), commands.is_whole)
        raise SystemExit(1) from None
    finally:
        printed.give_back()
