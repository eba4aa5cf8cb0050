"""What a training run did: the record that `train` writes and `report` shows."""

from __future__ import annotations

from typing import Literal

from memfit.ir.display import Shown
from memfit.ir.timeline import Timeline


class Comparison(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plain step against the planned one, measured side by side on the same batches from the same start.

    Attributes:
        plain_peak_bytes: Measured peak allocated of the plain step.
        planned_peak_bytes: The same of the planned step.
        plain_step_seconds: Median over interleaved steps.
        planned_step_seconds: The same of the planned step.
        plain_losses: Loss of each step.
        planned_losses: The same of the planned step.
    """

    plain_peak_bytes: int
    planned_peak_bytes: int
    plain_step_seconds: float
    planned_step_seconds: float
    plain_losses: list[float]
    planned_losses: list[float]


class Evaluation(Shown, frozen=True, forbid_unknown_fields=True):
    """What the workload's `evaluate` returned after some steps."""

    step: int
    values: dict[str, float]


class Event(Shown, frozen=True, forbid_unknown_fields=True):
    """Something out of the ordinary that happened after some steps, and what was done about it."""

    step: int
    kind: str
    text: str


class RunRecord(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run, as `run.json` in its folder holds it.

    Attributes:
        steps: Optimizer updates done.
        status: "failed" names its `error`.
        started: ISO 8601, UTC.
        measured_peak_bytes: The largest peak allocated that was measured; None before the first measurement.
        step_seconds: Median over the run's steps, without the first.
        data_share: Which part of the time steps waited for their batches, in [0, 1]; without the first step.
        command: The words after "memfit" of the command that started the run, or resumed it last; none where another
            program trains.
        allocation_retries: How often the GPU's allocator found no room and gave back what it cached to look again,
            since the run was started or resumed last; None on the CPU.
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
        parameter_bytes: Of its own parameters and its children's.
        saved_bytes: What autograd keeps for it in the plain step, at the end of the forward pass.
        planned_saved_bytes: The same in the planned step.
        forward_seconds: Predicted, for one global batch.
        action: What the plan does with it: "" or "recomputed" or "recomputed, keeps 3 operators".
    """

    fqn: str
    kind: str
    parameter_bytes: int
    saved_bytes: int
    planned_saved_bytes: int
    forward_seconds: float
    action: str


class Views(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a report draws: both predicted timelines, and the modules. `views.json` in a run's folder."""

    schema: str = "memfit.views/1"
    plain: Timeline
    planned: Timeline
    modules: list[ModuleRow]
    comparison: Comparison | None = None
