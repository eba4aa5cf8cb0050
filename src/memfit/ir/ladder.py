"""A ladder: the effect of each lever on a workload, measured one on top of the other on this machine."""

from __future__ import annotations

from typing import Literal

from memfit.ir.display import Shown
from memfit.ir.plan import Levers, Numerics

Outcome = Literal["kept", "does not pay", "proposed", "not available"]


class Rung(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lever on top of the levers kept before it.

    Attributes:
        name: Name of the lever.
        outcome: "kept" where it pays; a "proposed" lever changes the model, and is compared with the plain step.
        why: The reason why it was not measured; else a description.
        levers: The levers of the step; None where it was not measured, or is another model's.
        numerics: The freest class of these levers.
        peak_bytes: Measured peak allocated, at the workload's batch.
        step_seconds: Measured time of one update at the workload's batch: the median of the plain step, times the
            ratios of the rungs kept since.
        peak_ratio: Its peak relative to that of the rung kept before.
        step_ratio: Its time relative to that of the rung kept before, of interleaved steps.
        predicted_peak_bytes: The prediction for `peak_bytes`.
        largest_batch: Predicted number of samples that fit the budget; None where microbatches take any number.
        samples_per_second: Throughput at `largest_batch`, predicted from the measured step; at the workload's batch
            where that is None. 0 where no sample fits.
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
    """The rungs in the order of measurement, the plain step first.

    Attributes:
        budget_bytes: The budget of the step.
        is_budget_given: Whether the user gave it; otherwise it is the plain step's measured peak.
        allowed: The numerics class that the user allowed.
        threads: Number of PyTorch's threads during the measurements.
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
        """The last rung that was kept, with the levers of all that pay."""
        return next(rung for rung in reversed(self.rungs) if rung.outcome == "kept")
