"""Runs the user's own training script, unchanged, within a budget."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import torch

from memfit.cli import commands
from memfit.cli.output import err, stages
from memfit.errors import MemfitError, UsageError
from memfit.frames import is_users
from memfit.hardware import heap
from memfit.hardware.host import free_bytes
from memfit.ir.plan import Numerics
from memfit.pipeline import load_log
from memfit.pipeline._fit import fit_whatever_trains
from memfit.units import Budget, read_budget


def run_script(
    name: str,
    arguments: list[str],
    is_module: bool,
    budget: str,
    numerics: Numerics,
    host_budget: str | None,
    log: str | None,
) -> None:
    """Run a script, or a module as with `python -m`, and fit its training loop into a budget.

    Its errors end the command as they end Python, with a traceback without memfit's frames, and status 1.

    Raises:
        UsageError: The script does not exist.
        WorkloadError: The function that `log` names does not exist, or can't be loaded.
    """
    if not is_module and not Path(name).is_file():
        raise UsageError(f"there is no script {name!r}: give a file and its arguments, or -m and a module")
    _settle_memory(read_budget(budget))
    log_function = None if log is None else load_log(log)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(Path.cwd() if is_module else Path(name).resolve().parent))
    try:
        with (
            stages() as progress,
            fit_whatever_trains(
                budget=budget,
                numerics=numerics,
                host_budget=host_budget,
                tell=_tell,
                progress=progress,
                log=log_function,
            ),
        ):
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except MemfitError:
        raise
    except Exception as e:
        _print_traceback(e)
        raise SystemExit(1) from None


def _settle_memory(budget: Budget) -> None:
    """Keep or return freed memory (`heap.settle`), by a CPU budget in bytes, and tell the user where it is slower."""
    if budget.of == "" and not torch.cuda.is_available() and (told := heap.settle(budget.nbytes(), free_bytes())):
        _tell(told)


def _tell(text: str) -> None:
    err.print(commands.words.of(text), highlight=False, markup=False, soft_wrap=True)


def _print_traceback(error: Exception) -> None:
    """Print a traceback as Python does, without the frames outside of the script."""
    exception = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(exception.stack) if is_users(frame.filename)), 0)
    exception.stack = traceback.StackSummary.from_list(exception.stack[first:])
    sys.stderr.writelines(exception.format())
