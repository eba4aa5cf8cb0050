"""Bytes alive and seconds spent over a step."""

from __future__ import annotations

from memfit.ir.display import Shown
from memfit.ir.trace import CATEGORIES

WORKSPACE = "workspaces"
TIMELINE_CATEGORIES: tuple[str, ...] = (*CATEGORIES, WORKSPACE)


class Timeline(Shown, frozen=True, kw_only=True):
    """A step's memory by category, one point for each operator, while it runs.

    Attributes:
        live_bytes: For each category of `TIMELINE_CATEGORIES`, the bytes alive at each point.
        labels: The operator at each point: "phase · module FQN · operator".
        modules: FQN of the module at each point.
        seconds: The predicted duration of each point.
        peak_bytes: The largest total over the points.
        peak_index: The first point that reaches it.
        step_seconds: The predicted duration of the whole step, with every microbatch.
    """

    live_bytes: dict[str, list[int]]
    labels: list[str]
    modules: list[str]
    phases: list[str]
    seconds: list[float]
    peak_bytes: int
    peak_index: int
    step_seconds: float

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category at the peak."""
        return {name: values[self.peak_index] for name, values in self.live_bytes.items()}

    def where(self) -> str:
        """Return the label of the peak's operator."""
        return self.labels[self.peak_index] if self.labels else ""
