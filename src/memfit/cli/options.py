"""Options of commands, and the values of the library that their values stand for."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from memfit.cli import streams
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.ir.plan import Precision

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="file.py:function or package.module:function.", show_default=False)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", callback=streams.when_asked)
]
DeviceHere = Annotated[
    str | None,
    typer.Option(help="Device of this machine to run on; by default the one that the model is on.", show_default=False),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="Device to predict for; see `memfit devices`. By default the one that the model is on.",
        show_default=False,
    ),
]
MicrobatchSize = Annotated[
    int | None, typer.Option(help="Samples in one forward and backward pass; the whole batch by default.", min=1)
]
BudgetText = Annotated[
    str,
    typer.Option(
        help="Bytes, or with a unit (1.5GiB, 22GB), or a share of the device (90%) or of the plain peak (0.5x).",
        show_default=False,
    ),
]
HostBudget = Annotated[
    str | None, typer.Option(help="Pinned host memory that activations may wait in (32GiB); for GPUs.")
]
PlanFile = Annotated[Path, typer.Option("--plan", help="A plan that `memfit plan` wrote.", show_default=False)]
LogName = Annotated[
    str | None,
    typer.Option(
        help="A function that takes each step's record, a dict: file.py:function or package.module:function.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option(help="Replace what is there already.")]


class NumericsName(enum.StrEnum):
    """Numerics classes, by how far the numbers of the training may change."""

    exact = "exact"
    reordered = "reordered"
    reduced = "reduced"
    changed = "changed"


NumericsOption = Annotated[NumericsName, typer.Option(help="How far the numbers of the training may change.")]


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
        help="Precisions to search, repeatable; auto, the default, is 32-true and the mixed one for the device.",
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
    CompileName, typer.Option(help="Whether the model and the loss may be compiled; auto searches compiled steps too.")
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


def check_new(option: str, path: Path | None, overwrite: bool) -> None:
    """Refuse to replace a file, and a file that can't be written, before any work is done for it."""
    from memfit.ir import codec

    if path is None:
        return
    codec.check_writable(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} already exists: give another file, or --overwrite")
