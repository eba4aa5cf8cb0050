"""Commands that predict and plan: `estimate`, `plan`, `fleet`, `run`, `probe-range`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer

from memfit.cli import commands, output
from memfit.cli.commands import with_options
from memfit.cli.options import (
    BUDGET_HELP,
    COMPILE,
    AsJson,
    BudgetText,
    CompileName,
    CompileOption,
    DeviceName,
    FrameworkName,
    HostBudget,
    LogName,
    LoopNumericsName,
    MicrobatchSize,
    NumericsName,
    NumericsOption,
    Overwrite,
    PrecisionName,
    PrecisionsOption,
    ShardingName,
    SharedName,
    WorkloadName,
    check_inputs,
    check_new,
    given_budget,
    load,
    load_for,
    precisions_of,
    read_plan,
    strays,
)
from memfit.cli.output import out, print_json, stages, tell_written
from memfit.errors import UsageError
from memfit.hardware import heap
from memfit.hardware.host import free_bytes
from memfit.units import parse_budget, read_budget
from memfit.workload_names import has_module

if TYPE_CHECKING:
    from memfit.ir.plan import Precision


def estimate(
    workload: WorkloadName,
    device: DeviceName = None,
    precision: Annotated[
        PrecisionName | None,
        typer.Option(
            help="Precision of the step; auto is the mixed precision of the device. Default: auto for a card of"
            " the catalogue, shown beside 32-true; elsewhere 32-true.",
            show_default=False,
        ),
    ] = None,
    microbatch_size: MicrobatchSize = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks; each runs its part of the batch.", min=1)] = 1,
    sharding: Annotated[
        ShardingName | None, typer.Option(help="How ranks share the step; ddp by default.", show_default=False)
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Ranks that share one copy of the model, on paper: tensor, context and pipeline parallelism, as"
            " in tp=4,pp=2.",
            show_default=False,
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            help="Write the allocator's simulated history to this file, for pytorch.org/memory_viz; GPUs only."
        ),
    ] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write the step's timeline to this file, for Perfetto.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Predict the memory and the time of a training step, without running it."""
    check_inputs(workload, device=device)
    check_new("--snapshot", snapshot, overwrite)
    check_new("--chrome-trace", chrome_trace, overwrite)
    if sharding is not None and world_size == 1:
        raise UsageError(f"--sharding {sharding.value} needs several ranks: give --world-size above 1")
    from memfit import pipeline
    from memfit.hardware.catalogue import precisions
    from memfit.report.estimates import as_written_line, estimate_page
    from memfit.report.verdict import prediction_verdict
    from memfit.workload import is_in_fp32, precision_label

    loaded = load_for(workload, device)
    device = pipeline.device_named(device, loaded)
    card = pipeline.find_device(device)
    compares = precision is None and card.kind == "cuda" and not card.is_here and is_in_fp32(loaded)
    if compares or precision is PrecisionName.auto:
        chosen = precisions(card)[-1]
    else:
        chosen = cast("Precision", (precision or PrecisionName.fp32).value)
    sizes = {"microbatch_size": microbatch_size, "world_size": world_size, "parallel": parallel}
    given = {**sizes, "device": device, "sharding": sharding.value if sharding else "ddp"}
    with stages() as progress:
        prediction = pipeline.estimate(
            loaded,
            precision=chosen,
            snapshot=snapshot,
            chrome_trace=chrome_trace,
            progress=progress,
            **given,  # type: ignore[arg-type]
        )
        as_written = pipeline.estimate(loaded, progress=progress, **given) if compares else None  # type: ignore[arg-type]
    if as_json:
        written_too = {} if as_written is None else {"precision": chosen, "as_written": as_written}
        verdict = prediction_verdict(prediction)
        print_json({"verdict": verdict, **msgspec.to_builtins(prediction), **written_too})
    elif output.is_quiet:
        out.print(prediction_verdict(prediction), highlight=False, markup=False, soft_wrap=True)
    else:
        ranks = f", one of {world_size} ranks" if world_size > 1 else ""
        ranks += f", {parallel} on paper" if parallel else ""
        out.print(
            estimate_page(
                with_options(prediction), f"{loaded.name} on {device}, {precision_label(loaded, chosen)}{ranks}"
            )
        )
        if as_written is not None:
            out.print(as_written_line(as_written, prediction, chosen), highlight=False, soft_wrap=True)
    for written in (snapshot, chrome_trace):
        if written is not None:
            tell_written(written, as_json)


def plan(
    workload: WorkloadName,
    budget: BudgetText = None,
    path: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as JSON.")] = None,
    device: DeviceName = None,
    numerics: NumericsOption = NumericsName.reordered,
    precision: PrecisionsOption = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks; each runs its part of the batch.", min=1)] = 1,
    sharding: Annotated[
        SharedName, typer.Option(help="How ranks share the step; auto searches all.")
    ] = SharedName.auto,
    points: Annotated[
        int, typer.Option(help="Number of budgets on the frontier, per precision and microbatch size.", min=1)
    ] = 8,
    host_budget: HostBudget = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run plans of about equal predicted time for a few steps, on copies, and choose the fastest."
            " Default: if the device is here and this needs at most 30 seconds (60 if compiled); --measure"
            " allows 120.",
            show_default=False,
        ),
    ] = None,
    compile: CompileOption = CompileName.no,
    framework: Annotated[
        FrameworkName, typer.Option(help="Framework of the workload; a Jittor workload is measured on this machine.")
    ] = FrameworkName.pytorch,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Choose the fastest settings that fit a memory budget, by their predicted peak."""
    if framework is FrameworkName.pytorch:
        check_inputs(workload, device=device)
    check_new("--output", path, overwrite)
    budget = given_budget(budget, device)
    if host_budget is not None:
        parse_budget(host_budget, None, "host_budget")
    searched = precisions_of(precision or [])
    if sharding is not SharedName.auto and world_size == 1:
        raise UsageError(f"--sharding {sharding.value} needs several ranks: give --world-size above 1")
    if world_size > 1 and framework is FrameworkName.jittor:
        raise UsageError("--world-size is for workloads in PyTorch: leave out --framework jittor")
    from memfit import pipeline
    from memfit.report.tables import frontier_table, plan_table
    from memfit.report.verdict import plan_verdict

    if framework is FrameworkName.jittor:
        from memfit.cli.jittor_commands import plan_in_jittor

        if measure is not None:
            raise UsageError("--measure is for workloads in PyTorch: leave it out with --framework jittor")
        if compile is not CompileName.no:
            raise UsageError("--compile is for workloads in PyTorch: leave it out with --framework jittor")
        chosen = plan_in_jittor(workload, budget, device, numerics.value, searched, points)
    else:
        loaded = load_for(workload, device)
        if pipeline.device_named(device, loaded) == "cpu" and read_budget(budget).of == "":
            heap.keep(read_budget(budget).nbytes(), free_bytes())  # steps that are measured run as `memfit train` does
        with stages() as progress:
            chosen = pipeline.plan(
                loaded,
                budget=budget,
                device=device,
                numerics=numerics.value,
                precisions=searched,
                world_size=world_size,
                sharding=sharding.value,
                points=points,
                host_budget=host_budget,
                measure="auto" if measure is None else measure,
                compile=COMPILE[compile],
                progress=progress,
            )
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


def fleet(
    workload: WorkloadName,
    steps: Annotated[int, typer.Option(help="Optimizer updates of the whole training.", min=1, show_default=False)],
    budget: Annotated[
        str,
        typer.Option(help="Memory to use on each card: bytes, or with a unit (70GiB), or a share of the card (90%)."),
    ] = "90%",
    within: Annotated[
        str | None, typer.Option(help="Longest training time (24h, 3d, 90min); no limit by default.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Cards to compare, repeatable; all of the catalogue by default.", show_default=False),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to try: 1-64, or 1,2,4,8.")] = "1-64",
    sharding: Annotated[
        SharedName, typer.Option(help="How ranks share the step; auto searches all.")
    ] = SharedName.auto,
    numerics: NumericsOption = NumericsName.reduced,
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(
            help="Precisions to search, repeatable. auto, the default: the mixed precision of each card, if"
            " --numerics allows it.",
            show_default=False,
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="TOML file of your prices, each with its date.", show_default=False)
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Solve for every number of ranks, even where more ranks can't be faster.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with table and plot to this file.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find the fewest, the cheapest and the fastest cards that train a workload in time."""
    from memfit.cli.fleet_options import check_cards, rank_numbers

    check_inputs(workload)
    check_new("--html", page, overwrite)
    read_budget(budget)
    numbers, searched = rank_numbers(ranks), precisions_of(precision or [])
    cards = check_cards(device, prices, within)
    from memfit import pipeline
    from memfit.report.fleets import fleet_table, write_fleet

    loaded = load_for(workload, cards[0])
    with stages() as progress:
        found = pipeline.fleet(
            loaded,
            budget=budget,
            steps=steps,
            within=within,
            devices=device or None,
            world_sizes=numbers,
            sharding=sharding.value,
            numerics=numerics.value,
            precisions=searched,
            prices=prices,
            each=each,
            progress=progress,
        )
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
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"{BUDGET_HELP}; by default 90% of the GPU. On a CPU give it, or --plan.", show_default=False
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Start with this plan, written by `memfit run -o`.", show_default=False),
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file as soon as it is made, as JSON.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")] = False,
    numerics: Annotated[
        LoopNumericsName | None,
        typer.Option(help="Allowed change in the numbers of the training; by default exact.", show_default=False),
    ] = None,
    host_budget: HostBudget = None,
    log: LogName = None,
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
    if is_module and not has_module(script.partition(".")[0]):
        raise UsageError(f"there is no module {script!r} in {Path.cwd()}, and none is installed")
    if not is_module and not Path(script).is_file():
        raise UsageError(f"there is no script {script!r}: give a file and its arguments, or -m and a module")
    if budget is not None and plan is not None:
        raise UsageError("give --budget or --plan, not both: a plan has its own budget")
    for name, value in {"--numerics": numerics, "--host-budget": host_budget}.items():
        if plan is not None and value:
            raise UsageError(f"{name} is for the plan that --budget makes: leave it out with --plan, which sets it")
    if budget is not None:
        read_budget(budget)
    if host_budget is not None:
        parse_budget(host_budget, None, "host_budget")
    check_new("--output", path, overwrite)
    given = None if plan is None else read_plan(plan)
    from memfit.cli.run import ScriptCall, run_script

    run_script(
        ScriptCall(script, context.args, is_module, strays(context)),
        budget=budget,
        plan=given,
        numerics=(numerics or LoopNumericsName.exact).value,
        host_budget=host_budget,
        path=path,
        log=log,
    )


def probe_range(
    workload: WorkloadName,
    batches: Annotated[int, typer.Option(help="Number of batches to check, from the first.", min=1)] = 1,
    microbatch_size: MicrobatchSize = None,
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
