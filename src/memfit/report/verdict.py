"""The verdict: one line that each answer begins with, from records alone."""

from __future__ import annotations

import math

from memfit.foundations import format_bytes
from memfit.ir import NUMERICS, OTHER_DRAWS, Candidate, Comparison, LeverUse, Plan, Prediction, Verification
from memfit.report.summary import MISSING, clean, levers_text

_AS_FAST = 0.005
_TIMES = 2.0  # from here on a time is told as a multiple
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_BITS = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "tf32": "TF32"}


def plan_verdict(plan: Plan, comparison: Comparison | None = None) -> str:
    """Return whether a plan fits, its time beside the plain step's, and what it does to the numbers.

    Args:
        comparison: What was measured of it, which is told in place of what is predicted; None for nothing.
    """
    ours = plan.predicted
    if comparison is not None:
        plain_seconds, seconds = comparison.plain_step_seconds, comparison.planned_step_seconds
        peak_bytes = upper_bytes = comparison.planned_peak_bytes
    else:
        # Measured ones where both steps were run, else predicted ones.
        plain_seconds, seconds = plan.plain.step_seconds, ours.step_seconds
        run = next((step.measured_seconds for step in plan.measured if not step.uses), None)
        if run is not None and plan.measured_seconds is not None:
            plain_seconds, seconds = run, plan.measured_seconds
        peak_bytes, upper_bytes = ours.peak_reserved_bytes or ours.peak_bytes, ours.peak_upper_bytes
    said = "measured " if comparison is not None else ""
    if upper_bytes <= plan.budget_bytes:
        parts = [f"Fits: {said}{of_text(upper_bytes, plan.budget_bytes)}"]
    elif peak_bytes <= plan.budget_bytes:
        parts = [f"May not fit: needs up to {of_text(upper_bytes, plan.budget_bytes)}"]
    else:
        parts = [f"Does not fit: {said or 'needs '}{of_text(peak_bytes, plan.budget_bytes)}"]
    if comparison is None and ours.peak_reserved_bytes is not None:
        parts[0] += f" reserved ({format_bytes(ours.peak_bytes)} allocated)"
    if (sharding := plan.levers.sharding or plan.engine) is not None and sharding.world_size > 1:
        parts[0] += f" on each of {sharding.world_size} ranks"
    if not plan.uses:
        return f"{parts[0].replace('Fits', 'Fits as it is')}."
    differs = comparison is not None and comparison.plain_losses != comparison.planned_losses
    said = "losses not identical" if differs and plan.numerics == "exact" else numerics_text(plan)
    parts += [speed_text(seconds, plain_seconds), said]
    return f"{', '.join(filter(None, parts))}."


def of_text(part: int, whole: int) -> str:
    """Return "99 of 100 MiB"; in bytes where rounding would hide that the part is larger."""
    said, of = _short(part), _short(whole)
    if said == of and part > whole:
        return f"{part:,} of {whole:,} bytes"
    number, unit = said.rsplit(" ", 1)
    return f"{number if unit == of.rsplit(' ', 1)[1] else said} of {of}"


def _short(nbytes: float) -> str:
    return format_bytes(nbytes).replace(".0 ", " ")


def speed_text(seconds: float, plain_seconds: float) -> str:
    """Return "4 % slower", "3 % faster", "as fast", or "" where a time is not known."""
    if not (math.isfinite(seconds) and math.isfinite(plain_seconds)) or seconds <= 0 or plain_seconds <= 0:
        return ""
    ratio = seconds / plain_seconds
    if abs(ratio - 1) < _AS_FAST:
        return "as fast"
    if ratio >= _TIMES:
        return f"{ratio:,.1f} times as long"
    if 1 / ratio >= _TIMES:
        return f"{1 / ratio:,.1f} times as fast"
    return f"{abs(ratio - 1) * 100:.0f} % {'slower' if ratio > 1 else 'faster'}"


def beside_text(seconds: float, other_seconds: float, other: str) -> str:
    """Return "4 % slower than plain", "as fast as plain", or a dash where a time is not known."""
    speed = speed_text(seconds, other_seconds)
    return f"{speed} {'than' if speed.endswith('er') else 'as'} {other}" if speed else MISSING


def numerics_text(point: Plan | Candidate) -> str:
    """Return what the levers of a plan do to the numbers, in words."""
    if point.numerics == "exact":
        return "bit-identical"
    if point.numerics == "reordered":
        draws = isinstance(point, Plan) and any(note.startswith(OTHER_DRAWS) for note in point.notes)
        return "equal to rounding but for dropout masks" if draws else "equal to rounding"
    used = [_bits(point, use) for use in point.uses if use.numerics == point.numerics]
    said = {"reduced": "fewer bits", "changed": "another training"}[point.numerics]
    return f"{said}: {', '.join(dict.fromkeys(used))}" if used else said


def _bits(point: Plan | Candidate, use: LeverUse) -> str:
    return _BITS.get(point.levers.precision, clean(use.name)) if use.name == "precision" else clean(use.name)


def prediction_verdict(prediction: Prediction) -> str:
    """Return what a step needs, and whether the device has that, where it is known what it has."""
    peak_bytes = prediction.peak_reserved_bytes or prediction.peak_bytes
    upper_bytes, room_bytes = prediction.peak_upper_bytes, prediction.device_bytes
    reserved = "" if prediction.peak_reserved_bytes is None else " reserved"
    needs = f"needs {_short(peak_bytes)}{reserved}"
    is_wide = _short(peak_bytes) != _short(upper_bytes)
    if room_bytes is None:
        return f"N{needs[1:]}{f', at most {_short(upper_bytes)}' * is_wide}."
    if upper_bytes <= room_bytes:
        least = f"{needs}, at most" if is_wide else "needs"
        return f"Fits: {least} {of_text(upper_bytes, room_bytes)}."
    if peak_bytes <= room_bytes:
        return f"May not fit: {needs}, up to {of_text(upper_bytes, room_bytes)}."
    return f"Does not fit: needs {of_text(peak_bytes, room_bytes)}{reserved}."


def infeasible_verdict(
    budget_bytes: int, smallest_bytes: int, *, plain_bytes: int | None = None, is_proven: bool = False
) -> str:
    """Return that no plan fits a budget, and the smallest one that works.

    Args:
        plain_bytes: What the step needs as it is; None where that is not known.
        is_proven: Whether no plan can do with less; else the budget works, and a smaller one may.
    """
    needed_bytes = smallest_bytes if plain_bytes is None else plain_bytes
    smallest = "Smallest budget that works" if is_proven else "Smallest budget found that works"
    return f"Does not fit: needs {of_text(needed_bytes, budget_bytes)}. {smallest}: {enough_text(smallest_bytes)}"


def enough_text(nbytes: int) -> str:
    """Return bytes rounded up to three digits or more: a budget of that much is no less."""
    unit, size = next((name, size) for name, size in _UNITS if nbytes >= size or size == 1)
    parts = 100 if nbytes < 10 * size else 10
    return f"{math.ceil(parts * nbytes / size) / parts:g} {unit}"


def verification_verdict(found: Verification) -> str:
    """Return whether a plan is what it says."""
    if not found.holds:
        more = f" (and {len(found.failures) - 1} more)" if len(found.failures) > 1 else ""
        return f"Verification failed: {clean(found.failures[0])}{more}."
    taken = found.measured_peak_bytes if found.measured_reserved_bytes is None else found.measured_reserved_bytes
    ranks = f" on each of {len(found.rank_peaks_bytes)} ranks" if found.rank_peaks_bytes else ""
    if found.bitwise:
        said = "bit-identical"
    else:
        equal = {"exact": "bit-identical", "reordered": "equal to rounding", "reduced": "fewer bits"}
        apart = f"gradients {found.gradient_difference:.0e} apart"
        said = f"{equal.get(found.numerics, 'another training')} ({apart})"
    return f"Verified: measured {of_text(taken, found.budget_bytes)}{ranks}, {said}."


def comparison_verdict(comparison: Comparison) -> str:
    """Return what was measured of the planned step beside the plain one."""
    peaks = f"Measured: {_short(comparison.planned_peak_bytes)} in place of {_short(comparison.plain_peak_bytes)}"
    speed = speed_text(comparison.planned_step_seconds, comparison.plain_step_seconds)
    pairs = list(zip(comparison.plain_losses, comparison.planned_losses, strict=False))
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        losses = "a loss is not finite"
    else:
        losses = f"losses at most {apart:.1e} apart" if apart else "losses bit-identical"
    return f"{', '.join(filter(None, [peaks, speed, losses if pairs else 'losses not compared']))}."


def offers(plan: Plan) -> list[str]:
    """Return what each class beyond the allowed one would buy within the budget, where it buys time."""
    ours, texts = plan.predicted.step_seconds, []
    for numerics in NUMERICS[NUMERICS.index(plan.allowed) + 1 :]:
        fitting = [c for c in plan.frontier if c.numerics == numerics and c.held_bytes <= plan.budget_bytes]
        best = min(fitting, key=lambda c: c.step_seconds, default=None)
        if best is not None and best.step_seconds < ours:
            speed = speed_text(best.step_seconds, ours)
            texts.append(f"numerics='{numerics}' would need {_short(best.held_bytes)}, {speed} ({levers_text(best)})")
    return texts
