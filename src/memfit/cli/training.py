"""The work of commands: training with a progress bar, the demonstration, and the user's own script within a budget."""

from __future__ import annotations

import contextlib
import functools
import runpy
import shlex
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.rule import Rule

from memfit import hardware, ir, pipeline, recipes
from memfit.cli import commands, output
from memfit.cli.options import ScriptOptions, suggested_budget, typed
from memfit.cli.output import err, note, out, stages, tell
from memfit.errors import MemfitError, UsageError
from memfit.foundations import format_bytes, format_seconds, is_memfits, is_users, parse_budget, read_budget
from memfit.hardware import free_bytes, is_busy
from memfit.ir import Plan, RunRecord, Views
from memfit.pipeline import Listener, fit_whatever_trains, load_log, trained
from memfit.ranks import launched_size
from memfit.report import comparison_table, estimate_page, frontier_table, plan_table, plan_verdict
from memfit.training import PLAN, VIEWS, RunOptions, StepRecord, held_folder
from memfit.workload import Workload

_GPU_BUDGET = "90%"
_COMPARED_STEPS = 4  # of which the first is not timed
_PLAIN_BYTES = 600 * 2**20  # no less than the plain step takes
_TRAINING_SECONDS = 15.0
_FEWEST, _MOST = 6, 60


def train_with_bar(plan: Plan, workload: Workload, options: RunOptions) -> RunRecord:
    """Train with `memfit.train`, and show progress: loss, step time, and the last measured peak."""
    peak = ""
    total = options.steps
    if total is None and options.epochs is not None:
        with contextlib.suppress(TypeError):  # batches without a length
            total = options.epochs * (1 if workload.batches is None else len(workload.batches))  # type: ignore[arg-type]
    is_prepared = False
    prepare = f"prepare, make code (about {format_seconds(plan.code_seconds)})" if plan.code_seconds else "prepare"
    with stages() as report:

        def compared(done: int, of: int) -> None:
            report("plain and planned", done, of)
            if done == of:
                report(prepare, 0, 1)

        def on_step(progress: StepRecord) -> None:
            nonlocal peak, is_prepared
            if not is_prepared:
                is_prepared = True
                report(prepare, 1, 1)
                report("train", progress.step - 1, total)
            if progress.peak_bytes is not None:
                peak = f", peak {format_bytes(progress.peak_bytes)}"
            note = f"loss {progress.loss:.4f}, {format_seconds(progress.seconds)} a step{peak}"
            report("train", progress.step, total, note)

        if not options.compare_steps:
            report(prepare, 0, 1)
        return trained(plan, workload, replace(options, progress=compared, on_step=on_step))


def plan_of(path: Path | None, folder: Path | None) -> Plan | None:
    """Load the plan from `path`, or else from the run that is resumed, if it was made for this number of ranks."""
    if path is not None:
        return Plan.load(path)
    if folder is None or not (folder / PLAN).is_file():
        return None
    held = Plan.load(folder / PLAN)
    sharding = held.levers.sharding
    return held if launched_size() == (1 if sharding is None else sharding.world_size) else None


def settle_memory(plan: Plan, host_budget: int | float | str | None = None, *, runs_plain: bool = False) -> None:
    """Keep or return this process's freed memory (`heap.settle`), and tell the user where it is slower.

    Call it before any large allocation.

    Args:
        host_budget: The run's host budget, as given by the user; None for the host's free memory.
        runs_plain: Whether the plain step runs too.
    """
    if plan.device != "cpu":
        return
    free = free_bytes()
    room = free if host_budget is None else min(free, parse_budget(host_budget, free, "host_budget"))
    peak_bytes = plan.predicted.peak_upper_bytes
    if runs_plain:
        peak_bytes = max(peak_bytes, plan.plain.peak_upper_bytes)
    if told := hardware.heap.settle(peak_bytes, room):
        note(told)


def run_demo(folder: Path, steps: int | None, budget: str, device: str, overwrite: bool) -> None:
    """Estimate, plan, compare, train and report, showing each, in about two minutes.

    Args:
        steps: Optimizer updates; None for as many as take a quarter of a minute.
    """
    with held_folder(folder, overwrite=overwrite, resume=False):
        if torch.get_num_threads() > 1 and is_busy():  # threads that wait for each other are many times slower there
            torch.set_num_threads(1)
            out.print("Other programs are using this machine: memfit computes with one thread.", highlight=False)
        if device == "cpu":
            hardware.heap.keep(_PLAIN_BYTES, free_bytes())  # before operators are timed
        workload = recipes.byte_lm()
        with stages() as progress:
            plain = pipeline.estimate(workload, device=device, progress=progress)
        out.print(Rule("The plain step, predicted without running it"))
        out.print(estimate_page(plain, f"{workload.name} on {device}, 32-true"))
        with stages() as progress:
            plan = pipeline.plan(workload, budget=budget, device=device, progress=progress)
        out.print(Rule(f"The plan for {budget}, and the frontier"))
        out.print(plan_table(plan))
        out.print(frontier_table(plan))
        steps = steps or max(_FEWEST, min(_MOST, int(_TRAINING_SECONDS / plan.predicted.step_seconds)))
        out.print(Rule(f"The plain step and the planned step, compared; then {steps} steps of training with the plan"))
        record = train_with_bar(
            plan,
            workload,
            RunOptions(
                out=folder,
                steps=steps,
                evaluate_every=max(1, steps // 3),
                measure_every=10,
                compare_steps=_COMPARED_STEPS,
                overwrite=overwrite,
            ),
        )
        report = pipeline.write_report(folder)
        comparison = ir.codec.read(folder / VIEWS, Views).comparison
        assert comparison is not None  # asked for above
        out.print(Rule("Predicted and measured"))
        out.print(comparison_table(plan, comparison))
        peak = format_bytes(record.measured_peak_bytes or 0)
        loss = f"{record.first_loss:.3f} → {record.last_loss:.3f}"
        out.print(f"{record.steps} steps: loss {loss}, highest measured peak {peak}", highlight=False)
        out.print(f"The report: {report}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class ScriptCall:
    """A script as it is called."""

    name: str  # or the module's
    arguments: list[str]
    is_module: bool  # whether it is run as with `python -m`
    strays: list[list[str]]  # arguments that are options of `memfit run` too, each with its value


def run_script(call: ScriptCall, options: ScriptOptions, plan: Plan | None) -> None:
    """Run a script, or a module as with `python -m`, and fit its training loop into a budget.

    Its errors end the command as they end Python, with a traceback without memfit's frames, and status 1.

    Args:
        plan: The plan to begin with; None to make one.
    """
    budget = options.budget
    if plan is None and budget is None:
        budget = _default_budget(call)
    held = read_budget(f"{plan.budget_bytes}B" if plan is not None else str(budget))
    is_on_cpu = hardware.accelerators.current_kind() is None
    if is_on_cpu and held.of == "" and (told := hardware.heap.settle(held.nbytes(), free_bytes())):
        _note(told)
    log = None if options.log is None else load_log(options.log)
    advice = _stray_text(call.strays[0]) if call.strays else ""
    sys.argv = [call.name, *call.arguments]
    sys.path.insert(0, str(Path.cwd() if call.is_module else Path(call.name).resolve().parent))
    written: list[Path] = []

    def keep(made: Plan) -> None:
        if output.is_quiet:
            _tell(f"memfit: {plan_verdict(made)}")
        if options.path is not None:
            written[:] = [made.save(options.path)]

    try:
        with fit_whatever_trains(
            budget=budget,
            plan=plan,
            numerics=options.numerics or "exact",
            host_budget=options.host_budget,
            listener=Listener(_tell, _note, keep, functools.partial(stages, "memfit: "), log),
        ):
            if call.is_module:
                runpy.run_module(call.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(call.name, run_name="__main__")
    except MemfitError:
        raise
    except KeyboardInterrupt as e:
        left = "no plan is kept (`-o plan.json` keeps it)"
        if written:
            script = f"-m {call.name}" if call.is_module else shlex.quote(call.name)
            line = f"memfit run --plan {shlex.quote(str(written[0]))} {script}"
            left = f"the plan is in {written[0]}, and `{line}` starts with it"
        e.add_note(f"{left}. Checkpoints are the script's own")
        raise
    except SystemExit as e:
        if e.code == 2 and advice:  # argparse's status, for an option that the script does not have
            _tell(advice)
        raise
    except Exception as e:
        exception = traceback.TracebackException.from_exception(e)
        if not commands.is_whole:
            _leave_out_frames(exception)
        sys.stderr.writelines(exception.format())  # as Python does
        raise SystemExit(1) from None


def _default_budget(call: ScriptCall) -> str:
    """Return the share of the GPU that is taken without --budget; without a GPU, ask for a budget."""
    stray = next((stray for stray in call.strays if stray[0].startswith("--budget")), None)
    if hardware.accelerators.current_kind() is None:
        if stray is not None:
            raise UsageError(f"--budget stands before the script: {typed(*stray, without=stray)}")
        raise UsageError(
            "--budget is missing, and there is no GPU for its default of 90%: give the memory for a step."
            f" Type {typed('--budget', suggested_budget())}"
        )
    _note(f"memfit: the budget is {_GPU_BUDGET} of the device; --budget before the script sets another")
    if stray is not None:
        text = "" if call.is_module else Path(call.name).read_text(encoding="utf-8", errors="replace")
        # An option of the script's own stands in its text, by its name or as a parser's field.
        if "--budget" not in text and "budget:" not in text:
            _tell(f"memfit: {' '.join(stray)} is passed to the script. {_stray_text(stray)}")
    return _GPU_BUDGET


def _stray_text(stray: list[str]) -> str:
    option = stray[0].partition("=")[0]
    return f"If {option} is meant for memfit, it stands before the script: {typed(*stray, without=stray)}"


def _tell(text: str) -> None:
    tell(commands.words.of(text), to=err)


def _note(text: str) -> None:
    note(commands.words.of(text))


def _leave_out_frames(exception: traceback.TracebackException) -> None:
    """Leave out memfit's frames, and those before the script."""
    frames = list(exception.stack)
    first = next((i for i, frame in enumerate(frames) if is_users(frame.filename)), len(frames))
    exception.stack = traceback.StackSummary.from_list([f for f in frames[first:] if not is_memfits(f.filename)])
    for link in (exception.__cause__, exception.__context__, *(exception.exceptions or ())):
        if link is not None:
            _leave_out_frames(link)
