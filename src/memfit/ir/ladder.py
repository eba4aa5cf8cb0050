"""A ladder: what each lever bought on a workload, measured one on top of the other on the machine at hand."""

from __future__ import annotations

from typing import Literal

from memfit.ir.display import Shown
from memfit.ir.plan import Levers, Numerics

Outcome = Literal["kept", "does not pay", "proposed", "not available"]


class Rung(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lever on top of those before it that were kept.

    Attributes:
        name: Of the lever.
        outcome: "kept" where it pays; what is "proposed" changes the model, and is held against the plain step.
        why: Where it was not measured, why not; otherwise what it does.
        levers: What the step ran with; None where it was not measured, or is another model's.
        numerics: The freest class of these.
        peak_bytes: Measured peak allocated, at the workload's batch.
        step_seconds: Measured, of one update at the workload's batch: the median of the plain step, times the
            ratios of those that were kept since.
        peak_ratio: Its peak in that of the rung kept before.
        step_ratio: Its time in that of the rung kept before, of steps that ran in turn.
        predicted_peak_bytes: What was predicted for `peak_bytes`.
        largest_batch: Samples that fit the budget together, predicted; None where microbatches take any number.
        samples_per_second: At `largest_batch`, predicted from the measured step; at the workload's batch where that is
            None. 0 where no sample fits.
    """

    name: str
    outcome: Outcome
    why: str = ""
    levers: Levers | None = None
    numerics: Numerics | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    peak_ratio: float | None = None
    step_ratio: float | None = None
    predicted_peak_bytes: int | None = None
    largest_batch: int | None = None
    samples_per_second: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the step ran."""
        return self.peak_bytes is not None


class Ladder(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rungs in the order in which they were climbed, the plain step first.

    Attributes:
        budget_bytes: What the step may take.
        is_budget_given: Whether the user said so; otherwise it is the plain step's measured peak.
        allowed: The numerics class that the user allowed.
        threads: Of PyTorch, while it was measured.
    """

    schema: str = "memfit.ladder/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    device: str
    threads: int
    batch_size: int
    budget_bytes: int
    is_budget_given: bool
    allowed: Numerics
    rungs: list[Rung]

    @property
    def top(self) -> Rung:
        """The last rung that was kept: its levers are those of all that pay."""
        return next(rung for rung in reversed(self.rungs) if rung.outcome == "kept")
