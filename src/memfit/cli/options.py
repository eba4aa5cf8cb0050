"""Options of commands, and the values of the library that their values stand for."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import typer

from memfit import hardware, ir
from memfit.cli import output
from memfit.cli.output import stage
from memfit.errors import UsageError
from memfit.foundations import CommandOption, parse_hours, parts_of, read_budget
from memfit.hardware import check_device, find_device, free_bytes, known_devices, read_prices
from memfit.ir import Numerics
from memfit.planner import (
    BUDGET_HELP,
    COMPILE,
    COMPILE_HELP,
    HOST_BUDGET_HELP,
    NUMERICS_HELP,
    PRECISIONS_HELP,
    AnyPrecision,
    Compile,
    PlanOptions,
)
from memfit.training import LOG_HELP, OVERWRITE_HELP

if TYPE_CHECKING:
    from memfit.ir import Plan, Precision
    from memfit.workload import Workload

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="file.py:function or package.module:function.", show_default=False)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", callback=output.when_asked)
]
PlanFile = Annotated[Path, typer.Option("--plan", help="Plan file, written by `memfit plan`.", show_default=False)]
PageFile = Annotated[Path | None, typer.Option("--html", help="Write an HTML page with table and plot to this file.")]
Overwrite = Annotated[bool, typer.Option(help=OVERWRITE_HELP)]

_OF_RUN = ("--budget", "--plan", "--output", "--numerics", "--host-budget")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_RANKS = 65_536
_DEVICE_HERE_HELP = "Device of this machine to run on; by default the model's own."
DeviceHere = Annotated[str | None, typer.Option(help=_DEVICE_HERE_HELP, show_default=False)]


@dataclass(frozen=True)
class ScriptOptions:
    """The options of `memfit run`."""

    budget: Annotated[
        str | None, CommandOption(f"{BUDGET_HELP}; by default 90% of the GPU. On a CPU give it, or --plan.")
    ] = None
    plan: Annotated[
        Path | None, CommandOption("Start with this plan, written by `memfit run -o`.", flags=("--plan",))
    ] = None
    path: Annotated[
        Path | None,
        CommandOption("Write the plan to this file as soon as it is made, as JSON.", flags=("--output", "-o")),
    ] = None
    is_module: Annotated[bool, CommandOption("SCRIPT is a module, as for `python -m`.", flags=("-m",))] = False
    numerics: Annotated[
        Literal["exact", "reordered"] | None,
        CommandOption("Allowed change in the numbers of the training; by default exact."),
    ] = None
    host_budget: Annotated[str | None, CommandOption(HOST_BUDGET_HELP)] = None
    log: Annotated[str | None, CommandOption(LOG_HELP)] = None


@dataclass(frozen=True)
class PlanSource:
    """The plan that `memfit train` runs: a file, or one that `memfit.plan` makes for a budget."""

    plan: Annotated[
        Path | None, CommandOption("Plan file, written by `memfit plan`; or give --budget.", flags=("--plan",))
    ] = None
    budget: Annotated[
        str | None,
        CommandOption(
            "Plan for this budget first, as `memfit plan` does, for the ranks that were started; or give --plan."
        ),
    ] = None
    device: Annotated[str | None, CommandOption(_DEVICE_HERE_HELP)] = None
    numerics: Annotated[
        Numerics | None, CommandOption("Allowed change in the numbers of the training; by default reordered.")
    ] = None
    precision: Annotated[Sequence[AnyPrecision] | None, CommandOption(PRECISIONS_HELP)] = None
    compile: Annotated[
        bool | Literal["auto"], CommandOption(COMPILE_HELP, kind=Compile, default="no", values=COMPILE)
    ] = False

    def options(self, budget: int | float | str) -> PlanOptions:
        """Return the options of the plan to make for a budget."""
        return PlanOptions(
            budget=budget,
            device=self.device,
            numerics=self.numerics or "reordered",
            precisions=precisions_of(self.precision),
            compile=self.compile,
        )


@dataclass(frozen=True)
class LadderOptions:
    """The options of `memfit.tools.ladder`, as it takes them."""

    budget: Annotated[
        str | None, CommandOption("Bytes, or a share as in `memfit plan`; by default the plain step's peak.")
    ] = None
    numerics: Annotated[Numerics, CommandOption(NUMERICS_HELP)] = "reduced"
    min_run_seconds: Annotated[
        float, CommandOption("Least time to run each step for, in seconds.", name="seconds", min=0.01)
    ] = 2.0
    device: Annotated[str | None, CommandOption(_DEVICE_HERE_HELP)] = None


def precisions_of(names: Sequence[str] | None) -> list[Precision] | None:
    """Return the precisions for `memfit.plan`; "auto" is its default, None."""
    if not names or "auto" not in names:
        return [cast("Precision", name) for name in names or ()] or None
    if set(names) != {"auto"}:
        other_options = " ".join(f"--precision {name}" for name in names if name != "auto")
        raise UsageError(
            f"--precision auto chooses the precisions by the device: leave out {other_options}, or --precision auto"
        )
    return None


def rank_numbers(text: str) -> list[int]:
    """Return the numbers of ranks that a text names ("1-64", "1,2,4,8")."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 1 <= first <= last <= _MOST_RANKS:
            raise UsageError(f"--ranks {text} can't be read: give a range (1-64), or numbers (1,2,4,8)")
        found.update(range(first, last + 1))
    return sorted(found)


def check_cards(names: Sequence[str] | None, prices: str | Path | None, within: float | str | None) -> list[str]:
    """Return the names of the cards to look at; raise `UsageError` where they, the prices or the time can't be read."""
    if prices is not None:
        read_prices(prices)
    if within is not None:
        parse_hours(within, "--within")
    if names:
        return [find_device(name).name for name in names]
    return [device.name for device in known_devices().values() if device.kind == "cuda"]


def refuse_beside_a_plan(name: str) -> NoReturn:
    """Refuse an option of planning beside a plan."""
    raise UsageError(f"{name} is for the plan that --budget makes: leave it out with --plan, which sets it")


def check_inputs(workload: str | None = None, *, device: str | None = None) -> None:
    """Refuse the names of a workload and of a device that don't exist, before PyTorch is imported."""
    if workload is not None:
        parts_of(workload)
    if device is not None:
        check_device(device)


def given_budget(budget: int | float | str | None, device: str | None = None) -> int | float | str:
    """Return a budget that can be parsed; where it is missing, raise an error with the line to type."""
    if budget is not None:
        read_budget(budget)
        return budget
    fit = "90%" if device not in (None, "cpu") else suggested_budget()
    raise UsageError(f"--budget is missing: the memory for a step. Type {typed('--budget', fit)}")


def read_plan(path: Path) -> Plan:
    """Return the plan of a file."""
    return ir.codec.read(path, ir.Plan)


def strays(context: typer.Context) -> list[list[str]]:
    """Return the arguments after a script that are long options of the command itself, each with its value.

    Those that the command was given before the script are the script's.
    """
    found = []
    for i, argument in enumerate(context.args):
        option, has_value, _ = argument.partition("=")
        for parameter in context.command.params:
            if option in _OF_RUN and option in parameter.opts and context.params.get(str(parameter.name)) is None:
                found.append(context.args[i : i + (1 if has_value else 2)])
    return found


def suggested_budget() -> str:
    """Return nine tenths of this machine's free memory, rounded down ("18GiB")."""
    nbytes = 0.9 * free_bytes()
    return f"{int(nbytes / 2**30)}GiB" if nbytes >= 2**31 else f"{int(nbytes / 2**20)}MiB"


def typed(*options: str, without: Sequence[str] = ()) -> str:
    """Return the command line that runs, with options right after the command, to be typed.

    Args:
        without: Words at its end that go.
    """
    command, *rest = sys.argv[1:]
    if without:
        at = next(i for i in range(len(rest)) if rest[i : i + len(without)] == list(without))
        del rest[at : at + len(without)]
    return "memfit " + shlex.join([command, *options, *rest])


def check_new(option: str, path: Path | str | None, overwrite: bool) -> None:
    """Refuse to replace a file, and a file that can't be written, before any work is done for it."""
    if path is None:
        return
    ir.codec.check_writable(Path(path))
    if Path(path).exists() and not overwrite:
        raise UsageError(f"{option} {path} already exists: give another file, or --overwrite")


def load_for(workload: str, device: str | None) -> Workload:
    """Return a workload to predict for a device; for a GPU, restart in a process with fake CUDA tensors.

    There the workload is built under fake tensors, so that a model of any size takes no memory.
    """
    from memfit import planner

    if device is None:
        return load(workload)
    target = hardware.find_device(device)
    if planner.is_elsewhere(target):
        line = hardware.shim.command("memfit", *sys.argv[1:])
        output.give_back(is_end=False)
        sys.stdout.flush()
        os.execve(line[0], line, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return load(workload, is_fake=target.kind == "cuda")


def load(workload: str, *, is_fake: bool = False) -> Workload:
    """Load a workload by name, which runs the user's code, and show that as a stage."""
    from memfit import pipeline

    def tell(line: str) -> None:
        print(f"memfit: {line}", file=sys.stderr, flush=True)

    with stage("load"):
        return pipeline.load_fake_workload(workload, tell) if is_fake else pipeline.load_workload(workload)
