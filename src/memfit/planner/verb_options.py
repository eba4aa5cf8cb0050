"""The options of verbs, as the verbs take them and as the command line asks for them.

Each field says its option's help text. The command line reads this module without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from memfit.foundations import CommandOption
from memfit.ir import CardPrice, Mode, Numerics, Precision, Sharding, UpdateSetting

if TYPE_CHECKING:
    import torch

    DeviceName = str | torch.device
else:
    DeviceName = str

BUDGET_HELP = "With a unit (24GiB or 24G, 22GB), or a share of the device (90%) or of the plain step's peak (0.5x)"
HOST_BUDGET_HELP = "Pinned host memory for activations, optimizer states and frozen weights (32GiB); GPUs only."
MICROBATCH_HELP = "Samples in one forward and backward pass; the whole batch by default."
NUMERICS_HELP = "Allowed change in the numbers of the training."
PRECISIONS_HELP = "Precisions to search, repeatable. auto, the default: 32-true and the mixed precision of the device."
COMPILE_HELP = "Compile the model and the loss: no, yes, or auto to search both."
AnyPrecision = Precision | Literal["auto"]
Measure = bool | Literal["auto"]
"""Whether plans are run before one is chosen (`memfit.plan`)."""
Compile = Literal["no", "auto", "yes"]
COMPILE: dict[str, bool | Literal["auto"]] = {"no": False, "auto": "auto", "yes": True}
_DEVICE_HELP = "Device to predict for; see `memfit devices`. By default the model's own."
_RANKS_HELP = "Number of ranks; each runs its part of the batch."
_SHARDING_HELP = "How ranks share the step; auto searches all."
_Searched = Literal["ddp", "zero2", "zero3", "auto"]
_Options = TypeVar("_Options")


def options_of(kind: type[_Options], arguments: Mapping[str, Any]) -> _Options:
    """Return the options of a verb, of the arguments of its call, which go by the fields' names."""
    return kind(**{field.name: arguments[field.name] for field in fields(kind)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `memfit.estimate`, as it takes them."""

    device: Annotated[DeviceName | None, CommandOption(_DEVICE_HELP)] = None
    precision: Annotated[
        AnyPrecision,
        CommandOption(
            "Precision of the step; auto is the mixed precision of the device. Default: auto for a card of the"
            " catalogue, shown beside 32-true; elsewhere 32-true.",
            default=None,
        ),
    ] = "32-true"
    microbatch_size: Annotated[int | None, CommandOption(MICROBATCH_HELP, min=1)] = None
    world_size: Annotated[int, CommandOption(_RANKS_HELP, min=1)] = 1
    sharding: Annotated[Mode, CommandOption("How ranks share the step; ddp by default.", default=None)] = "ddp"
    parallel: Annotated[
        str | None,
        CommandOption(
            "Ranks that share one copy of the model, on paper: tensor, context and pipeline parallelism, as in"
            " tp=4,pp=2."
        ),
    ] = None
    snapshot: Annotated[
        Path | str | None,
        CommandOption("Write the allocator's simulated history to this file, for pytorch.org/memory_viz; GPUs only."),
    ] = None
    chrome_trace: Annotated[
        Path | str | None, CommandOption("Write the step's timeline to this file, for Perfetto.")
    ] = None


@dataclass(frozen=True)
class PlanOptions:
    """The options of `memfit.plan`, as it takes them."""

    budget: Annotated[int | float | str, CommandOption(f"{BUDGET_HELP}. Must be given.", kind=str, default=None)]
    device: Annotated[DeviceName | None, CommandOption(_DEVICE_HELP)] = None
    numerics: Annotated[Numerics, CommandOption(NUMERICS_HELP)] = "reordered"
    precisions: Annotated[
        Sequence[Precision] | None, CommandOption(PRECISIONS_HELP, name="precision", kind=Sequence[AnyPrecision])
    ] = None
    optimizers: Sequence[UpdateSetting] | None = None
    world_size: Annotated[int | None, CommandOption(_RANKS_HELP, min=1, default=1)] = None
    sharding: Annotated[Mode | Literal["auto"], CommandOption(_SHARDING_HELP, kind=_Searched)] = "auto"
    engine: Sharding | None = None
    points: Annotated[
        int, CommandOption("Number of budgets on the frontier, per precision and microbatch size.", min=1)
    ] = 8
    host_budget: Annotated[int | str | None, CommandOption(HOST_BUDGET_HELP, kind=str)] = None
    time_limit_seconds: float = 10.0
    measure: Annotated[
        Measure,
        CommandOption(
            "Run plans of about equal predicted time for a few steps, on copies, and choose the fastest. Default: if"
            " the device is here and this needs at most 30 seconds (60 if compiled); --measure allows 120.",
            flags=("--measure/--no-measure",),
            kind=bool,
            default=None,
            values={None: "auto"},
        ),
    ] = "auto"
    compile: Annotated[
        bool | Literal["auto"], CommandOption(COMPILE_HELP, kind=Compile, default="no", values=COMPILE)
    ] = False


@dataclass(frozen=True)
class FleetOptions:
    """The options of `memfit.fleet`, as it takes them."""

    steps: Annotated[int, CommandOption("Optimizer updates of the whole training.", min=1, show_default=False)]
    budget: Annotated[
        int | str,
        CommandOption(
            "Memory to use on each card: bytes, or with a unit (70GiB), or a share of the card (90%).", kind=str
        ),
    ] = "90%"
    within: Annotated[
        float | str | None, CommandOption("Longest training time (24h, 3d, 90min); no limit by default.", kind=str)
    ] = None
    devices: Annotated[
        Sequence[str] | None,
        CommandOption("Cards to compare, repeatable; all of the catalogue by default.", name="device"),
    ] = None
    world_sizes: Annotated[
        Sequence[int],
        CommandOption("Numbers of ranks to try: 1-64, or 1,2,4,8.", name="ranks", kind=str, default="1-64"),
    ] = range(1, 65)
    sharding: Annotated[Mode | Literal["auto"], CommandOption(_SHARDING_HELP, kind=_Searched)] = "auto"
    numerics: Annotated[Numerics, CommandOption(NUMERICS_HELP)] = "reduced"
    precisions: Annotated[
        Sequence[Precision] | None,
        CommandOption(
            "Precisions to search, repeatable. auto, the default: the mixed precision of each card, if --numerics"
            " allows it.",
            name="precision",
            kind=Sequence[AnyPrecision],
        ),
    ] = None
    prices: Annotated[
        Mapping[str, CardPrice] | str | Path | None,
        CommandOption("TOML file of your prices, each with its date.", kind=Path),
    ] = None
    each: Annotated[
        bool,
        CommandOption("Solve for every number of ranks, even where more ranks can't be faster.", flags=("--each",)),
    ] = False
