"""Bytes alive and seconds spent over a step."""

from __future__ import annotations

from memfit.ir.display import Shown
from memfit.ir.trace import CATEGORIES

WORKSPACE = "workspaces"
TIMELINE_CATEGORIES: tuple[str, ...] = (*CATEGORIES, WORKSPACE)
_EDGE, _FEW = 0.1, 4  # share of a pass that is its start, or its end, and operators of one that has few


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
        """Return the place of the peak: "start of the backward pass, in blocks.7 (sum)"; "" without points."""
        if not self.labels:
            return ""
        at = self.peak_index
        passes = ["backward" if phase == "recompute" else phase for phase in self.phases]
        begin = end = at
        while begin and passes[begin - 1] == passes[at]:
            begin -= 1
        while end + 1 < len(passes) and passes[end + 1] == passes[at]:
            end += 1
        near = max(_FEW, _EDGE * (end - begin))
        part = "start" if at - begin <= near else "end" if end - at <= near else "middle"
        stage = "optimizer step" if passes[at] == "optimizer" else f"{passes[at]} pass"
        operator = operator_text(self.labels[at].rpartition(" · ")[2])
        again = ", recomputed" if self.phases[at] == "recompute" else ""
        return f"{part} of the {stage}{_within(self.modules[at])} ({operator}{again})"


def operator_text(name: str) -> str:
    """Return the name of an operator without its namespace and overload: "sum" for "aten.sum.dim_IntList"."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else name).lstrip("_")


def _within(fqn: str) -> str:
    if not fqn:
        return ""
    return f", in module {fqn}" if fqn[0].isdecimal() else f", in {fqn}"
