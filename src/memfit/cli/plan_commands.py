"""Commands that predict and plan: `estimate`, `plan`, `fleet`, `run`, `probe-range`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
import typer

from memfit import hardware
from memfit.cli import commands, output
from memfit.cli.commands import After, with_options
from memfit.cli.machine_commands import prepare_jittor
from memfit.cli.options import (
    AsJson,
    Overwrite,
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
    strays,
)
from memfit.cli.output import out, print_json, stages, tell_written
from memfit.errors import UsageError
from memfit.foundations import has_module, parse_budget, read_budget
from memfit.hardware import free_bytes
from memfit.planner import MICROBATCH_HELP, EstimateOptions, FleetOptions, PlanOptions

if TYPE_CHECKING:
    from memfit.ir import Plan


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
    from memfit.hardware import precisions
    from memfit.report import as_written_line, estimate_page, prediction_verdict
    from memfit.workload import is_in_fp32, precision_label

    loaded = load_for(workload, asked)
    device = pipeline.device_named(asked, loaded)
    card = hardware.find_device(device)
    compares = options.precision is None and card.kind == "cuda" and not card.is_here and is_in_fp32(loaded)
    auto = compares or options.precision == "auto"
    chosen = precisions(card)[-1] if auto else options.precision or "32-true"
    options = replace(options, device=device, precision=chosen, sharding=options.sharding or "ddp")
    plain = replace(options, precision="32-true", snapshot=None, chrome_trace=None)
    with stages() as progress:
        prediction = pipeline.estimate(loaded, **vars(options), progress=progress)
        as_written = pipeline.estimate(loaded, **vars(plain), progress=progress) if compares else None
    if as_json:
        written_too = {} if as_written is None else {"precision": chosen, "as_written": as_written}
        verdict = prediction_verdict(prediction)
        print_json({"verdict": verdict, **msgspec.to_builtins(prediction), **written_too})
    elif output.is_quiet:
        out.print(prediction_verdict(prediction), highlight=False, markup=False, soft_wrap=True)
    else:
        ranks = f", one of {options.world_size} ranks" if options.world_size > 1 else ""
        ranks += f", {options.parallel} on paper" if options.parallel else ""
        title = f"{loaded.name} on {device}, {precision_label(loaded, chosen)}{ranks}"
        out.print(estimate_page(with_options(prediction), title))
        if as_written is not None:
            out.print(as_written_line(as_written, prediction, chosen), highlight=False, soft_wrap=True)
    for written in (options.snapshot, options.chrome_trace):
        if written is not None:
            tell_written(written, as_json)


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
        if options.measure != "auto":
            raise UsageError("--measure is for workloads in PyTorch: leave it out with --framework jittor")
        if options.compile:
            raise UsageError("--compile is for workloads in PyTorch: leave it out with --framework jittor")
        chosen = _planned_in_jittor(workload, options)
    else:
        loaded = load_for(workload, device)
        if pipeline.device_named(device, loaded) == "cpu" and read_budget(budget).of == "":
            hardware.heap.keep(
                read_budget(budget).nbytes(), free_bytes()
            )  # steps that are measured run as `memfit train` does
        with stages() as progress:
            chosen = pipeline.plan(loaded, **vars(options), progress=progress)
    if path is not None:
        chosen.save(path)
    if as_json:
        print_json(chosen)
    elif output.is_quiet:
        out.print(plan_verdict(chosen), highlight=False, markup=False, soft_wrap=True)
    else:
        out.print(plan_table(with_options(chosen)), frontier_table(chosen, commands.words.of))
    if path is not None:
        tell_written(path, as_json)


def _planned_in_jittor(name: str, options: PlanOptions) -> Plan:
    """Return the plan for a workload in Jittor.

    Raises:
        UsageError: `device` is not the one that Jittor uses.
    """
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


def fleet(
    workload: WorkloadName,
    options: FleetOptions,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with table and plot to this file.")
    ] = None,
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
    from memfit.report import fleet_table, write_fleet

    loaded = load_for(workload, cards[0])
    with stages() as progress:
        found = pipeline.fleet(loaded, **vars(options), progress=progress)
    if page is not None:
        write_fleet(page, found)
    if as_json:
        print_json({**msgspec.to_builtins(found), "answers": found.answers()})
    else:
        out.print(fleet_table(with_options(found)))
    if page is not None:
        tell_written(page, as_json)


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
            raise UsageError(f"{name} is for the plan that --budget makes: leave it out with --plan, which sets it")
    if budget is not None:
        read_budget(budget)
    if host_budget is not None:
        parse_budget(host_budget, None, "host_budget")
    check_new("--output", options.path, overwrite)
    given = None if plan is None else read_plan(plan)
    from memfit.cli.run import ScriptCall, run_script

    run_script(ScriptCall(script, context.args, options.is_module, strays(context)), options, given)


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
        out.print(str(ranges), highlight=False, markup=False, soft_wrap=True)
