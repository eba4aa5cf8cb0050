"""A plan and its run in words, for the terminal and the page alike, and the verdict that each answer begins with."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from memfit.foundations import format_bytes, format_seconds
from memfit.ir import (
    NUMERICS,
    OTHER_DRAWS,
    Candidate,
    Comparison,
    LeverUse,
    Plan,
    Prediction,
    Region,
    RunRecord,
    Verification,
    uses_text,
)

MISSING = "—"
_MUCH_WAITING = 0.2
_MANY_TIMES = 2.0  # from here on times are told as multiples
_NO_GAP = 1e-3  # as near as the solver goes
_AS_FAST = 0.005
_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_BITS = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16", "tf32": "TF32"}
_Group = tuple[tuple[str, ...], str]  # the parts of an FQN, and what is done with the module


ComparisonRow = tuple[str, str, str, str]
"""A line of predicted against measured: the quantity, the plain step's, the planned one's, and their ratio."""


class RegionGroup(NamedTuple):
    """Repeated siblings that the plan treats alike ("blocks 0 to 5"), how many, and what it does with them."""

    name: str
    modules: int
    action: str


def clean(text: str) -> str:
    """Return text on one line, with characters that a terminal would obey replaced."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def byte_unit(nbytes: float, largest: str = "GiB") -> tuple[str, int]:
    """Return the unit that a size is written in, and its bytes."""
    units = _UNITS[[name for name, _ in _UNITS].index(largest) :]
    return next((name, size) for name, size in units if nbytes >= size or size == 1)


def seconds_text(seconds: float) -> str:
    """Return seconds as people read them, or a dash where there is no such number."""
    return format_seconds(seconds) if math.isfinite(seconds) else MISSING


def ratio_text(new: float, old: float) -> str:
    """Return `new / old` as "×1.18", or a dash where there is no such number."""
    if not (math.isfinite(new) and math.isfinite(old)) or old <= 0:
        return MISSING
    ratio = new / old
    return f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:,.1f}" if ratio < 100 else f"×{ratio:,.0f}"


def share_text(part: float, whole: float) -> str:
    """Return `part / whole` in percent, or a dash where there is no such number."""
    if not (math.isfinite(part) and math.isfinite(whole)) or whole <= 0:
        return MISSING
    percent = abs(part / whole) * 100
    if 0 < percent < 0.005:
        return "<0.01 %"
    digits = 0 if percent >= 10 or percent == 0 else 1 if percent >= 1 else 2
    return f"{percent:,.{digits}f} %"


def change_text(new: float, old: float) -> str:
    """Return the change from `old` to `new` in percent of `old`, with its sign."""
    share = share_text(new - old, old)
    sign = "" if share == MISSING or new == old else "+" if new > old else "−"
    return sign + share


def microbatches(plan: Plan) -> int:
    """Return how many microbatches the planned step has."""
    return -(-plan.batch_size // max(1, plan.levers.microbatch_size))


def lever_rows(plan: Plan) -> list[LeverUse]:
    """Return the levers that a plan uses, how they are set, and their classes."""
    return [replace(use, name=clean(use.name), setting=clean(use.setting)) for use in plan.uses]


def measured_plan_rows(plan: Plan) -> list[tuple[str, str, str, bool]]:
    """Return the plans that were run to choose this one, the fastest first; empty where none was.

    Each by its measured time, its predicted one, its levers, and whether it is this plan.
    """
    return [
        (
            seconds_text(step.measured_seconds),
            seconds_text(step.predicted_seconds),
            clean(uses_text(step.uses)),
            step.levers == plan.levers,
        )
        for step in plan.measured
    ]


def levers_text(point: Plan | Candidate) -> str:
    """Return the levers in use in a few words, "plain" for none."""
    return clean(uses_text(point.uses))


def proof_text(plan: Plan) -> str:
    """Return whether what a plan recomputes was held against the step; "" where it recomputes nothing."""
    if not any(use.recomputes for use in plan.uses):
        return ""
    if plan.is_proven:
        return "recomputed tensors matched a real step bit for bit"
    why = clean(plan.proof.why) or "the levers changed after the proof"
    return f"not checked yet ({why}); the first step compares recomputed tensors with the originals"


def keep_text(keep: Sequence[str], offload: bool = False) -> str:
    """Return what checkpointing does with a module that keeps these operators."""
    if not keep:
        return "recomputed, its input in host memory" if offload else "recomputed"
    overloads = (clean(entry).rpartition("#")[0] or clean(entry) for entry in keep)
    names = Counter(re.sub(r"^aten\.|\.default$", "", overload) for overload in overloads)
    listed = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in names.items())
    return f"recomputed, keeps {listed}{' and its input in host memory' if offload else ''}"


def region_groups(regions: Iterable[Region]) -> list[RegionGroup]:
    """Return regions with repeated siblings folded: those alike but for a number in their FQN become one."""
    groups: dict[_Group, int] = {}
    for region in regions:
        first, last = (clean(fqn).split(".") for fqn in (region.modules[0], region.modules[-1]))
        action = keep_text(region.keep, region.offload)
        if len(region.modules) > 1:
            action = action.replace("recomputed", "recomputed together", 1)
            if len(first) == len(last):
                first = [a if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True)]
        groups[tuple(first), action] = 1
    for position in reversed(range(max((len(fqn) for fqn, _ in groups), default=0))):
        groups = _fold(groups, position)
    return [RegionGroup(_named(fqn), n, action) for (fqn, action), n in groups.items()]


def _fold(groups: dict[_Group, int], position: int) -> dict[_Group, int]:
    """Fold the groups that differ only in a number at one position of their FQN, and hold as many modules each."""
    families: dict[tuple[object, ...], list[_Group]] = {}
    for (fqn, action), count in groups.items():
        numbered = position < len(fqn) and fqn[position].isdecimal()
        rest = (fqn[:position], None, fqn[position + 1 :]) if numbered else (fqn,)
        families.setdefault((rest, action, count), []).append((fqn, action))
    folded = {}
    for members in families.values():
        fqn, action = members[0]
        if len(members) > 1:
            numbers = enumerate(sorted(int(member[position]) for member, _ in members))
            ascending = itertools.groupby(numbers, lambda item: item[1] - item[0])  # "0 to 2, 5"
            runs = [[number for _, number in run] for _, run in ascending]
            said = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
            fqn = (*fqn[:position], said, *fqn[position + 1 :])
        folded[fqn, action] = sum(groups[member] for member in members)
    return folded


def _named(path: Sequence[str]) -> str:
    """Return the path of folded siblings as people say it: "blocks 0 to 5", "attn in blocks 0 to 5"."""
    if path == ("",):
        return "(the whole model)"
    segments: list[str] = []
    names: list[str] = []
    for part in path:
        if part[:1].isdecimal() and not part.isdecimal():  # numbers that were folded
            segments.append(f"{'.'.join(names) or ('' if segments else 'modules')} {part}".strip())
            names = []
        else:
            names.append(part)
    return " in ".join(reversed([*segments, ".".join(names)] if names else segments))


def chosen_index(plan: Plan) -> int | None:
    """Return which point of the frontier the plan is: same levers, nearest in predicted peak; None if none is."""
    same = [i for i, candidate in enumerate(plan.frontier) if candidate.levers == plan.levers]
    distance = {i: abs(plan.frontier[i].peak_bytes - plan.predicted.peak_bytes) for i in same}
    return min(same, key=distance.__getitem__) if same else None


def solver_text(plan: Plan) -> str:
    """Return how far a plan is from the fastest one that there can be."""
    solution = plan.solution
    if solution.status == "optimal" and solution.gap <= _NO_GAP:
        return "no faster plan fits, as far as times are predicted"
    gap = solution.gap if solution.status == "optimal" else max(solution.gap, _NO_GAP)
    if gap >= 1:
        return "a faster plan may fit: the solver found no lower bound of the step time"
    slower = share_text(gap, 1 - gap)  # the gap is a share of the plan's time
    return f"at most {slower} slower than the best possible plan, as far as times are predicted"


_SMALLER_BY = {
    "logits": "a chunked loss, microbatches",
    "attention scores": "F.scaled_dot_product_attention (never allocates them whole), checkpointing, microbatches",
    "activations": "activation checkpointing, microbatches, mixed precision",
    "activation gradients": "microbatches, mixed precision",
    "gradients": "updates in the backward pass, sharding",
    "optimizer state": "an 8-bit optimizer, offloading, sharding",
    "parameters": "16-bit weights, sharding",
    "inputs": "microbatches, a smaller batch",
    "workspaces": "microbatches",
}


def place_lines(prediction: Prediction) -> list[str]:
    """Return the place of a peak, and the largest tensors there with what would shrink the largest."""
    place = [f"at the {clean(prediction.where)}"] if prediction.where else []
    lines = [
        f"{clean(part.text)}: {share_text(part.nbytes, prediction.peak_bytes)} of this peak"
        for part in prediction.largest
    ]
    remedy = _SMALLER_BY.get(prediction.largest[0].kind) if lines else None
    return [*place, f"{lines[0]} (smaller with {remedy})", *lines[1:]] if remedy else [*place, *lines]


def fit_text(peak_bytes: float, budget_bytes: int) -> str:
    """Return how a peak stands to the budget."""
    if peak_bytes <= budget_bytes:
        return f"fits, {format_bytes(budget_bytes - peak_bytes)} free"
    return f"{format_bytes(peak_bytes - budget_bytes)} over"


def comparison_rows(plan: Plan, comparison: Comparison | None, run: RunRecord | None = None) -> list[ComparisonRow]:
    """Return the lines of predicted against measured; empty if nothing was measured.

    Error = predicted / measured − 1.
    """
    run_peak_bytes = run.measured_peak_bytes if run else None
    run_seconds = run.step_seconds if run else None
    if comparison is None and run_peak_bytes is None and run_seconds is None:
        return []
    plain, planned, budget = plan.plain, plan.predicted, plan.budget_bytes
    peaks, steps = measured_rows(comparison) if comparison else (None, None)
    rows = [_both("Peak, predicted", plain.peak_bytes, planned.peak_bytes, format_bytes)]
    if comparison and peaks:
        measured = comparison.plain_peak_bytes, comparison.planned_peak_bytes
        errors = change_text(plain.peak_bytes, measured[0]), change_text(planned.peak_bytes, measured[1])
        fits = fit_text(measured[0], budget), fit_text(measured[1], budget)
        rows += [peaks, ("Prediction error", *errors, "")]
        rows.append((f"Budget {format_bytes(budget)}", *fits, ""))
    if run_peak_bytes is not None:
        rows.append(("Peak, training run", "", format_bytes(run_peak_bytes), ""))
        rows.append(("Prediction error", "", change_text(planned.peak_bytes, run_peak_bytes), ""))
    rows.append(_both("Step, predicted", plain.step_seconds, planned.step_seconds, seconds_text))
    rows += [steps] if steps else []
    if run_seconds is not None:
        rows.append(("Step, training run", "", seconds_text(run_seconds), ""))
    return rows


def measured_rows(comparison: Comparison) -> list[ComparisonRow]:
    """Return the lines of what was measured side by side: peaks, then times."""
    peaks = comparison.plain_peak_bytes, comparison.planned_peak_bytes
    times = comparison.plain_step_seconds, comparison.planned_step_seconds
    return [_both("Peak, measured", *peaks, format_bytes), _both("Step, measured", *times, seconds_text)]


def _both(what: str, plain: float, planned: float, shown: Callable[[float], str]) -> ComparisonRow:
    return what, shown(plain), shown(planned), ratio_text(planned, plain)


def waiting_text(run: RunRecord) -> str | None:
    """Return which part of the time a run's steps waited for data, and what to do where that is much."""
    if run.data_share is None:
        return None
    share = f"Steps waited for data {share_text(run.data_share, 1)} of the time"
    if run.data_share < _MUCH_WAITING:
        return f"{share}."
    return (
        f"{share}. Make batches while steps run: DataLoader(num_workers=...) or prefetch_batches=2. Or do less work"
        " for each batch."
    )


def retries_text(run: RunRecord) -> str | None:
    """Return the warning of a run whose GPU's allocator found no room at times, or None."""
    if not run.allocation_retries:
        return None
    times = f"{run.allocation_retries:,} time{'s' * (run.allocation_retries != 1)}"
    return (
        f"The allocator found no room {times} and emptied its cache. Each time stops the GPU, and the next may run"
        " out of memory: plan with a lower budget=."
    )


def loss_rows(comparison: Comparison) -> list[tuple[int, str, str, str]]:
    """Return the number of each step, the losses of the plain and the planned one, and their difference."""
    pairs = zip(comparison.plain_losses, comparison.planned_losses, strict=False)
    return [
        (step, f"{plain:.7g}", f"{planned:.7g}", "0" if plain == planned else f"{planned - plain:+.1e}")
        for step, (plain, planned) in enumerate(pairs, 1)
    ]


def comparison_lines(comparison: Comparison, plan: Plan | None = None) -> list[str]:
    """Return the sentences below a comparison: of the losses, of times unlike the predicted ones, of the machine."""
    lines = []  # for each step that took another time than predicted, beyond the error that was stated
    times = comparison.plain_step_seconds, comparison.planned_step_seconds
    steps = zip(("plain", "planned"), times, (plan.plain, plan.predicted), strict=True) if plan else ()
    for name, seconds, predicted in steps:
        error = predicted.throughput.step_error if predicted.throughput else 0.0
        ratio = seconds / predicted.step_seconds if predicted.step_seconds else 1.0
        if error and not abs(ratio - 1) <= error:  # also where a time is no number
            change = share_text(seconds - predicted.step_seconds, predicted.step_seconds)
            took = f"{change} less than predicted" if ratio < 1 else f"{change} longer than predicted"
            took = f"{ratio:,.1f} times as long as predicted" if ratio >= _MANY_TIMES else took
            lines.append(f"The {name} step took {took}, more than the stated error of {error:.0%}.")
    if lines and not comparison.notes:
        count = max(1, len(comparison.plain_losses) - 1)
        lines.append(
            f"memfit saw no other program, and compared only {count} step{'s' * (count != 1)} of each: compare"
            " more steps."
        )
    notes = [f"{note[0].upper()}{note[1:]}." for note in comparison.notes]
    return [f"Losses on the same data: {loss_text(comparison)}.", *lines, *notes]


def loss_text(comparison: Comparison) -> str:
    """Return how far the losses of the planned step are from those of the plain one."""
    pairs = list(zip(comparison.plain_losses, comparison.planned_losses, strict=False))
    steps = f"{len(pairs):,} step{'s' * (len(pairs) != 1)}"
    if not pairs:
        return "no losses were compared"
    if any(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return f"a loss among {steps} is not finite"
    if all(a == b for a, b in pairs):
        return f"identical over {steps}"
    step, (a, b) = max(enumerate(pairs), key=lambda item: abs(item[1][0] - item[1][1]))
    relative = f", {abs(b - a) / abs(a):.1e} of the loss" if a else ""
    return f"largest difference over {steps}: {abs(b - a):.1e}{relative}, at step {step + 1:,}"


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
    if ratio >= _MANY_TIMES:
        return f"{ratio:,.1f} times as long"
    if 1 / ratio >= _MANY_TIMES:
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
    bits = _BITS.get(point.levers.precision)
    used = [
        bits if bits and use.name == "precision" else clean(use.name)
        for use in point.uses
        if use.numerics == point.numerics
    ]
    said = {"reduced": "fewer bits", "changed": "another training"}[point.numerics]
    return f"{said}: {', '.join(dict.fromkeys(used))}" if used else said


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
    unit, size = byte_unit(nbytes)
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
