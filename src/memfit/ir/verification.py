"""The result of verifying a plan."""

from __future__ import annotations

from memfit.ir.display import Shown
from memfit.ir.plan import Numerics
from memfit.ir.run_record import Comparison


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
