"""Runs: train with a plan, report, and the model of a run as other libraries read it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from memfit import ir
from memfit.capture import measure_peak_bytes
from memfit.errors import CheckpointError, OutputError, UsageError
from memfit.foundations import format_seconds, parse_budget
from memfit.hardware import find_device, free_bytes
from memfit.ir import Comparison, Levers, Plan, RunRecord, Views, module_table, simulate
from memfit.levers import host_bytes_of
from memfit.pipeline._apply import apply
from memfit.pipeline._verify import compare
from memfit.pipeline.placement import check_runs_here, placed, ranks_of
from memfit.pipeline.verbs import checked, uninterrupted, verb
from memfit.planner import capture_each, costs_of, options_of
from memfit.ranks import launched_rank, once
from memfit.report import Bars, Report, ReportFile, plan_page, with_bars
from memfit.training import (
    MANIFEST,
    METRICS,
    PLAN,
    REPORT,
    RUN,
    VIEWS,
    HostWatch,
    LogFunction,
    RunOptions,
    StepRecord,
    Trainer,
    check_disk,
    check_host,
    held_folder,
    holds_a_start,
    host_needs,
    is_begun,
    latest,
    read_lines,
    read_model,
    write_tensors,
)
from memfit.workload import Workload

MAX_FILE_BYTES = 5 * 10**9
"""A file's size from which the model goes on in the next one: as many bytes of the host's memory are used."""


@verb
def views_of(plan: Plan, workload: Workload, comparison: Comparison | None = None) -> Views:
    """Return what a report draws: the predicted timelines of the plain and the planned step, and the modules."""
    device = find_device(plan.device)
    plain, planned = capture_each(workload, [Levers(microbatch_size=plan.batch_size), plan.levers], device)
    costs = costs_of([plain, planned], device)
    return Views(
        plain=simulate(plain, costs),
        planned=simulate(planned, costs),
        modules=module_table(plain, planned, costs, plan.levers.regions),
        comparison=comparison,
    )


def _train_bars(bars: Bars, arguments: Mapping[str, Any]) -> dict[str, Callable[..., None]]:
    def on_step(progress: StepRecord) -> None:
        note = f"loss {progress.loss:.4g}, {format_seconds(progress.seconds)} a step"
        bars("train", progress.step, arguments.get("steps"), note)

    return {"progress": functools.partial(bars, "plain and planned"), "on_step": on_step}


@checked
@with_bars(_train_bars)
def train(
    plan: Plan,
    workload: Workload,
    *,
    out: str | Path,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    async_checkpoints: bool = False,
    prefetch_batches: int = 0,
    measure_every: int | None = None,
    compare_steps: int = 0,
    tensorboard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    recover: bool | None = None,
    limit_bytes: int | None = None,
    adaptive: bool = False,
    host_budget: int | float | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    log: LogFunction | None = None,
) -> RunRecord:
    """Train a workload with a plan, and write metrics, checkpoints and plan to the run's folder.

    The workload's own model and optimizer are trained, on the device that the plan was made for: what is on the CPU is
    moved there (`memfit.apply`), and so is each batch; `Workload.evaluate` must move its own data. For arguments not
    named here see `Trainer`. On SIGTERM a checkpoint is written after the step at hand, and SystemExit raised with
    status 75: run it again, with `resume`.

    A plan for several ranks is trained by all of them: torchrun starts them, each calls this function, which joins the
    process group, and the first writes the run's files. `Workload.batches` gives global batches, the same on every
    rank; `Workload.evaluate` and `on_step` run on every rank, and the first one's metrics are kept. If one rank is told
    to stop, all do, after the same step. With `resume`, a folder without a checkpoint is begun in: torchrun starts
    ranks again by the same command, however far they came.

    Args:
        plan: The plan.
        workload: The workload it was made for.
        out: Folder of the run.
        compare_steps: Before training, steps to run side by side with the plain step, on copies (0 for none).
        recover: Whether a step that runs out of memory is undone, and run again on the same batch under the next
            lower plan of the frontier, on all ranks that share it. None does so wherever it can be done: `fully_shard`
            needs torch 2.13 for it.
        limit_bytes: What a step may hold at a time (> 0): it fails before it exceeds that. None sets no limit.
        adaptive: Whether batches of other shapes than the workload's are run with plans of their own; see `apply`.
            Steps that run out of memory are then always run again.
        host_budget: What the run may take of the host's memory beyond what the process holds when it begins: bytes, a
            string with a unit, or a share ("90%") of what the host has left; None for all of that. What plan, batches
            made ahead, checkpoints and recovery need is counted before the run begins, and so are the copies of
            `async_checkpoints`, which on a CPU come on top of the plan's budget. Between steps the process is held to
            it, as its resident memory says, and the run stopped with a checkpoint.
        progress: Called with how many of the `compare_steps` are done, of how many; by default bars in a notebook.
        on_step: Called after every step; by default a bar in a notebook.
        log: Given each line of `metrics.jsonl` as a dict: of a step, an evaluation or an event, for an experiment
            tracker. Ranks other than the first do not call it. Its errors are raised as they are, after a checkpoint.

    Raises:
        UsageError: An argument is out of its range, or the plan does not fit the workload, or not the number of ranks.
        RankError: Another rank failed.
        BudgetError: The run needs more of the host's memory than there is, or `host_budget` can't be parsed.
        OutputError: `out` can't be written, has too little room, must not be overwritten, or another run has it.
        OutOfMemoryError: A step ran out of memory, and so it did under every lower plan.
        NonFiniteError: The loss or a gradient is not finite.
    """
    return trained(plan, workload, options_of(RunOptions, {**locals(), "out": Path(out)}))


@uninterrupted
def trained(plan: Plan, workload: Workload, options: RunOptions, *, draw: Callable[..., Views] = views_of) -> RunRecord:
    """Train as `memfit.train` does, with what its report draws from a function; return the record of the run."""
    folder, sharding = options.out, plan.levers.sharding
    check_runs_here(plan, workload, makes_values=not options.compare_steps)
    if sharding is not None and options.adaptive:
        raise UsageError("adaptive=True can't be used with levers.sharding: leave it out")
    if options.adaptive or options.recover is None:
        can_undo = True
        if sharding is not None:
            from memfit.ranks import why_not_undone  # distributed packages take a second to import

            can_undo = not why_not_undone(sharding)
        options = replace(options, recover=options.adaptive or can_undo)
    is_drawn = False
    if options.resume and (folder / VIEWS).exists():
        with contextlib.suppress(UsageError):
            is_drawn = ir.codec.read(folder / PLAN, Plan) == plan
    drawn: Views | None = None
    if sharding is not None and not is_drawn:
        from memfit.ranks import is_joined  # distributed packages take a second to import

        if not is_joined() and not launched_rank():  # by the first rank, before the ranks are joined
            drawn = draw(plan, workload)
    with ranks_of(plan) as ranks:
        if sharding is not None:
            # A run that was ended before its first checkpoint begins again.
            if once(ranks, lambda: options.resume and not is_begun(folder)):
                overwrite = once(ranks, lambda: options.overwrite or holds_a_start(folder))
                options = replace(options, resume=False, overwrite=overwrite)
        workload = placed(workload, plan)
        with held_folder(folder, overwrite=options.overwrite, resume=options.resume, ranks=ranks):
            host_bytes = None
            if options.host_budget is not None:
                host_bytes = parse_budget(options.host_budget, free_bytes(), "host_budget")
            check_host(host_needs(plan, workload, host_bytes_of(plan), options), host_bytes)
            once(ranks, lambda: check_disk(plan, workload, options))
            comparison = None
            if options.compare_steps:
                comparison = compare(plan, workload, steps=options.compare_steps, progress=options.progress)
            if sharding is None:
                drawn = draw(plan, workload, comparison)
            elif drawn is not None:
                drawn = msgspec.structs.replace(drawn, comparison=comparison)
            with apply(
                plan,
                workload,
                recover=bool(options.recover),
                adaptive=options.adaptive,
                limit_bytes=options.limit_bytes,
                snapshots=folder,
            ) as step:
                host = HostWatch(step, host_bytes)
                pending = None if is_drawn else drawn

                def write() -> None:
                    nonlocal pending
                    if pending is not None:
                        ir.codec.write_atomic(folder / VIEWS, ir.codec.encode(pending))
                        pending = None

                def watch() -> None:
                    write()  # at the first batch, so that a run that goes on has a report too
                    host.check()

                trainer = Trainer(step, plan, options, measure=measure_peak_bytes, watch=watch)
                try:
                    return trainer.fit()
                finally:
                    if (folder / RUN).exists():
                        write()


@checked
def write_report(run: str | Path, path: str | Path | None = None) -> Path:
    """Write the report of a run: one HTML file that needs no network. In a notebook its path shows the report.

    Args:
        run: The run's folder.
        path: The file; `report.html` in the folder by default.

    Raises:
        UsageError: The folder holds no run, or its files can't be read.
        OutputError: The file can't be written.
    """
    folder = Path(run)
    if not (folder / RUN).is_file():
        raise UsageError(f"{folder} has no {RUN}: give the folder of a run, made by `memfit train --out`")
    if not (folder / VIEWS).is_file():
        raise UsageError(
            f"{folder} has no {VIEWS}: its ranks were joined before memfit.train, so it can't predict the"
            " step. Leave out torch.distributed.init_process_group: memfit.train joins the ranks"
        )
    data = Report(
        ir.codec.read(folder / PLAN, Plan),
        ir.codec.read(folder / VIEWS, Views, error=UsageError),
        ir.codec.read(folder / RUN, RunRecord, error=UsageError),
        read_lines(folder / METRICS),
        folder,
    )
    return ReportFile(ir.codec.write_atomic(path or folder / REPORT, plan_page(data).encode()))


def consolidate(
    run: str | Path, out: str | Path, *, overwrite: bool = False, max_file_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Write the model of a run's newest checkpoint as whole tensors, however many ranks wrote it; return the folder.

    Tied weights are written once. The folder is what `from_pretrained` of Hugging Face's transformers reads, once the
    model's `config.json` is beside it (`model.config.save_pretrained(out)`). Tensors are read one file's worth at a
    time, so that no GPU and little memory is needed.

    Args:
        run: The run's folder, or that of one checkpoint.
        out: The folder to write to; it is made where it is missing.
        overwrite: Whether to replace a model that is there.
        max_file_bytes: Bytes of a file (> 0); a larger model gets several and an index.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        OutputError: A model is there already, or can't be written.
    """
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes} is not above 0")
    run, out = Path(run), Path(out)
    path = run if (run / MANIFEST).is_file() else latest(run)
    if path is None:
        raise CheckpointError(f"{run} has no complete checkpoint: give the folder of a run, or of a checkpoint")
    there = sorted(file.name for file in out.glob("model*.safetensors*")) if out.is_dir() else []
    if there and not overwrite:
        raise OutputError(f"{out} has {there[0]} already: give another folder, or overwrite=True")
    model = read_model(path)
    files: list[list[str]] = [[]]
    filled = 0
    for key in model:
        if files[-1] and filled + model.bytes(key) > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(key)
        filled += model.bytes(key)
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    names = ["model.safetensors"] if len(files) == 1 else names
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in there:
            (out / name).unlink()
        for name, keys in zip(names, files, strict=True):
            write_tensors({key: model[key] for key in keys}, out / name, {"format": "pt", **model.notes})
    except OSError as e:
        raise OutputError(f"can't write the model to {out}: {e.strerror or e}") from e
    if len(files) > 1:
        weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(map(model.bytes, model))}, "weight_map": weight_map}
        ir.codec.write_atomic(out / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
    return out
