"""Options of commands, and the values of the library that their values stand for."""

from __future__ import annotations

import enum
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from memfit import hardware
from memfit.cli import streams
from memfit.cli.output import stages
from memfit.errors import UsageError
from memfit.foundations import parts_of, read_budget
from memfit.hardware import check_device, free_bytes

if TYPE_CHECKING:
    from memfit.ir import Plan, Precision
    from memfit.workload import Workload

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="file.py:function or package.module:function.", show_default=False)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", callback=streams.when_asked)
]
DeviceHere = Annotated[
    str | None,
    typer.Option(help="Device of this machine to run on; by default the model's own.", show_default=False),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="Device to predict for; see `memfit devices`. By default the model's own.",
        show_default=False,
    ),
]
MicrobatchSize = Annotated[
    int | None, typer.Option(help="Samples in one forward and backward pass; the whole batch by default.", min=1)
]
BUDGET_HELP = "With a unit (24GiB or 24G, 22GB), or a share of the device (90%) or of the plain step's peak (0.5x)"
BudgetText = Annotated[str | None, typer.Option(help=f"{BUDGET_HELP}. Must be given.", show_default=False)]
HostBudget = Annotated[
    str | None, typer.Option(help="Pinned host memory for offloaded activations (32GiB); GPUs only.")
]
PlanFile = Annotated[Path, typer.Option("--plan", help="Plan file, written by `memfit plan`.", show_default=False)]
LogName = Annotated[
    str | None,
    typer.Option(
        help="Function to call with each step's record, a dict: file.py:function or package.module:function.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option(help="Replace existing files.")]


class NumericsName(enum.StrEnum):
    """Numerics classes, by how far the numbers of the training may change."""

    exact = "exact"
    reordered = "reordered"
    reduced = "reduced"
    changed = "changed"


_OF_RUN = ("--budget", "--plan", "--output", "--numerics", "--host-budget")


class LoopNumericsName(enum.StrEnum):
    """Numerics classes of a loop that stays as it is."""

    exact = "exact"
    reordered = "reordered"


NumericsOption = Annotated[NumericsName, typer.Option(help="Allowed change in the numbers of the training.")]


class PrecisionName(enum.StrEnum):
    """Precisions of the step."""

    fp32 = "32-true"
    tf32 = "tf32"
    bf16 = "bf16-mixed"
    fp16 = "16-mixed"
    bf16_true = "bf16-true"
    auto = "auto"


PrecisionsOption = Annotated[
    list[PrecisionName] | None,
    typer.Option(
        help="Precisions to search, repeatable. auto, the default: 32-true and the mixed precision of the device.",
        show_default=False,
    ),
]


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
    CompileName, typer.Option(help="Compile the model and the loss: no, yes, or auto to search both.")
]
COMPILE: dict[CompileName, bool | Literal["auto"]] = {
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


def precisions_of(names: list[PrecisionName]) -> list[Precision] | None:
    """Return the precisions for `memfit.plan`; "auto" is its default, None."""
    if PrecisionName.auto not in names:
        return [cast("Precision", name.value) for name in names] or None
    if set(names) != {PrecisionName.auto}:
        other_options = " ".join(f"--precision {name.value}" for name in names if name is not PrecisionName.auto)
        raise UsageError(
            f"--precision auto chooses the precisions by the device: leave out {other_options}, or --precision auto"
        )
    return None


def check_inputs(workload: str | None = None, *, device: str | None = None) -> None:
    """Refuse the names of a workload and of a device that don't exist, before PyTorch is imported."""
    if workload is not None:
        parts_of(workload)
    if device is not None:
        check_device(device)


def given_budget(budget: str | None, device: str | None = None) -> str:
    """Return a budget that can be parsed; where it is missing, raise an error with the line to type."""
    if budget is not None:
        read_budget(budget)
        return budget
    fit = "90%" if device not in (None, "cpu") else suggested_budget()
    raise UsageError(f"--budget is missing: the memory for a step. Type {typed('--budget', fit)}")


def read_plan(path: Path) -> Plan:
    """Return the plan of a file.

    Raises:
        PlanError: The file can't be read, or is not a plan.
    """
    from memfit import ir

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


def check_new(option: str, path: Path | None, overwrite: bool) -> None:
    """Refuse to replace a file, and a file that can't be written, before any work is done for it."""
    from memfit import ir

    if path is None:
        return
    ir.codec.check_writable(path)
    if path.exists() and not overwrite:
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
        streams.give_back(is_end=False)
        sys.stdout.flush()
        os.execve(line[0], line, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return load(workload, is_fake=target.kind == "cuda")


def _told(line: str) -> None:
    print(f"memfit: {line}", file=sys.stderr, flush=True)


def load(workload: str, *, is_fake: bool = False) -> Workload:
    """Load a workload by name, which runs the user's code, and show that as a stage."""
    from memfit import pipeline

    with stages() as progress:
        progress("load", 0, 1)
        loaded = pipeline.load_fake_workload(workload, _told) if is_fake else pipeline.load_workload(workload)
        progress("load", 1, 1)
    return loaded
