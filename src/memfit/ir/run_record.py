"""The records of steps that ran, for `train`, `verify`, `probe_range` and `report`, and the table by module."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from memfit.ir.codec import Shown
from memfit.ir.costs import CostTable
from memfit.ir.levers import Numerics, Precision, Region
from memfit.ir.timeline import Timeline
from memfit.ir.trace import Trace, enclosing


class Comparison(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plain and the planned step, measured in turn on the same batches from the same state.

    Peaks are measured peaks allocated, times are medians over the interleaved steps, and losses are those of each step.

    Attributes:
        notes: On the times: that the machine was busy, or slower than when its operators were timed.
    """

    plain_peak_bytes: int
    planned_peak_bytes: int
    plain_step_seconds: float
    planned_step_seconds: float
    plain_losses: list[float]
    planned_losses: list[float]
    notes: tuple[str, ...] = ()


class Evaluation(Shown, frozen=True, forbid_unknown_fields=True):
    """The result of the workload's `evaluate` after a number of steps."""

    step: int
    values: dict[str, float]


class Event(Shown, frozen=True, forbid_unknown_fields=True):
    """An unusual event after a number of steps, and the reaction to it."""

    step: int
    kind: str
    text: str


class RunRecord(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a run, in `run.json` of its folder.

    Attributes:
        status: "failed" comes with an `error`.
        started: Start of the run, in ISO 8601, UTC.
        measured_peak_bytes: Largest measured peak allocated; None before the first measurement.
        step_seconds: Median over the run's steps, without the first.
        data_share: Share of the time that steps waited for their batches, in [0, 1], without the first step.
        command: The arguments of the memfit command that started the run, or last resumed it; empty where another
            program trains.
        allocation_retries: How often the GPU's allocator released its cache and retried an allocation, since the run
            was started or last resumed; None on the CPU.
    """

    schema: str = "memfit.run/1"
    workload: str
    fingerprint: str
    memfit_version: str
    torch_version: str
    machine: str
    started: str
    status: Literal["running", "finished", "failed"]
    steps: int
    measured_peak_bytes: int | None = None
    step_seconds: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    data_share: float | None = None
    allocation_retries: int | None = None
    command: list[str] = []
    evaluations: list[Evaluation] = []
    events: list[Event] = []
    error: str | None = None


class ModuleRow(Shown, frozen=True, forbid_unknown_fields=True):
    """A module in the table by module.

    Attributes:
        parameter_bytes: Bytes of its own parameters and its children's.
        saved_bytes: Bytes that autograd keeps for it in the plain step, at the end of the forward pass.
        planned_saved_bytes: Bytes that autograd keeps for it in the planned step.
        forward_seconds: Predicted seconds of its forward pass, for one global batch.
        action: The plan's action on it: "" or "recomputed" or "recomputed, keeps 3 operators".
    """

    fqn: str
    kind: str
    parameter_bytes: int
    saved_bytes: int
    planned_saved_bytes: int
    forward_seconds: float
    action: str


class Views(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data of a report: both predicted timelines, and the modules. `views.json` in a run's folder."""

    schema: str = "memfit.views/1"
    plain: Timeline
    planned: Timeline
    modules: list[ModuleRow]
    comparison: Comparison | None = None


def module_table(plain: Trace, planned: Trace, costs: CostTable, regions: Iterable[Region]) -> list[ModuleRow]:
    """Return a row for each module that keeps activations or holds parameters, in the model's order."""
    before, after = _kept_bytes(plain), _kept_bytes(planned)
    parameters: dict[str, int] = defaultdict(int)
    for storage in plain.storages:
        if storage.category == "parameters" and storage.owner >= 0:
            for fqn in enclosing(plain.modules[storage.owner].fqn):
                parameters[fqn] += storage.nbytes
    seconds: dict[str, float] = defaultdict(float)
    for op, of_op in zip(plain.ops, (plain.repeats * costs.op_seconds(plain)).tolist(), strict=True):
        for fqn in _around(plain, op.call) if op.phase == "forward" else ():
            seconds[fqn] += of_op
    actions: dict[str, str] = {}
    for region in regions:
        text = f"recomputed, keeps {len(region.keep)} operators" if region.keep else "recomputed"
        actions |= dict.fromkeys(region.modules, f"{text}, offloaded" if region.offload else text)
    kinds = {module.fqn: module.kind for module in plain.modules if before[module.fqn] or parameters[module.fqn]}
    return [
        ModuleRow(fqn or "(model)", kind, parameters[fqn], before[fqn], after[fqn], seconds[fqn], actions.get(fqn, ""))
        for fqn, kind in kinds.items()
    ]


def _kept_bytes(trace: Trace) -> dict[str, int]:
    """Return, by module, the bytes allocated in its forward pass that are alive when the first backward pass starts."""
    start = next((i for i, op in enumerate(trace.ops) if op.phase == "backward"), len(trace.ops))
    total: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if 0 <= storage.birth < start <= storage.death:
            for fqn in _around(trace, trace.ops[storage.birth].call):
                total[fqn] += storage.nbytes
    return total


def _around(trace: Trace, call: int) -> set[str]:
    return set(map(trace.fqn_of, trace.call_chain(call)))


class GradientDifference(Shown, frozen=True, kw_only=True):
    """The difference of a parameter's gradient under the plan from the plain one.

    Attributes:
        relative: ‖planned − plain‖ / ‖plain‖.
        equal: Whether they are equal bit for bit.
    """

    parameter: str
    relative: float
    equal: bool


class Verification(Shown, frozen=True, kw_only=True):
    """The result of `verify`.

    Attributes:
        failures: Statements of the plan that do not hold; empty when it holds.
        loss_difference: Relative difference of the losses.
        gradient_difference: Relative difference of the gradients, over all parameters together.
        bitwise: Whether the loss and every gradient are equal bit for bit.
        measured_peak_bytes: Measured peak of the planned step.
        measured_reserved_bytes: What an accelerator's allocator reserved for it at most, from an empty cache; None on
            the CPU.
        plain_measured_peak_bytes: Measured peak of the plain step; None of several ranks, of which none may have room
            for it.
        rank_peaks_bytes: Of several ranks, the measured peak of each, by rank; `measured_peak_bytes` is the largest.
        comparison: Both steps as they trained in turn: peaks, times and losses; None where that was not asked for.
    """

    failures: list[str]
    numerics: Numerics
    plain_loss: float
    planned_loss: float
    loss_difference: float
    gradient_difference: float
    bitwise: bool
    gradients: list[GradientDifference]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    measured_reserved_bytes: int | None = None
    plain_measured_peak_bytes: int | None
    budget_bytes: int
    notes: list[str]
    rank_peaks_bytes: list[int] = []
    comparison: Comparison | None = None

    @property
    def holds(self) -> bool:
        """True if all statements of the plan hold."""
        return not self.failures


FP16_LARGEST = 65504.0
"""The largest finite fp16 value."""

FP16_FLUSHED_EXPONENT = -25
"""fp16 rounds values below 2 to this power to zero."""

MOST_FLUSHED = 0.05
"""Largest share of a module's summed gradients that may flush to zero at the recommended scale: a choice."""

_HEADROOM_EXPONENT = 2  # gradients may grow to 4 times the largest seen before the scale has to shrink
_MOST_EXPONENT = 24
_FEW = 0.25  # share of the modules: where more leave the range, fp16 is the wrong precision


class ValueStatistics(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of values: their largest, and their sums by exponent.

    Attributes:
        largest: The largest finite absolute value; 0 where there is none.
        not_finite: Number of values that are not finite.
        sums: By exponent e, the sum of the absolute values from 2^e up to 2^(e+1).
    """

    largest: float = 0.0
    not_finite: int = 0
    sums: dict[int, float] = {}

    def flushed(self, scale: float = 1.0) -> float:
        """Return the share of the sum of absolute values that fp16 rounds to zero, after scaling.

        It is not the share of their number, since most gradients of a softmax over many classes are negligible.
        """
        below = FP16_FLUSHED_EXPONENT - math.floor(math.log2(scale))
        total = sum(self.sums.values())
        return sum(n for e, n in self.sums.items() if e < below) / total if total else 0.0


class ModuleRange(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a module that mixed precision stores in 16 bits.

    Attributes:
        module: Its FQN; "" for the model itself and for the loss function outside of modules.
        activations: Statistics of its inputs and outputs.
        gradients: Statistics of the gradients of its outputs and parameters, with an unscaled loss.
    """

    module: str
    activations: ValueStatistics
    gradients: ValueStatistics


class RangeReport(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of `probe_range`.

    Attributes:
        modules: The modules that compute in 16 bits, in the order of the model.
        precision: The recommended precision for a device without bfloat16: "16-mixed", or "bf16-mixed" nevertheless.
        fp32_modules: Value for `Workload.fp32_modules`, with 16-mixed.
        initial_scale: Value for `LossScaling.initial`, with 16-mixed.
        overflowing: Modules whose activations leave fp16's range.
        flushing: Modules with more than `MOST_FLUSHED` of their summed gradients flushed to zero at `initial_scale`.
    """

    modules: list[ModuleRange]
    precision: Precision
    fp32_modules: list[str]
    initial_scale: float
    overflowing: list[str]
    flushing: list[str]

    def advice(self) -> str:
        """Return the advice, in a sentence or two."""
        start = "bf16-mixed has fp32's range: where the device has bfloat16, use it. "
        if self.precision == "bf16-mixed":
            names = ", ".join(repr(name) for name in [*self.overflowing, *self.flushing][:5])
            return f"{start}16-mixed does not suit this step: too much of it leaves fp16's range ({names})."
        modules = f" with Workload.fp32_modules={tuple(self.fp32_modules)}" if self.fp32_modules else ""
        return f"{start}16-mixed works{modules}, from LossScaling(initial={self.initial_scale:g})."


def range_report(activations: Mapping[str, ValueStatistics], gradients: Mapping[str, ValueStatistics]) -> RangeReport:
    """Evaluate the statistics of activations, by FQN in the order of the model, and those of gradients."""
    modules = [
        ModuleRange(module=name, activations=seen, gradients=gradients.get(name, ValueStatistics()))
        for name, seen in activations.items()
    ]
    # The largest power of two that leaves the largest gradient some headroom.
    largest = max((module.gradients.largest for module in modules), default=0.0)
    exponent = math.floor(math.log2(FP16_LARGEST / largest)) - _HEADROOM_EXPONENT if largest else 0
    scale = 2.0 ** min(max(exponent, 0), _MOST_EXPONENT)
    overflowing = [
        m.module
        for m in modules
        if m.activations.largest > FP16_LARGEST or m.activations.not_finite or m.gradients.not_finite
    ]
    flushing = [m.module for m in modules if m.gradients.flushed(scale) > MOST_FLUSHED]
    troubled = list(dict.fromkeys([*overflowing, *flushing]))
    suits = len(troubled) <= _FEW * len(modules) and "" not in troubled
    return RangeReport(
        modules=modules,
        precision="16-mixed" if suits else "bf16-mixed",
        fp32_modules=troubled if suits else [],
        initial_scale=scale,
        overflowing=overflowing,
        flushing=flushing,
    )
