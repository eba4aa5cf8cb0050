"""The command line: one command for each verb of the library."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
import typer

from memfit.cli import commands, streams
from memfit.cli.output import err, out, print_error, print_json, stages
from memfit.errors import MemfitError, UsageError, VerificationError
from memfit.fake_gpu import shim
from memfit.frames import users_frames
from memfit.ranks.environment import launched_rank
from memfit.units import parse_budget

if TYPE_CHECKING:
    from memfit.ir.plan import Precision
    from memfit.workload import Workload

app = commands.Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Make a PyTorch training step fit the memory you have, at the smallest slow-down that can be found.\n\n"
        "A WORKLOAD is file.py:function or package.module:function, where the function takes nothing and returns"
        " a memfit.Workload.\n\n"
        "Exit status: 0 done, 1 your own code raised an error, 2 wrong use or a step that can't be captured,"
        " 3 no plan fits the budget, 4 a plan is not what it says, 5 the loss is not finite,"
        " 6 out of memory with no lower plan left, 75 stopped by SIGTERM with a checkpoint."
    ),
)

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="file.py:function or package.module:function.", show_default=False)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", callback=streams.when_asked)
]
DeviceHere = Annotated[
    str | None,
    typer.Option(help="Device of this machine to run on; by default the one that the model is on.", show_default=False),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="Device to predict for; see `memfit devices`. By default the one that the model is on.",
        show_default=False,
    ),
]
MicrobatchSize = Annotated[
    int | None, typer.Option(help="Samples in one forward and backward pass; the whole batch by default.", min=1)
]
BudgetText = Annotated[
    str,
    typer.Option(
        help="Bytes, or with a unit (1.5GiB, 22GB), or a share of the device (90%) or of the plain peak (0.5x).",
        show_default=False,
    ),
]
HostBudget = Annotated[
    str | None, typer.Option(help="Pinned host memory that activations may wait in (32GiB); for GPUs.")
]
PlanFile = Annotated[Path, typer.Option("--plan", help="A plan that `memfit plan` wrote.", show_default=False)]
Overwrite = Annotated[bool, typer.Option(help="Replace what is there already.")]


class NumericsName(enum.StrEnum):
    """Numerics classes, by how far the numbers of the training may change."""

    exact = "exact"
    reordered = "reordered"
    reduced = "reduced"
    changed = "changed"


NumericsOption = Annotated[NumericsName, typer.Option(help="How far the numbers of the training may change.")]


class PrecisionName(enum.StrEnum):
    """Precisions of the step."""

    fp32 = "32-true"
    tf32 = "tf32"
    bf16 = "bf16-mixed"
    fp16 = "16-mixed"
    bf16_true = "bf16-true"
    auto = "auto"


class ShardingName(enum.StrEnum):
    """Ways in which ranks share the training."""

    ddp = "ddp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


class SharedName(enum.StrEnum):
    """Ways in which ranks share a step that is planned."""

    ddp = "ddp"
    zero2 = "zero2"
    zero3 = "zero3"
    auto = "auto"


class CompileName(enum.StrEnum):
    """Whether a step may be compiled."""

    no = "no"
    auto = "auto"
    yes = "yes"


CompileOption = Annotated[
    CompileName, typer.Option(help="Whether the model and the loss may be compiled; auto searches compiled steps too.")
]
_COMPILE: dict[CompileName, bool | Literal["auto"]] = {
    CompileName.no: False,
    CompileName.auto: "auto",
    CompileName.yes: True,
}


class FrameworkName(enum.StrEnum):
    """Frameworks of workloads."""

    pytorch = "pytorch"
    jittor = "jittor"


class DoctorFramework(enum.StrEnum):
    """Frameworks that need preparation."""

    jittor = "jittor"


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
        print_error(e, streams.takes_json(), commands.is_whole)
        raise SystemExit(e.exit_status) from None
    except KeyboardInterrupt as e:
        _print_notes("interrupted", e)
        raise SystemExit(130) from None
    except SystemExit as e:
        if getattr(e, "__notes__", []):
            _print_notes("stopped by SIGTERM", e)
        raise
    except Exception as e:
        if not users_frames(e):
            raise
        print_error(e, streams.takes_json(), commands.is_whole)
        raise SystemExit(1) from None
    finally:
        streams.give_back()


def _print_notes(what: str, error: BaseException) -> None:
    err.print("; ".join([what, *getattr(error, "__notes__", [])]), highlight=False, soft_wrap=True)


@app.command()
def estimate(
    workload: WorkloadName,
    device: DeviceName = None,
    precision: Annotated[
        PrecisionName, typer.Option(help="Precision of the step; auto takes the mixed one that suits the device.")
    ] = PrecisionName.fp32,
    microbatch_size: MicrobatchSize = None,
    world_size: Annotated[
        int, typer.Option(help="Ranks that share the step; each runs its part of the batch.", min=1)
    ] = 1,
    sharding: Annotated[
        ShardingName | None, typer.Option(help="How they share it; ddp by default.", show_default=False)
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Ranks that share one copy of the model, on paper: tensor, context and pipeline parallelism, as in"
            " tp=4,pp=2.",
            show_default=False,
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write the allocator's simulated history there, for pytorch.org/memory_viz; GPUs only."),
    ] = None,
    chrome_trace: Annotated[Path | None, typer.Option(help="Write the step's timeline there, for Perfetto.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Predict the memory (bytes) and the time (seconds) of the step as it is, without running it."""
    from memfit import pipeline
    from memfit.hardware.advice import precisions
    from memfit.report.estimates import estimate_page
    from memfit.workload import precision_label

    _check_new("--snapshot", snapshot, overwrite)
    _check_new("--chrome-trace", chrome_trace, overwrite)
    if sharding is not None and world_size == 1:
        raise UsageError(f"--sharding {sharding.value} needs several ranks: give --world-size above 1")
    loaded = _load_for(workload, device)
    device = pipeline.device_named(device, loaded)
    is_auto = precision is PrecisionName.auto
    chosen = precisions(pipeline.find_device(device))[-1] if is_auto else cast("Precision", precision.value)
    with stages() as progress:
        prediction = pipeline.estimate(
            loaded,
            device=device,
            precision=chosen,
            microbatch_size=microbatch_size,
            world_size=world_size,
            sharding=sharding.value if sharding else "ddp",
            parallel=parallel,
            snapshot=snapshot,
            chrome_trace=chrome_trace,
            progress=progress,
        )
    if as_json:
        print_json(prediction)
    else:
        ranks = f", one of {world_size} ranks" if world_size > 1 else ""
        ranks += f", {parallel} on paper" if parallel else ""
        out.print(estimate_page(prediction, f"{loaded.name} on {device}, {precision_label(loaded, chosen)}{ranks}"))
    for written in (snapshot, chrome_trace):
        if written is not None and not as_json:
            out.print(f"Written to {written}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    workload: WorkloadName,
    budget: BudgetText,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan there, as JSON.")] = None,
    device: DeviceName = None,
    numerics: NumericsOption = NumericsName.reordered,
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(
            help="Precisions to search, repeatable; auto, the default, is 32-true and the mixed one for the device.",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        int, typer.Option(help="Ranks that share the step; each runs its part of the batch.", min=1)
    ] = 1,
    sharding: Annotated[SharedName, typer.Option(help="How they share it; auto searches all.")] = SharedName.auto,
    points: Annotated[int, typer.Option(help="Budgets on the frontier, per precision and microbatch size.", min=1)] = 8,
    host_budget: HostBudget = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run plans that are predicted to be about as fast for a few steps, on copies, and take the fastest; by"
            " default where the device is here and steps are short enough for 20 seconds.",
            show_default=False,
        ),
    ] = None,
    compile: CompileOption = CompileName.no,
    framework: Annotated[
        FrameworkName, typer.Option(help="What the workload is written in; one in Jittor is measured here.")
    ] = FrameworkName.pytorch,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Choose the fastest combination of levers whose predicted peak fits a budget in bytes."""
    from memfit import pipeline
    from memfit.report.tables import frontier_table, plan_table

    _check_new("--output", output, overwrite)
    searched = _precisions(precision or [])
    if sharding is not SharedName.auto and world_size == 1:
        raise UsageError(f"--sharding {sharding.value} needs several ranks: give --world-size above 1")
    if world_size > 1 and framework is FrameworkName.jittor:
        raise UsageError("--world-size is for workloads in PyTorch: leave out --framework jittor")
    if framework is FrameworkName.jittor:
        from memfit.cli.jittor import plan_in_jittor

        if measure is not None:
            raise UsageError("--measure is for workloads in PyTorch: leave it out with --framework jittor")
        if compile is not CompileName.no:
            raise UsageError("--compile is for workloads in PyTorch: leave it out with --framework jittor")
        chosen = plan_in_jittor(workload, budget, device, numerics.value, searched, points)
    else:
        loaded = _load_for(workload, device)
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
                compile=_COMPILE[compile],
                progress=progress,
            )
    if output is not None:
        pipeline.save_plan(chosen, output)
    if as_json:
        print_json(chosen)
    else:
        out.print(plan_table(chosen), frontier_table(chosen))
        if output is not None:
            out.print(f"Written to {output}", highlight=False)


@app.command()
def fleet(
    workload: WorkloadName,
    steps: Annotated[int, typer.Option(help="Optimizer updates of the whole training.", min=1, show_default=False)],
    budget: Annotated[
        str, typer.Option(help="What a card may hold: bytes, or with a unit (70GiB), or a share of each card (90%).")
    ] = "90%",
    within: Annotated[
        str | None, typer.Option(help="What the training may take (24h, 3d, 90min); any time by default.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Cards to look at, repeatable; all of the catalogue by default.", show_default=False),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to try: 1-64, or 1,2,4,8.")] = "1-64",
    sharding: Annotated[
        SharedName, typer.Option(help="How ranks share the step; auto searches all.")
    ] = SharedName.auto,
    numerics: NumericsOption = NumericsName.reordered,
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(
            help="Precisions to search, repeatable; auto, the default, is the mixed one that each card is made for,"
            " where --numerics allows it.",
            show_default=False,
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="TOML file of your prices, each with its date.", show_default=False)
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Solve for numbers of ranks too that can't be faster than fewer are.")
    ] = False,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page with table and plot there.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find the fewest cards that train a workload in time, the cheapest ones, and the fastest."""
    from memfit import pipeline
    from memfit.cli.fleet_options import check_cards, rank_numbers
    from memfit.report.fleets import fleet_table, write_fleet

    _check_new("--html", page, overwrite)
    numbers, searched = rank_numbers(ranks), _precisions(precision or [])
    cards = check_cards(device, prices, within)
    loaded = _load_for(workload, cards[0])
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
        out.print(fleet_table(found))
        if page is not None:
            out.print(f"Written to {page}", highlight=False, soft_wrap=True)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT [ARGS]...", help="Your script.", show_default=False)],
    budget: BudgetText,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")] = False,
    numerics: Annotated[
        NumericsName, typer.Option(help="How far the numbers of the training may change: exact or reordered.")
    ] = NumericsName.exact,
    host_budget: HostBudget = None,
) -> None:
    """Run your own training script as it is, and fit the loop in it into a budget.

    Its first step is watched where it runs; the steps after it run under the plan for it.
    """
    from memfit.cli.run import run_script

    run_script(script, context.args, is_module, budget, numerics.value, host_budget)


@app.command("probe-range")
def probe_range(
    workload: WorkloadName,
    batches: Annotated[int, typer.Option(help="First batches of the workload to look at.", min=1)] = 1,
    microbatch_size: MicrobatchSize = None,
    as_json: AsJson = False,
) -> None:
    """Tell which modules' activations or gradients leave fp16's range or flush to zero, and what to do about it."""
    from memfit import pipeline

    loaded = _load(workload)
    with stages() as progress:
        ranges = pipeline.probe_range(loaded, batches=batches, microbatch_size=microbatch_size, progress=progress)
    if as_json:
        print_json(ranges)
    else:
        out.print(str(ranges), highlight=False, markup=False, soft_wrap=True)


@app.command()
def verify(workload: WorkloadName, plan: PlanFile, as_json: AsJson = False) -> None:
    """Run the plain and the planned step side by side: numerics and peak bytes, against what the plan says.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit verify ...
    """
    from memfit import pipeline
    from memfit.cli.training import check_launched
    from memfit.report.listings import verification_table

    read, loaded = pipeline.load_plan(plan), _load(workload)
    check_launched(read, "verify")
    with pipeline.ranks_of(read) as ranks:
        with stages() as progress:
            verification = pipeline.verify(read, loaded, progress=progress)
        if ranks.rank == 0:  # the first shows it
            if as_json:
                print_json({**msgspec.structs.asdict(verification), "holds": verification.holds})
            else:
                out.print(verification_table(verification))
        ranks.gathered(None)  # the others wait for it: torchrun ends all ranks when one has failed
    if not verification.holds and ranks.rank:
        raise SystemExit(VerificationError.exit_status)
    if not verification.holds:
        raise VerificationError(f"{plan} does not hold: " + "; ".join(verification.failures))


@app.command()
def compare(
    workload: WorkloadName,
    plan: PlanFile,
    steps: Annotated[int, typer.Option(help="Steps of each.", min=2)] = 5,
    as_json: AsJson = False,
) -> None:
    """Train the plain and the planned step in turn on copies: peaks in bytes, seconds a step, and losses.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit compare ...
    """
    from memfit import pipeline
    from memfit.cli.training import check_launched
    from memfit.report.tables import comparison_table

    read, loaded = pipeline.load_plan(plan), _load(workload)
    check_launched(read, "compare")
    with stages() as progress:

        def compared(done: int, of: int) -> None:
            progress("plain and planned", done, of)

        comparison = pipeline.compare(read, loaded, steps=steps, progress=compared)
    if launched_rank():  # the first shows it
        return
    if as_json:
        print_json(comparison)
    else:
        out.print(comparison_table(None, comparison))


@app.command()
def train(
    workload: WorkloadName,
    output: Annotated[Path, typer.Option("--out", help="The run's folder.", show_default=False)],
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan that `memfit plan` wrote; or give --budget.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Plan for this budget first, as `memfit plan` does, for the ranks that are there; or give --plan.",
            show_default=False,
        ),
    ] = None,
    compile: CompileOption = CompileName.no,
    steps: Annotated[int | None, typer.Option(help="Optimizer updates; or give --epochs.", min=1)] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the workload's batches; or give --steps.", min=1)
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.", min=1)] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.", min=1)] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="Checkpoints that are kept.", min=1)] = 2,
    async_checkpoints: Annotated[
        bool,
        typer.Option(
            "--async-checkpoints", help="Write checkpoints in a thread, from copies in host memory, while steps run."
        ),
    ] = False,
    prefetch_batches: Annotated[
        int, typer.Option(help="Batches that a thread makes ahead, while steps run.", min=0)
    ] = 0,
    measure_every: Annotated[
        int | None,
        typer.Option(help="Steps between measurements of the peak; the second step is measured in any case.", min=1),
    ] = None,
    compare: Annotated[
        int, typer.Option(help="Before training, steps to run side by side with the plain step; 0 for none.", min=0)
    ] = 0,
    recover: Annotated[
        bool | None,
        typer.Option(
            "--recover/--no-recover",
            help="Run a step that runs out of memory again, under the next lower plan; by default where it can be.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            help="What a step may hold at a time: bytes, or with a unit (1.5GiB). It fails before it exceeds that.",
            show_default=False,
        ),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Run batches of other shapes with plans of their own.")
    ] = False,
    host_budget: Annotated[
        str | None,
        typer.Option(
            help="What the run may take of the host's memory (64GiB, 90%); by default what the host has left.",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard scalars too.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the run's latest checkpoint.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train with a plan: metrics, checkpoints and a report in the run's folder.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit train ...
    """
    from memfit import pipeline
    from memfit.cli.training import check_launched, plan_of, spare_memory, train_with_bar
    from memfit.report.summary import retries_text, waiting_text

    if (steps is None) == (epochs is None):
        raise UsageError("give one of --steps and --epochs")
    if adaptive and recover is False:
        raise UsageError("--adaptive always reruns steps that run out of memory: leave out --no-recover")
    limit_bytes = None if limit is None else parse_budget(limit, None, "--limit")
    if (plan is None) == (budget is None):
        raise UsageError("give one of --plan and --budget")
    if plan is not None and compile is not CompileName.no:
        raise UsageError("--compile is for the plan that --budget makes: leave it out with --plan, which says it")
    read = plan_of(plan, output if resume else None)
    if read is not None:
        check_launched(read, "train")
        spare_memory(read, host_budget)
    loaded = _load(workload)
    if read is None:
        assert budget is not None
        with stages() as progress, pipeline.joined_by(loaded):
            read = pipeline.plan(loaded, budget=budget, compile=_COMPILE[compile], progress=progress)
        spare_memory(read, host_budget)
    record = train_with_bar(
        read,
        loaded,
        out=output,
        steps=steps,
        epochs=epochs,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        async_checkpoints=async_checkpoints,
        prefetch_batches=prefetch_batches,
        measure_every=measure_every,
        compare_steps=compare,
        recover=recover,
        limit_bytes=limit_bytes,
        adaptive=adaptive,
        host_budget=host_budget,
        tensorboard=tensorboard,
        resume=resume,
        overwrite=overwrite,
    )
    if launched_rank():  # the first shows it
        return
    if as_json:
        print_json(record)
    else:
        losses = f"{record.first_loss:.4g} → {record.last_loss:.4g}"
        out.print(f"{record.steps} steps, loss {losses}. `memfit report {output}` draws the run", highlight=False)
        for line in (waiting_text(record), retries_text(record)):
            if line:
                out.print(line, highlight=False, soft_wrap=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; RUN/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML file that needs no network."""
    from memfit import pipeline

    _check_new("--output", output, overwrite=True)
    with stages() as progress:
        progress("draw", 0, 1)
        written = pipeline.write_report(run, output)
        progress("draw", 1, 1)
    if as_json:
        print_json({"report": str(written)})
    else:
        out.print(f"Written to {written}", highlight=False)


@app.command()
def consolidate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or of one checkpoint.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--out", help="The folder to write the model to.", show_default=False)],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as whole tensors in safetensors files, however many ranks wrote its shards."""
    from memfit import pipeline

    with stages() as progress:
        progress("write", 0, 1)
        written = pipeline.consolidate(run, output, overwrite=overwrite)
        progress("write", 1, 1)
    if as_json:
        print_json({"model": str(written)})
    else:
        out.print(f"Written to {written}", highlight=False)


@app.command()
def ladder(
    workload: WorkloadName,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes, or a share as `plan` takes it; what the plain step takes by default."),
    ] = None,
    numerics: NumericsOption = NumericsName.reduced,
    seconds: Annotated[float, typer.Option(help="How long each step is timed for, at least.", min=0.01)] = 2.0,
    device: DeviceHere = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the ladder there, as JSON.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page with table and plot there.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Climb the levers one by one, and measure on this machine what each buys."""
    from memfit._ladder import ladder as climb
    from memfit.ir import codec
    from memfit.report.ladders import ladder_table, write_ladder

    _check_new("--output", output, overwrite)
    _check_new("--html", page, overwrite)
    loaded = _load(workload)
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


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show all of one device.", show_default=False)
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure this machine's devices and keep the figures.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --probe, the file of devices to write to.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine's devices and the catalogue of others, or measure this machine's."""
    from memfit.cli.devices import list_devices, probe_devices, show_device

    if probe and name is not None:
        raise UsageError(f"--probe measures this machine's devices: leave out {name!r}")
    if output is not None and not probe:
        raise UsageError("--output is the file that --probe writes to: give --probe too")
    if probe:
        probe_devices(output, as_json)
    elif name is not None:
        show_device(name, as_json)
    else:
        list_devices(as_json)


@app.command()
def doctor(
    framework: Annotated[DoctorFramework, typer.Argument(help="What to look at.", show_default=False)],
    prepare: Annotated[bool, typer.Option(help="Compile it where that was not done; takes minutes, once.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what a second framework lacks on this machine, and prepare it."""
    from memfit.cli.jittor import examine

    examine(prepare, as_json)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("runs/demo"),
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer updates; as many as take about half a minute by default.", min=2),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory budget; the plain step needs about 573 MiB.")] = "128MiB",
    device: DeviceHere = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level GPT on Python's standard library under a budget that the plain step does not meet."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: waiting threads leave the cores
    from memfit.cli.demo import run_demo

    run_demo(output, steps, budget, device or "cpu", overwrite)


def _precisions(names: list[PrecisionName]) -> list[Precision] | None:
    """Return the precisions for `memfit.plan`; "auto" is its default, None."""
    if PrecisionName.auto not in names:
        return [cast("Precision", name.value) for name in names] or None
    if set(names) != {PrecisionName.auto}:
        other_options = " ".join(f"--precision {name.value}" for name in names if name is not PrecisionName.auto)
        raise UsageError(
            f"--precision auto chooses the precisions by the device: leave out {other_options}, or --precision auto"
        )
    return None


def _load_for(workload: str, device: str | None) -> Workload:
    """Return a workload to predict for a device; for a GPU, restart in a process with fake CUDA tensors.

    There the workload is built under fake tensors, so that a model of any size takes no memory.
    """
    from memfit import pipeline

    if device is None:
        return _load(workload)
    target = pipeline.find_device(device)
    if pipeline.is_elsewhere(target):
        line = shim.command("memfit", *sys.argv[1:])
        streams.give_back(is_end=False)
        sys.stdout.flush()
        os.execve(line[0], line, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return _load(workload, is_fake=target.kind == "cuda")


def _load(workload: str, *, is_fake: bool = False) -> Workload:
    """Load a workload by name, which runs the user's code, and show that as a stage."""
    from memfit import pipeline

    with stages() as progress:
        progress("load", 0, 1)
        loaded = (pipeline.load_fake_workload if is_fake else pipeline.load_workload)(workload)
        progress("load", 1, 1)
    return loaded


def _check_new(option: str, path: Path | None, overwrite: bool) -> None:
    """Refuse to replace a file, and a file that can't be written, before any work is done for it."""
    from memfit.ir import codec

    if path is None:
        return
    codec.check_writable(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} already exists: give another file, or --overwrite")
