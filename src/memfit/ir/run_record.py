"""The record of a training run, which `train` writes and `report` shows."""

from __future__ import annotations

from typing import Literal

from memfit.ir.display import Shown
from memfit.ir.timeline import Timeline


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
        steps: Number of optimizer updates done.
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
