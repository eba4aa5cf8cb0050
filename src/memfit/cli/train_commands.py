"""Commands that hold a plan against the plain step, train with it, and write a run's report and model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from memfit import hardware, ir
from memfit.cli import output as printed
from memfit.cli.commands import After
from memfit.cli.options import (
    AsJson,
    Overwrite,
    PlanSource,
    WorkloadName,
    check_inputs,
    check_new,
    given_budget,
    load,
    read_plan,
)
from memfit.cli.output import note, out, print_json, stages, tell_written
from memfit.errors import UsageError, VerificationError
from memfit.foundations import parse_budget
from memfit.hardware import free_bytes
from memfit.ranks import launched_rank
from memfit.training import RunOptions


def verify(
    workload: WorkloadName,
    plan: Annotated[Path, typer.Option("--plan", help="Plan file, written by `memfit plan`.", show_default=False)],
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
        of_budget = {
            "--device": source.device,
            "--numerics": source.numerics,
            "--precision": source.precision,
            "--compile": source.compile,
        }
        for name in (name for name, value in of_budget.items() if value):
            raise UsageError(f"{name} is for the plan that --budget makes: leave it out with --plan, which sets it")
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
