"""Commands that hold a plan against the plain step, train with it, and write a run's report and model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from memfit.cli import output as printed
from memfit.cli.options import (
    COMPILE,
    AsJson,
    CompileName,
    CompileOption,
    DeviceHere,
    LogName,
    NumericsName,
    Overwrite,
    PlanFile,
    PrecisionsOption,
    WorkloadName,
    check_inputs,
    check_new,
    given_budget,
    load,
    precisions_of,
    read_plan,
)
from memfit.cli.output import note, out, print_json, stages, tell_written
from memfit.errors import UsageError, VerificationError
from memfit.hardware.host import free_bytes
from memfit.ir import codec
from memfit.ranks.environment import launched_rank
from memfit.units import parse_budget


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
    from memfit.report.listings import verification_table
    from memfit.report.verdict import verification_verdict

    pipeline.check_launched(read)
    if steps:
        settle_memory(read, runs_plain=True)
    loaded = load(workload)
    with pipeline.ranks_of(read) as ranks:
        with stages() as progress:
            verification = pipeline.verify(read, loaded, steps=steps, progress=progress)
        if ranks.rank == 0:  # the first shows it
            if as_json:
                verdict = verification_verdict(verification)
                print_json({"verdict": verdict, **msgspec.structs.asdict(verification), "holds": verification.holds})
            elif printed.is_quiet:
                out.print(verification_verdict(verification), highlight=False, markup=False, soft_wrap=True)
            else:
                out.print(verification_table(verification))
        ranks.gathered(None)  # the others wait for it: torchrun ends all ranks when one has failed
    if not verification.holds and ranks.rank:
        raise SystemExit(VerificationError.exit_status)
    if not verification.holds:
        raise VerificationError(f"verification of {plan} failed: " + "; ".join(verification.failures))


def train(
    workload: WorkloadName,
    output: Annotated[Path, typer.Option("--out", help="The run's folder.", show_default=False)],
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Plan file, written by `memfit plan`; or give --budget.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Plan for this budget first, as `memfit plan` does, for the ranks that were started; or give --plan.",
            show_default=False,
        ),
    ] = None,
    device: DeviceHere = None,
    numerics: Annotated[
        NumericsName | None,
        typer.Option(help="Allowed change in the numbers of the training; by default reordered.", show_default=False),
    ] = None,
    precision: PrecisionsOption = None,
    compile: CompileOption = CompileName.no,
    steps: Annotated[int | None, typer.Option(help="Optimizer updates; or give --epochs.", min=1)] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the workload's batches; or give --steps.", min=1)
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.", min=1)] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.", min=1)] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="Number of checkpoints to keep.", min=1)] = 2,
    async_checkpoints: Annotated[
        bool,
        typer.Option(
            "--async-checkpoints", help="Write checkpoints in a thread, from copies in host memory, while steps run."
        ),
    ] = False,
    prefetch_batches: Annotated[
        int, typer.Option(help="Number of batches to make ahead, in a thread, while steps run.", min=0)
    ] = 0,
    measure_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between measurements of the peak. Step 2 (with DDP step 3) is always measured.",
            min=1,
        ),
    ] = None,
    compare: Annotated[
        int, typer.Option(help="Before training, steps to run side by side with the plain step; 0 for none.", min=0)
    ] = 0,
    recover: Annotated[
        bool | None,
        typer.Option(
            "--recover/--no-recover",
            help="After out of memory, run the step again under the next lower plan; by default where possible.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            help="Limit of a step's memory: bytes, or with a unit (1.5GiB). A step fails before it exceeds the limit.",
            show_default=False,
        ),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Run batches of other shapes with plans of their own.")
    ] = False,
    host_budget: Annotated[
        str | None,
        typer.Option(
            help="Host memory for the run (64GiB, 90%); by default the host's free memory.",
            show_default=False,
        ),
    ] = None,
    log: LogName = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard scalars too.")] = False,
    resume: Annotated[bool, typer.Option(help="Continue from the run's latest checkpoint.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train with a plan: metrics, checkpoints and a report in the run's folder.

    For a plan for several ranks: torchrun --nproc-per-node N -m memfit train ...
    """
    check_inputs(workload, device=device)
    if (steps is None) == (epochs is None):
        raise UsageError("give one of --steps and --epochs")
    if adaptive and recover is False:
        raise UsageError("--adaptive always reruns steps that run out of memory: leave out --no-recover")
    limit_bytes = None if limit is None else parse_budget(limit, None, "limit")
    if host_budget is not None:
        parse_budget(host_budget, free_bytes(), "host_budget")
    if plan is None:
        budget = given_budget(budget, device)
    elif budget is not None:
        raise UsageError("give one of --plan and --budget")
    of_budget = {
        "--device": device,
        "--numerics": numerics,
        "--precision": precision,
        "--compile": None if compile is CompileName.no else compile,
    }
    for name in (name for name, value in of_budget.items() if plan is not None and value):
        raise UsageError(f"{name} is for the plan that --budget makes: leave it out with --plan, which sets it")
    if plan is not None:
        read_plan(plan)
    searched = precisions_of(precision or [])
    codec.check_writable(output / "plan.json")
    from memfit import pipeline
    from memfit.cli.training import plan_of, settle_memory, train_with_bar
    from memfit.report.summary import retries_text, waiting_text
    from memfit.training.runs.folder import check_folder
    from memfit.training.runs.log import RunOptions

    if plan is None and not launched_rank():  # before it is planned; others may come when the first has begun to write
        check_folder(output, overwrite=overwrite, resume=resume)
    if device is not None and pipeline.on_this_machine(pipeline.find_device(device)) is None:
        raise UsageError(
            f"--device {device} is not on this machine, and training runs here: give cpu or cuda, or make a"
            f" plan for it with memfit plan --device {device} and train there"
        )
    read = plan_of(plan, output if resume else None)
    if read is not None:
        pipeline.check_launched(read)
        settle_memory(read, host_budget, runs_plain=compare > 0)
    loaded = load(workload)
    log_function = None if log is None or launched_rank() else pipeline.load_log(log)  # the first calls it
    if read is None:
        assert budget is not None
        with stages() as progress, pipeline.joined_by(loaded):
            read = pipeline.plan(
                loaded,
                budget=budget,
                device=device,
                numerics=(numerics or NumericsName.reordered).value,
                precisions=searched,
                compile=COMPILE[compile],
                progress=progress,
            )
        settle_memory(read, host_budget, runs_plain=compare > 0)
    options = RunOptions(
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
        tensorboard=tensorboard,
        resume=resume,
        overwrite=overwrite,
        recover=recover,
        limit_bytes=limit_bytes,
        adaptive=adaptive,
        host_budget=host_budget,
        log=log_function,
    )
    record = train_with_bar(read, loaded, options)
    if launched_rank():  # the first shows it
        return
    if as_json:
        print_json(record)
    else:
        losses = f"{record.first_loss:.4g} → {record.last_loss:.4g}"
        out.print(f"{record.steps} steps, loss {losses}. `memfit report {output}` draws the run", highlight=False)
        for line in (waiting_text(record), retries_text(record)):
            if line:
                note(line)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; RUN/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML file that needs no network."""
    check_new("--output", output, overwrite=True)
    from memfit import pipeline

    with stages() as progress:
        progress("draw", 0, 1)
        written = pipeline.write_report(run, output)
        progress("draw", 1, 1)
    if as_json:
        print_json({"report": str(written)})
    tell_written(written, as_json)


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

    with stages() as progress:
        progress("write", 0, 1)
        written = pipeline.consolidate(run, output, overwrite=overwrite)
        progress("write", 1, 1)
    if as_json:
        print_json({"model": str(written)})
    tell_written(written, as_json)
