"""Compound scaling: the largest member of a family of models that fits a budget.

A family is a function of three multipliers, of width, depth and resolution. A rule says how they grow together;
EfficientNet's (Tan and Le 2019, *EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks*, section
3.3, equation 3) is depth 1.2^φ, width 1.1^φ, resolution 1.15^φ, found by a grid search on a small model so that the
multiply-adds about double with each φ. It is not the best rule for every family: give several `rules`, and a `proxy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from memfit import ir, report
from memfit.errors import InfeasibleError, WorkloadError
from memfit.foundations import format_bytes, format_seconds, parse_budget
from memfit.hardware import find_device
from memfit.ir import Numerics
from memfit.pipeline import estimate, plan
from memfit.report import FAR_BUDGET, GRID, Axis, byte_axis, chart_page, text_of
from memfit.structure.proposal import forward_pass
from memfit.workload import Workload, fingerprint


@dataclass(frozen=True)
class Rule:
    """A rule of growth: each multiplier is its base to the power of φ.

    Args:
        name: Name in tables.
        depth: Base of the depth's multiplier (≥ 1), as `width` and `resolution` of theirs.
    """

    name: str
    depth: float
    width: float
    resolution: float

    def at(self, phi: float) -> tuple[float, float, float]:
        """Return the multipliers of width, depth and resolution at a φ."""
        return self.width**phi, self.depth**phi, self.resolution**phi


COMPOUND = Rule("compound", depth=1.2, width=1.1, resolution=1.15)
"""EfficientNet's rule."""
SINGLE = (
    Rule("depth", 2.0, 1.0, 1.0),
    Rule("width", 1.0, math.sqrt(2), 1.0),
    Rule("resolution", 1.0, 1.0, math.sqrt(2)),
)
"""Rules for one multiplier alone, which also double a convolutional network's multiply-adds with each φ."""


@dataclass(frozen=True)
class Member:
    """The prediction for one member of a family.

    Attributes:
        width: Multiplier of the width, as `depth` and `resolution` of theirs.
        parameters: Number of elements in the model's parameters.
        multiply_adds: Multiply-adds of the loss's forward pass, for one sample.
        peak_bytes: Peak of its plain step, or of its planned step with `planned=True`.
        step_seconds: Time of the same step.
        fits: Whether the upper end of the predicted peak is within the budget.
        proxy: The proxy's value, by which members are chosen; None for members that do not fit.
    """

    rule: str
    phi: float
    width: float
    depth: float
    resolution: float
    parameters: int
    multiply_adds: int
    peak_bytes: int
    step_seconds: float
    fits: bool
    proxy: float | None


@dataclass(frozen=True)
class Scaling:
    """The predicted members of a family, and the chosen one. Print it for a table.

    Attributes:
        workload: The chosen member's workload.
        chosen: The fitting member with the best proxy.
        members: All members, by rule and φ.
    """

    workload: Workload
    chosen: Member
    members: tuple[Member, ...]
    budget_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def frontier(self) -> list[Member]:
        """Return the members with more multiply-adds than all members of a lower peak, from small to large."""
        members: list[Member] = []
        for member in sorted(self.members, key=lambda m: (m.peak_bytes, -m.multiply_adds)):
            if not members or member.multiply_adds > members[-1].multiply_adds:
                members.append(member)
        return members

    def __str__(self) -> str:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        names = ("rule", "φ", "width", "depth", "resol.", "parameters", "multiply-adds", "peak", "step", "proxy")
        table.add_column("")
        for name in names:
            table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=True)
        for m in self.members:
            mark = "▶" if m is self.chosen else "" if m.fits else "▲"
            multipliers = (f"{multiplier:.2f}" for multiplier in (m.phi, m.width, m.depth, m.resolution))
            figures = (format_bytes(m.peak_bytes), format_seconds(m.step_seconds))
            proxy = "" if m.proxy is None else f"{m.proxy:.4g}"
            cells = (m.rule, *multipliers, f"{m.parameters:,}", f"{m.multiply_adds:,}", *figures, proxy)
            table.add_row(mark, *(Text(cell) for cell in cells))
        marks = f"▶ chosen   ▲ over the budget of {format_bytes(self.budget_bytes)}"
        return text_of(table, *(Text(line) for line in (marks, *self.notes)), width=120)

    def plot(self, path: Path | str) -> Path:
        """Write the frontier as an HTML page, readable offline: multiply-adds over the predicted peak.

        Raises:
            OutputError: The file can't be written.
        """
        text = f"predicted peak and multiply-adds of {len(self.members)} members of the family, and the budget"
        return ir.codec.write_atomic(path, chart_page(_chart(self), "Scaling", "Members of the family", text).encode())


def scale(
    family: Callable[[float, float, float], Workload],
    *,
    budget: int | float | str,
    rules: Sequence[Rule] = (COMPOUND,),
    proxy: Callable[[Workload], float] | None = None,
    planned: bool = False,
    numerics: Numerics = "reordered",
    device: str = "cpu",
    tolerance: float = 0.1,
    phi_range: tuple[float, float] = (-8.0, 8.0),
) -> Scaling:
    """Find the largest member of a family within a budget: by bisection for each rule, then the best by a proxy.

    Args:
        family: `family(width, depth, resolution)` returns the workload for multipliers; its peak must not fall as φ
            grows; `family(1, 1, 1)` is φ = 0. Multiply sizes and round them; build under `torch.device("meta")` where
            models are large.
        budget: Bytes, or a string with a unit ("24GiB"), or a share of the device ("90%").
        rules: Rules by which the multipliers grow.
        proxy: `proxy(workload)` stands for accuracy, the higher the better: an accuracy after a short training, say.
            Called for members that fit, the largest of each rule among them. None takes the multiply-adds.
        planned: Whether a member fits if any plan of it does; else its plain step has to fit.
        numerics: Numerics class that plans may use; see `memfit.plan`.
        device: Device that steps are predicted for.
        tolerance: Largest error of the largest φ that fits (> 0).
        phi_range: The smallest and the largest φ to try.

    Raises:
        WorkloadError: An argument is out of its range.
        InfeasibleError: The smallest member of no rule fits.
    """
    if tolerance <= 0 or not phi_range[0] < phi_range[1] or not rules:
        raise WorkloadError(
            f"tolerance={tolerance}, phi_range={phi_range}, rules={len(rules)}: give a tolerance above 0, a range from"
            " low to high, and at least one rule"
        )
    budget_bytes = parse_budget(budget, find_device(device).usable_bytes)
    search = ScalingSearch(family, budget_bytes, proxy, planned, numerics, device)
    best = [member for rule in rules if (member := search.largest(rule, tolerance, phi_range)) is not None]
    members = sorted(search.members, key=lambda m: ([r.name for r in rules].index(m.rule), m.phi))
    if not best:
        lowest = min(members, key=lambda m: m.peak_bytes)
        raise InfeasibleError(
            f"no member of the family fits {format_bytes(budget_bytes)}: the smallest, at φ={lowest.phi:g} of the rule"
            f" {lowest.rule!r}, needs {format_bytes(lowest.peak_bytes)}. Raise budget, or lower phi_range",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest.peak_bytes,
            where=f"φ={lowest.phi:g}",
        )
    chosen = max(best, key=lambda m: -math.inf if m.proxy is None else m.proxy)
    workload = family(chosen.width, chosen.depth, chosen.resolution)
    notes = []
    for member in best:
        if member.phi == phi_range[1]:
            notes.append(f"{member.rule}: the largest φ of phi_range fits too: raise phi_range for larger members")
        larger = [m.phi for m in members if m.rule == member.rule and m.phi < member.phi and not m.fits]
        if larger:
            notes.append(
                f"{member.rule}: φ={max(larger):g} does not fit, and a larger φ does: the peak does not always grow"
                " with φ"
            )
    return Scaling(workload, chosen, tuple(members), budget_bytes, tuple(notes))


@dataclass
class ScalingSearch:
    """The search for the largest member of a family; each member is predicted once."""

    family: Callable[[float, float, float], Workload]
    budget_bytes: int
    proxy: Callable[[Workload], float] | None
    planned: bool
    numerics: Numerics
    device: str
    members: list[Member] = field(default_factory=list)
    known: dict[str, tuple[int, float, bool]] = field(default_factory=dict)

    def largest(self, rule: Rule, tolerance: float, phi_range: tuple[float, float]) -> Member | None:
        """Return the member at the largest φ of a rule that fits, or None."""
        lowest, highest = phi_range
        low, step = min(max(0.0, lowest), highest), 1.0
        best = self.member(rule, low)
        while not best.fits and low > lowest:
            low, step = max(low - step, lowest), 2 * step
            best = self.member(rule, low)
        if not best.fits:
            return None
        over = [m.phi for m in self.members if m.rule == rule.name and m.phi > low]
        high = min(over, default=None)
        step = 1.0
        while high is None and low < highest:
            tried = self.member(rule, min(low + step, highest))
            low, best, high = (tried.phi, tried, None) if tried.fits else (low, best, tried.phi)
            step *= 2
        while high is not None and high - low > tolerance:
            tried = self.member(rule, (low + high) / 2)
            low, best, high = (tried.phi, tried, high) if tried.fits else (low, best, tried.phi)
        return best

    def member(self, rule: Rule, phi: float) -> Member:
        """Return the prediction for the member at a φ, and note it in `members`."""
        width, depth, resolution = rule.at(phi)
        workload = self.family(width, depth, resolution)
        key = fingerprint(workload)
        if key not in self.known:
            self.known[key] = self._predicted(workload)
        peak_bytes, step_seconds, fits = self.known[key]
        multiply_adds = forward_pass(workload).multiply_adds
        proxy = float(multiply_adds if self.proxy is None else self.proxy(workload)) if fits else None
        member = Member(
            rule.name, phi, width, depth, resolution, sum(p.numel() for p in workload.model.parameters()),
            multiply_adds, peak_bytes, step_seconds, fits, proxy,
        )  # fmt: skip
        self.members.append(member)
        return member

    def _predicted(self, workload: Workload) -> tuple[int, float, bool]:
        """Return peak, time, and whether it fits the budget, of a plain or a planned step."""
        plain = estimate(workload, device=self.device)
        fits = plain.peak_upper_bytes <= self.budget_bytes
        if fits or not self.planned:
            return plain.peak_bytes, plain.step_seconds, fits
        try:
            planned = plan(
                workload, budget=self.budget_bytes, device=self.device, numerics=self.numerics, points=1, world_size=1
            )
        except InfeasibleError as e:
            return e.lowest_peak_bytes, plain.step_seconds, False
        return planned.predicted.peak_bytes, planned.predicted.step_seconds, True


_COLOURS = ("var(--accent)", "var(--good)", "var(--denied)", "var(--c-activations)", "var(--c-workspaces)")
_SYMBOLS = ("circle", "square", "diamond", "hexagon", "triangle")


def _chart(scaling: Scaling) -> report.charts.Chart:
    """Return a chart of the members by predicted peak and multiply-adds, joined by rule, with the chosen one marked.

    Members far over the budget are left out, since they would flatten the rest.
    """
    shown = [m for m in scaling.members if m.peak_bytes <= FAR_BUDGET * scaling.budget_bytes]
    x = byte_axis(1.08 * max(scaling.budget_bytes, *(m.peak_bytes for m in shown)), "predicted peak")
    y = Axis(0.0, 1.12 * max(m.multiply_adds for m in shown), "multiply-adds per sample, millions", 1e6)
    lines, marks = [], []
    for index, rule in enumerate(dict.fromkeys(member.rule for member in shown)):
        colour, symbol = _COLOURS[index % len(_COLOURS)], _SYMBOLS[index % len(_SYMBOLS)]
        own = sorted((m for m in shown if m.rule == rule), key=lambda m: m.phi)
        places = [(x.at(m.peak_bytes), y.at(m.multiply_adds)) for m in own]
        lines.append(report.charts.Shape(places, colour, name=rule))
        marks += [
            report.charts.Mark(*place, symbol, colour, tip=f"{rule}, φ={m.phi:.2f}\n{_told(m)}", series=rule)
            for place, m in zip(places, own, strict=True)
        ]
    at = scaling.chosen
    star = x.at(at.peak_bytes), y.at(at.multiply_adds)
    told = f"chosen, φ={at.phi:.2f}\n{_told(at)}"
    marks.append(report.charts.Mark(*star, "star", "var(--chosen)", tip=told, text="chosen", series="chosen"))
    budget = x.at(scaling.budget_bytes)
    note = report.charts.Note(
        budget, GRID, f"budget {format_bytes(scaling.budget_bytes)}", "budget", above=False, side="left"
    )
    rule_at = report.charts.ChartRule("budget", budget, upright=True)
    return report.charts.Chart(x=x, y=y, shapes=lines, rules=[rule_at], marks=marks, notes=[note])


def _told(member: Member) -> str:
    return (
        f"{format_bytes(member.peak_bytes)}, {format_seconds(member.step_seconds)}\n{member.parameters:,} parameters,"
        f" {member.multiply_adds:,} multiply-adds"
    )
