"""Runs the user's own training script, unchanged, within a budget."""

from __future__ import annotations

import functools
import runpy
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from memfit import hardware
from memfit.cli import commands, output
from memfit.cli.options import ScriptOptions, suggested_budget, typed
from memfit.cli.output import err, note, stages
from memfit.errors import MemfitError, UsageError
from memfit.foundations import Budget, is_memfits, is_users, read_budget
from memfit.hardware import free_bytes
from memfit.ir import Plan
from memfit.pipeline import Listener, fit_whatever_trains, load_log
from memfit.report import plan_verdict

_GPU_BUDGET = "90%"


@dataclass(frozen=True)
class ScriptCall:
    """A script as it is called.

    Attributes:
        name: The script, or the module.
        arguments: Its own arguments.
        is_module: Whether it is run as with `python -m`.
        strays: Those of the arguments that are options of `memfit run` too, each with its value.
    """

    name: str
    arguments: list[str]
    is_module: bool
    strays: list[list[str]]


def run_script(call: ScriptCall, options: ScriptOptions, plan: Plan | None) -> None:
    """Run a script, or a module as with `python -m`, and fit its training loop into a budget.

    Its errors end the command as they end Python, with a traceback without memfit's frames, and status 1.

    Args:
        plan: The plan to begin with; None to make one.

    Raises:
        UsageError: There is no budget, no plan and no GPU.
        WorkloadError: The function that `log` names does not exist, or can't be loaded.
    """
    budget = options.budget
    if plan is not None:
        _settle_memory(read_budget(f"{plan.budget_bytes}B"))
    else:
        budget = budget or _default_budget(call)
        _settle_memory(read_budget(budget))
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
        e.add_note(_what_is_left(call, written))
        raise
    except SystemExit as e:
        if e.code == 2 and advice:  # argparse's status, for an option that the script does not have
            _tell(advice)
        raise
    except Exception as e:
        _print_traceback(e)
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
    if stray is not None and not _is_in_script("--budget", call):
        _tell(f"memfit: {' '.join(stray)} is passed to the script. {_stray_text(stray)}")
    return _GPU_BUDGET


def _stray_text(stray: list[str]) -> str:
    option = stray[0].partition("=")[0]
    return f"If {option} is meant for memfit, it stands before the script: {typed(*stray, without=stray)}"


def _is_in_script(option: str, call: ScriptCall) -> bool:
    """Tell whether a script's text has an option, by its name or as a parser's field."""
    if call.is_module:
        return False
    text = Path(call.name).read_text(encoding="utf-8", errors="replace")
    return option in text or f"{option[2:].replace('-', '_')}:" in text


def _what_is_left(call: ScriptCall, written: list[Path]) -> str:
    """Return the plan file that an interrupted script leaves, and the command that continues."""
    script = f"-m {call.name}" if call.is_module else shlex.quote(call.name)
    if written:
        line = f"memfit run --plan {shlex.quote(str(written[0]))} {script}"
        return f"the plan is in {written[0]}, and `{line}` starts with it. Checkpoints are the script's own"
    return "no plan is kept (`-o plan.json` keeps it). Checkpoints are the script's own"


def _settle_memory(budget: Budget) -> None:
    """Keep or return freed memory (`heap.settle`), by a CPU budget in bytes, and tell the user where it is slower."""
    if (
        budget.of == ""
        and hardware.accelerators.current_kind() is None
        and (told := hardware.heap.settle(budget.nbytes(), free_bytes()))
    ):
        _note(told)


def _tell(text: str) -> None:
    err.print(commands.words.of(text), highlight=False, markup=False, soft_wrap=True)


def _note(text: str) -> None:
    note(commands.words.of(text))


def _print_traceback(error: Exception) -> None:
    """Print a traceback as Python does; without --traceback, without memfit's frames and those before the script."""
    exception = traceback.TracebackException.from_exception(error)
    if not commands.is_whole:
        _leave_out_frames(exception)
    sys.stderr.writelines(exception.format())


def _leave_out_frames(exception: traceback.TracebackException) -> None:
    frames = list(exception.stack)
    first = next((i for i, frame in enumerate(frames) if is_users(frame.filename)), len(frames))
    exception.stack = traceback.StackSummary.from_list([f for f in frames[first:] if not is_memfits(f.filename)])
    for link in (exception.__cause__, exception.__context__, *(exception.exceptions or ())):
        if link is not None:
            _leave_out_frames(link)
