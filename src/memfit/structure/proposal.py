"""Proposals: a lighter workload beside the user's own, with the prices of both."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from memfit._torch import BatchNormBase, count_step
from memfit.capture import KnownValues, fake_copy, measure_peak_bytes, mode_of, nothing_changes, real_copy
from memfit.errors import WorkloadError
from memfit.foundations import format_bytes, format_seconds
from memfit.hardware import find_device
from memfit.ir import Levers, Numerics, Prediction
from memfit.levers import applied
from memfit.pipeline import estimate
from memfit.report import MISSING, clean, ratio_text, text_of
from memfit.training import evaluation_mode
from memfit.workload import Workload, samples_of

MEASURED_STEPS = 5


@dataclass(frozen=True)
class Price:
    """The price of a workload: its size, work, peak and step time, and the metrics of its model.

    Attributes:
        parameters: Number of elements in the model's parameters; tied ones count once.
        multiply_adds: Multiply-adds of the loss's forward pass, for one sample, as `torch.utils.flop_counter` counts:
            only products and convolutions.
        prediction: The prediction for its plain step.
        metrics: The result of `Workload.evaluate` for the model as it is; empty without one.
        measured_peak_bytes: Peak allocated by a step that ran here; None where none was measured.
        measured_step_seconds: Median time of steps that ran here; None where none was measured.
    """

    parameters: int
    multiply_adds: int
    prediction: Prediction
    metrics: Mapping[str, float]
    measured_peak_bytes: int | None = None
    measured_step_seconds: float | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the predicted peak of the plain step."""
        return self.prediction.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Return the predicted time of the plain step."""
        return self.prediction.step_seconds


@dataclass(frozen=True)
class Change:
    """A changed module: its FQN, and a description of the change."""

    module: str
    what: str


@dataclass(frozen=True)
class Proposal:
    """A lighter workload with its price. Print it for a table.

    Attributes:
        workload: The changed workload, for `memfit.plan` and `memfit.train` like any other. Its model and optimizer
            are new; `batches` are the same object as the original's.
        after: Price of the changed workload, before any fine-tuning but that of `prune` between its rounds.
        notes: Remarks, above all on where the change does not pay.
    """

    workload: Workload
    lever: str
    changes: tuple[Change, ...]
    before: Price
    after: Price
    notes: tuple[str, ...] = ()
    numerics: Numerics = field(default="changed", init=False)

    def __str__(self) -> str:
        title = f"{self.lever} of {clean(self.workload.name)}: {len(self.changes)} modules, numerics {self.numerics}"
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in ("before", "after", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)

        def row(what: str, values: Sequence[Any], text: Callable[[Any], str]) -> None:
            if None not in values:
                table.add_row(what, *(Text(text(value)) for value in values), Text(ratio_text(values[1], values[0])))

        both = (self.before, self.after)
        row("parameters", [p.parameters for p in both], lambda n: f"{n:,}")
        row("multiply-adds per sample, forward", [p.multiply_adds for p in both], lambda n: f"{n:,}")
        row("peak, predicted", [p.peak_bytes for p in both], format_bytes)
        row("peak, measured", [p.measured_peak_bytes for p in both], format_bytes)
        row("step, predicted", [p.step_seconds for p in both], format_seconds)
        row("step, measured", [p.measured_step_seconds for p in both], format_seconds)
        for name in (name for name in self.before.metrics if name in self.after.metrics):
            table.add_row(Text(clean(name)), *(f"{p.metrics[name]:.4g}" for p in both), MISSING)
        changes = (Text(clean(f"{change.module}: {change.what}")) for change in self.changes)
        return text_of(Text(title), table, *changes, *(Text(clean(note)) for note in self.notes))


class Pricing:
    """A user's workload, priced for a device before anything is changed, and proposals that are priced as it is.

    Args:
        measure: Whether to run both steps too: on that device where it is in this machine, else where they are.
    """

    def __init__(self, workload: Workload, device: str, measure: bool) -> None:
        self.workload, self.device, self.measure = workload, device, measure
        self.before = price(workload, device=device)

    def proposal(self, lever: str, after: Workload, changes: Iterable[Change], notes: Sequence[str] = ()) -> Proposal:
        """Return the proposal of a changed workload.

        Notes say where the change does not pay: by measured times where there are any, else by predicted ones.
        """
        was, now = self.before, price(after, device=self.device)
        if self.measure:
            both = zip((was, now), measured([self.workload, after], self.device), strict=True)
            was, now = (
                dataclasses.replace(unmeasured, measured_peak_bytes=peak, measured_step_seconds=seconds)
                for unmeasured, (peak, seconds) in both
            )
        advice = []
        if now.peak_bytes >= was.peak_bytes:
            advice.append(
                f"no memory saved: the predicted peak changes from {format_bytes(was.peak_bytes)} to"
                f" {format_bytes(now.peak_bytes)}. memfit.plan can recompute the added activations"
            )
        kind, seconds = "predicted", (was.step_seconds, now.step_seconds)
        if was.measured_step_seconds is not None and now.measured_step_seconds is not None:
            kind, seconds = "measured", (was.measured_step_seconds, now.measured_step_seconds)
        if seconds[1] >= seconds[0]:
            ratio = ratio_text(now.multiply_adds, was.multiply_adds)
            advice.append(
                f"no time saved on this device: the {kind} step time changes from {format_seconds(seconds[0])} to"
                f" {format_seconds(seconds[1])}, with {ratio} the multiply-adds"
            )
        return Proposal(after, lever, tuple(changes), was, now, (*notes, *advice))


def price(workload: Workload, *, device: str = "cpu") -> Price:
    """Return the price of a workload, without changing it."""
    return Price(
        parameters=sum(p.numel() for p in workload.model.parameters()),
        multiply_adds=forward_pass(workload).multiply_adds,
        prediction=estimate(workload, device=device),
        metrics=evaluated(workload) if has_data(workload) else {},
    )


def has_data(workload: Workload) -> bool:
    """Tell whether a workload's model has values; one built under `torch.device("meta")` has none."""
    return all(parameter.device.type != "meta" for parameter in workload.model.parameters())


def evaluated(workload: Workload) -> dict[str, float]:
    """Return the metrics of `Workload.evaluate`; empty without one."""
    if workload.evaluate is None:
        return {}
    with evaluation_mode(workload.model):
        return {name: float(value) for name, value in workload.evaluate(workload.model).items()}


def measured(
    workloads: Sequence[Workload], device: str = "cpu", steps: int = MEASURED_STEPS
) -> list[tuple[int, float]]:
    """Run copies of workloads in turn, and return each one's peak in bytes and median step in seconds.

    The first step of each, which makes the optimizer's state, is not timed.

    Args:
        device: An accelerator of this machine that the copies run on; where the workloads are for all others.
    """
    found = find_device(device)
    place = torch.device(found.name) if found.is_here and found.kind != "cpu" else None
    seconds: list[list[float]] = [[] for _ in workloads]
    with ExitStack() as stack:
        for workload in workloads:
            stack.enter_context(nothing_changes(workload))
        plain = [(Levers(microbatch_size=samples_of(w)), real_copy(w, place)) for w in workloads]
        running = [stack.enter_context(applied(levers, copied)) for levers, copied in plain]
        for index in range(steps + 1):
            for which, step in enumerate(running):
                result = step(step.workload.batch)
                if index > 0:
                    seconds[which].append(result.seconds)
        peaks = [measure_peak_bytes(step, step.workload.batch) for step in running]
    return list(zip(peaks, [statistics.median(times) for times in seconds], strict=True))


@dataclass(frozen=True)
class ForwardPass:
    """The multiply-adds and outputs of a loss's forward pass.

    Attributes:
        multiply_adds: Multiply-adds for one sample.
        outputs: The shapes of modules' outputs, by FQN in the order of first calls, a shape for each call;
            modules that return something else than one tensor are left out.
    """

    multiply_adds: int
    outputs: dict[str, list[torch.Size]]


def forward_pass(workload: Workload) -> ForwardPass:
    """Run the loss's forward pass in evaluation mode under fake tensors, and return its multiply-adds and outputs."""
    values = KnownValues.of(mode_of(workload))
    copied = fake_copy(workload, values)
    outputs: dict[str, list[torch.Size]] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.setdefault(name, []).append(output.shape)

    with nothing_changes(workload), evaluation_mode(copied.model), ExitStack() as stack:
        for name, module in copied.model.named_modules():
            stack.enter_context(module.register_forward_hook(functools.partial(note, name)))
        counter = FlopCounterMode(display=False)
        with values.fake, values, counter:
            copied.loss_fn(copied.model, copied.batch)
    return ForwardPass(counter.get_total_flops() // 2 // samples_of(workload), outputs)


def changeable_copy(workload: Workload) -> Workload:
    """Return an independent copy of a workload, scheduler included, for a lever to change."""
    copied = dataclasses.replace(real_copy(workload), loss_fn=workload.loss_fn)
    if workload.scheduler is None:
        return copied
    scheduler = copy.deepcopy(workload.scheduler, {id(workload.optimizer): copied.optimizer})
    count_step(scheduler)  # it does not watch the copied optimizer's steps
    return dataclasses.replace(copied, scheduler=scheduler)


def replace_parameters(
    workload: Workload, made: Mapping[Tensor, Sequence[Tensor]], states: Mapping[Tensor, Any] | None = None
) -> None:
    """Replace parameters in a workload's optimizer, with the same hyper-parameters.

    Where its groups name their parameters, the names are set to those of the model.

    Args:
        workload: Its optimizer is changed in place; its model has the new parameters already.
        made: The new parameters for each replaced one; empty where it is gone. The state of all others stays.
        states: The optimizer state of new parameters that have one.
    """
    optimizer = workload.optimizer
    names: dict[Tensor, str] = {parameter: name for name, parameter in workload.model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"][:] = [new for old in group["params"] for new in made.get(old, [old])]
        if "param_names" in group:
            group["param_names"] = [names.get(parameter, "") for parameter in group["params"]]
    for old in made:
        optimizer.state.pop(old, None)
    optimizer.state.update(states or {})


def matching(names: Sequence[str], patterns: Sequence[str], argument: str, noun: str) -> list[str]:
    """Return the names that match a pattern, in their order.

    Raises:
        WorkloadError: A pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise WorkloadError(
                f"{argument} has {pattern!r}, and no {noun} of Workload.model matches it: the model has"
                f" {', '.join(names[:6]) or 'none'}{' and so on' if len(names) > 6 else ''}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module of a model by another, under all of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def refresh_statistics(workload: Workload) -> None:
    """Set the running statistics of BatchNorms in training mode to those of the workload's batch.

    Their inputs changed with the layers before, and evaluation uses these statistics (Li et al. 2020, *EagleEye: Fast
    Sub-Net Evaluation for Efficient Neural Network Pruning*, section 3.4).
    """
    norms = [m for m in workload.model.modules() if isinstance(m, BatchNormBase) and m.training]
    norms = [norm for norm in norms if norm.running_mean is not None]
    momenta = [norm.momentum for norm in norms]
    with evaluation_mode(workload.model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean over the batches that follow
            norm.train()
        if norms:
            workload.loss_fn(workload.model, workload.batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
