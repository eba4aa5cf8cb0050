"""Somebody's own training script, run in a budget as it is."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

from memfit.cli.output import err, stages
from memfit.errors import MemfitError, UsageError
from memfit.frames import is_users
from memfit.ir.plan import Numerics
from memfit.pipeline.fitting import fit_whatever_trains


def run_script(
    name: str, arguments: list[str], is_module: bool, budget: str, numerics: Numerics, host_budget: str | None
) -> None:
    """Run a script, or a module as `python -m` does, with its arguments, and fit the loop in it into a budget.

    What it raises ends the command as it ends Python: with its traceback, but for memfit's own frames, and status 1.

    Raises:
        UsageError: There is no such script.
    """
    if not is_module and not Path(name).is_file():
        raise UsageError(f"there is no script {name!r}: name one, with its arguments after it, or -m and a module")
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(Path.cwd() if is_module else Path(name).resolve().parent))
    try:
        with (
            stages() as progress,
            fit_whatever_trains(
                budget=budget, numerics=numerics, host_budget=host_budget, tell=_tell, progress=progress
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


def _tell(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_traceback(error: Exception) -> None:
    """Print a traceback as Python does, without the frames of what runs the script."""
    found = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(found.stack) if is_users(frame.filename)), 0)
    found.stack = traceback.StackSummary.from_list(found.stack[first:])
    for line in found.format():
        sys.stderr.write(line)
