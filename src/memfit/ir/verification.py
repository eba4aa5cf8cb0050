"""What holding a plan to what it says has found."""

from __future__ import annotations

from memfit.ir.display import Shown
from memfit.ir.plan import Numerics


class GradientDifference(Shown, frozen=True, kw_only=True):
    """How far a parameter's gradient under the plan is from the plain one.

    Attributes:
        relative: ‖planned − plain‖ / ‖plain‖.
        equal: Bit for bit.
    """

    parameter: str
    relative: float
    equal: bool


class Verification(Shown, frozen=True, kw_only=True):
    """What `verify` found.

    Attributes:
        failures: What the plan says and is not so; empty when it holds.
        loss_difference: Relative.
        gradient_difference: Relative, over all parameters together.
        bitwise: Whether the loss and every gradient are equal bit for bit.
        measured_peak_bytes: Of the planned step.
        plain_measured_peak_bytes: Of the plain step.
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
    plain_measured_peak_bytes: int
    budget_bytes: int
    notes: list[str]

    @property
    def holds(self) -> bool:
        """Whether the plan is what it says."""
        return not self.failures
