"""The command line: one command for each verb of the library."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from memfit.cli import commands, machine_commands, output, plan_commands, train_commands
from memfit.errors import MemfitError
from memfit.foundations import users_frames
from memfit.version import __version__

app = commands.Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Make PyTorch training fit the memory you have.\n\n"
        "Fit your training script, unchanged: memfit run --budget 6GiB train.py\n\n"
        "A WORKLOAD is file.py:function or package.module:function. The function has no arguments and returns"
        " a memfit.Workload.\n\n"
        "Exit status: 0 done, 1 your own code raised an error, 2 wrong use, or the step can't be captured,"
        " 3 no plan fits the budget, 4 a plan fails its checks, 5 the loss is not finite,"
        " 6 out of memory with no lower plan left, 75 stopped by SIGTERM with a checkpoint, 130 interrupted by Ctrl-C."
    ),
)

tools = commands.Commands(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure levers, number ranges and devices; join the shards of a model; prepare other frameworks.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show memfit's version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app.command(runs_steps=True, context_settings=_ANY_ARGUMENTS)(plan_commands.run)
app.command()(plan_commands.estimate)
app.command(runs_steps=True)(plan_commands.plan)
app.command()(plan_commands.fleet)
app.command(runs_steps=True)(train_commands.verify)
app.command(runs_steps=True)(train_commands.train)
app.command()(train_commands.report)
app.command()(machine_commands.devices)
app.command(runs_steps=True)(machine_commands.demo)
app.add_typer(tools, name="tools")
tools.command(runs_steps=True)(machine_commands.ladder)
tools.command("probe-range")(plan_commands.probe_range)
tools.command("probe-devices")(machine_commands.probe_devices)
tools.command()(train_commands.consolidate)
tools.command()(machine_commands.doctor)


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
        output.print_error(e, output.takes_json(), commands.is_whole)
        raise SystemExit(e.exit_status) from None
    except KeyboardInterrupt as e:
        commands.print_ended("interrupted", e)
        raise SystemExit(130) from None
    except SystemExit as e:
        if getattr(e, "__notes__", []):
            commands.print_ended("stopped by SIGTERM", e)
        raise
    except Exception as e:
        if not users_frames(e):
            raise
        output.print_error(e, output.takes_json(), commands.is_whole)
        raise SystemExit(1) from None
    finally:
        output.give_back()
